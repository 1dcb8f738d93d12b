"""Conversions between f32 and the bits of floats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import numpy as np

Array = np.ndarray


def f32_of_bits(bits: Array) -> Array:
    return np.ascontiguousarray(bits).view(np.float32)


def bits_of_f32(values: Array) -> Array:
    return np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)


def f32_of_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def bf16_of_f32(values: Array) -> Array:
    """Bits of the nearest bf16, the even one of two."""
    bits = bits_of_f32(values)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def f32_of_f16(bits: Array) -> Array:
    return np.ascontiguousarray(bits).view(np.float16).astype(np.float32)


def f16_of_f32(values: Array) -> Array:
    return np.asarray(values).astype(np.float16).view(np.uint16)


@dataclass(frozen=True)
class Half:
    """A float of 16 bits."""

    to_f32: Callable[[Array], Array]
    of_f32: Callable[[Array], Array]


HALVES = {"bf16": Half(f32_of_bf16, bf16_of_f32), "f16": Half(f32_of_f16, f16_of_f32)}
