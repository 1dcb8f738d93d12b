"""The step on several ranks of NCCL, as processes that share one GPU.

NCCL takes the ranks for machines of their own, since each has another `NCCL_HOSTID`, and connects them over
loopback sockets: slow and real. A variable that only tests set lets the library's ranks share a GPU.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

from correctness import OTHER_ROWS, SAME_DEVICE, distance
from harness import POLL, TAIL, StepRun, end_group, free_port, json_lines, last_json

# Exit code of a rank whose peer has failed.
PEER_FAILED = 75
# Losses and the time-out of the runs, and seconds of one that ends by itself.
STEPS, TIMEOUT, LIMIT = 20, 15, 60
# The step after which a run is saved, to be resumed with more ranks.
SAVED_AFTER = 10
# Seconds within which a rank names a killed peer, and a stopped one.
KILLED, STOPPED = 10, TIMEOUT + 25
SHARES = {"NCCL_SOCKET_IFNAME": "lo", "FSDP_NCCL_TEST_SHARED_GPU": "1"}
# Flags of gpt_pretrain.
SETTINGS = {"clipping": ("--clip-norm", "0.05"), "accumulation": ("--update-freq", "2"), "loss scaling": ("--fp16",)}


@dataclass
class Rank:
    """How a rank has ended."""

    exit_code: int | None
    seconds: float
    text: str


def place(rank: int, world: int, port: int, local: int) -> dict[str, str]:
    """The variables of a rank, on machines of `local` ranks."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank % local, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local}
    return {name: str(number) for name, number in numbers.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NCCL_HOSTID": f"host{rank}",
        # On a machine with several GPUs each process would take another one.
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
        **SHARES,
    }


def run_ranks(
    step: StepRun,
    name: str,
    argv: list[str],
    env: dict[str, str],
    envs: list[dict[str, str]],
    limit: float = LIMIT,
    trouble: "Callable[[list[subprocess.Popen[bytes]], list[Path]], None] | None" = None,
) -> list[Rank]:
    """Runs a program as ranks, each in a folder of its own, and returns how they ended. `trouble` may end some."""
    limit = min(limit, step.left())
    if step.context.dry_run:
        for own in envs:
            step.command(f"{name}, rank {own.get('RANK', '')}", argv, env | own)
        return []
    entry: dict[str, Any] = {"command": name, "argv": argv, "env": env | envs[0], "ranks": len(envs)}
    step.record["commands"].append(entry)
    if limit <= 0:
        entry["not_run"] = "the step has no time left"
        step.save()
        return []
    print(f"  {name} (at most {limit:.0f} s)", flush=True)
    step.save()
    folder = step.context.scratch / name.replace(" ", "-").replace(",", "")
    children: list[subprocess.Popen[bytes]] = []
    logs, ends = [folder / str(rank) / "log" for rank in range(len(envs))], {}
    begin = time.monotonic()
    try:
        for own, log in zip(envs, logs):
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("wb") as file:
                children.append(
                    subprocess.Popen(
                        argv,
                        cwd=log.parent,
                        env=os.environ | env | own,
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        if trouble:
            trouble(children, logs)
            begin = time.monotonic()
        # A rank that is in trouble may never end.
        awaited = range(1 if trouble else len(children))
        while not all(rank in ends for rank in awaited) and time.monotonic() - begin < limit:
            for rank, child in enumerate(children):
                if rank not in ends and child.poll() is not None:
                    ends[rank] = time.monotonic() - begin
            time.sleep(POLL)
    except OSError as error:
        entry["error"] = str(error)
    finally:
        for child in children:
            # A stopped rank does not end by SIGTERM.
            end_group(child, (signal.SIGKILL,))
    texts = [log.read_text(errors="replace") if log.is_file() else "" for log in logs]
    found = [
        Rank(children[rank].returncode if rank in ends else None, ends.get(rank, limit), texts[rank])
        for rank in range(len(children))
    ]
    entry["exit_codes"] = [rank.exit_code for rank in found]
    entry["seconds"] = [round(rank.seconds, 2) for rank in found]
    if any(rank.exit_code != 0 for rank in found):
        entry["tails"] = [rank.text[-TAIL:] for rank in found]
    step.save()
    return found


def finetune(step: StepRun, world: int, *flags: str, steps: int = STEPS) -> list[str]:
    """The command of bert_finetune with a global batch of 16 rows."""
    argv = [step.context.program("bert_finetune"), "--device", "cuda", "--batch-size", str(16 // world)]
    argv += ["--steps", str(steps), "--max-length", "16", "--dropout", "0", "--json", "--quiet"]
    return [*argv, "--timeout", str(TIMEOUT), *flags]


def losses_of(text: str) -> list[Any]:
    """The losses that bert_finetune or gpt_pretrain has printed."""
    last = last_json(text) or {}
    return last.get("losses") or [float(line["loss"]) for line in json_lines(text) if "num_updates" in line]


def losses(
    step: StepRun, name: str, argv: list[str], world: int, env: "dict[str, str] | None" = None, local: int = 0
) -> list[Any]:
    """The losses of ranks over NCCL. Requires that all ranks end."""
    port = free_port()
    envs = [place(rank, world, port, local or world) for rank in range(world)]
    ranks = run_ranks(step, name, [*argv, "--engine", "nccl"], step.context.env | (env or {}), envs)
    step.check(f"{name}: ends", [rank.exit_code for rank in ranks] == [0] * world)
    if not ranks:
        return []
    found = losses_of(ranks[0].text)
    step.record["commands"][-1]["result"] = {"losses": found}
    step.save()
    return found


def thread_losses(step: StepRun, name: str, argv: list[str], world: int) -> list[Any]:
    """The losses of thread ranks on the engine `local`."""
    argv = [*argv, "--engine", "local", "--world-size", str(world)]
    done = step.command(name, argv, step.context.env, LIMIT, lambda done: losses_of(done.stdout))
    return losses_of(done.stdout)


def near(step: StepRun, name: str, found: list[Any], expected: list[Any], limit: float = OTHER_ROWS) -> None:
    apart = distance(expected, found)
    step.check(name, apart <= limit, found=apart, limit=limit)


def conformance_of_processes(step: StepRun) -> None:
    """All collectives, on ranks that are processes."""
    argv = [step.context.program("unit_tests"), "ranks_conform_as_processes_on_one_gpu", "--nocapture"]
    for world in (2, 4):
        port, name = free_port(), f"conformance, {world} ranks"
        envs = [place(rank, world, port, world) for rank in range(world)]
        envs = [env | {"FSDP_NCCL_TEST_RANK": f"{rank}/{world}@{port}"} for rank, env in enumerate(envs)]
        ranks = run_ranks(step, name, argv, step.context.env | {"BURN_DEVICE": "flex"}, envs, limit=120)
        conformed = [f"conformed: rank {at} of {world}" in rank.text for at, rank in enumerate(ranks)]
        # A rank may crash after its last line, when the communicator ends.
        ends = [rank.exit_code for rank in ranks]
        step.check(name, conformed == [True] * world and ends == [0] * world, conformed=conformed, exit_codes=ends)


def strategies(step: StepRun) -> list[Any]:
    """Losses under each strategy beside those of threads, and with waits on the host. Returns those of two ranks."""
    of_two: list[Any] = []
    for world in (2, 4):
        argv = finetune(step, world)
        threads = thread_losses(step, f"threads, {world} ranks", argv, world)
        plain = losses(step, f"FULL_SHARD, {world} ranks", argv, world)
        of_two = of_two or plain
        near(step, f"FULL_SHARD, {world} ranks, to threads", plain, threads)
        # Autotune may choose other kernels in another process.
        noise = distance(plain, losses(step, f"FULL_SHARD again, {world} ranks", argv, world))
        step.check(f"FULL_SHARD again, {world} ranks", noise <= OTHER_ROWS, found=noise, limit=OTHER_ROWS)
        limit = max(SAME_DEVICE, min(2 * noise, OTHER_ROWS))
        for name in ("SHARD_GRAD_OP", "NO_SHARD", *(["HYBRID_SHARD"] if world == 4 else [])):
            # Two machines of two ranks, for the strategy that shards within each.
            local = 2 if name == "HYBRID_SHARD" else world
            found = losses(step, f"{name}, {world} ranks", [*argv, "--strategy", name], world, local=local)
            near(step, f"{name}, {world} ranks, to FULL_SHARD", found, plain, limit)
        waits = losses(step, f"waits on the host, {world} ranks", argv, world, {"FSDP_NCCL_STREAM": "0"})
        apart = distance(waits, plain)
        step.check(f"waits on the host, {world} ranks: equal bits", apart == 0.0, found=apart, noise=noise)
    return of_two


def settings(step: StepRun) -> None:
    """Clipping, accumulation and loss scaling, beside threads."""
    argv = [step.context.program("gpt_pretrain"), "--device", "cuda", "--tokens-per-sample", "64", "--batch-size", "2"]
    argv += ["--max-update", "10", "--max-valid-steps", "1", "--log-interval", "1", "--json"]
    argv += ["--timeout", str(TIMEOUT), "--bpe-cache", str(step.context.scratch / "bpe")]
    for name, flags in SETTINGS.items():
        threads = thread_losses(step, f"{name}, threads", [*argv, *flags], 2)
        near(step, f"{name}, to threads", losses(step, name, [*argv, *flags], 2), threads)


def resume(step: StepRun, plain: list[Any]) -> None:
    """A checkpoint of two ranks goes on with four."""
    saved = ["--save-dir", str(step.context.scratch / "saved")]
    losses(step, "save at 2 ranks", finetune(step, 2, "--stop-after", str(SAVED_AFTER), *saved), 2)
    found = losses(step, "resume at 4 ranks", finetune(step, 4, "--resume", "auto", *saved), 4)
    # A run that began anew has more losses, and so another length.
    near(step, "resume at 4 ranks, to 2 ranks without a break", found, plain[SAVED_AFTER:])


def trains(step: StepRun, children: "list[subprocess.Popen[bytes]]", log: Path) -> bool:
    """Waits for rank 0's first line of progress, of step 20. Returns whether it came while all ranks ran."""
    until = time.monotonic() + min(LIMIT, step.left())
    while time.monotonic() < until and all(child.poll() is None for child in children):
        if re.search(rb"^step \d+/", log.read_bytes(), re.M):
            return True
        time.sleep(POLL)
    return False


def signals(step: StepRun) -> None:
    """A rank that is killed, and one that is stopped. The other one names it."""
    for name, number, most in (("killed", signal.SIGKILL, KILLED), ("stopped", signal.SIGSTOP, STOPPED)):

        def trouble(children: "list[subprocess.Popen[bytes]]", logs: "list[Path]") -> None:
            # An earlier failure must not pass for the end of a rank whose peer is gone.
            if step.check(f"a {name} rank: the ranks train before", trains(step, children, logs[0])):
                os.kill(children[1].pid, number)

        port = free_port()
        argv = finetune(step, 2, "--engine", "nccl", steps=100_000)
        argv.remove("--quiet")
        envs = [place(rank, 2, port, 2) for rank in range(2)]
        ranks = run_ranks(step, f"a {name} rank", argv, step.context.env, envs, most, trouble)
        first = ranks[0] if ranks else Rank(None, most, "")
        found = {"exit_code": first.exit_code, "seconds": round(first.seconds, 1), "limit": most}
        ended = first.exit_code == PEER_FAILED if name == "killed" else first.exit_code not in (None, 0)
        step.check(f"a {name} rank: the other one ends", ended, **found)
        step.check(f"a {name} rank is named", "rank 1" in first.text[-TAIL:])


def ranks(step: StepRun) -> None:
    """Ranks of NCCL that share the GPU."""
    conformance_of_processes(step)
    plain = strategies(step)
    signals(step)
    resume(step, plain)
    settings(step)
