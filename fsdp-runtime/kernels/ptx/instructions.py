"""What each instruction does: a table of functions by opcode.

A function takes the machine, the operands and the indices of the threads that execute the instruction. An opcode
that is not in the table is an error, so no modifier is overlooked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

import numpy as np

from arithmetic import ARITHMETIC, COMPARISONS, CONVERSIONS
from floats import HALVES, bits_of_f32, f32_of_bits
from program import Instruction, PtxError

if TYPE_CHECKING:
    from machine import Machine

Array = np.ndarray
Handler = Callable[["Machine", Any, Array], None]
WARP = 32
NAN_BITS = 0x7FC00000
LOW_HALF = np.uint32(0xFFFF)
# Rows and columns of the quarters of a 16 by 16 operand that the four registers of a thread hold.
QUARTERS = ((0, 0), (8, 0), (0, 8), (8, 8))


def handler(instruction: Instruction) -> Handler:
    """Returns the function that executes an instruction."""
    if instruction.opcode not in TABLE:
        raise PtxError(f"line {instruction.line}: unknown instruction {instruction.opcode}: {instruction.text}")
    return TABLE[instruction.opcode]


def vector(operand: Any) -> tuple[Any, ...]:
    return operand if isinstance(operand, tuple) else (operand,)


def branch(machine: Machine, operands: Any, threads: Array) -> None:
    if operands[0] not in machine.program.labels:
        raise machine.error("an unknown label")
    machine.counter[threads] = machine.program.labels[operands[0]]


def end(machine: Machine, operands: Any, threads: Array) -> None:
    machine.ended[threads] = True


def barrier(machine: Machine, operands: Any, threads: Array) -> None:
    if operands != ("0",):
        raise machine.error("a barrier other than 0, or of a part of the threads")
    machine.waits[threads] = True


def move(bits: int) -> Handler:
    def execute(machine: Machine, operands: Any, threads: Array) -> None:
        target, source = operands
        if isinstance(target, tuple):
            split(machine, target, machine.read(source, bits, threads), threads)
        elif isinstance(source, tuple):
            machine.write(target, joined(machine, source, bits, threads), threads)
        else:
            machine.write(target, machine.read(source, bits, threads), threads)

    return execute


def split(machine: Machine, targets: tuple[str, str], values: Array, threads: Array) -> None:
    """Writes the low half of numbers to the first register and the high half to the second."""
    half = values.dtype.itemsize * 4
    dtype = {16: np.uint16, 32: np.uint32}[half]
    machine.write(targets[0], values.astype(dtype), threads)
    machine.write(targets[1], (values >> values.dtype.type(half)).astype(dtype), threads)


def joined(machine: Machine, sources: tuple[str, str], bits: int, threads: Array) -> Array:
    """Returns numbers whose low half is the first register and whose high half is the second."""
    dtype = {32: np.uint32, 64: np.uint64}[bits]
    low, high = (machine.read(source, bits // 2, threads).astype(dtype) for source in sources)
    return low | (high << dtype(bits // 2))


def load_parameter(bits: int) -> Handler:
    def execute(machine: Machine, operands: Any, threads: Array) -> None:
        target, address = operands
        stored = machine.parameters.get(address.base)
        size = bits // 8
        for at, register in enumerate(vector(target)):
            offset = address.offset + at * size
            if stored is None or offset + size > len(stored):
                raise machine.error("an unknown parameter, or a read behind its end")
            value = int.from_bytes(stored[offset : offset + size], "little")
            machine.write_extended(register, np.full(len(threads), value, np.uint64), threads)

    return execute


def load_global(bits: int, count: int) -> Handler:
    def execute(machine: Machine, operands: Any, threads: Array) -> None:
        addresses = machine.addresses(operands[1], threads)
        found = machine.memory.load(addresses, bits, count, machine.report)
        for register, values in zip(vector(operands[0]), found, strict=True):
            machine.write_extended(register, values, threads)

    return execute


def store_global(bits: int, count: int) -> Handler:
    def execute(machine: Machine, operands: Any, threads: Array) -> None:
        addresses = machine.addresses(operands[0], threads)
        machine.memory.store(addresses, bits, stored_values(machine, operands[1], bits, count, threads), machine.report)

    return execute


def stored_values(machine: Machine, operand: Any, bits: int, count: int, threads: Array) -> list[Array]:
    """Returns the low bits of each register of a store."""
    registers = vector(operand)
    if len(registers) != count:
        raise machine.error("the wrong number of registers")
    dtype = {16: np.uint16, 32: np.uint32, 64: np.uint64}[bits]
    return [machine.read(register, bits, threads).astype(dtype) for register in registers]


def shared_addresses(machine: Machine, operand: Any, threads: Array) -> Array:
    return machine.addresses(operand, threads).astype(np.int64)


def load_shared(count: int) -> Handler:
    def execute(machine: Machine, operands: Any, threads: Array) -> None:
        addresses = shared_addresses(machine, operands[1], threads)
        found = machine.shared.load(machine.cube[threads], addresses, count, machine.report)
        for register, words in zip(vector(operands[0]), found, strict=True):
            machine.write_extended(register, words, threads)

    return execute


def store_shared(count: int) -> Handler:
    def execute(machine: Machine, operands: Any, threads: Array) -> None:
        addresses = shared_addresses(machine, operands[0], threads)
        values = stored_values(machine, operands[1], 32, count, threads)
        machine.shared.store(machine.cube[threads], addresses, values, machine.report)

    return execute


def load_matrices(transposed: bool) -> Handler:
    """`ldmatrix .x4`: lanes 8m to 8m + 7 have the addresses of the rows of matrix m, of 8 by 8 numbers of 16 bits."""

    def execute(machine: Machine, operands: Any, threads: Array) -> None:
        if not machine.need_whole_warps(threads):
            raise machine.error("threads of a warp at different instructions")
        addresses = shared_addresses(machine, operands[1], threads)
        words = machine.shared.load(machine.cube[threads], addresses, 4, machine.report)
        matrices = np.stack(words, axis=-1).view(np.uint16).reshape(-1, 4, 8, 8)
        if transposed:
            matrices = matrices.swapaxes(2, 3)
        # Lane l has columns 2 (l mod 4) and 2 (l mod 4) + 1 of row l / 4.
        for at, register in enumerate(operands[0]):
            fragments = np.ascontiguousarray(matrices[:, at]).view(np.uint32)
            machine.write(register, fragments.reshape(-1), threads)

    return execute


def halves(machine: Machine, register: str, name: str, threads: Array) -> tuple[Array, Array]:
    """Returns the numbers in the low and the high half of a register as `[warp, lane / 4, lane mod 4]`."""
    words = machine.read(register, 32, threads).reshape(-1, 8, 4)
    to_f32 = HALVES[name].to_f32
    return to_f32((words & LOW_HALF).astype(np.uint16)), to_f32((words >> np.uint32(16)).astype(np.uint16))


def left_operand(machine: Machine, registers: Any, name: str, threads: Array) -> Array:
    """Returns the 16 by 16 matrices of warps."""
    matrices = np.zeros((len(threads) // WARP, 16, 16), np.float64)
    for register, (row, column) in zip(registers, QUARTERS, strict=True):
        low, high = halves(machine, register, name, threads)
        matrices[:, row : row + 8, column : column + 8 : 2] = low
        matrices[:, row : row + 8, column + 1 : column + 8 : 2] = high
    return matrices


def right_operand(machine: Machine, registers: Any, name: str, threads: Array) -> Array:
    """Returns the 16 by 8 matrices of warps, of which lane / 4 is the column."""
    matrices = np.zeros((len(threads) // WARP, 16, 8), np.float64)
    for register, row in zip(registers, (0, 8), strict=True):
        low, high = halves(machine, register, name, threads)
        matrices[:, row : row + 8 : 2] = low.swapaxes(1, 2)
        matrices[:, row + 1 : row + 8 : 2] = high.swapaxes(1, 2)
    return matrices


def multiply_matrices(name: str) -> Handler:
    """`mma.m16n8k16`: the product of 16 by 16 and 16 by 8 numbers of 16 bits plus 16 by 8 in f32, rounded once."""
    places = [(slice(row, row + 8), slice(column, None, 2)) for row in (0, 8) for column in (0, 1)]

    def execute(machine: Machine, operands: Any, threads: Array) -> None:
        if not machine.need_whole_warps(threads):
            raise machine.error("threads of a warp at different instructions")
        targets, left, right, added = operands
        total = left_operand(machine, left, name, threads) @ right_operand(machine, right, name, threads)
        for register, (rows, columns) in zip(added, places, strict=True):
            values = f32_of_bits(machine.read(register, 32, threads))
            total[:, rows, columns] += values.reshape(-1, 8, 4)
        rounded = total.astype(np.float32)
        for register, (rows, columns) in zip(targets, places, strict=True):
            machine.write(register, bits_of_f32(rounded[:, rows, columns]).reshape(-1), threads)

    return execute


def active_mask(machine: Machine, operands: Any, threads: Array) -> None:
    machine.write(operands[0], machine.active_lanes(threads)[machine.warp[threads]], threads)


def shuffle(machine: Machine, operands: Any, threads: Array) -> None:
    """`shfl.sync.bfly` in a whole warp. A lane outside of the mask gives NaN."""
    target, source, distance, clamp, members = operands
    if clamp != "31" or not isinstance(distance, str) or not distance.isdigit():
        raise machine.error("a shuffle in a part of the warp, or by a distance in a register")
    mask = machine.read(members, 32, threads)
    if (machine.active_lanes(threads)[machine.warp[threads]] != mask).any():
        machine.report("shuffle by other lanes than those of the mask")
    lanes = machine.lane[threads] ^ int(distance)
    is_member = ((mask >> lanes.astype(np.uint32)) & np.uint32(1)).astype(bool)
    if not is_member.all():
        machine.report("shuffle from a lane outside the mask")
    values = machine.register(source)[machine.warp[threads] * WARP + lanes]
    machine.write(target, np.where(is_member, values, np.uint32(NAN_BITS)), threads)


def select(bits: int) -> Handler:
    def execute(machine: Machine, operands: Any, threads: Array) -> None:
        target, first, second, predicate = operands
        chosen = machine.read(predicate, 1, threads)
        values = np.where(chosen, machine.read(first, bits, threads), machine.read(second, bits, threads))
        machine.write(target, values, threads)

    return execute


def extract_bits(bits: int) -> Handler:
    """`bfe` of an unsigned number, by an immediate position and length."""

    def execute(machine: Machine, operands: Any, threads: Array) -> None:
        target, source, position, length = operands
        values = machine.read(source, bits, threads)
        shift, mask = values.dtype.type(int(position)), values.dtype.type((1 << int(length)) - 1)
        machine.write(target, (values >> shift) & mask, threads)

    return execute


def elementwise(function: Callable[..., Array], bits: tuple[int, ...]) -> Handler:
    """Returns the handler of a function of operands of some numbers of bits each."""

    def execute(machine: Machine, operands: Any, threads: Array) -> None:
        target, *sources = operands
        if len(sources) != len(bits):
            raise machine.error(f"{len(sources)} operands in place of {len(bits)}")
        values = [machine.read(source, width, threads) for source, width in zip(sources, bits)]
        machine.write(target, function(*values), threads)

    return execute


def memory_handlers() -> dict[str, Handler]:
    table: dict[str, Handler] = {}
    for count, infix in ((1, ""), (2, ".v2"), (4, ".v4")):
        for bits in (16, 32, 64):
            for space in ("global", "global.nc"):
                table[f"ld.{space}{infix}.b{bits}"] = load_global(bits, count)
            table[f"st.global{infix}.b{bits}"] = store_global(bits, count)
            table[f"ld.param{infix}.b{bits}"] = load_parameter(bits)
        table[f"ld.shared{infix}.b32"] = load_shared(count)
        table[f"st.shared{infix}.b32"] = store_shared(count)
    for transposed, infix in ((False, ""), (True, ".trans")):
        table[f"ldmatrix.sync.aligned.m8n8.x4{infix}.shared.b16"] = load_matrices(transposed)
    return table


def warp_handlers() -> dict[str, Handler]:
    table: dict[str, Handler] = {"activemask.b32": active_mask, "shfl.sync.bfly.b32": shuffle}
    for name in HALVES:
        table[f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32"] = multiply_matrices(name)
    return table


def register_handlers() -> dict[str, Handler]:
    table: dict[str, Handler] = {"mov.pred": move(1)}
    for kind, bits in (("b16", 16), ("b32", 32), ("u32", 32), ("f32", 32), ("b64", 64), ("u64", 64)):
        table[f"mov.{kind}"] = move(bits)
        table[f"selp.{kind}"] = select(bits)
    for bits in (32, 64):
        table[f"bfe.u{bits}"] = extract_bits(bits)
    for opcode, (function, bits) in {**ARITHMETIC, **COMPARISONS, **CONVERSIONS}.items():
        table[opcode] = elementwise(function, bits)
    return table


TABLE: dict[str, Handler] = {
    "bra": branch,
    "bra.uni": branch,
    "ret": end,
    "bar.sync": barrier,
    **memory_handlers(),
    **warp_handlers(),
    **register_handlers(),
}
