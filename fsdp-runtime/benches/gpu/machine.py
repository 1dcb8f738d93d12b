"""What the programs need of the machine, and the step `environment`, which checks it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from harness import Context, StepRun, available_bytes

# NVIDIA's library of math functions, below CUDA's folder. CubeCL needs it to compile kernels.
LIBDEVICE = Path("nvvm/libdevice/libdevice.10.bc")
# Where CubeCL looks without `CUDA_PATH`.
CUDA_ROOTS = ("/usr/local/cuda", "/opt/cuda", "/usr/lib/cuda", "/usr")
NCCL = "libnccl.so.2"
CUBLASLT = ("libcublasLt.so.13", "libcublasLt.so.12")
# The programs, each with an argument that shows whether it starts.
HARMLESS = {
    "bert_finetune": "--help",
    "gpt_pretrain": "--help",
    "llm_finetune": "--help",
    "step": "--help",
    "attention": "--help",
    "kernel_rates": "--help",
    "kernels": "--list",
    "unit_tests": "--list",
}


def output(*argv: str, env: dict[str, str] | None = None) -> str:
    """What a short command prints; empty if it cannot be run or hangs."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=os.environ | (env or {}))
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def programs(context: Context) -> list[Path]:
    return sorted(path for path in context.programs.iterdir() if path.is_file())


def missing_libraries(program: Path, env: dict[str, str]) -> list[str]:
    lines = output("ldd", str(program), env=env).splitlines()
    return [line.strip() for line in lines if "not found" in line]


def cuda_root(env: dict[str, str]) -> Path | None:
    """The folder in which CubeCL will find the math functions."""
    given = (os.environ | env).get("CUDA_PATH")
    roots = [Path(root) for root in ([given] if given else CUDA_ROOTS)]
    return next((root for root in roots if (root / LIBDEVICE).is_file()), None)


def by_name(*libraries: str) -> bool:
    """Whether the loader finds one of the libraries by its name."""
    found = output(shutil.which("ldconfig") or "/sbin/ldconfig", "-p")
    return any(library in found for library in libraries)


def wheels(python: str) -> list[Path]:
    """The folders in which the interpreter's packages are."""
    code = "import site, sysconfig; print(sysconfig.get_path('purelib'), *site.getsitepackages(), sep='\\n')"
    return [Path(line) for line in dict.fromkeys(output(python, "-c", code).splitlines()) if Path(line).is_dir()]


def first(folders: list[Path], *patterns: str) -> Path | None:
    """The first file that a pattern matches, in the order of the patterns."""
    found = (path for pattern in patterns for folder in folders for path in folder.glob(pattern))
    return next(found, None)


def library_env(context: Context) -> dict[str, str]:
    """The variables with which this crate's programs find NVIDIA's libraries.

    Wheels that PyTorch depends on have what the machine lacks: `libdevice` and CUDA's headers are linked into
    a folder that becomes `CUDA_PATH`. C++ and compression libraries that it lacks are in the pack.
    """
    env = {"RUST_BACKTRACE": "1", "RUST_TEST_THREADS": "1"}
    if not context.on_gpu or context.dry_run:
        return env
    packages = wheels(context.python)
    if not cuda_root(env):
        root = context.scratch / "cuda"
        bitcode = first(packages, f"nvidia/*/{LIBDEVICE}", "triton/backends/nvidia/lib/libdevice.10.bc")
        header = first(packages, "nvidia/*/include/cuda_fp16.h", "triton/backends/nvidia/include/cuda_fp16.h")
        for link, target in ((root / LIBDEVICE, bitcode), (root / "include", header and header.parent)):
            if target:
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(target)
                env["CUDA_PATH"] = str(root)
    nccl = first(packages, f"nvidia/nccl/lib/{NCCL}")
    if nccl and not by_name(NCCL) and "FSDP_NCCL_LIBRARY" not in os.environ:
        env["FSDP_NCCL_LIBRARY"] = str(nccl)
    cublaslt = first(packages, *(f"nvidia/*/lib/{name}" for name in CUBLASLT))
    if cublaslt and not by_name(*CUBLASLT) and "FSDP_CUBLASLT_LIBRARY" not in os.environ:
        env["FSDP_CUBLASLT_LIBRARY"] = str(cublaslt)
    if any(missing_libraries(program, {}) for program in programs(context)):
        folders = [str(context.pack / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
        env["LD_LIBRARY_PATH"] = ":".join(filter(None, folders))
    return env


def environment(step: StepRun) -> None:
    """The driver, libraries, libdevice, NCCL and PyTorch; and each program starts."""
    context = step.context
    step.command("nvidia-smi", ["nvidia-smi"], limit=30, parse=lambda done: done.stdout)
    code = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name(0))"
    torch = step.command("torch", [context.python, "-c", code], limit=120, parse=lambda done: done.stdout)
    code = "import transformers; print(transformers.__version__)"
    transformers = step.command("transformers", [context.python, "-c", code], limit=120, parse=lambda done: done.stdout)
    starts = {}
    for name, flag in HARMLESS.items():
        # The second build has some of the programs only.
        if context.dry_run or (context.programs / name).exists():
            starts[name] = step.command(name, [context.program(name), flag], context.env, limit=30).ok
    if context.dry_run:
        return
    for program in programs(context):
        missing = missing_libraries(program, context.env)
        step.check(f"libraries of {program.name}", not missing, missing=missing)
    for name, ok in starts.items():
        step.check(f"{name} starts", ok)
    root = cuda_root(context.env)
    step.check("libdevice", root is not None, cuda_path=str(root) if root else None)
    if context.programs.name == "bin-cuda-cpp":
        step.check("CUDA's headers", bool(root and (root / "include/cuda_fp16.h").is_file()))
    nccl = (os.environ | context.env).get("FSDP_NCCL_LIBRARY")
    step.check("NCCL", Path(nccl).is_file() if nccl else by_name(NCCL), library=nccl or NCCL)
    cublaslt = (os.environ | context.env).get("FSDP_CUBLASLT_LIBRARY")
    step.check("cuBLASLt", Path(cublaslt).is_file() if cublaslt else by_name(*CUBLASLT), library=cublaslt)
    step.check("torch with CUDA", torch.ok)
    step.check("transformers", transformers.ok)
    tools = {tool: shutil.which(tool) for tool in ("compute-sanitizer", "ncu", "nvcc")}
    machine = {"cores": os.cpu_count(), "available_bytes": available_bytes(), "tools": tools}
    step.result("machine", machine | {"env": context.env})
