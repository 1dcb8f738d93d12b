"""Training steps of this crate and of PyTorch on a CPU, in turns: the programs that `vs_torch.sh` builds.

STEP=.. GPT=.. LLM=.. python vs_torch.py [--rounds 3] [--steps 12] [CASE ..]

Each round runs every program of the chosen cases once. Prints the processor, the seconds of each round, the medians,
and the ratios of the cases; of `llama` also the number of parameters and the first losses. Ranks of this crate are
threads of one process, those of PyTorch processes over Gloo.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = os.path.dirname(os.path.abspath(__file__))
sys.dont_write_bytecode = True
sys.path.append(os.path.join(HERE, "gpu"))

import llama

# Hidden width, layers, heads and feed-forward width of the BERT.
SHAPE = [384, 6, 12, 1536]

# Name of a program: whose it is, with its arguments. Ours: variant, ranks, rows a rank, length, more arguments.
# PyTorch's: mode, ranks, rows a rank, length. Of a Llama: rows, length.
PROGRAMS = {
    "FULL_SHARD, 2 x 4": ("ours", "FULL_SHARD", 2, 4, 128),
    "NO_SHARD, 2 x 4": ("ours", "NO_SHARD", 2, 4, 128),
    "FULL_SHARD, 2 x 4, bf16": ("ours", "FULL_SHARD", 2, 4, 128, "--bf16"),
    "FULL_SHARD, 1 x 8": ("ours", "FULL_SHARD", 1, 8, 128),
    "FULL_SHARD, 8 x 1": ("ours", "FULL_SHARD", 8, 1, 128),
    "NO_SHARD, 8 x 1": ("ours", "NO_SHARD", 8, 1, 128),
    "FULL_SHARD, 2 x 1, length 512": ("ours", "FULL_SHARD", 2, 1, 512),
    "GPT small, 2 x 1, length 1024": ("gpt", 2, 1, 1024),
    "Llama 135 M, 1 x 2, length 512": ("llama", 2, 512),
    "PyTorch, one process, 8 rows": ("torch", "single", 1, 8, 128),
    "PyTorch DDP, 2 x 4": ("torch", "ddp", 2, 4, 128),
    "PyTorch FSDP2, 2 x 4": ("torch", "fsdp", 2, 4, 128),
    "PyTorch FSDP2, 2 x 4, bf16": ("torch", "fsdp", 2, 4, 128, "bf16"),
    "PyTorch, one process, 2 rows, length 512": ("torch", "single", 1, 2, 512),
    "PyTorch GPT small, one process, 2 rows, length 1024": ("torch_gpt", 2, 1024),
    "PyTorch Llama 135 M, one process, 2 rows, length 512": ("torch_llama", 2, 512),
}

# Name of a case: ratios of the times of two programs.
CASES = {
    "ranks": [
        ("FULL_SHARD, 2 x 4", "PyTorch, one process, 8 rows"),
        ("FULL_SHARD, 2 x 4", "PyTorch FSDP2, 2 x 4"),
        ("NO_SHARD, 2 x 4", "PyTorch DDP, 2 x 4"),
    ],
    "one-rank": [("FULL_SHARD, 1 x 8", "PyTorch, one process, 8 rows")],
    "bf16": [
        ("FULL_SHARD, 2 x 4, bf16", "FULL_SHARD, 2 x 4"),
        ("FULL_SHARD, 2 x 4, bf16", "PyTorch FSDP2, 2 x 4, bf16"),
    ],
    "length-512": [
        ("FULL_SHARD, 2 x 1, length 512", "PyTorch, one process, 2 rows, length 512"),
    ],
    "eight-ranks": [
        ("FULL_SHARD, 8 x 1", "FULL_SHARD, 2 x 4"),
        ("NO_SHARD, 8 x 1", "NO_SHARD, 2 x 4"),
    ],
    "gpt": [
        ("GPT small, 2 x 1, length 1024", "PyTorch GPT small, one process, 2 rows, length 1024"),
    ],
    "llama": [
        ("Llama 135 M, 1 x 2, length 512", "PyTorch Llama 135 M, one process, 2 rows, length 512"),
    ],
}


def output(command, **environment):
    done = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"{command} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def ours(steps, variant, ranks, rows, length, *more):
    sizes = ["--batch", rows, "--length", length]
    run = ["--world", ranks, "--rounds", 1, "--steps", steps, "--brief", "--variants", variant]
    return float(output([os.environ["STEP"], *run, *sizes, *more]).split()[0])


def torch(steps, mode, ranks, rows, length, dtype="f32"):
    """Returns the step of the slowest rank."""
    program = [sys.executable, os.path.join(HERE, "torch_bert.py"), mode, rows, length, *SHAPE]
    started = []
    for rank in range(ranks):
        environment = {
            **os.environ,
            "STEPS": str(steps),
            "DTYPE": dtype,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29517",
        }
        command = [str(part) for part in program]
        started.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        )
    texts = [process.communicate()[0] for process in started]
    if any(process.returncode != 0 for process in started):
        sys.exit(f"{program} failed")
    return max(float(text.split(" step ")[1].split()[0]) for text in texts)


def gpt(_steps, ranks, rows, length):
    flags = ["--arch", "small", "--tokens-per-sample", length, "--batch-size", rows]
    run = ["--max-update", 4, "--world-size", ranks, "--device", "flex", "--json", "--quiet"]
    result = json.loads(output([os.environ["GPT"], *flags, *run]).splitlines()[-1])
    return result["update_seconds_median"]


def torch_gpt(_steps, rows, length):
    flags = ["--device", "cpu", "--arch", "small", "--tokens-per-sample", length]
    program = [sys.executable, os.path.join(HERE, "torch_gpt.py"), *flags]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29518"}
    lines = output([*program, "--batch-size", rows, "--max-update", 4], **alone).splitlines()
    updates = [json.loads(line) for line in lines if '"update"' in line]
    return statistics.median(update["seconds"] for update in updates[2:])


def our_llama(steps, rows, length):
    with tempfile.TemporaryDirectory(prefix="vs-torch-") as folder:
        steps += llama.WARM_UP
        flags = llama.our_flags(Path(folder), llama.LLAMA_135M, length, rows, steps)
        return llama_step(output([os.environ["LLM"], *flags, "--device", "flex"]))


def torch_llama(steps, rows, length):
    flags = llama.torch_flags(llama.LLAMA_135M, length, rows, steps + llama.WARM_UP)
    program = [sys.executable, os.path.join(HERE, "torch_llama.py")]
    return llama_step(output([*program, "--device", "cpu", *flags]))


def llama_step(printed):
    """Returns the median step of a run that has trained the expected model."""
    shape, run = llama.LLAMA_135M, json.loads(printed.splitlines()[-1])
    found, loss = run["num_params"], run["losses"][0]
    print(f"  {found:,} parameters, first loss {loss:.4f}", flush=True)
    if found != shape.parameters() or not llama.first_loss_fits(shape, run):
        expected = f"{shape.parameters():,} parameters and a first loss of {shape.first_loss():.2f}"
        sys.exit(f"another model than expected, which has {expected}")
    return llama.step_seconds(run)


RUN = {
    "ours": ours,
    "torch": torch,
    "gpt": gpt,
    "torch_gpt": torch_gpt,
    "llama": our_llama,
    "torch_llama": torch_llama,
}


def processor():
    name, flags = "unknown", ""
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            key, value = key.strip(), value.strip()
            if key == "model name":
                name = value
            if key in ("cpu family", "model"):
                name += f", {key} {value}"
            if key == "flags":
                flags = value
                break
    best = "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else "no AVX2"
    return f"{name}, {best}, {os.cpu_count()} cores"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="of a BERT or a Llama [12]")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    arguments = parser.parse_args()
    unknown = [name for name in arguments.cases if name not in CASES]
    if unknown:
        parser.error(f"no case {unknown[0]}; the cases are {', '.join(CASES)}")
    ratios = [ratio for name in arguments.cases or CASES for ratio in CASES[name]]
    needed = [name for name in PROGRAMS if any(name in ratio for ratio in ratios)]
    print(processor(), flush=True)
    times = {name: [] for name in needed}
    for number in range(arguments.rounds):
        for name in needed:
            whose, *program = PROGRAMS[name]
            times[name].append(RUN[whose](arguments.steps, *program))
            print(f"round {number + 1}: {name}: {times[name][-1]:.4f} s", flush=True)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    print()
    for name, median in medians.items():
        print(f"{name:54}{median:9.4f} s")
    print()
    for ours_name, other in ratios:
        print(f"{ours_name:32} / {other:54}{medians[ours_name] / medians[other]:6.2f}")


if __name__ == "__main__":
    main()
