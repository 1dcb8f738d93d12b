"""Runs the attention kernels on cases, and compares their results with the reference."""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass
from typing import Callable

import numpy as np

from cases import CASES, MEANS_CASES, Case, Sizes
from machine import Machine, Schedule, faults
from memory import GlobalMemory
from program import KernelId, Program, PtxError

Array = np.ndarray
# Elements of a chunk, of which strides are multiples.
CHUNK = 8
# Bits of a NaN with a sign, in bf16 and f16.
NAN_HALF = 0x7FFF
MEANS_THREADS = 256
# Numbers above this stand for infinity. They may differ by a thousandth.
ALMOST_INFINITE = 1e30
# Largest elements below this count as this, so that results near 0 may have some error.
LEAST_LARGEST = 1e-3
# Largest errors relative to the largest element, of results in bf16 and f16, and of results in f32. No word of a
# dropout mask may differ.
HALF_LIMITS = {"bf16": 0.02, "f16": 0.004}
OTHER_LIMITS = {"logarithms": 1e-4, "means": 1e-5, "mask": 0.0}


@dataclass(frozen=True)
class Outcome:
    """The largest error of each result, relative to the largest element, and what the machine reported."""

    errors: dict[str, float]
    reports: Counter[str]

    def failures(self, dtype: str) -> list[str]:
        """Returns the errors above their limits and the faults. NaN is above each limit."""
        limits = {**dict.fromkeys(self.errors, HALF_LIMITS.get(dtype, 0.0)), **OTHER_LIMITS}
        too_large = [name for name, error in self.errors.items() if not error <= limits[name]]
        large = [f"{name} has error {self.errors[name]:.3g}, above {limits[name]}" for name in too_large]
        return large + [f"{report} ({count} times)" for report, count in faults(self.reports).items()]


class Launch:
    """The arguments of a kernel for a case, and its run."""

    def __init__(self, program: Program, case: Case, schedule: Schedule) -> None:
        if program.kernel is None:
            raise PtxError("no ID of the kernel in the last line")
        self.program, self.kernel, self.case, self.schedule = program, program.kernel, case, schedule
        self.memory = GlobalMemory()
        self.pointers: list[int] = []
        # Address and bytes of each result.
        self.results: dict[str, tuple[int, int]] = {}

    def add_tensors(self, *tensors: Array) -> None:
        """Adds tensors `[batch, heads, rows, width]`, in the layout of the case."""
        laid_out = lambda tensor: tensor.swapaxes(1, 2) if self.case.interleaved else tensor
        self.pointers += [self.memory.allocate(laid_out(tensor)) for tensor in tensors]

    def add_statistics(self) -> None:
        """Adds the logarithms and means that the backward pass takes."""
        reference = self.case.reference
        for values in (reference.logarithms, reference.means):
            self.pointers.append(self.memory.allocate(values.astype(np.float32)))

    def add_rule(self) -> None:
        """Adds bias, table and mask, if the rule has them."""
        rule = self.case.rule
        bias = None if rule.bias is None else self.case.half.of_f32(rule.bias.astype(np.float32))
        present = [values for values in (bias, rule.table, rule.mask_words) if values is not None]
        self.pointers += [self.memory.allocate(values) for values in present]

    def add_result(self, name: str, size: int, is_half: bool = True) -> None:
        """Adds an output of NaN."""
        values = np.full(size, NAN_HALF, np.uint16) if is_half else np.full(size, np.nan, np.float32)
        self.pointers.append(self.memory.allocate(values, writable=True))
        self.results[name] = (self.pointers[-1], values.nbytes)

    def strides(self, heads: int, rows: int) -> list[int]:
        """Returns the strides of batch, heads and rows in chunks. A dimension of length 1 has stride 0."""
        chunks = self.case.width // CHUNK
        of_head, of_row = (chunks, heads * chunks) if self.case.interleaved else (rows * chunks, chunks)
        lengths = (self.case.batch, heads, rows)
        strides = (rows * heads * chunks, of_head, of_row)
        return [stride if length > 1 else 0 for length, stride in zip(lengths, strides)]

    def query_strides(self) -> list[int]:
        return self.strides(self.case.heads, self.case.queries)

    def shape(self) -> list[int]:
        """Returns the integers of the attention's shape, in the order of the kernels' `AttentionShape`."""
        case, rule = self.case, self.case.rule
        position = case.keys - case.queries
        split = lambda by: [max(by, 0), max(-by, 0)]
        first = [0, case.queries] if rule.before is None else split(position - rule.before)
        end = [case.keys, 0] if rule.after is None else split(position + rule.after + 1)
        lengths = [case.queries, case.keys, case.heads, case.heads // case.key_heads]
        key_strides = self.strides(case.key_heads, case.keys)
        return lengths + self.query_strides() + key_strides * 2 + first + end + [rule.row_words]

    def info(self, more_strides: list[int]) -> bytes:
        """Returns the last parameter of a kernel with an `AttentionShape`. CubeCL puts integers before floats."""
        integers = self.shape() + more_strides
        return struct.pack(f"<{len(integers)}Q2f", *integers, self.case.rule.scale, self.case.rule.keep)

    def grid(self, rows: int, heads: int) -> tuple[int, int, int]:
        return (-(-rows // self.kernel.rows), heads, self.case.batch)

    def run(self, grid: tuple[int, int, int], info: bytes) -> Counter[str]:
        """Runs the kernel. That a part of a result was not written just once is a fault."""
        machine = Machine(self.program, grid, self.memory, self.pointers, info, self.schedule)
        reports = machine.run()
        for name, (address, size) in self.results.items():
            times = self.memory.times_written(address, size)
            if times != {1}:
                reports[f"elements of {name} written {sorted(times)} times"] += 1
        return reports

    def half_result(self, name: str, heads: int, rows: int) -> Array:
        """Returns a result of 16 bits as `[batch, heads, rows, width]` in f32."""
        case = self.case
        address, size = self.results[name]
        values = case.half.to_f32(self.memory.values(address, size // 2, np.uint16))
        if case.interleaved:
            return values.reshape(case.batch, rows, heads, case.width).swapaxes(1, 2)
        return values.reshape(case.batch, heads, rows, case.width)

    def f32_result(self, name: str) -> Array:
        """Returns a result in f32 as `[batch, heads, queries]`."""
        address, size = self.results[name]
        values = self.memory.values(address, size // 4, np.float32)
        return values.reshape(self.case.batch, self.case.heads, self.case.queries)


def relative_error(values: Array, reference: Array) -> float:
    """Returns the largest difference relative to the largest element."""
    sizes = np.abs(reference)
    is_finite = sizes < ALMOST_INFINITE
    largest = sizes[is_finite].max() if is_finite.any() else 0.0
    with np.errstate(invalid="ignore"):
        differences = np.abs(values - reference) / np.where(is_finite, 1.0, sizes * 1e-3)
    return float(differences.max() / max(largest, LEAST_LARGEST))


def forward(program: Program, case: Case, schedule: Schedule) -> Outcome:
    launch = Launch(program, case, schedule)
    launch.add_tensors(case.query, case.key, case.value)
    launch.add_rule()
    launch.add_result("output", case.query.size)
    launch.add_result("logarithms", case.batch * case.heads * case.queries, is_half=False)
    reports = launch.run(launch.grid(case.queries, case.heads), launch.info(launch.query_strides()))
    output = launch.half_result("output", case.heads, case.queries)
    errors = {
        "output": relative_error(output, case.reference.output),
        "logarithms": relative_error(launch.f32_result("logarithms"), case.reference.logarithms),
    }
    return Outcome(errors, reports)


def backward_launch(program: Program, case: Case, schedule: Schedule) -> Launch:
    """Returns the launch of a backward kernel with its inputs."""
    launch = Launch(program, case, schedule)
    launch.add_tensors(case.query, case.key, case.value, case.grad)
    launch.add_statistics()
    launch.add_rule()
    return launch


def query_grads(program: Program, case: Case, schedule: Schedule) -> Outcome:
    launch = backward_launch(program, case, schedule)
    launch.add_result("query grads", case.query.size)
    # Strides of the gradient of the output, and of the result.
    info = launch.info(launch.query_strides() * 2)
    reports = launch.run(launch.grid(case.queries, case.heads), info)
    grads = launch.half_result("query grads", case.heads, case.queries)
    return Outcome({"query grads": relative_error(grads, case.reference.query_grads)}, reports)


def key_grads(program: Program, case: Case, schedule: Schedule) -> Outcome:
    launch = backward_launch(program, case, schedule)
    launch.add_result("key grads", case.key.size)
    launch.add_result("value grads", case.key.size)
    reports = launch.run(launch.grid(case.keys, case.key_heads), launch.info(launch.query_strides()))
    references = {"key grads": case.reference.key_grads, "value grads": case.reference.value_grads}
    result = lambda name: launch.half_result(name, case.key_heads, case.keys)
    return Outcome({name: relative_error(result(name), reference) for name, reference in references.items()}, reports)


def means(program: Program, case: Case, schedule: Schedule) -> Outcome:
    """Runs the kernel of the sums of products of outputs and their gradients, on the rounded reference output."""
    launch = Launch(program, case, schedule)
    output = case.half.of_f32(case.reference.output.astype(np.float32))
    launch.add_tensors(output, case.grad)
    rows = case.batch * case.heads * case.queries
    launch.add_result("means", rows, is_half=False)
    integers = launch.query_strides() * 2 + [rows, case.heads, case.queries]
    cubes = -(-rows * launch.kernel.lanes // MEANS_THREADS)
    reports = launch.run((cubes, 1, 1), struct.pack(f"<{len(integers)}I", *integers))
    products = case.half.to_f32(output).astype(np.float64) * case.half.to_f32(case.grad)
    return Outcome({"means": relative_error(launch.f32_result("means"), products.sum(axis=-1))}, reports)


# Functions that run the kernels, and the sizes of their cases.
KERNELS: dict[str, tuple[Callable[[Program, Case, Schedule], Outcome], tuple[Sizes, ...]]] = {
    "flash_forward_kernel": (forward, CASES),
    "flash_query_grads_kernel": (query_grads, CASES),
    "flash_key_grads_kernel": (key_grads, CASES),
    "flash_means_kernel": (means, MEANS_CASES),
}


def check_id(kernel: KernelId) -> None:
    """Fails if the ID has not what the kernel's launch depends on."""
    is_of_means = kernel.kind == "flash_means_kernel"
    needed = ("chunks", "lanes") if is_of_means else ("planes", "strips", "width")
    missing = [name for name in needed if not getattr(kernel, name)]
    if missing or kernel.dtype not in HALF_LIMITS:
        raise PtxError(f"the kernel's ID lacks a dtype of 16 bits or one of {', '.join(needed)}")
    if kernel.address_bits != (32 if is_of_means else 64):
        raise PtxError(f"sizes of {kernel.address_bits} bits are not supported for {kernel.kind}")


def cases(kernel: KernelId, most: int | None) -> list[Case]:
    """Returns the first cases of a kernel."""
    check_id(kernel)
    return [Case(kernel, sizes) for sizes in KERNELS[kernel.kind][1][:most]]


def run_kernel(program: Program, case: Case, schedule: Schedule = Schedule.LOWEST_FIRST) -> Outcome:
    """Runs an attention kernel on a case."""
    if program.kernel is None or program.kernel.kind not in KERNELS:
        raise PtxError(f"{program.name} is no attention kernel")
    return KERNELS[program.kernel.kind][0](program, case, schedule)
