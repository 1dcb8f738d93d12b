#!/usr/bin/env python3
"""Checks of the examples on processes, and `bert_finetune`'s throughput there. For a build with `mpi`:

    cargo build --release --features mpi --example bert_finetune
    tests/mpi.py losses EXAMPLE        20 steps on 4 processes against 4 threads: at most 1e-6 apart
    tests/mpi.py learner EXAMPLE       `mnist_learner` on 2 processes against 2 threads: the same metrics
    tests/mpi.py resume EXAMPLE        `mnist_learner`, killed after an epoch and resumed, as 2 threads and as 2
                                       processes: the same bits as without a kill
    tests/mpi.py kills EXAMPLE COUNT   ranks killed or stopped at random: each run ends within 10 s,
                                       names the rank, exits with an error and leaves no process
    tests/mpi.py throughput EXAMPLE    2 processes against 2 threads, in turns: at least 0.9 of it
"""

import json
import os
import pathlib
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time

MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n"]
TIMEOUT = 4
# The device, whichever devices the build has.
DEVICE = ["--device", "flex"]


def result(command):
    """The object that a run prints last."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def losses(example):
    run = [example, *DEVICE, "--json", "--quiet", "--steps", "20", "--batch-size", "2"]
    threads = result(run + ["--engine", "local", "--world-size", "4"])["losses"]
    processes = result(MPIRUN + ["4"] + run + ["--engine", "mpi"])["losses"]
    apart = max(abs(a - b) / abs(a) for a, b in zip(threads, processes, strict=True))
    print(f"{len(threads)} losses on 4 processes and on 4 threads: {apart:.1e} apart")
    assert len(threads) == 20 and apart <= 1e-6, (threads, processes)


def learner(example):
    """The Learner's metrics of every epoch, as its loggers write them."""

    def metrics(command, folder):
        done = subprocess.run([*command, "--epochs", "1", "--out", folder], capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "panicked" not in done.stdout + done.stderr, done.stdout + done.stderr
        logs = sorted(pathlib.Path(folder).rglob("*.log"))
        return {str(log.relative_to(folder)): log.read_text() for log in logs if log.name != "experiment.log"}

    with tempfile.TemporaryDirectory() as threads, tempfile.TemporaryDirectory() as processes:
        expected = metrics([example, "--world", "2"], threads)
        found = metrics(MPIRUN + ["2", example], processes)
    assert expected and found == expected, (found, expected)
    lines = sum(text.count("\n") for text in found.values())
    print(f"{lines} values of {len(found)} metrics on 2 processes and on 2 threads: the same")


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ranks_of(mpirun):
    """The processes of the ranks, by rank."""
    found = {}
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(mpirun)], capture_output=True, text=True)
    for pid in map(int, children.stdout.split()):
        try:
            with open(f"/proc/{pid}/environ") as environ:
                rank = re.search(r"OMPI_COMM_WORLD_RANK=(\d+)", environ.read())
        except (FileNotFoundError, ProcessLookupError):
            continue
        if rank:
            found[int(rank[1])] = pid
    return found


def disturb(example, world, how, log):
    """One run, one of whose ranks is killed or stopped at a random moment of its training."""
    command = MPIRUN + [str(world), example, *DEVICE, "--timeout", str(TIMEOUT), "--steps", "100000"]
    with open(log, "w+") as output:
        # A short message is written at once. A backtrace would be longer than a pipe takes at once.
        environment = {**os.environ, "RUST_BACKTRACE": "0"}
        run = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        while "step 20/" not in open(log).read():
            assert run.poll() is None, open(log).read()
            time.sleep(0.05)
        ranks = ranks_of(run.pid)
        assert len(ranks) == world, ranks
        victim = random.randrange(world)
        time.sleep(random.uniform(0, 1))
        os.kill(ranks[victim], how)
        begin = time.monotonic()
        try:
            code = run.wait(10)
        except subprocess.TimeoutExpired:
            run.kill()
            sys.exit(f"rank {victim}: the run goes on 10 s later\n{open(log).read()}")
        took = time.monotonic() - begin
        time.sleep(0.2)
        left = [pid for pid in ranks.values() if alive(pid)]
        text = open(log).read()
    if how == signal.SIGKILL:
        named = re.findall(r"process rank (\d+) with PID \d+ on node \S+ exited on signal 9", text)
    else:
        # All other ranks report the error at the same time, so that a line may follow another's end.
        named = re.findall(r"\w+ of .*: rank (\d+) did not join", text)
    assert set(named) == {str(victim)}, f"rank {victim} is not named:\n{text}"
    assert code != 0 and not left, f"exit code {code}, left: {left}\n{text}"
    print(f"rank {victim} of {world}, {how.name}: {took:.1f} s, exit code {code}", flush=True)


def resume(example):
    """The last checkpoint and metrics of a run that is killed with SIGKILL after its first epoch, and resumed."""

    def trained(command, folder):
        done = subprocess.run([*command, "--out", folder], capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        # The ranks' files of the last checkpoint: weights and the optimizer's state.
        last = max(pathlib.Path(folder).glob("checkpoints/step-????????"))
        files = [*last.glob("rank-*"), *pathlib.Path(folder).glob("valid/epoch-3/*.log")]
        return {str(file.relative_to(folder)): file.read_bytes() for file in files}

    def killed(command, folder):
        with open(pathlib.Path(folder, "killed.log"), "w+") as log:
            run = subprocess.Popen([*command, "--out", folder], stdout=log, stderr=log)
        while not list(pathlib.Path(folder).glob("checkpoints/step-????????/manifest.json")):
            assert run.poll() is None, pathlib.Path(folder, "killed.log").read_text()
            time.sleep(0.05)
        time.sleep(random.uniform(0, 0.5))
        victim = ranks_of(run.pid).get(1, run.pid)
        os.kill(victim, signal.SIGKILL)
        assert run.wait(30) != 0
        return "a rank" if victim != run.pid else "the process"

    for command in ([example, "--world", "2"], MPIRUN + ["2", example]):
        with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as parts:
            expected = trained(command, whole)
            victim = killed(command, parts)
            assert not pathlib.Path(parts, "model.bpk").exists(), "it was killed before its end"
            found = trained([*command, "--resume"], parts)
        assert len(expected) == 4 and expected.keys() == found.keys(), (expected.keys(), found.keys())
        differing = [name for name, bytes in expected.items() if found[name] != bytes]
        assert not differing, differing
        print(f"{command[0]}: {victim} was killed and the run resumed: the same bits", flush=True)


def kills(example, count):
    for _ in range(int(count)):
        how = random.choice([signal.SIGKILL, signal.SIGSTOP])
        disturb(example, random.choice([2, 3, 4]), how, "/tmp/fsdp-mpi-kills.log")


def throughput(example):
    run = [example, *DEVICE, "--json", "--quiet", "--steps", "60", "--seed", "1"]
    threads = run + ["--engine", "local", "--world-size", "2"]
    processes = MPIRUN + ["2"] + run + ["--engine", "mpi"]
    seconds = {"threads": [], "processes": []}
    for _ in range(3):
        seconds["threads"].append(result(threads)["step_seconds_median"])
        seconds["processes"].append(result(processes)["step_seconds_median"])
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    ratio = medians["threads"] / medians["processes"]
    print({name: [round(time, 4) for time in times] for name, times in seconds.items()})
    print(f"median step: {medians}; throughput of processes / threads: {ratio:.3f}")
    assert ratio >= 0.9


if __name__ == "__main__":
    commands = {"losses": losses, "learner": learner, "resume": resume, "kills": kills, "throughput": throughput}
    try:
        command, arguments = commands[sys.argv[1]], sys.argv[2:]
    except (IndexError, KeyError):
        sys.exit(__doc__)
    command(*arguments)
