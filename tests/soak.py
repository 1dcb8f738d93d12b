#!/usr/bin/env python3
"""A long run of `bert_finetune` at world 4, with saves, evaluation and restarts. The ranks of a start must keep their
resident memory within 2 %, all together, and each its numbers of file handles and threads; the run must end with the
bits and the losses of an undisturbed one. For a release build with `cli,mpi`:

    cargo build --release --features cli,mpi --bin fsdp --example bert_finetune
    tests/soak.py FSDP EXAMPLE [STEPS] [RESTARTS]     10000 steps and 3 restarts by default, about an hour
"""

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


def judged(ranks):
    """Prints how the ranks of a start have changed after its beginning, given their samples. Returns what is wrong."""
    wrong, totals = [], [0, 0]
    for samples in ranks:
        steady = samples[int(len(samples) * WARM_UP):]
        half = len(steady) // 2
        texts = []
        for column, name in enumerate(["memory", "threads", "handles"]):
            found = [statistics.median(sample[column] for sample in part) for part in (steady[:half], steady[half:])]
            texts.append(f"{name} {found[0]:.0f} to {found[1]:.0f}")
            if name == "memory":
                # An allocator takes megabytes at a time, a percent or two of one rank.
                totals = [total + one for total, one in zip(totals, found, strict=True)]
                texts[-1] += " kB"
            elif found[0] != found[1]:
                wrong.append(texts[-1])
        print(f"  {len(samples)} samples: {', '.join(texts)}", flush=True)
    change = totals[1] / totals[0] - 1
    print(f"  memory of {len(ranks)} ranks: {change:+.2%}", flush=True)
    if abs(change) > MEMORY:
        wrong.append(f"memory {change:+.2%}")
    return wrong


def main(fsdp, example, steps="10000", restarts="3"):
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
            # The ranks of a start are seen one after the other. A start of a few seconds is all beginning.
            ranks = list(watch.samples.values())
            starts = [ranks[at : at + WORLD] for at in range(0, len(ranks), WORLD)]
            judgeable = [start for start in starts if all(len(samples) >= 40 for samples in start)]
            assert judgeable, "no start was long enough"
            for start in judgeable:
                wrong += judged(start)
    (whole, losses), (files, tail) = results
    assert len(whole) == WORLD and files == whole, "the last checkpoint has other bits"
    assert len(losses) == steps and losses[-len(tail):] == tail, "other losses"
    print(f"{len(tail)} losses since the last restart, and the last checkpoint: those of the undisturbed run")
    assert not wrong, wrong


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4, 5):
        sys.exit(__doc__)
    main(*sys.argv[1:])
