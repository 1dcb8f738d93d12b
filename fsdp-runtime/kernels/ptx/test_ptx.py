"""Tests of the interpreter with small PTX programs.

    python3 -B -m unittest discover -s fsdp-runtime/kernels/ptx
"""

from __future__ import annotations

import sys
import tempfile
import unittest
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np

sys.dont_write_bytecode = True

from attention import Outcome, check_id, relative_error
from cases import restrict_to_segments
from dropout import random_block
from floats import HALVES
from machine import Machine, Schedule, faults
from memory import GlobalMemory
from program import Program, PtxError, parse_kernel_id, parse_program
from run import run_folder

Array = np.ndarray
REGISTERS = """
	.reg .pred %p<9>;
	.reg .b16 %rs<9>;
	.reg .b32 %r<40>;
	.reg .b64 %rd<40>;
"""
# The input's address of a thread is in %rd3, the output's in %rd4. Each has 4 words of the thread.
PROLOGUE = """
	ld.param.b64 %rd1, [test_param_0];
	ld.param.b64 %rd2, [test_param_1];
	mov.u32 %r1, %tid.x;
	mul.wide.u32 %rd9, %r1, 16;
	add.s64 %rd3, %rd1, %rd9;
	add.s64 %rd4, %rd2, %rd9;
	ld.global.nc.v4.b32 {%r2, %r3, %r4, %r5}, [%rd3];
"""
STORE = """
	st.global.v4.b32 [%rd4], {%r2, %r3, %r4, %r5};
	ret;
"""
MMA = """
	ld.global.nc.v2.b32 {%r6, %r7}, [%rd3+512];
	ld.global.nc.v4.b32 {%r8, %r9, %r10, %r11}, [%rd3+1024];
	mma.sync.aligned.m16n8k16.row.col.f32.DTYPE.DTYPE.f32
		{%r2, %r3, %r4, %r5},
		{%r2, %r3, %r4, %r5},
		{%r6, %r7},
		{%r8, %r9, %r10, %r11};
"""
# Shared memory has the input. Lane l has the address of 16 bytes l, and so of row l mod 8 of matrix l / 8.
LDMATRIX = """
	mov.b64 %rd5, cube_shared;
	add.s64 %rd6, %rd5, %rd9;
	st.shared.v4.b32 [%rd6], {%r2, %r3, %r4, %r5};
	bar.sync 0;
	ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r2, %r3, %r4, %r5}, [%rd6];
"""
BUTTERFLY = "".join(
    f"""
	activemask.b32 %r9;
	shfl.sync.bfly.b32 %r8, %r2, {distance}, 31, %r9;
	add.f32 %r2, %r2, %r8;
"""
    for distance in (1, 2, 4, 8, 16)
)
# Lanes below 16 take a branch to the end of which all lanes come.
DIVERGENT_SHUFFLE = """
	setp.ge.u32 %p1, %r1, 16;
	@%p1 bra $L_all;
	add.f32 %r2, %r2, 0f3F800000;
$L_all:
	activemask.b32 %r9;
	shfl.sync.bfly.b32 %r8, %r2, 16, 31, %r9;
	add.f32 %r2, %r2, %r8;
"""
# A thread reads what the thread of the other warp wrote.
EXCHANGE = """
	mov.b64 %rd5, cube_shared;
	add.s64 %rd6, %rd5, %rd9;
	xor.b64 %rd10, %rd9, 512;
	add.s64 %rd7, %rd5, %rd10;
	st.shared.v4.b32 [%rd6], {%r2, %r3, %r4, %r5};
	BARRIER
	ld.shared.v4.b32 {%r2, %r3, %r4, %r5}, [%rd7];
"""


def text_of(body: str, threads: int = 32, shared_bytes: int = 0) -> str:
    """Returns PTX that reads 4 words for each thread, executes a body and writes 4 words."""
    return (
        ".visible .entry test(\n\t.param .u64 .ptr .global .align 1 test_param_0,\n"
        "\t.param .u64 .ptr .global .align 1 test_param_1\n)\n"
        f".reqntid {threads}, 1, 1\n{{\n{REGISTERS}{PROLOGUE}{body}{STORE}\n}}\n// {shared_bytes} bytes smem\n"
    )


def program_of(body: str, threads: int = 32, shared_bytes: int = 0) -> Program:
    return parse_program(text_of(body, threads, shared_bytes))


def execute(
    program: Program, source: Array, schedule: Schedule = Schedule.LOWEST_FIRST
) -> tuple[Array, Counter[str]]:
    """Returns the words that one cube writes, `[threads, 4]`, and the reports."""
    memory = GlobalMemory(1 << 20)
    pointers = [memory.allocate(source), memory.allocate(np.zeros((program.threads, 4), np.uint32), writable=True)]
    reports = Machine(program, (1, 1, 1), memory, pointers, schedule=schedule).run()
    return memory.values(pointers[1], program.threads * 4, np.uint32).reshape(-1, 4), reports


def words(threads: int = 32) -> Array:
    return np.arange(threads * 4, dtype=np.uint32).reshape(threads, 4) * np.uint32(0x01030507)


def pairs(low: Array, high: Array) -> Array:
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))


class Instructions(unittest.TestCase):
    def test_mma_is_a_product_of_matrices(self) -> None:
        lanes = np.arange(32)
        row, column = lanes // 4, lanes % 4 * 2
        for dtype, half in HALVES.items():
            random = np.random.RandomState(3)
            left, right = (half.of_f32(random.randn(*shape).astype(np.float32)) for shape in ((16, 16), (16, 8)))
            added = random.randn(16, 8).astype(np.float32)
            places = ((0, 0), (8, 0), (0, 8), (8, 8))
            of_left = lambda down, along: pairs(left[row + down, column + along], left[row + down, column + along + 1])
            of_right = lambda down: pairs(right[column + down, row], right[column + down + 1, row])
            of_added = lambda matrix: np.stack([matrix[row + down, column + at] for down in (0, 8) for at in (0, 1)], 1)
            zeros = np.zeros(32, np.uint32)
            first = np.stack([of_left(*place) for place in places], 1)
            second = np.stack([of_right(0), of_right(8), zeros, zeros], 1)
            source = np.concatenate([first, second, of_added(added).view(np.uint32)])
            found, reports = execute(program_of(MMA.replace("DTYPE", dtype)), source)
            expected = half.to_f32(left).astype(np.float64) @ half.to_f32(right).astype(np.float64) + added
            np.testing.assert_allclose(found.view(np.float32), of_added(expected), rtol=1e-6, atol=1e-6)
            self.assertFalse(reports)

    def test_ldmatrix_gives_pairs_of_rows_or_of_columns(self) -> None:
        matrices = words().view(np.uint16).reshape(4, 8, 8)
        lanes = np.arange(32)
        row, column = lanes // 4, lanes % 4 * 2
        plain = [pairs(matrix[row, column], matrix[row, column + 1]) for matrix in matrices]
        transposed = [pairs(matrix[column, row], matrix[column + 1, row]) for matrix in matrices]
        for body, expected in ((LDMATRIX, plain), (LDMATRIX.replace(".x4.", ".x4.trans."), transposed)):
            found, reports = execute(program_of(body, shared_bytes=512), words())
            np.testing.assert_array_equal(found, np.stack(expected, axis=1))
            self.assertFalse(reports)

    def test_a_butterfly_shuffle_adds_all_lanes(self) -> None:
        source = np.arange(128, dtype=np.float32).reshape(32, 4)
        found, reports = execute(program_of(BUTTERFLY), source)
        np.testing.assert_array_equal(found.view(np.float32)[:, 0], np.full(32, source[:, 0].sum()))
        self.assertFalse(reports)

    def test_shared_memory_begins_as_nan(self) -> None:
        body = "mov.b64 %rd5, cube_shared;\nld.shared.b32 %r2, [%rd5];\n"
        found, _ = execute(program_of(body, shared_bytes=512), words())
        self.assertTrue(np.isnan(found.view(np.float32)[:, 0]).all())
        for half in HALVES.values():
            self.assertTrue(np.isnan(half.to_f32(found[:, 0].copy().view(np.uint16))).all())

    def test_comparisons_with_nan_are_false_unless_unordered(self) -> None:
        for name, expected in (("ne", 0), ("neu", 1), ("lt", 0), ("ltu", 1)):
            body = f"setp.{name}.f32 %p1, 0f7FC00000, 0f00000000;\nselp.b32 %r2, 1, 0, %p1;\n"
            found, _ = execute(program_of(body), words())
            self.assertEqual(set(found[:, 0].tolist()), {expected}, name)

    def test_an_unknown_instruction_is_an_error_with_its_line(self) -> None:
        text = text_of("\tmystery.f32 %r2, %r2;\n")
        line = next(number for number, line in enumerate(text.split("\n"), 1) if "mystery" in line)
        with self.assertRaisesRegex(PtxError, rf"line {line}: unknown instruction mystery\.f32"):
            execute(parse_program(text), words())


class Faults(unittest.TestCase):
    def assert_only_fault(self, reports: Counter[str], text: str) -> None:
        found = faults(reports)
        self.assertTrue(found, f"no report of {text}")
        self.assertTrue(all(text in report for report in found), found)

    def test_a_missing_barrier_is_a_race(self) -> None:
        for barrier in ("bar.sync 0;", ""):
            program = program_of(EXCHANGE.replace("BARRIER", barrier), threads=64, shared_bytes=1024)
            found, reports = execute(program, words(64))
            if barrier:
                np.testing.assert_array_equal(found, np.roll(words(64), 32, axis=0))
                self.assertFalse(reports)
            else:
                self.assert_only_fault(reports, "race")

    def test_a_shared_write_after_a_read_is_a_race(self) -> None:
        body = EXCHANGE.replace("BARRIER", "bar.sync 0;") + "\tst.shared.b32 [%rd6], 1;\n"
        _, reports = execute(program_of(body, threads=64, shared_bytes=1024), words(64))
        self.assert_only_fault(reports, "race: shared write of a word read")

    def test_a_barrier_that_some_threads_miss_is_reported(self) -> None:
        body = "setp.ge.u32 %p1, %r1, 32;\n@%p1 bra $L_end;\nbar.sync 0;\n$L_end:\n"
        _, reports = execute(program_of(body, threads=64), words(64))
        self.assert_only_fault(reports, "barrier that some threads")

    def test_global_accesses_out_of_bounds_are_reported(self) -> None:
        for access, kind in (("ld.global.b32 %r2, [%rd3+16]", "read"), ("st.global.b32 [%rd4+-16], %r2", "write")):
            _, reports = execute(program_of(f"{access};\n"), words())
            self.assert_only_fault(reports, f"global {kind} out of bounds")
        _, reports = execute(program_of("ld.global.b32 %r2, [%rd9];\n"), words())
        self.assert_only_fault(reports, "global read out of bounds")
        _, reports = execute(program_of("st.global.b32 [%rd3], %r2;\n"), words())
        self.assert_only_fault(reports, "global write out of bounds")

    def test_shared_accesses_out_of_bounds_are_reported(self) -> None:
        body = LDMATRIX.replace("[%rd6];", "[%rd6+16];")
        _, reports = execute(program_of(body, shared_bytes=512), words())
        self.assert_only_fault(reports, "shared read out of bounds")

    def test_misalignment_is_reported(self) -> None:
        _, reports = execute(program_of("ld.global.v2.b32 {%r2, %r3}, [%rd1+4];\n"), words())
        self.assert_only_fault(reports, "misaligned global read")
        body = "mov.b64 %rd5, cube_shared;\nld.shared.v4.b32 {%r2, %r3, %r4, %r5}, [%rd5+8];\n"
        _, reports = execute(program_of(body, shared_bytes=512), words())
        self.assert_only_fault(reports, "misaligned shared read")

    def test_a_shuffle_after_a_divergent_branch_is_reported_by_the_second_schedule(self) -> None:
        program = program_of(DIVERGENT_SHUFFLE)
        source = np.ones((32, 4), np.float32)
        found, reports = execute(program, source)
        np.testing.assert_array_equal(found.view(np.float32)[:, 0], np.full(32, 3.0))
        self.assertTrue(reports)
        self.assertFalse(faults(reports))
        _, reports = execute(program, source, Schedule.HIGHEST_FIRST)
        self.assert_only_fault(reports, "shuffle from a lane outside the mask")


class References(unittest.TestCase):
    def test_random_blocks_are_those_of_random123(self) -> None:
        # The known answers of the generator's authors.
        answers = {
            (0, 0): [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48],
            (2**64 - 1, 2**32 - 1): [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662],
        }
        for (number, word), expected in answers.items():
            self.assertEqual(random_block(number, (word, word), (word, word)), expected)

    def test_segments_divide_the_keys(self) -> None:
        ranges = np.zeros((2, 60, 2), np.int64)
        ranges[..., 1] = np.arange(60) + 1
        restrict_to_segments(ranges, 60)
        firsts = [[0] * 5 + [5] * 12 + [17] * 19 + [36] * 24, [0] * 45 + [45] * 12 + [57] * 3]
        np.testing.assert_array_equal(ranges[..., 0], firsts)
        np.testing.assert_array_equal(ranges[..., 1], np.stack([np.arange(60) + 1] * 2))


class Files(unittest.TestCase):
    ID = (
        "KernelId{type:kernels::flash::flash_forward_kernel::Kernel<x::Product>,address_type:U64,"
        "info:Info{plan:Plan{planes:4,strips:1,columns:64,width:128,bounded:[false,true]},dtype:Float(F16),"
        "bias:Sequence[Buffer{}],table:Sequence[]}}"
    )

    def test_the_id_of_a_kernel_may_have_spaces(self) -> None:
        for text in (self.ID, self.ID.replace(",", ", ").replace(":", ": ").replace(": : ", "::")):
            kernel = parse_kernel_id(text)
            self.assertEqual((kernel.kind, kernel.dtype, kernel.rows), ("flash_forward_kernel", "f16", 64))
            self.assertEqual((kernel.columns, kernel.width, kernel.bounded), (64, 128, (False, True)))
            self.assertEqual((kernel.bias, kernel.table, kernel.mask), (True, False, False))

    def test_an_id_without_the_sizes_of_a_launch_is_an_error(self) -> None:
        for lacking in ("planes:4,", "dtype:Float(F16),", "address_type:U64,"):
            with self.assertRaises(PtxError):
                check_id(parse_kernel_id(self.ID.replace(lacking, "")))
        check_id(parse_kernel_id(self.ID))

    def test_a_folder_without_files_is_an_error(self) -> None:
        with tempfile.TemporaryDirectory() as folder, redirect_stderr(StringIO()) as errors:
            self.assertEqual(run_folder(Path(folder), "", None), 1)
        self.assertIn("no PTX file", errors.getvalue())

    def test_a_kernel_without_cases_is_a_failure(self) -> None:
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()) as output:
            for name, last in (("a", "// ID KernelId{type:kernels::flash::flash_other_kernel::Kernel}\n"), ("b", "")):
                (Path(folder) / f"{name}.ptx").write_text(text_of("") + last)
            self.assertEqual(run_folder(Path(folder), "", None), 1)
        self.assertIn("2 kernels failed", output.getvalue())

    def test_errors_above_their_limits_and_nan_are_failures(self) -> None:
        none: Counter[str] = Counter()
        self.assertEqual(Outcome({"output": 0.01, "logarithms": 1e-5}, none).failures("bf16"), [])
        self.assertEqual(len(Outcome({"output": 0.01}, none).failures("f16")), 1)
        self.assertEqual(len(Outcome({"logarithms": 1e-3}, none).failures("bf16")), 1)
        nan = relative_error(np.array([1.0, np.nan]), np.array([1.0, 2.0]))
        self.assertEqual(len(Outcome({"output": nan}, none).failures("bf16")), 1)


if __name__ == "__main__":
    unittest.main()
