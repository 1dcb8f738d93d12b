"""The machine: it interprets the program of all cubes of a grid at once, each instruction for a group of threads.

A group is all threads at one instruction. The registers of all threads are numpy arrays. What a GPU would not do, or
would do by chance, is reported, and the machine goes on: accesses out of bounds, misalignment, races, and warps
that are divided where an instruction needs them whole.
"""

from __future__ import annotations

import enum
import re
from collections import Counter

import numpy as np

import instructions
from memory import UNSIGNED, GlobalMemory, SharedMemory
from program import Address, Instruction, Operand, Program, PtxError

Array = np.ndarray
WARP = 32
# Begin of the reports of branches that divide a warp, which are no fault.
DIVERGENT = "divergent branch"
# Instructions after which a program is taken not to end. Programs with the largest cases have some 100,000.
STEP_LIMIT = 10_000_000
DTYPES = {1: np.bool_, **UNSIGNED}
# The only object in shared memory begins at address 0.
SHARED_OBJECT = "cube_shared"


class Schedule(enum.Enum):
    """Which group of threads is next."""

    # The lowest instruction first: divided warps become whole as early as they can.
    LOWEST_FIRST = "lowest first"
    # The highest instruction first: divided warps become whole as late as they can.
    HIGHEST_FIRST = "highest first"


class Machine:
    """A grid of cubes that execute a program.

    `pointers` are the values of the first parameters. `info` is the bytes of the last one, and may be shorter.
    """

    def __init__(
        self,
        program: Program,
        grid: tuple[int, int, int],
        memory: GlobalMemory,
        pointers: list[int],
        info: bytes = b"",
        schedule: Schedule = Schedule.LOWEST_FIRST,
    ) -> None:
        if program.threads % WARP:
            raise PtxError(f"{program.threads} threads of a cube are not whole warps")
        self.program = program
        self.memory = memory
        self.schedule = schedule
        self.cubes = grid[0] * grid[1] * grid[2]
        self.threads = self.cubes * program.threads
        self.shared = SharedMemory(self.cubes, program.shared_bytes)
        self.parameters = parameter_bytes(program, pointers, info)
        self.handlers = [instructions.handler(instruction) for instruction in program.instructions]
        # How often each fault was found.
        self.reports: Counter[str] = Counter()
        self._place_threads(grid)
        self.registers: dict[str, Array] = {}
        self.counter = np.zeros(self.threads, np.int64)
        self.waits = np.zeros(self.threads, bool)
        self.ended = np.zeros(self.threads, bool)
        self.instruction: Instruction | None = None

    def _place_threads(self, grid: tuple[int, int, int]) -> None:
        thread = np.arange(self.threads)
        self.cube = thread // self.program.threads
        self.warp = thread // WARP
        self.lane = thread % WARP
        in_cube = thread % self.program.threads
        special: dict[str, Array] = {}
        for axis, name in enumerate("xyz"):
            block, before = self.program.block[axis], int(np.prod(self.program.block[:axis]))
            special[f"%tid.{name}"] = in_cube // before % block
            special[f"%ntid.{name}"] = np.full(self.threads, block)
            special[f"%ctaid.{name}"] = self.cube // int(np.prod(grid[:axis])) % grid[axis]
            special[f"%nctaid.{name}"] = np.full(self.threads, grid[axis])
        self.special = {name: values.astype(np.uint32) for name, values in special.items()}

    def report(self, what: str) -> None:
        """Counts a fault of the present instruction."""
        assert self.instruction is not None
        self.reports[f"{what} at line {self.instruction.line}: {self.instruction.text}"] += 1

    def read(self, operand: Operand, bits: int, threads: Array) -> Array:
        """Returns a register or an immediate number of threads, as unsigned integers or bools."""
        if not isinstance(operand, str):
            raise self.error("an operand that is no register and no number")
        if operand.startswith("%"):
            return self.register(operand)[threads]
        if operand == SHARED_OBJECT:
            return np.zeros(len(threads), DTYPES[bits])
        try:
            number = int(operand[2:], 16) if operand[:2] in ("0f", "0F") else int(operand, 0)
        except ValueError:
            raise self.error(f"an unknown operand, {operand}") from None
        value = number != 0 if bits == 1 else number & ((1 << bits) - 1)
        return np.full(len(threads), value, DTYPES[bits])

    def register(self, name: str) -> Array:
        """Returns a register of all threads."""
        found = self.special.get(name, self.registers.get(name))
        if found is None:
            raise self.error(f"{name} is read but never written")
        return found

    def write(self, register: Operand, values: Array, threads: Array) -> None:
        """Sets a register of threads to values of its type."""
        assert isinstance(register, str)
        dtype = DTYPES[self.bits_of(register)]
        if values.dtype != dtype:
            raise self.error(f"{register} does not take {values.dtype}")
        if register not in self.registers:
            self.registers[register] = np.zeros(self.threads, dtype)
        self.registers[register][threads] = values

    def write_extended(self, register: str, values: Array, threads: Array) -> None:
        """Sets a register that may be wider than the values."""
        self.write(register, values.astype(DTYPES[self.bits_of(register)]), threads)

    def bits_of(self, register: str) -> int:
        prefix = re.sub(r"\d+$", "", register)
        if prefix not in self.program.register_bits:
            raise self.error(f"no declaration of {register}")
        return self.program.register_bits[prefix]

    def addresses(self, operand: Operand, threads: Array) -> Array:
        """Returns addresses as unsigned integers of 64 bits."""
        if not isinstance(operand, Address):
            raise self.error("no address")
        base = self.read(operand.base, 64, threads).astype(np.uint64)
        return base + np.uint64(operand.offset & (2**64 - 1))

    def active_lanes(self, threads: Array) -> Array:
        """Returns a bit for each lane of each warp that is among the threads."""
        lanes = np.zeros(self.threads // WARP, np.uint32)
        np.bitwise_or.at(lanes, self.warp[threads], np.uint32(1) << self.lane[threads].astype(np.uint32))
        return lanes

    def need_whole_warps(self, threads: Array) -> bool:
        """Returns whether the threads are whole warps. Reports it if not."""
        counts = np.bincount(self.warp[threads], minlength=self.threads // WARP)
        whole = not ((counts != 0) & (counts != WARP)).any()
        if not whole:
            self.report("warp-wide instruction in a divided warp")
        return whole

    def error(self, what: str) -> PtxError:
        assert self.instruction is not None
        return PtxError(f"line {self.instruction.line}: {what}: {self.instruction.text}")

    def run(self) -> Counter[str]:
        """Executes the program to its end and returns the reports."""
        with np.errstate(all="ignore"):
            for _ in range(STEP_LIMIT):
                ready = np.nonzero(~self.waits & ~self.ended)[0]
                if len(ready):
                    self._step(ready)
                elif self.ended.all():
                    return self.reports
                else:
                    self._pass_barrier()
        raise PtxError(f"no end after {STEP_LIMIT} instructions")

    def _step(self, ready: Array) -> None:
        """Executes one instruction of the next group of threads."""
        counters = self.counter[ready]
        is_lowest = self.schedule is Schedule.LOWEST_FIRST
        counter = int(counters.min() if is_lowest else counters.max())
        if counter >= len(self.program.instructions):
            raise PtxError("a thread runs past the last instruction")
        threads = ready[counters == counter]
        self.instruction = self.program.instructions[counter]
        self.counter[threads] = counter + 1
        threads = self._guarded(self.instruction, threads)
        if len(threads):
            self.handlers[counter](self, self.instruction.operands, threads)

    def _guarded(self, instruction: Instruction, threads: Array) -> Array:
        """Returns the threads whose guard lets them execute an instruction."""
        if instruction.guard is None:
            return threads
        taken = self.read(instruction.guard, 1, threads) ^ instruction.negated
        if instruction.opcode.startswith("bra"):
            warps = self.threads // WARP
            counts = [np.bincount(self.warp[threads[side]], minlength=warps) for side in (taken, ~taken)]
            if ((counts[0] > 0) & (counts[1] > 0)).any():
                self.report(DIVERGENT)
        return threads[taken]

    def _pass_barrier(self) -> None:
        """Lets all threads go on that wait. All others have ended."""
        by_cube = lambda values: values.reshape(self.cubes, -1)
        waits, ended, counters = by_cube(self.waits), by_cube(self.ended), by_cube(self.counter)
        if (waits.any(axis=1) & ended.any(axis=1)).any():
            self.report("barrier that some threads of a cube do not reach")
        lowest = np.where(waits, counters, np.iinfo(np.int64).max).min(axis=1)
        if (waits & (counters != lowest[:, None])).any():
            self.report("threads of a cube at different barriers")
        self.shared.end_interval()
        self.waits[:] = False


def parameter_bytes(program: Program, pointers: list[int], info: bytes) -> dict[str, bytes]:
    """Returns the bytes of each parameter. Those that `info` has not are zeros."""
    values = [pointer.to_bytes(8, "little") for pointer in pointers] + ([info] if info else [])
    if len(values) != len(program.parameters):
        raise PtxError(f"{len(values)} arguments for {len(program.parameters)} parameters")
    for value, parameter in zip(values, program.parameters):
        if len(value) > parameter.bytes:
            raise PtxError(f"{len(value)} bytes for {parameter.name}, which has {parameter.bytes}")
    return {parameter.name: value.ljust(parameter.bytes, b"\0") for value, parameter in zip(values, program.parameters)}


def faults(reports: Counter[str]) -> Counter[str]:
    """Returns the reports of what is not allowed. Divergent branches are."""
    return Counter({report: count for report, count in reports.items() if not report.startswith(DIVERGENT)})
