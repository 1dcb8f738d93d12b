"""Runs the kernel that writes dropout masks on cases, and compares each word with a reference.

A mask has a bit for each weight of an attention, which is 1 if dropout keeps it. A thread writes the bits of a batch
of 256 keys of a query: those of 64 draws for each of the four words of 16 random blocks.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from attention import Outcome
from machine import Machine, Schedule
from memory import GlobalMemory
from program import KernelId, Program, PtxError

Array = np.ndarray
# The constants and rounds of Philox4x32-7.
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 7
WORD = 0xFFFFFFFF
# Random blocks of a batch of keys, and words that a thread writes.
LANES = 16
WORDS_OF_BATCH = 8
LOW_BYTES = np.uint32(0x00FF00FF)
HIGH_BYTES = np.uint32(0xFF00FF00)
SIGN = 0x8000
THREADS_OF_CUBE = 256
# Counter of the generator, and the draw from which on an element is kept: a quarter is dropped.
PLACE = (3, 4)
THRESHOLD = 1 << 14


@dataclass(frozen=True)
class MaskCase:
    """The sizes of a mask. The heads are some of all heads."""

    batch: int
    heads: tuple[int, ...]
    all_heads: int
    queries: int
    # Batches of 256 keys in a row.
    batches: int

    @property
    def rows(self) -> int:
        return self.batch * len(self.heads) * self.queries

    def of_queries(self) -> Array:
        """For each query the two words of the key, its index in its block of queries, and the block's queries."""
        queries = [(query + 1, query * 7 + 2, query % 3, 9) for query in range(self.queries)]
        return np.array(queries, np.uint32)

    def words(self) -> Array:
        """Returns the words of the mask, `[rows, words of a row]`."""
        rows = [self.row(index) for index in range(self.rows)]
        return np.array(rows, np.uint32)

    def row(self, index: int) -> list[int]:
        index, query = divmod(index, self.queries)
        batch, head = divmod(index, len(self.heads))
        key_0, key_1, at, of_block = map(int, self.of_queries()[query])
        first = ((batch * self.all_heads + self.heads[head]) * of_block + at) * self.batches
        batches = range(first, first + self.batches)
        return [word for batch in batches for word in words_of_batch(batch, (key_0, key_1))]


CASES = (
    MaskCase(2, (1, 2, 5), 7, 5, 2),
    MaskCase(1, (0,), 1, 1, 1),
    MaskCase(3, (0, 1), 2, 17, 3),
)


def random_block(number: int, key: tuple[int, int], counter: tuple[int, int]) -> list[int]:
    """Returns the four words of a block of Philox4x32-7."""
    words = [number & WORD, number >> 32, *counter]
    for _ in range(ROUNDS):
        even, odd = words[0] * MULTIPLIERS[0], words[2] * MULTIPLIERS[1]
        words = [(odd >> 32) ^ words[1] ^ key[0], odd & WORD, (even >> 32) ^ words[3] ^ key[1], even & WORD]
        key = ((key[0] + WEYL[0]) & WORD, (key[1] + WEYL[1]) & WORD)
    return words


def words_of_batch(batch: int, key: tuple[int, int]) -> list[int]:
    """Returns the words of a batch of keys. Two draws of a lane are at bits `2 lane` and `2 lane + 1` of a word."""
    blocks = np.array([random_block(batch * LANES + lane, key, PLACE) for lane in range(LANES)], np.uint32)
    words: list[int] = []
    for at in range(4):
        upper, lower = blocks[:, at], blocks[:, (at + 1) % 4] ^ blocks[:, (at + 2) % 4]
        odd = (upper & HIGH_BYTES) | (lower & LOW_BYTES)
        even = ((upper & LOW_BYTES) << np.uint32(8)) | ((lower & HIGH_BYTES) >> np.uint32(8))
        for pairs in (odd, even):
            draws = np.ascontiguousarray(pairs).view("<u2") ^ np.uint16(SIGN)
            words.append(int(np.packbits(draws >= THRESHOLD, bitorder="little").view("<u4")[0]))
    return words


def mask(program: Program, case: MaskCase, schedule: Schedule) -> Outcome:
    """Runs the kernel of masks. The error is the part of the words that differ."""
    memory, threads = GlobalMemory(), case.rows * case.batches
    size = threads * WORDS_OF_BATCH
    target = memory.allocate(np.zeros(size, np.uint32), writable=True)
    heads = np.array(case.heads, np.uint32)
    pointers = [target, memory.allocate(case.of_queries()), memory.allocate(heads)]
    sizes = (threads, case.batches, case.queries, len(heads), case.all_heads)
    # 4 bytes align the fields that follow the sizes.
    info = struct.pack("<5I4x3I", *sizes, *PLACE, THRESHOLD)
    grid = (-(-threads // THREADS_OF_CUBE), 1, 1)
    reports = Machine(program, grid, memory, pointers, info, schedule).run()
    times = memory.times_written(target, size * 4)
    if times != {1}:
        reports[f"elements of the mask written {sorted(times)} times"] += 1
    found = memory.values(target, size, np.uint32).reshape(case.rows, -1)
    return Outcome({"mask": float((found != case.words()).mean())}, reports)


def cases(kernel: KernelId, most: int | None) -> list[MaskCase]:
    """Returns the first cases. They are the same for each kernel of masks."""
    if kernel.address_bits != 32:
        raise PtxError(f"sizes of {kernel.address_bits} bits are not supported for {kernel.kind}")
    return list(CASES[:most])
