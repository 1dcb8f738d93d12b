"""The steps on correctness: kernels, NCCL conformance, losses, and runs that must agree."""

from __future__ import annotations

import math
import re
import shutil
from typing import Any, Iterator

from harness import Context, Outcome, StepRun, gpus, json_lines, last_json


def distance(one: list[Any], other: list[Any]) -> float:
    """The largest relative difference. Infinite for different lengths, no numbers, or numbers that are not finite."""
    if not one or len(one) != len(other) or None in one or None in other:
        return math.inf
    found = max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(one, other))
    return found if math.isfinite(sum(one) + sum(other)) else math.inf


# Tests


def tests_of(done: Outcome) -> dict[str, Any]:
    """The results of a test program, also of one that was killed."""
    results = dict(re.findall(r"^test (\S+).* \.\.\. (ok|FAILED|ignored)", done.stdout, re.M))
    started = re.findall(r"^test (\S+)(?: - .*)? \.\.\. ", done.stdout, re.M)
    return {
        "passed": sum(result == "ok" for result in results.values()),
        "failed": [name for name, result in results.items() if result == "FAILED"],
        "unfinished": [] if done.ok else [name for name in started if name not in results],
        "summary": re.findall(r"^test result: .*", done.stdout, re.M),
    }


def kernel_tests(step: StepRun) -> list[str]:
    argv = [step.context.program("kernels"), "--list", "--format", "terse"]
    listed = step.command("list", argv, step.context.env, limit=60)
    return re.findall(r"^(\S+): test$", listed.stdout, re.M)


def kernels(step: StepRun) -> None:
    """The kernel tests. Each module is a process, since an error of the device fails all tests after it."""
    context = step.context
    tests = kernel_tests(step)
    modules = list(dict.fromkeys("::".join(test.split("::")[:2]) + "::" for test in tests))
    step.check("there are kernel tests", bool(modules))
    for at, module in enumerate(modules):
        # A module that hangs leaves half of the time to the others.
        limit = step.left() / (2 if at + 1 < len(modules) else 1)
        env = context.env | {"BURN_DEVICE": context.device}
        done = step.command(module, [context.program("kernels"), module], env, limit, tests_of)
        found, of = tests_of(done), sum(test.startswith(module) for test in tests)
        # The check shows what failed, and where a killed module was.
        step.check(module, done.ok and found["passed"] == of, of=of, **found)


# Rows of the bench of kernels that decode codes: to f32, and to bf16.
DECODES = [f"decode {codes} -> {dtype}" for codes in ("int8", "nf4") for dtype in ("f32", "bf16")]


def rates(done: Outcome) -> list[dict[str, Any]]:
    return [line for line in json_lines(done.stdout) if "gb_per_s" in line]


def kernel_rates(step: StepRun) -> None:
    """Bytes per second of each kernel, and of a plain copy of as many bytes. The decoding of codes has a verdict."""
    argv = [step.context.program("kernel_rates"), "--device", step.context.device, "--json"]
    found = rates(step.command("kernels", argv, step.context.env, parse=rates))
    step.result("rates", found)
    for name in DECODES:
        of_name = {f"{row['megabytes']} MB": row["gb_per_s"] for row in found if row["kernel"] == name}
        step.check(f"{name} is measured", len(of_name) == 3, gb_per_s=of_name)


def memcheck(step: StepRun) -> None:
    """Three kernel tests under NVIDIA's memory checker. Without the checker there is no verdict."""
    context = step.context
    tool = shutil.which("compute-sanitizer")
    if not tool and not context.dry_run:
        step.result("skipped", "compute-sanitizer is not installed")
        return
    on_device = [test for test in kernel_tests(step) if "_on_the_device" in test]
    for module in ("copies", "means", "norms"):
        test = next((test for test in on_device if f"::{module}::" in test), f"a test of {module}")
        argv = [tool or "compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]
        argv += [context.program("kernels"), "--exact", test]
        done = step.command(test, argv, context.env | {"BURN_DEVICE": context.device}, 170, tests_of)
        clean = "ERROR SUMMARY: 0 errors" in done.stdout + done.stderr
        step.check(test, done.ok and tests_of(done)["passed"] == 1 and clean)


def conformance(step: StepRun) -> None:
    """The conformance tests of the NCCL engine, on threads and on processes, with up to four GPUs."""
    argv = [step.context.program("unit_tests"), "nccl", "--nocapture"]
    done = step.command("nccl", argv, step.context.env | {"BURN_DEVICE": "flex"}, parse=tests_of)
    text = done.stdout + done.stderr
    conformed = re.search(r"conformed: (\d+) of (\d+) GPUs", text)
    on_gpus = conformed is not None and int(conformed[1]) == min(int(conformed[2]), 4) > 0
    # Two tests are about machines without a GPU, and one about several processes, which the step `ranks` starts.
    others = ("this machine has a GPU", "FSDP_NCCL_TEST_RANK is not set")
    skipped = [line for line in re.findall(r"skipped: .*", text) if not any(it in line for it in others)]
    step.check("tests pass", done.ok and "test result: ok" in text)
    step.check("on GPUs", on_gpus, found=conformed[0] if conformed else None)
    step.check("none is skipped", not skipped, skipped=skipped)


# Losses

# Two runs on one device differ by the order of sums. Autotune chooses kernels by their time, so a second
# process may choose others: the limit grows with the difference between two equal runs.
SAME_DEVICE = 1e-5
# With more ranks, each multiplies fewer rows, for which autotune may choose other kernels. On a GPU some compute in
# TF32, and some in f32.
OTHER_ROWS = 1e-3
# GELU's backward is exact on Flex and a tanh approximation on CubeCL devices, which also compute products of
# f32 in TF32.
OTHER_DEVICE = 1e-2


def loss_runs(context: Context) -> Iterator[tuple[str, str, str, int]]:
    """Name, device, engine and number of ranks of each run."""
    device = context.device
    if context.on_gpu:
        yield "flex", "flex", "local", 1
    yield "local", device, "local", 1
    yield "local again", device, "local", 1
    # Thread ranks may share a GPU on the engine `local`. Over NCCL each has its own.
    yield "local, world 2", device, "local", 2
    yield "local, world 4", device, "local", 4
    if context.on_gpu:
        count = 1 if context.dry_run else len(gpus())
        for world in (1, 2, 4):
            if world <= count:
                yield f"nccl, world {world}", device, "nccl", world


def losses(step: StepRun) -> None:
    """The losses of bert_finetune on each engine and number of ranks at one global batch, and on the CPU.

    A step on the CPU makes a checkpoint, from which all runs go on: each kind of device draws other initial weights.
    """
    context = step.context
    batch, steps = (16, 20) if context.on_gpu else (4, 4)
    found: dict[str, list[Any]] = {}

    def run(name: str, device: str, engine: str, world: int, *flags: str) -> Outcome:
        argv = [context.program("bert_finetune"), "--device", device, "--engine", engine]
        argv += ["--world-size", str(world), "--batch-size", str(batch // world)]
        # Short examples of one length, since each shape is tuned.
        argv += ["--steps", str(steps), "--max-length", "16", "--dropout", "0", "--json", "--quiet", *flags]
        return step.command(name, argv, context.env, parse=lambda done: last_json(done.stdout))

    runs = list(loss_runs(context))
    first = context.scratch / "losses" / "first"
    made = run("first step", "flex", "local", 1, "--stop-after", "1", "--save-dir", str(first))
    step.check("first step: ends", made.ok)
    for number, (name, *place) in enumerate(runs):
        saved = context.scratch / "losses" / str(number)
        done = run(name, *place, "--resume", str(first), "--save-dir", str(saved))
        result = last_json(done.stdout) if done.ok else None
        found[name] = result["losses"] if result else []
        step.check(f"{name}: ends", bool(found[name]))
    noise = distance(found["local"], found["local again"])
    step.check("local again, to local", noise <= OTHER_DEVICE, found=noise, limit=OTHER_DEVICE)
    limit = max(SAME_DEVICE, min(2 * noise, OTHER_DEVICE))
    for name, _, _, world in runs:
        if name not in ("flex", "local", "local again"):
            apart, most = distance(found["local"], found[name]), limit
            if context.on_gpu and world > 1:
                most = max(limit, OTHER_ROWS)
            step.check(f"{name}, to local", apart <= most, found=apart, limit=most)
    if "flex" in found:
        apart = distance(found["flex"], found["local"])
        step.check("local, to flex", apart <= OTHER_DEVICE, found=apart, limit=OTHER_DEVICE)


# Agreement

PLAIN, SYNCED = "FULL_SHARD", "FULL_SHARD synced"
# Rounds in one process use the same kernels, and can differ by the order of atomic sums only.
SAME_KERNELS = 1e-6
# Another process may choose other kernels, whose results in bf16 differ in the last of 8 bits.
OTHER_KERNELS = 1e-2

# Losses of each round, for each variant.
Rounds = dict[str, list[list[Any]]]


def rounds_of(done: Outcome) -> Rounds:
    return {line["variant"]: line["losses"] for line in json_lines(done.stdout) if "variant" in line}


def check_rounds(step: StepRun, name: str, rounds: Rounds) -> None:
    """Compares the rounds of one process: plain ones with synced ones.

    The noise is that of synced rounds alone, since a race makes plain rounds differ from each other.
    """
    plain, synced = rounds.get(PLAIN, []), rounds.get(SYNCED, [])
    if len(plain) < 2 or len(synced) < 2:
        step.check(f"{name}: two rounds of each", False)
        return
    noise = max(distance(synced[0], other) for other in synced[1:])
    step.check(f"{name}: synced rounds", noise <= OTHER_KERNELS, found=noise, limit=OTHER_KERNELS)
    limit = max(SAME_KERNELS, min(4 * noise, OTHER_KERNELS))
    apart = max(distance(synced[0], other) for other in plain)
    step.check(f"{name}: plain, to synced", apart <= limit, found=apart, limit=limit)


def agreement(step: StepRun) -> None:
    """Compares losses of plain training, with a wait after each step, and with blocking launches.

    A missing wait between streams shows as plain rounds that differ from the others, or from each other.
    """
    context = step.context
    size = "--hidden 768 --layers 4 --heads 12 --inner 3072 --batch 8 --steps 22 --rounds 3 --bf16 --cuda 0"
    if not context.on_gpu:
        size = "--hidden 32 --layers 2 --heads 2 --inner 64 --batch 2 --length 16 --steps 5 --rounds 2"
    argv = [context.program("step"), "--world", "1", *size.split(), "--sync", "--json"]
    argv += ["--variants", f"{PLAIN},{SYNCED}"]
    plain: dict[str, list[Any]] = {}
    for name in ("first", "second", "blocking"):
        env = context.env | ({"CUDA_LAUNCH_BLOCKING": "1"} if name == "blocking" else {})
        done = step.command(name, argv, env, parse=rounds_of)
        rounds = rounds_of(done)
        plain[name] = (rounds.get(PLAIN) or [[]])[0]
        step.check(f"{name}: ends", done.ok)
        check_rounds(step, name, rounds)
    noise = distance(plain["first"], plain["second"])
    step.check("second, to first", noise <= OTHER_KERNELS, found=noise, limit=OTHER_KERNELS)
    apart = distance(plain["first"], plain["blocking"])
    step.check("blocking, to first", apart <= OTHER_KERNELS, found=apart, limit=OTHER_KERNELS)
    step.result("final_losses", {name: losses[-1] if losses else None for name, losses in plain.items()})
