"""Cases of attention: tensors, rules, and the results that the kernels should have, computed in f64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from floats import HALVES
from program import KernelId, PtxError

Array = np.ndarray
# Keys of which a row of the dropout mask has whole batches, a bit for each.
MASK_BATCH = 256
DROPPED = 0.25
# Part of the keys that the bias hides. It hides all keys of the last row of a batch of several.
HIDDEN = 0.2
# Logarithm of the sum of exponentials of a query that sees no key.
LEAST = -3.4028234663852886e38


@dataclass(frozen=True)
class Sizes:
    """The sizes of a case."""

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    # Queries and keys where there are segments.
    segmented: int
    # Keys that a query sees before itself, itself included, where there is a window, and with segments.
    window: int
    segmented_window: int
    # Layout `[batch, rows, heads, width]`. A kernel that is compiled for one layout has that.
    interleaved: bool
    seed: int
    # Factor of the scores, or None for 1.5 over the root of the width.
    scale: float | None = None
    # Whether a window has keys after the query too.
    two_sided: bool = False


CASES = (
    Sizes(1, 4, 2, 150, 150, 150, 11, 3, False, seed=0),
    Sizes(3, 4, 2, 75, 101, 101, 11, 30, True, seed=1),
    Sizes(1, 4, 2, 101, 37, 131, 11, 30, False, seed=2),
    Sizes(3, 4, 2, 133, 301, 200, 11, 30, True, seed=3),
    Sizes(1, 4, 2, 1, 1, 1, 11, 30, False, seed=4),
    Sizes(1, 4, 2, 64, 64, 64, 11, 30, True, seed=5),
    Sizes(1, 4, 2, 192, 256, 256, 11, 30, False, seed=6),
    Sizes(2, 3, 3, 70, 260, 70, 40, 40, False, seed=9, scale=0.5),
    Sizes(1, 4, 1, 90, 90, 90, 1, 1, False, seed=9, scale=0.5),
    Sizes(1, 2, 2, 17, 300, 65, 200, 200, True, seed=9, scale=0.5),
    Sizes(2, 2, 1, 65, 129, 65, 64, 64, True, seed=9, scale=0.5),
    Sizes(2, 4, 2, 83, 97, 97, 23, 23, True, seed=10, two_sided=True),
)
MEANS_CASES = (
    Sizes(1, 4, 1, 150, 150, 150, 1, 1, False, seed=0),
    Sizes(3, 5, 1, 77, 77, 77, 1, 1, True, seed=0),
    Sizes(1, 1, 1, 1, 1, 1, 1, 1, False, seed=0),
    Sizes(2, 3, 1, 64, 64, 64, 1, 1, True, seed=0),
)


@dataclass(frozen=True)
class Rule:
    """Which keys queries see, and the factors of scores and weights."""

    # Keys before and after a query's own that it sees. None is all of them.
    before: int | None
    after: int | None
    # Whether queries see each key, `[batch, queries, keys]`.
    seen: Array
    # First key that each query sees and the one after the last, `[batch, queries, 2]`, if there are segments.
    table: Array | None
    # Numbers that are added to the scores of each key, `[batch, keys]`.
    bias: Array | None
    # Whether dropout keeps each weight, `[batch, heads, queries, keys]`, and the same as words of bits.
    kept: Array
    mask_words: Array | None
    # Words of a row of the mask.
    row_words: int
    scale: np.float32
    # Factor of the weights that dropout keeps.
    keep: np.float32


@dataclass(frozen=True)
class Reference:
    """The results in f64, each in the layout `[batch, heads, rows, width]` or `[batch, heads, rows]`."""

    output: Array
    logarithms: Array
    means: Array
    query_grads: Array
    key_grads: Array
    value_grads: Array


class Case:
    """An attention whose tensors are random. `query`, `key`, `value` and `grad` are bits of floats of 16 bits."""

    def __init__(self, kernel: KernelId, sizes: Sizes) -> None:
        self.half = HALVES[kernel.dtype]
        self.width = kernel.width or 8 * kernel.chunks
        self.batch, self.heads, self.key_heads = sizes.batch, sizes.heads, sizes.key_heads
        is_segmented = kernel.table
        self.queries = sizes.segmented if is_segmented else sizes.queries
        self.keys = sizes.segmented if is_segmented else sizes.keys
        is_of_one_layout = kernel.kind == "flash_key_grads_kernel"
        self.interleaved = kernel.interleaved if is_of_one_layout else sizes.interleaved
        random = np.random.RandomState(sizes.seed)
        draw = lambda heads, rows: self.half.of_f32(
            random.randn(self.batch, heads, rows, self.width).astype(np.float32)
        )
        self.query, self.key = draw(self.heads, self.queries), draw(self.key_heads, self.keys)
        self.value, self.grad = draw(self.key_heads, self.keys), draw(self.heads, self.queries)
        self.rule = self._rule(kernel, sizes, random)
        self.reference = self._reference()

    def _rule(self, kernel: KernelId, sizes: Sizes, random: np.random.RandomState) -> Rule:
        bias = self._bias(random) if kernel.bias else None
        before, after = reach(kernel, sizes, self.queries + self.keys)
        ranges = self._ranges(before, after)
        if kernel.table:
            restrict_to_segments(ranges, self.keys)
        key = np.arange(self.keys)
        seen = (key >= ranges[..., :1]) & (key < ranges[..., 1:])
        row_words = -(-self.keys // MASK_BATCH) * MASK_BATCH // 32
        bits = self._dropout_bits(random, row_words) if kernel.mask else None
        all_kept = np.ones((self.batch, self.heads, self.queries, self.keys))
        return Rule(
            before=before,
            after=after,
            seen=seen if bias is None else seen & (bias[:, None] == 0),
            table=ranges.astype(np.uint32) if kernel.table else None,
            bias=bias,
            kept=all_kept if bits is None else bits[..., : self.keys].astype(np.float64),
            mask_words=None if bits is None else words_of_bits(bits),
            row_words=row_words,
            scale=np.float32(sizes.scale or 1.5 / np.sqrt(self.width)),
            keep=np.float32(1.0 if bits is None else 1 / (1 - DROPPED)),
        )

    def _bias(self, random: np.random.RandomState) -> Array:
        bias = np.where(random.rand(self.batch, self.keys) < HIDDEN, -np.inf, 0.0)
        if self.batch > 1:
            bias[-1] = -np.inf
        return bias

    def _ranges(self, before: int | None, after: int | None) -> Array:
        """Returns the first key that each query sees and the one after the last, `[batch, queries, 2]`."""
        position = np.arange(self.queries) + self.keys - self.queries
        ranges = np.zeros((self.batch, self.queries, 2), np.int64)
        ranges[..., 0] = 0 if before is None else np.clip(position - before, 0, self.keys)
        ranges[..., 1] = self.keys if after is None else np.clip(position + after + 1, 0, self.keys)
        return ranges

    def _dropout_bits(self, random: np.random.RandomState, row_words: int) -> Array:
        return random.rand(self.batch, self.heads, self.queries, row_words * 32) >= DROPPED

    def _reference(self) -> Reference:
        to_f64 = lambda bits: self.half.to_f32(bits).astype(np.float64)
        group = self.heads // self.key_heads
        query, grad = to_f64(self.query), to_f64(self.grad)
        key, value = (np.repeat(to_f64(bits), group, axis=1) for bits in (self.key, self.value))
        scale, factors = float(self.rule.scale), self.rule.kept * float(self.rule.keep)
        scores = np.einsum("bhqd,bhkd->bhqk", query, key) * scale
        weights, logarithms = softmax(np.where(self.rule.seen[:, None], scores, -np.inf))
        weight_grads = np.einsum("bhqd,bhkd->bhqk", grad, value) * factors
        means = (weights * weight_grads).sum(axis=-1, keepdims=True)
        score_grads = weights * (weight_grads - means) * scale
        of_group = lambda sums: sums.reshape(self.batch, self.key_heads, group, self.keys, self.width).sum(axis=2)
        return Reference(
            output=np.einsum("bhqk,bhkd->bhqd", weights * factors, value),
            logarithms=logarithms,
            means=means[..., 0],
            query_grads=np.einsum("bhqk,bhkd->bhqd", score_grads, key),
            key_grads=of_group(np.einsum("bhqk,bhqd->bhkd", score_grads, query)),
            value_grads=of_group(np.einsum("bhqk,bhqd->bhkd", weights * factors, grad)),
        )


def reach(kernel: KernelId, sizes: Sizes, most: int) -> tuple[int | None, int | None]:
    """Returns how many keys before and after its own a query sees, for the bounds that a kernel is compiled with."""
    has_window = kernel.bounded[0] or kernel.table
    if kernel.bounded[0] and not kernel.bounded[1]:
        raise PtxError("no case of attention has a bound before a query and none after it")
    window = sizes.segmented_window if kernel.table else sizes.window
    before = min(window, most) - 1 if has_window else None
    if not kernel.bounded[1]:
        return before, None
    return before, before if sizes.two_sided else 0


def restrict_to_segments(ranges: Array, keys: int) -> None:
    """Restricts the keys of queries to segments of 5, 12, 19.. keys. The first one of row `r` has `40 r` more."""
    for row in range(len(ranges)):
        start, end, length = 0, 40 * row, 5
        while start < keys:
            end, length = min(end + length, keys), length + 7
            first, last = ranges[row, start:end, 0], ranges[row, start:end, 1]
            np.maximum(first, start, out=first)
            np.minimum(last, end, out=last)
            start = end
    ranges[..., 0] = np.minimum(ranges[..., 0], ranges[..., 1])


def softmax(scores: Array) -> tuple[Array, Array]:
    """Returns weights and the logarithms of sums of exponentials. A query that sees no key has weights of 0."""
    most = scores.max(axis=-1, keepdims=True)
    is_empty = ~np.isfinite(most)
    most = np.where(is_empty, 0, most)
    exponentials = np.exp(scores - most)
    sums = np.where(is_empty, 1, exponentials.sum(axis=-1, keepdims=True))
    logarithms = np.where(is_empty, LEAST, most + np.log(sums))
    return np.where(is_empty, 0, exponentials / sums), logarithms[..., 0]


def words_of_bits(bits: Array) -> Array:
    """Returns words of 32 bits, the lowest bit first."""
    return np.packbits(bits.reshape(-1, 32), axis=1, bitorder="little").view("<u4").reshape(-1)
