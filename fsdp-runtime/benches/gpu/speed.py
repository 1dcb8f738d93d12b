"""The steps on speed and memory, beside PyTorch's `fully_shard`."""

from __future__ import annotations

import re
import statistics
from typing import Any, Callable

import llama
from correctness import PLAIN
from harness import Outcome, StepRun, available_bytes, free_port, json_lines, last_json

# Rounds of a comparison, as far as the step's time allows. Both sides take turns.
ROUNDS = 3
TF32 = (
    "CubeCL computes products of f32 in TF32 wherever it chooses a kernel for tensor cores, and has no switch for "
    "this. PyTorch's side therefore allows TF32 too."
)

# Runs one side for at most the given seconds. Returns its measure, or None.
Side = Callable[[float], "float | None"]


def one_rank() -> dict[str, str]:
    """The variables of the only rank, for PyTorch."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    return place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def take_turns(step: StepRun, ours: Side, theirs: Side) -> dict[str, list[float]]:
    """Runs both sides in turns. Returns the measures of each side.

    The first side leaves time to the second. A side that fails is not run again. A round starts only if the
    step has time for one as long as the longest so far.
    """
    sides = {"ours": ours, "torch": theirs}
    if step.context.side != "both":
        sides = {step.context.side: sides[step.context.side]}
    found: dict[str, list[float]] = {side: [] for side in sides}
    longest = 0.0
    for _ in range(1 if step.context.dry_run else ROUNDS):
        before = step.left()
        if not sides or before < 1.2 * longest:
            break
        for side in list(sides):
            is_last = side == list(sides)[-1]
            measure = sides[side](step.left() * (1.0 if is_last else 0.6))
            if measure is None:
                del sides[side]
            else:
                found[side].append(measure)
        longest = max(longest, before - step.left())
    return found


def gpu_peak(step: StepRun, side: str) -> int | None:
    """The most MiB in use on the GPU in the measured runs of a side."""
    runs = [run for run in step.record["commands"] if run["command"].startswith(side) and run.get("result")]
    return max((run["gpu_peak_mib"] for run in runs if run.get("gpu_peak_mib")), default=None)


def compare(step: StepRun, found: dict[str, list[float]], facts: dict[str, Any]) -> None:
    """Records medians, their ratio, and the memory of both sides. Requires a measure of each."""
    result: dict[str, Any] = dict(facts)
    for side, values in found.items():
        median = statistics.median(values) if values else None
        result[side] = {"median": median, "rounds": values, "gpu_peak_mib": gpu_peak(step, side)}
    if all(found.get(side) for side in ("ours", "torch")):
        result["ours_to_torch"] = result["ours"]["median"] / result["torch"]["median"]
    step.result("comparison", result)
    for side, values in found.items():
        step.check(f"{side} is measured", bool(values), rounds=len(values), median=result[side]["median"])


# BERT

# Rows, tokens a row, hidden size, layers, heads, feed-forward size.
BERT_BASE = (32, 128, 768, 12, 12, 3072)
BERT_NAMES = ("--batch", "--length", "--hidden", "--layers", "--heads", "--inner")
BERT_FLAGS = [text for name, size in zip(BERT_NAMES, BERT_BASE) for text in (name, str(size))]
BERT_STEPS = 30


def step_seconds(done: Outcome) -> float | None:
    return (last_json(done.stdout) or {}).get("step")


def torch_step_seconds(done: Outcome) -> float | None:
    found = re.search(r" step ([0-9.]+) s", done.stdout)
    return float(found[1]) if found else None


# Most of a step that the host may take to issue it: the rest is a reserve for slower machines.
MOST_HOST = 0.5


def bert(step: StepRun, dtype: str) -> None:
    """A step of a BERT of the base shape, with one rank over NCCL on both sides."""
    context = step.context
    shares: list[float] = []

    def ours(limit: float) -> float | None:
        argv = [context.program("step"), "--cuda", "0", "--world", "1", *BERT_FLAGS, "--variants", PLAIN, "--json"]
        # The first two steps are not counted, here and in PyTorch's side.
        argv += ["--rounds", "1", "--steps", str(BERT_STEPS + 2), *(["--bf16"] if dtype == "bf16" else [])]
        done = step.command("ours", argv, context.env, limit, step_seconds, watch_gpu=True)
        times = last_json(done.stdout) or {}
        if "host" in times:
            shares.append(times["host"] / times["step"])
        return step_seconds(done)

    def theirs(limit: float) -> float | None:
        argv = [context.python, str(context.pack / "torch_bert.py"), "fsdp", *map(str, BERT_BASE)]
        env = one_rank() | {"DEVICE": "cuda", "DTYPE": dtype, "STEPS": str(BERT_STEPS), "TF32": "1"}
        done = step.command("torch", argv, env, limit, torch_step_seconds, watch_gpu=True)
        return torch_step_seconds(done)

    found = take_turns(step, ours, theirs)
    rows, length, *_ = BERT_BASE
    rates = {side: rows * length / statistics.median(values) for side, values in found.items() if values}
    facts = {"unit": "seconds a step", "dtype": dtype, "tokens_per_second": rates, "tf32": TF32}
    compare(step, found, facts)
    share = statistics.median(shares) if shares else None
    if share is not None:
        step.check("the host issues a step in time", share <= MOST_HOST, found=share, limit=MOST_HOST)


# Attention

ATTENTION_BATCH = 4
ATTENTION_LENGTHS = (1024, 2048, 4096)
ATTENTION_ROUNDS = 9
# Part of the warning that the kernels which keep scores on the chip are wrong on this device.
FAILED_CHECK = "runs on the slower kernels that store its scores"


def attention_times(done: Outcome) -> dict[str, float]:
    """The seconds of forward and backward for each shape."""
    name = lambda line: f"{line['length']}{', causal' if line['causal'] else ''}"
    return {name(line): line["both"] for line in json_lines(done.stdout) if "both" in line}


def attention(step: StepRun, dtype: str) -> None:
    """Forward and backward of attention with 12 heads of width 64, beside `scaled_dot_product_attention`.

    A side's measure is the sum over all shapes, which has no value unless all are measured. In bf16 it is also
    measured with scores in memory, without the kernels that keep them on the chip.
    """
    context = step.context
    size = ["--batch", str(ATTENTION_BATCH), "--lengths", ",".join(map(str, ATTENTION_LENGTHS))]
    shapes: dict[str, list[dict[str, float]]] = {"ours": [], "torch": []}

    def measured(side: str, argv: list[str], env: dict[str, str], limit: float) -> float | None:
        times = attention_times(step.command(side, argv, env, limit, attention_times, watch_gpu=True))
        if len(times) < 2 * len(ATTENTION_LENGTHS):
            return None
        shapes[side].append(times)
        return sum(times.values())

    argv = [context.program("attention"), "--device", "cuda", "--dtype", dtype, *size, "--json"]
    argv += ["--rounds", str(ATTENTION_ROUNDS)]

    def ours(limit: float) -> float | None:
        return measured("ours", argv, context.env, limit)

    def theirs(limit: float) -> float | None:
        torch = [context.python, str(context.pack / "torch_attention.py"), *size]
        env = {"DEVICE": "cuda", "DTYPE": dtype, "ROUNDS": str(ATTENTION_ROUNDS), "TF32": "1"}
        return measured("torch", torch, env, limit)

    found = take_turns(step, ours, theirs)
    medians = {
        side: {shape: statistics.median(times[shape] for times in rounds) for shape in rounds[0]}
        for side, rounds in shapes.items()
        if rounds
    }
    facts: dict[str, Any] = {"unit": "seconds of all shapes", "dtype": dtype, "shapes": medians, "tf32": TF32}
    if len(medians) == 2:
        ratios = {shape: time / medians["torch"][shape] for shape, time in medians["ours"].items()}
        facts["ours_to_torch_by_shape"] = ratios
    if dtype == "bf16" and "ours" in medians:
        env = context.env | {"FSDP_ATTENTION_KERNEL": "0"}
        done = step.command("ours, scores in memory", argv, env, parse=attention_times)
        facts["scores_in_memory"] = attention_times(done)
    compare(step, found, facts)


# GPT

LENGTH = 2048
NO_TF32 = "Products are in bf16 on both sides."
# Updates that compile and tune kernels, and allocate the optimizer's state.
WARM_UP = 2
GIB = 1 << 30


def words_per_second(done: Outcome) -> float | None:
    """The median over the log lines, one for each update. A run that was killed has those of its updates."""
    rates = [float(line["wps"]) for line in json_lines(done.stdout) if "wps" in line][WARM_UP:]
    return statistics.median(rates) if rates else None


def gpt_sides(step: StepRun, arch: str, batch: int, updates: int, *flags: str) -> tuple[Side, Side]:
    """Pretraining in bf16 with one rank. Both sides have the same flags."""
    context = step.context
    shape = ["--arch", arch, "--bf16", "--tokens-per-sample", str(LENGTH), "--batch-size", str(batch), *flags]

    def torch_words_per_second(done: Outcome) -> float | None:
        seconds = [line["seconds"] for line in json_lines(done.stdout) if "update" in line][WARM_UP:]
        return batch * LENGTH / statistics.median(seconds) if seconds else None

    def ours(limit: float) -> float | None:
        argv = [context.program("gpt_pretrain"), "--device", "cuda", "--world-size", "1", "--engine", "local"]
        argv += [*shape, "--max-update", str(updates + WARM_UP), "--max-valid-steps", "1"]
        argv += ["--log-interval", "1", "--json", "--bpe-cache", str(context.scratch / "bpe")]
        done = step.command(f"ours, {batch} rows", argv, context.env, limit, words_per_second, watch_gpu=True)
        if words_per_second(done) is not None:
            step.check("attention passes its check", FAILED_CHECK not in done.stdout + done.stderr)
        return words_per_second(done)

    def theirs(limit: float) -> float | None:
        argv = [context.python, str(context.pack / "torch_gpt.py"), *shape, "--max-update", str(updates)]
        parse = torch_words_per_second
        return parse(step.command(f"torch, {batch} rows", argv, one_rank(), limit, parse, watch_gpu=True))

    return ours, theirs


def gpt_facts(arch: str, rows: int) -> dict[str, Any]:
    return {"unit": "word pieces per second", "arch": arch, "rows": rows, "length": LENGTH, "tf32": NO_TF32}


def gpt_on_device(step: StepRun) -> None:
    """GPT 1.3B in bf16, all of it on the GPU.

    If 2 rows of 2,048 fail here, both sides take 1.
    """
    for batch in (2, 1):
        found = take_turns(step, *gpt_sides(step, "1.3B", batch, 10))
        if found.get("ours", True) or step.context.dry_run:
            break
    compare(step, found, gpt_facts("1.3B", batch))


# Host memory that AdamW in f32 needs: 4 bytes of a parameter, 4 of its gradient and 8 of its two moments. In GB,
# for 6,658,465,792 parameters (6.7B) and 2,651,591,680 parameters (2.7B):
#
#                                                    6.7B                        2.7B
#   this crate: 16 bytes for each parameter          106.5                       42.4
#   and buffers for copies, of the 4 largest tensors   3.3                        2.1
#   PyTorch: 8 bytes for each parameter, in page-    29.0 + 29.0                 14.5 + 14.5
#   locked blocks rounded up to powers of two,
#   and 8 bytes of moments                           + 53.3 = 111.3              + 21.2 = 50.2
#
# 111.3 GB are 103.7 GiB, and Python and CUDA take a few more. So 6.7B fits a machine with 128 GiB of which 112 are
# free; with less, the step takes 2.7B. Neither side has AdamW with smaller moments, and SGD would not show what
# users run.
HOST_BYTES = {"6.7B": 112 * GIB, "2.7B": 54 * GIB}
# On the device are two gathered blocks (0.8 GB in bf16), the outermost unit (0.4), copies and gradients of one unit
# (1.6), and with 4 rows of 2,048 and recomputation 12.7 GB of activations and logits: 16 GB.
OFFLOAD_ROWS = 4
# The target for 6.7B is 32 GB.
OFFLOAD_MIB = 32_000_000_000 >> 20


def gpt_offloaded(step: StepRun) -> None:
    """GPT 6.7B in bf16 with recomputation; parameters, gradients and optimizer state are on the host."""
    available = available_bytes()
    fitting = [arch for arch, needed in HOST_BYTES.items() if available >= needed or step.context.dry_run]
    step.check("host memory", bool(fitting), available=available, needed=HOST_BYTES)
    if not fitting:
        return
    arch = fitting[0]
    sides = gpt_sides(step, arch, OFFLOAD_ROWS, 5, "--cpu-offload", "--checkpoint-activations")
    found = take_turns(step, *sides)
    compare(step, found, gpt_facts(arch, OFFLOAD_ROWS))
    peak = gpu_peak(step, "ours")
    if peak is not None:
        step.check("device memory of ours", peak <= OFFLOAD_MIB, found=peak, limit=OFFLOAD_MIB)


# Llama

LLAMA = llama.LLAMA_1_1B
LLAMA_ROWS = 2
LLAMA_STEPS = 12


def llama_commands(step: StepRun, steps: int) -> tuple[list[str], list[str]]:
    """The commands, here and in PyTorch, that train all parameters in bf16 with one rank."""
    context = step.context
    flags = llama.our_flags(context.scratch / "llama", LLAMA, LENGTH, LLAMA_ROWS, steps)
    ours = [context.program("llm_finetune"), "--device", "cuda", "--bf16", *flags]
    theirs = [context.python, str(context.pack / "torch_llama.py"), "--dtype", "bf16"]
    theirs += llama.torch_flags(LLAMA, LENGTH, LLAMA_ROWS, steps)
    return ours, theirs


def seconds_to_first_step(seconds: float, run: dict[str, Any]) -> float:
    """Seconds from the start of a command that took `seconds` to the end of its first step.

    The end of the process, about a second, counts too.
    """
    return round(seconds - sum(run["step_seconds"][1:]), 2)


def llama_on_device(step: StepRun) -> None:
    """A Llama with the shape of TinyLlama-1.1B and random weights, in bf16, all of it on the GPU."""
    our_argv, torch_argv = llama_commands(step, LLAMA_STEPS)
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "torch": []}

    def measured(side: str, argv: list[str], env: dict[str, str], limit: float) -> float | None:
        done = step.command(side, argv, env, limit, lambda done: last_json(done.stdout), watch_gpu=True)
        run = last_json(done.stdout) if done.ok else None
        seconds = llama.step_seconds(run)
        if not run or not seconds:
            return None
        first = seconds_to_first_step(step.record["commands"][-1]["seconds"], run)
        runs[side].append(run | {"seconds_to_first_step": first})
        return LLAMA_ROWS * LENGTH / seconds

    def ours(limit: float) -> float | None:
        return measured("ours", our_argv, step.context.env, limit)

    def theirs(limit: float) -> float | None:
        return measured("torch", torch_argv, one_rank(), limit)

    found = take_turns(step, ours, theirs)
    first = {side: [run["seconds_to_first_step"] for run in of_side] for side, of_side in runs.items() if of_side}
    facts = {"unit": "tokens per second", "rows": LLAMA_ROWS, "length": LENGTH, "tf32": NO_TF32}
    compare(step, found, facts | {"parameters": LLAMA.parameters(), "seconds_to_first_step": first})
    for side in found:
        for run in runs[side][:1]:
            number, loss = run["num_params"], run["losses"][0]
            step.check(f"{side}: parameters", number == LLAMA.parameters(), found=number, expected=LLAMA.parameters())
            fits = llama.first_loss_fits(LLAMA, run)
            step.check(f"{side}: first loss", fits, found=loss, expected=LLAMA.first_loss(), limit=llama.LOSS_TOLERANCE)
