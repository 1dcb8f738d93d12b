#!/usr/bin/env python3
"""Training under `fsdp launch --max-restarts`, whose processes are killed and stopped at random moments. Each run must
end by itself, with the bits of an undisturbed run with as many ranks. For a build with `mpi`:

    cargo build --workspace --features mpi --bin fsdp --example bert_finetune
    tests/restarts.py FSDP EXAMPLE COUNT [SEED]

COUNT disturbances: SIGKILL or SIGSTOP of a rank, SIGKILL of `mpirun`, and SIGKILL of the launcher, which is then
started again, as a service manager would. EXAMPLE is that of `bert_finetune` or of `gpt_pretrain`.
"""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid

# Seconds that a rank waits for another one in a collective.
TIMEOUT = 4
# Seconds after which a run hangs: without a new checkpoint, or at its end.
HANG = 120
STEPS = 60
PER_RUN = 5
MARK = "FSDP_TEST_MARK"
# The device, whichever devices the build has, and a program small enough that most of a run is not its start.
PROGRAMS = {
    "bert_finetune": ["--device", "flex", "--timeout", str(TIMEOUT), "--steps", str(STEPS), "--batch-size", "2"]
    + ["--max-length", "16", "--seed", "3", "--save-every", "3", "--keep-last", "2", "--resume", "auto"],
    "gpt_pretrain": ["--device", "flex", "--timeout", str(TIMEOUT), "--batch-size", "1", "--tokens-per-sample", "32", "--max-update", str(STEPS)]
    + ["--total-num-update", "1000", "--dropout", "0.1", "--max-valid-steps", "1", "--seed", "3"]
    + ["--save-interval-updates", "3", "--keep-interval-updates", "2", "--resume", "auto"],
}


class Run:
    """A run of the example in a folder, with one launcher after the other."""

    def __init__(self, fsdp, example, world, folder, flags=None, steps=STEPS):
        self.folder, self.steps = pathlib.Path(folder), steps
        flags = flags or PROGRAMS[pathlib.Path(example).name]
        program = [example, *flags, "--json", "--save-dir", str(self.folder / "run")]
        launch = ["launch", "--mpi", "-n", str(world), "--max-restarts", "100", "--restart-backoff", "0.05"]
        self.command = [fsdp, *launch, "--grace", "1", *program]
        self.world = world
        self.mark = uuid.uuid4().hex
        self.log = self.folder / "log"
        self.launcher = None

    def start(self):
        environment = {**os.environ, MARK: self.mark, "RUST_BACKTRACE": "0", "OMP_NUM_THREADS": "1"}
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        with open(self.log, "a") as log:
            self.launcher = subprocess.Popen(self.command, stdout=log, stderr=log, env=environment)

    def fail(self, what):
        self.launcher.kill()
        text = self.log.read_text()[-6000:]
        sys.exit(f"FAILED: {what}\n{' '.join(self.command)}\n{text}")

    def newest(self):
        """The step of the newest complete checkpoint."""
        while True:
            try:
                found = list(self.folder.glob("run/**/step-????????/manifest.json"))
                return max((int(path.parent.name[5:]) for path in found), default=0)
            except FileNotFoundError:
                pass  # An older checkpoint is being deleted.

    def processes(self):
        """The processes of the run: number, rank or None, and command line."""
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self.launcher.pid:
                continue
            try:
                pairs = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                variables = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if variables.get(MARK) == self.mark and words[0]:
                found.append((int(entry.name), variables.get("OMPI_COMM_WORLD_RANK"), words))
        return found

    def victims(self, kind):
        if kind == "launcher":
            return [self.launcher.pid]
        if kind == "mpirun":
            return [number for number, _, words in self.processes() if pathlib.Path(words[0]).name == "mpirun"]
        ours = self.command[self.command.index("--grace") + 2]
        return [number for number, rank, words in self.processes() if rank is not None and words[0] == ours]

    def wait_for_step(self, after):
        """Waits for a checkpoint after the step `after`. False if the run has ended."""
        last, deadline = self.newest(), time.monotonic() + HANG
        while (step := self.newest()) <= after:
            if self.launcher.poll() is not None:
                return self.newest() > after
            if step > last:
                last, deadline = step, time.monotonic() + HANG
            if time.monotonic() > deadline:
                self.fail(f"no checkpoint after step {step} within {HANG} s")
            time.sleep(0.02)
        return True

    def end(self):
        while (step := self.newest()) < self.steps and self.wait_for_step(step):
            pass
        try:
            code = self.launcher.wait(HANG)
        except subprocess.TimeoutExpired:
            self.fail(f"the run does not end within {HANG} s")
        if code != 0:
            self.fail(f"exit code {code}")
        left = [(number, words[0]) for number, _, words in self.processes()]
        if left:
            self.fail(f"processes are left: {left}")

    def result(self):
        """The files of the ranks in the last checkpoint, and the losses since the last start."""
        folders = self.folder.glob(f"run/**/step-{self.steps:08}")
        files = [file for folder in folders for file in folder.glob("rank-*.safetensors")]
        # The end of a run is also the end of an epoch, or an interval: any folder holds the same state.
        files = {file.name: file.read_bytes() for file in sorted(files)}
        lines = [line for line in self.log.read_text().splitlines() if line.startswith("[rank 0] {")]
        return files, json.loads(lines[-1].removeprefix("[rank 0] "))["losses"]


def disturbed(run, kills):
    """Disturbs a run up to `kills` times. Returns the kinds."""
    done, step = [], 0
    run.start()
    while len(done) < kills and run.wait_for_step(step):
        time.sleep(random.uniform(0, 0.7))
        kind, how = random.choices(
            [("rank", signal.SIGKILL), ("rank", signal.SIGSTOP), ("mpirun", signal.SIGKILL), ("launcher", signal.SIGKILL)],
            [6, 2, 1, 2],
        )[0]
        step = run.newest()
        victims = run.victims(kind)
        if not victims or run.launcher.poll() is not None:
            continue
        try:
            os.kill(random.choice(victims), how)
        except ProcessLookupError:
            continue
        done.append(f"{how.name} of {kind} after step {step}")
        if kind == "launcher":
            run.launcher.wait()
            run.start()
    run.end()
    return done


def main(fsdp, example, count, seed=None):
    seed = int(seed) if seed else random.randrange(1 << 32)
    random.seed(seed)
    print(f"seed {seed}", flush=True)
    count, expected, done, runs, equal = int(count), {}, 0, 0, 0
    kinds = {}
    while done < count:
        world = random.choice([2, 3])
        if world not in expected:
            with tempfile.TemporaryDirectory() as folder:
                run = Run(fsdp, example, world, folder)
                run.start()
                run.end()
                expected[world] = run.result()
                assert len(expected[world][0]) == world and len(expected[world][1]) == STEPS, expected[world][0].keys()
        with tempfile.TemporaryDirectory() as folder:
            run = Run(fsdp, example, world, folder)
            kills = disturbed(run, min(PER_RUN, count - done))
            files, losses = run.result()
        runs += 1
        (whole, all_losses) = expected[world]
        same = files == whole and losses == all_losses[len(all_losses) - len(losses):]
        equal += same
        done += len(kills)
        for kill in kills:
            kind = kill.rsplit(" after", 1)[0]
            kinds[kind] = kinds.get(kind, 0) + 1
        print(f"{world} ranks, {'; '.join(kills)}: {'equal bits' if same else 'OTHER BITS'}", flush=True)
    print(f"{done} disturbances in {runs} runs, {equal} of {runs} with the bits of an undisturbed run: {kinds}")
    assert equal == runs


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5):
        sys.exit(__doc__)
    main(*sys.argv[1:])
