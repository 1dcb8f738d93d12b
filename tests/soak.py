#!/usr/bin/env python3
"""A long run of `bert_finetune` at world 4 without huge pages, with saves, evaluation and restarts. Each process must
keep its resident memory within 2 %, and its numbers of file handles and threads; the run must end with the bits and
the losses of an undisturbed one. For a release build with `mpi`:

    cargo build --release --workspace --features mpi --bin fsdp --example bert_finetune
    tests/soak.py FSDP EXAMPLE [STEPS] [RESTARTS]     10000 steps and 3 restarts by default, about an hour
"""

import ctypes
import os
import pathlib
import random
import signal
import statistics
import sys
import tempfile
import threading
import time

from restarts import Run

WORLD = 4
# Part of a process's life that is its start: the first steps and saves allocate what later ones use again.
WARM_UP = 0.3
MEMORY = 0.02
# Option of Linux's `prctl` that disables huge pages for this process and those that it starts. A huge page of 2 MB is
# 1 % of the memory of this small model, and is resident as a whole as soon as one byte is used.
PR_SET_THP_DISABLE = 41


def status(number):
    """Resident memory in kB, threads and file handles of a process."""
    text = pathlib.Path(f"/proc/{number}/status").read_text()
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    files = len(os.listdir(f"/proc/{number}/fd"))
    return int(fields["VmRSS"].split()[0]), int(fields["Threads"]), files


class Watch(threading.Thread):
    """Samples the ranks of a run, by process."""

    def __init__(self, run, every):
        super().__init__(daemon=True)
        self.run_, self.every, self.samples, self.stopped = run, every, {}, threading.Event()

    def run(self):
        while not self.stopped.wait(self.every):
            for number in self.run_.victims("rank"):
                try:
                    self.samples.setdefault(number, []).append(status(number))
                except (OSError, KeyError):
                    pass


def judged(samples):
    """Prints how a process has changed after its start. Returns what is wrong."""
    steady = samples[int(len(samples) * WARM_UP):]
    half = len(steady) // 2
    wrong, texts = [], []
    for column, name in enumerate(["memory", "threads", "handles"]):
        first, last = (statistics.median(sample[column] for sample in part) for part in (steady[:half], steady[half:]))
        change = last / first - 1
        texts.append(f"{name} {first:.0f} to {last:.0f}")
        if name == "memory":
            texts[-1] += f" kB ({change:+.2%})"
        if abs(change) > MEMORY if name == "memory" else first != last:
            wrong.append(texts[-1])
    print(f"  {len(samples)} samples: {', '.join(texts)}", flush=True)
    return wrong


def main(fsdp, example, steps="10000", restarts="3"):
    if ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) != 0:
        print("huge pages cannot be disabled here")
    steps, restarts = int(steps), int(restarts)
    every = max(3, steps // 100)
    flags = ["--device", "flex", "--timeout", "20", "--steps", str(steps), "--batch-size", "2", "--max-length", "16"]
    flags += ["--seed", "3", "--save-every", str(every), "--keep-last", "2", "--resume", "auto", "--quiet"]
    results, wrong = [], []
    for kills in (0, restarts):
        with tempfile.TemporaryDirectory() as folder:
            run = Run(fsdp, example, WORLD, folder, flags, steps)
            begin = time.monotonic()
            run.start()
            watch = Watch(run, 0.5)
            watch.start()
            for kill in range(kills):
                run.wait_for_step(steps * (kill + 1) // (kills + 1))
                os.kill(random.choice(run.victims("rank")), signal.SIGKILL)
            run.end()
            watch.stopped.set()
            watch.join()
            results.append(run.result())
            print(f"{steps} steps, {kills} restarts: {time.monotonic() - begin:.0f} s", flush=True)
            # A process of a few seconds is all start.
            long = [samples for samples in watch.samples.values() if len(samples) >= 40]
            assert long, "no process ran long enough"
            for samples in long:
                wrong += judged(samples)
    (whole, losses), (files, tail) = results
    assert len(whole) == WORLD and files == whole, "the last checkpoint has other bits"
    assert len(losses) == steps and losses[-len(tail):] == tail, "other losses"
    print(f"{len(tail)} losses since the last restart, and the last checkpoint: those of the undisturbed run")
    assert not wrong, wrong


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4, 5):
        sys.exit(__doc__)
    main(*sys.argv[1:])
