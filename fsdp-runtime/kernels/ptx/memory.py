"""Global memory with guard zones, and shared memory that finds races."""

from __future__ import annotations

from typing import Callable

import numpy as np

Array = np.ndarray
Report = Callable[[str], None]
UNSIGNED = {16: np.uint16, 32: np.uint32, 64: np.uint64}
# NaN as f32, as two bf16 and as two f16.
NAN_WORD = 0x7FC07FC0


class GlobalMemory:
    """Allocations with guard zones between them, which no thread may access."""

    BASE = 0x700000000
    GUARD = 1 << 16
    ALIGNMENT = 512

    def __init__(self, capacity: int = 64 << 20) -> None:
        self.bytes = np.zeros(capacity, np.uint8)
        self.words = {bits: self.bytes.view(dtype) for bits, dtype in UNSIGNED.items()}
        self.readable = np.zeros(capacity, bool)
        self.writable = np.zeros(capacity, bool)
        # How often each two bytes were written.
        self.writes = np.zeros(capacity // 2, np.int32)
        self.end = self.GUARD

    def allocate(self, values: Array, writable: bool = False) -> int:
        """Copies values into a new allocation and returns its address."""
        source = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        start, end = self.end, self.end + len(source)
        if end + self.GUARD > len(self.bytes):
            raise MemoryError(f"no place for {len(source)} bytes of global memory")
        self.bytes[start:end] = source
        self.readable[start:end] = True
        self.writable[start:end] = writable
        self.end = -(-(end + self.GUARD) // self.ALIGNMENT) * self.ALIGNMENT
        return self.BASE + start

    def values(self, address: int, count: int, dtype: type) -> Array:
        """Returns a copy of numbers in memory."""
        start = address - self.BASE
        return self.bytes[start : start + count * np.dtype(dtype).itemsize].view(dtype).copy()

    def times_written(self, address: int, size: int) -> set[int]:
        """Returns how often elements of two bytes were written, each number once."""
        start = (address - self.BASE) // 2
        return set(self.writes[start : start + size // 2].tolist())

    def load(self, addresses: Array, bits: int, count: int, report: Report) -> list[Array]:
        """Returns `count` neighbouring numbers for each address, zeros outside of allocations."""
        offsets, allowed = self._offsets(addresses, bits * count // 8, self.readable, "read", report)
        offsets = np.where(allowed, offsets, 0) // (bits // 8)
        return [self.words[bits][offsets + at] for at in range(count)]

    def store(self, addresses: Array, bits: int, values: list[Array], report: Report) -> None:
        """Writes neighbouring numbers to each address, none outside of allocations."""
        offsets, allowed = self._offsets(addresses, bits * len(values) // 8, self.writable, "write", report)
        offsets = offsets[allowed] // (bits // 8)
        for at, numbers in enumerate(values):
            self.words[bits][offsets + at] = numbers[allowed]
            for half in range(bits // 16):
                np.add.at(self.writes, (offsets + at) * (bits // 16) + half, 1)

    def _offsets(self, addresses: Array, size: int, flags: Array, kind: str, report: Report) -> tuple[Array, Array]:
        if (addresses % np.uint64(size)).any():
            report(f"misaligned global {kind}")
        offsets = (addresses - np.uint64(self.BASE)).astype(np.int64)
        allowed = (offsets >= 0) & (offsets + size <= len(self.bytes))
        inside = np.where(allowed, offsets, 0)
        allowed &= flags[inside] & flags[inside + size - 1]
        if not allowed.all():
            report(f"global {kind} out of bounds")
        return offsets, allowed


class SharedMemory:
    """The shared memory of all cubes, in words of 32 bits. A word is NaN until it is written.

    In the interval between two barriers, a word that is read must not be written and a word that is written must not
    be read, not even by the same warp. Writes of the same value are no race.
    """

    def __init__(self, cubes: int, size: int) -> None:
        self.size = size
        self.words = np.full((cubes, size // 4 + 1), NAN_WORD, np.uint32)
        self.was_read = np.zeros(self.words.shape, bool)
        self.was_written = np.zeros(self.words.shape, bool)

    def end_interval(self) -> None:
        self.was_read[:] = False
        self.was_written[:] = False

    def load(self, cubes: Array, addresses: Array, count: int, report: Report) -> list[Array]:
        """Returns `count` neighbouring words for each address, NaN out of bounds."""
        first, allowed = self._first_words(addresses, count, "read", report)
        first, cubes_read = first[allowed], cubes[allowed]
        found = []
        for at in range(count):
            place = (cubes_read, first + at)
            if self.was_written[place].any():
                report("race: shared read of a word written in the same interval")
            self.was_read[place] = True
            words = np.full(len(cubes), NAN_WORD, np.uint32)
            words[allowed] = self.words[place]
            found.append(words)
        return found

    def store(self, cubes: Array, addresses: Array, values: list[Array], report: Report) -> None:
        """Writes neighbouring words to each address, none out of bounds."""
        first, allowed = self._first_words(addresses, len(values), "write", report)
        for at, words in enumerate(values):
            self._store_words((cubes[allowed], first[allowed] + at), words[allowed], report)

    def _store_words(self, place: tuple[Array, Array], words: Array, report: Report) -> None:
        if self.was_read[place].any():
            report("race: shared write of a word read in the same interval")
        if (self.was_written[place] & (self.words[place] != words)).any():
            report("race: shared write of another value in the same interval")
        self.words[place] = words
        if (self.words[place] != words).any():
            report("race: shared writes of several values in one instruction")
        self.was_written[place] = True

    def _first_words(self, addresses: Array, count: int, kind: str, report: Report) -> tuple[Array, Array]:
        if (addresses % (4 * count)).any():
            report(f"misaligned shared {kind}")
        allowed = (addresses >= 0) & (addresses + 4 * count <= self.size)
        if not allowed.all():
            report(f"shared {kind} out of bounds")
        return addresses // 4, allowed
