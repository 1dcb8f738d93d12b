"""The steps on products by cuBLASLt, on the kernels of a training step, and on the time to the first one."""

from __future__ import annotations

import os
from pathlib import Path

from correctness import OTHER_DEVICE, PLAIN, distance
from harness import StepRun, json_lines, last_json
from machine import cuda_root
from speed import BERT_BASE, BERT_FLAGS, llama_commands, one_rank

# Updates of a model whose kernels are recorded.
UPDATES = 4
# Seconds that the defaults of bert_finetune may take on a GPU, with nothing compiled before, and on a CPU.
START_LIMIT = {"cuda": 60, "flex": 240}


def products(step: StepRun) -> None:
    """Losses of 20 steps of bert_finetune with products by cuBLASLt, beside those with CubeCL's products."""
    context = step.context
    found: dict[str, list] = {}
    for name, setting in (("cuBLASLt", "1"), ("cuBLASLt again", "1"), ("CubeCL", "0")):
        argv = [context.program("bert_finetune"), "--device", context.device, "--steps", "20", "--batch-size", "16"]
        argv += ["--max-length", "16", "--dropout", "0", "--json", "--quiet"]
        argv += ["--save-dir", str(context.scratch / "products" / name.replace(" ", "-"))]
        env = context.env | {"FSDP_CUBLASLT": setting}
        done = step.command(name, argv, env, parse=lambda done: last_json(done.stdout))
        result = last_json(done.stdout) if done.ok else None
        found[name] = result["losses"] if result else []
        step.check(f"{name}: ends", bool(found[name]))
        if context.on_gpu:
            warned = "products of matrices are CubeCL's" in done.stdout + done.stderr
            step.check(f"{name}: without a warning", not warned)
    same = found["cuBLASLt"] == found["cuBLASLt again"]
    step.check("cuBLASLt again, to the bit", same)
    apart = distance(found["cuBLASLt"], found["CubeCL"])
    step.check("CubeCL, to cuBLASLt", apart <= OTHER_DEVICE, found=apart, limit=OTHER_DEVICE)


def recorder(step: StepRun) -> Path | None:
    """Builds the library that records kernels. Needs gcc and CUDA's headers."""
    context = step.context
    cuda = cuda_root(context.env) or Path("/usr/local/cuda")
    library = context.scratch / "kernel_times.so"
    argv = ["gcc", "-O2", "-shared", "-fPIC", str(context.pack / "kernel_times.c"), "-o", str(library)]
    for folder in (cuda, cuda / "extras/CUPTI"):
        argv += [f"-I{folder}/include", f"-L{folder}/lib64", f"-Wl,-rpath,{folder}/lib64"]
    built = step.command("gcc", [*argv, "-lcupti"], limit=60)
    ok = built.ok or context.dry_run
    step.check("the recorder is built", ok)
    return library if ok else None


def kernels_of_a_step(step: StepRun) -> None:
    """Time, launches and kernels of one step of GPT 1.3B, BERT-base and Llama 1.1B, and of PyTorch's side."""
    context = step.context
    library = recorder(step)
    if not library:
        return
    context.out.mkdir(parents=True, exist_ok=True)
    for name, argv, env, marker in recorded(step):
        trace = context.scratch / f"{name}.tsv"
        env = env | {"CUDA_INJECTION64_PATH": str(library), "KERNEL_TIMES": str(trace)}
        ran = step.command(name, argv, env, step.left() / 2)
        read = [context.python, str(context.pack / "kernel_times.py"), str(trace), "--marker", marker]
        table = step.command(f"{name}, kernels", read, limit=60)
        found = last_json(table.stdout)
        step.result(name, {"step": found, "kernels": table.stdout.splitlines()[1:]})
        step.check(f"{name} is recorded", ran.ok and bool(found) and found.get("step_ms") is not None, step=found)


def recorded(step: StepRun) -> list[tuple[str, list[str], dict[str, str], str]]:
    """Name, command, variables and mark of the optimizer's kernels of each program that is recorded."""
    context = step.context
    bert = [context.program("step"), "--cuda", "0", "--world", "1", *BERT_FLAGS, "--variants", PLAIN, "--json"]
    bert += ["--rounds", "1", "--steps", str(UPDATES + 2), "--bf16"]
    torch_bert = [context.python, str(context.pack / "torch_bert.py"), "fsdp", *map(str, BERT_BASE)]
    gpt = ["--arch", "1.3B", "--bf16", "--tokens-per-sample", "2048", "--batch-size", "2"]
    gpt += ["--max-update", str(UPDATES)]
    ours = [context.program("gpt_pretrain"), "--device", "cuda", "--world-size", "1", "--engine", "local", *gpt]
    ours += ["--max-valid-steps", "1", "--json", "--bpe-cache", str(context.scratch / "bpe")]
    torch_gpt = [context.python, str(context.pack / "torch_gpt.py"), *gpt]
    our_llama, torch_llama = llama_commands(step, UPDATES + 2)
    settings = {"DEVICE": "cuda", "DTYPE": "bf16", "STEPS": str(UPDATES), "TF32": "1"}
    return [
        ("gpt-1.3b", ours, context.env, "adam"),
        ("bert", bert, context.env, "adam"),
        ("gpt-1.3b, torch", torch_gpt, one_rank(), "adam"),
        ("bert, torch", torch_bert, one_rank() | settings, "adam"),
        ("llama-1.1b", our_llama, context.env, "adam"),
        ("llama-1.1b, torch", torch_llama, one_rank(), "adam"),
    ]


def start(step: StepRun) -> None:
    """bert_finetune with its defaults and no file of compiled kernels: seconds to its end."""
    context = step.context
    folder = context.scratch / "start"
    folder.mkdir(parents=True, exist_ok=True)
    # CubeCL's settings in this folder name no file of an earlier run.
    (folder / "cubecl.toml").write_text("[compilation]\ncache = false\n\n[environment]\npath = \"local\"\n")
    argv = ["env", "-C", str(folder), os.path.abspath(context.program("bert_finetune")), "--device", context.device]
    limit = START_LIMIT[context.device]
    done = step.command("bert_finetune", [*argv, "--json"], context.env, 2 * limit)
    if context.dry_run:
        return
    seconds = step.record["commands"][-1]["seconds"]
    step.result("seconds", seconds)
    lines = json_lines(done.stdout)
    step.result("last", lines[-1] if lines else None)
    step.check("it ends in time", done.ok and seconds <= limit, seconds=seconds, limit=limit)
