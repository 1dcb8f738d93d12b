"""Runs the attention kernels of a folder of PTX files without a GPU.

    python3 run.py FOLDER [--only TEXT] [--cases N]

Each distinct program runs on its cases: the first one with both schedules, the others with the first schedule. Each
kernel has a line with its largest errors. The exit code is 1 if an error exceeds its limit, or if the machine reports
a fault.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.dont_write_bytecode = True

import attention
import dropout
from attention import Outcome
from machine import Schedule
from program import KERNEL_ID, KernelId, Program, PtxError, load_program

MASK_KERNEL = "flash_mask_kernel"


@dataclass
class Summary:
    """The largest error of each result of a kernel, and its failures, each with its case."""

    errors: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    runs: int = 0

    def add(self, case: str, outcome: Outcome, dtype: str) -> None:
        for name, error in outcome.errors.items():
            # `np.maximum` keeps NaN.
            self.errors[name] = float(np.maximum(self.errors.get(name, 0.0), error))
        self.failures += [f"{case}: {failure}" for failure in outcome.failures(dtype)]

    def line(self, name: str) -> str:
        errors = ", ".join(f"{result} {error:.2e}" for result, error in self.errors.items())
        return f"{'FAILED' if self.failures else 'ok'} {name}: {errors or 'no result'}"


def programs_of(folder: Path, only: str) -> dict[str, Program]:
    """Returns the programs of the files whose names have a text, each distinct program once, by file name."""
    found: dict[tuple[str, KernelId | None], tuple[str, Program]] = {}
    for path in sorted(folder.glob("*.ptx")):
        if only in path.name:
            program = load_program(path)
            text = KERNEL_ID.sub("", path.read_text())
            found.setdefault((text, program.kernel), (path.name, program))
    return dict(found.values())


def summarise(program: Program, most: int | None) -> Summary:
    """Runs a kernel on its first cases. A kernel that has none is a failure."""
    if program.kernel is None or program.kernel.kind not in (*attention.KERNELS, MASK_KERNEL):
        return Summary(failures=["no attention kernel with cases, according to the ID in the last line"])
    is_mask = program.kernel.kind == MASK_KERNEL
    cases, run = (dropout.cases, dropout.mask) if is_mask else (attention.cases, attention.run_kernel)
    summary = Summary()
    for number, case in enumerate(cases(program.kernel, most)):
        for schedule in list(Schedule) if number == 0 else [Schedule.LOWEST_FIRST]:
            name = f"case {number}, {schedule.value}"
            try:
                summary.add(name, run(program, case, schedule), program.kernel.dtype)
            except PtxError as error:
                summary.failures.append(f"{name}: {error}")
            summary.runs += 1
    return summary


def run_folder(folder: Path, only: str, cases: int | None) -> int:
    """Runs the kernels of a folder and returns the exit code."""
    programs = programs_of(folder, only)
    if not programs:
        print(f"error: no PTX file to run in {folder}", file=sys.stderr)
        return 1
    start, runs, failed = time.monotonic(), 0, 0
    for name, program in programs.items():
        try:
            summary = summarise(program, cases)
        except PtxError as error:
            summary = Summary(failures=[str(error)])
        runs += summary.runs
        failed += bool(summary.failures)
        print(summary.line(name), flush=True)
        for failure in summary.failures:
            print(f"    {failure}", flush=True)
    print(f"{runs} runs of {len(programs)} kernels in {time.monotonic() - start:.0f} s, {failed} kernels failed")
    return 1 if failed else 0


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the attention kernels of a folder of PTX without a GPU.")
    parser.add_argument("folder", type=Path, help="folder of the files `*.ptx`")
    parser.add_argument("--only", default="", metavar="TEXT", help="run the files whose names have this text")
    parser.add_argument("--cases", type=positive, metavar="N", help="run the first N cases of each kernel")
    arguments = parser.parse_args()
    try:
        return run_folder(arguments.folder, arguments.only, arguments.cases)
    except (OSError, PtxError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
