"""Instructions on registers alone: arithmetic, comparisons and conversions.

Each table has, for an opcode, a function of arrays of unsigned integers (or bools) and the bits of its operands.
"""

from __future__ import annotations

import operator
from typing import Callable

import numpy as np

from floats import HALVES, bits_of_f32, f32_of_bits

Array = np.ndarray
Function = Callable[..., Array]
# A function, and the bits of each of its operands.
Operation = tuple[Function, tuple[int, ...]]
UNSIGNED = {16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {16: np.int16, 32: np.int32, 64: np.int64}
LEAST_NORMAL = np.finfo(np.float32).tiny
SIGN_BIT = np.uint32(0x80000000)


def as_signed(values: Array) -> Array:
    return np.ascontiguousarray(values).view(SIGNED[values.dtype.itemsize * 8])


def as_unsigned(values: Array) -> Array:
    return np.ascontiguousarray(values).view(UNSIGNED[values.dtype.itemsize * 8])


def of_signed(function: Function) -> Function:
    return lambda *values: as_unsigned(function(*map(as_signed, values)))


def of_f32(function: Function) -> Function:
    return lambda *values: bits_of_f32(function(*map(f32_of_bits, values)))


def of_f32_pairs(function: Function) -> Function:
    """Returns the function of two f32 in each of its operands of 64 bits."""
    pairs = lambda values: f32_of_bits(values).reshape(-1, 2)
    return lambda *values: bits_of_f32(function(*map(pairs, values))).view(np.uint64).reshape(-1)


def shift(values: Array, by: Array, direction: Function) -> Array:
    """Shifts unsigned numbers. A shift by all their bits or more gives 0."""
    is_far = by >= np.uint32(values.dtype.itemsize * 8)
    near = np.where(is_far, np.uint32(0), by).astype(values.dtype)
    return np.where(is_far, values.dtype.type(0), direction(values, near))


def multiply_add(first: Array, second: Array, third: Array) -> Array:
    return first * second + third


def multiply_wide(first: Array, second: Array) -> Array:
    return first.astype(np.uint64) * second.astype(np.uint64)


def multiply_high(first: Array, second: Array) -> Array:
    return (multiply_wide(first, second) >> np.uint64(32)).astype(np.uint32)


def exact_multiply_add(first: Array, second: Array, third: Array) -> Array:
    """Returns sums in f64. Their products are exact."""
    return first.astype(np.float64) * second.astype(np.float64) + third.astype(np.float64)


def fused_multiply_add(first: Array, second: Array, third: Array) -> Array:
    return exact_multiply_add(first, second, third).astype(np.float32)


def fused_multiply_add_down(first: Array, second: Array, third: Array) -> Array:
    """Rounds towards minus infinity."""
    exact = exact_multiply_add(first, second, third)
    nearest = exact.astype(np.float32)
    return np.where(nearest.astype(np.float64) > exact, np.nextafter(nearest, np.float32(-np.inf)), nearest)


def power_of_two(values: Array) -> Array:
    """Returns 2 to the power of numbers, with zeros in place of subnormal results."""
    powers = np.exp2(values.astype(np.float64)).astype(np.float32)
    return np.where(np.abs(powers) < LEAST_NORMAL, np.float32(0), powers)


def saturate(values: Array) -> Array:
    """Returns the nearest numbers from 0 to 1, and 0 for NaN."""
    return np.where(np.isnan(values), np.float32(0), np.clip(values, np.float32(0), np.float32(1)))


def pack(name: str) -> Function:
    """Returns the function that rounds its second operand to the low half of a word and the first to the high one."""
    of = HALVES[name].of_f32
    word = lambda values: of(f32_of_bits(values)).astype(np.uint32)
    return lambda high, low: word(low) | (word(high) << np.uint32(16))


def integer_operations(bits: int) -> dict[str, Operation]:
    two, three = (bits, bits), (bits, bits, bits)
    table: dict[str, Operation] = {}
    for sign in "su":
        kind = f"{sign}{bits}"
        table[f"add.{kind}"] = (operator.add, two)
        table[f"sub.{kind}"] = (operator.sub, two)
        table[f"mul.lo.{kind}"] = (operator.mul, two)
        table[f"mad.lo.{kind}"] = (multiply_add, three)
    for name, function in (("min", np.minimum), ("max", np.maximum)):
        table[f"{name}.u{bits}"] = (function, two)
        table[f"{name}.s{bits}"] = (of_signed(function), two)
    table[f"div.u{bits}"] = (operator.floordiv, two)
    table[f"rem.u{bits}"] = (operator.mod, two)
    table[f"shl.b{bits}"] = (lambda values, by: shift(values, by, operator.lshift), (bits, 32))
    for kind in (f"shr.u{bits}", f"shr.b{bits}"):
        table[kind] = (lambda values, by: shift(values, by, operator.rshift), (bits, 32))
    return table


def bit_operations() -> dict[str, Operation]:
    table: dict[str, Operation] = {}
    for kind, bits in (("pred", 1), ("b16", 16), ("b32", 32), ("b64", 64)):
        table[f"and.{kind}"] = (operator.and_, (bits, bits))
        table[f"or.{kind}"] = (operator.or_, (bits, bits))
        table[f"xor.{kind}"] = (operator.xor, (bits, bits))
        table[f"not.{kind}"] = (operator.invert, (bits,))
    return table


# Functions of f32, with the number of their operands.
F32_FUNCTIONS: dict[str, tuple[Function, int]] = {
    "add": (operator.add, 2),
    "add.rn": (operator.add, 2),
    "sub": (operator.sub, 2),
    "sub.rn": (operator.sub, 2),
    "mul": (operator.mul, 2),
    "mul.rn": (operator.mul, 2),
    "fma.rn": (fused_multiply_add, 3),
}
MORE_F32_FUNCTIONS: dict[str, tuple[Function, int]] = {
    "fma.rm": (fused_multiply_add_down, 3),
    "div.rn": (operator.truediv, 2),
    "min": (np.fmin, 2),
    "max": (np.fmax, 2),
    "ex2.approx.ftz": (power_of_two, 1),
    "cvt.sat.f32": (saturate, 1),
}


def f32_operations() -> dict[str, Operation]:
    table: dict[str, Operation] = {"neg.f32": (lambda values: values ^ SIGN_BIT, (32,))}
    for name, (function, operands) in {**F32_FUNCTIONS, **MORE_F32_FUNCTIONS}.items():
        table[f"{name}.f32"] = (of_f32(function), (32,) * operands)
    for name, (function, operands) in F32_FUNCTIONS.items():
        table[f"{name}.f32x2"] = (of_f32_pairs(function), (64,) * operands)
    return table


ORDER: dict[str, Function] = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
}


def unequal_numbers(first: Array, second: Array) -> Array:
    """Returns whether numbers differ, and neither is NaN."""
    return (first < second) | (first > second)


def compare(function: Function, convert: Function) -> Function:
    return lambda first, second: function(convert(first), convert(second))


def or_nan(function: Function) -> Function:
    return lambda first, second: function(first, second) | np.isnan(first) | np.isnan(second)


def comparisons() -> dict[str, Operation]:
    table: dict[str, Operation] = {}
    for bits in UNSIGNED:
        for name, function in {**ORDER, "ne": operator.ne}.items():
            table[f"setp.{name}.u{bits}"] = table[f"setp.{name}.b{bits}"] = (function, (bits, bits))
            table[f"setp.{name}.s{bits}"] = (compare(function, as_signed), (bits, bits))
    converters = {"f32": f32_of_bits, **{name: half.to_f32 for name, half in HALVES.items()}}
    for kind, convert in converters.items():
        bits = 32 if kind == "f32" else 16
        for name, function in {**ORDER, "ne": unequal_numbers}.items():
            table[f"setp.{name}.{kind}"] = (compare(function, convert), (bits, bits))
            table[f"setp.{name}u.{kind}"] = (compare(or_nan(function), convert), (bits, bits))
    return table


def convert_integer(source: str, target: str) -> Operation:
    """Returns the conversion between types such as `s32` and `u64`: the sign is extended, high bits are cut off."""
    bits = int(source[1:])
    is_signed = source[0] == "s"
    dtype = UNSIGNED[int(target[1:])]
    return (lambda values: (as_signed(values) if is_signed else values).astype(dtype), (bits,))


def conversions() -> dict[str, Operation]:
    kinds = [f"{sign}{bits}" for sign in "su" for bits in UNSIGNED]
    table = {f"cvt.{to}.{source}": convert_integer(source, to) for to in kinds for source in kinds if to != source}
    table["cvt.rn.f32.s32"] = (lambda values: bits_of_f32(as_signed(values).astype(np.float32)), (32,))
    table["cvt.rn.f32.u32"] = (lambda values: bits_of_f32(values.astype(np.float32)), (32,))
    for name, half in HALVES.items():
        table[f"cvt.f32.{name}"] = (lambda values, half=half: bits_of_f32(half.to_f32(values)), (16,))
        table[f"cvt.rn.{name}x2.f32"] = (pack(name), (32, 32))
    return table


ARITHMETIC: dict[str, Operation] = {
    **{opcode: operation for bits in UNSIGNED for opcode, operation in integer_operations(bits).items()},
    **bit_operations(),
    **f32_operations(),
    "mul.wide.u32": (multiply_wide, (32, 32)),
    "mul.hi.u32": (multiply_high, (32, 32)),
}
COMPARISONS = comparisons()
CONVERSIONS = conversions()
