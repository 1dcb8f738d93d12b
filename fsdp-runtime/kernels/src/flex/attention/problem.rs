//! Sizes and slices of one attention, and its division into tiles.

use std::ops::Range;

use super::heads::{Heads, Rows};
use crate::attention::{AttentionRule, KeyRanges, MASK_ROWS};
use crate::flex::dropout;
use crate::flex::float::KernelFloat;
use crate::mask::{BATCH, MaskSource};

/// Queries of a tile. Dropout numbers the elements within as many queries.
pub(super) const QUERIES: usize = MASK_ROWS;
/// Keys of a tile: whole batches of dropout's random generator.
pub(super) const KEYS: usize = BATCH;
/// Elements from one row of a tile to the next. Rows at multiples of a power of two would share few
/// sets of the cache.
pub(super) const STRIDE: usize = KEYS + 16;

/// Lengths of the dimensions.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    /// Heads of the queries of one row of the batch.
    pub(super) heads: usize,
    /// Heads of the queries that share a head of the keys and values.
    pub(super) group: usize,
    pub(super) queries: usize,
    pub(super) keys: usize,
    /// Elements of a query and a key.
    pub(super) width: usize,
    /// Elements of a value.
    pub(super) value_width: usize,
}

/// One attention.
#[derive(Clone, Copy)]
pub(super) struct Problem<'a, E> {
    pub(super) sizes: Sizes,
    pub(super) query: Heads<'a, E>,
    pub(super) key: Heads<'a, E>,
    pub(super) value: Heads<'a, E>,
    /// Number to add to all scores of a key, `[batch, keys]`: 0 or negative infinity.
    pub(super) bias: Option<&'a [f32]>,
    pub(super) rule: &'a AttentionRule,
}

/// The part of a [`Problem`] that belongs to one head of the queries, in one row of the batch.
#[derive(Clone, Copy)]
pub(super) struct Head<'a, E> {
    pub(super) sizes: Sizes,
    /// Number of the head over all rows of the batch.
    pub(super) number: usize,
    query: Rows<'a, E>,
    key: Rows<'a, E>,
    value: Rows<'a, E>,
    bias: Option<&'a [f32]>,
    ranges: KeyRanges<'a>,
    /// Row of the batch.
    row: usize,
}

impl<'a, E: KernelFloat> Problem<'a, E> {
    /// Returns the head of this number, counted over all rows of the batch.
    pub(super) fn head(&self, number: usize) -> Head<'a, E> {
        let Sizes { heads, group, queries, keys, .. } = self.sizes;
        let (row, key_head) = (number / heads, number / group);
        Head {
            sizes: self.sizes,
            number,
            query: self.query.head(number),
            key: self.key.head(key_head),
            value: self.value.head(key_head),
            bias: self.bias.map(|bias| &bias[row * keys..][..keys]),
            ranges: KeyRanges::new(self.rule, [queries, keys]),
            row,
        }
    }
}

impl<'a, E: KernelFloat> Head<'a, E> {
    /// Returns the factor of the scores.
    pub(super) fn scale(&self) -> f32 {
        self.ranges.rule().scale as f32
    }

    /// Returns the tiles of queries.
    pub(super) fn query_tiles(&self) -> impl Iterator<Item = Range<usize>> + use<E> {
        let queries = self.sizes.queries;
        (0..queries).step_by(QUERIES).map(move |start| start..(start + QUERIES).min(queries))
    }

    /// Returns the rows of queries.
    pub(super) fn query(&self, queries: &Range<usize>) -> Rows<'a, E> {
        self.query.range(queries)
    }

    /// Returns the tiles of these queries with the keys that some of them see. A query tile that sees no key
    /// has none.
    pub(super) fn tiles(&self, queries: &Range<usize>) -> impl Iterator<Item = Tile<'a, E>> {
        let (head, queries) = (*self, queries.clone());
        let numbers = 0..self.sizes.keys.div_ceil(KEYS);
        numbers.filter_map(move |number| head.tile(&queries, number))
    }

    /// Returns the tile of these queries with those of the keys from `number · KEYS` to `(number + 1) · KEYS`
    /// that lie between the first and the last key that some of the queries see. Returns `None` if no query
    /// sees any.
    pub(super) fn tile(&self, queries: &Range<usize>, number: usize) -> Option<Tile<'a, E>> {
        let seen = self.ranges.of_queries(self.row..self.row + 1, queries.clone());
        let keys = seen.start.max(number * KEYS)..seen.end.min((number + 1) * KEYS);
        let is_padding = |bias: &[f32]| bias.iter().all(|&bias| bias == f32::NEG_INFINITY);
        if keys.is_empty() || self.bias.is_some_and(|bias| is_padding(&bias[keys.clone()])) {
            return None;
        }
        Some(Tile { head: *self, queries: queries.clone(), keys })
    }
}

/// Some queries of a head, and some of the keys.
pub(super) struct Tile<'a, E> {
    pub(super) head: Head<'a, E>,
    pub(super) queries: Range<usize>,
    pub(super) keys: Range<usize>,
}

impl<'a, E: KernelFloat> Tile<'a, E> {
    /// Returns the rows of the keys.
    pub(super) fn key(&self) -> Rows<'a, E> {
        self.head.key.range(&self.keys)
    }

    /// Returns the rows of the values.
    pub(super) fn value(&self) -> Rows<'a, E> {
        self.head.value.range(&self.keys)
    }

    /// Returns the numbers to add to the scores of the keys.
    pub(super) fn bias(&self) -> Option<&'a [f32]> {
        self.head.bias.map(|bias| &bias[self.keys.clone()])
    }

    /// Returns the numbers of queries and keys.
    pub(super) fn shape(&self) -> [usize; 2] {
        [self.queries.len(), self.keys.len()]
    }

    /// Returns the column of the first key in a buffer of the tile. Columns before it have no meaning.
    pub(super) fn column(&self) -> usize {
        self.keys.start % KEYS
    }

    /// Returns which of the tile's keys each query sees: the first one, and the one after the last.
    pub(super) fn visible(&self) -> [[usize; 2]; QUERIES] {
        let (start, len) = (self.keys.start, self.keys.len());
        let mut visible = [[0; 2]; QUERIES];
        for (visible, query) in visible.iter_mut().zip(self.queries.clone()) {
            let seen = self.head.ranges.of_query(self.head.row, query);
            *visible = [seen.start, seen.end].map(|key| key.saturating_sub(start).min(len));
        }
        visible
    }

    /// Returns the tile's dropout mask, if the rule has dropout.
    pub(super) fn mask(&self) -> Option<TileMask<'_, 'a, E>> {
        let source = self.head.ranges.rule().dropout?;
        Some(TileMask { tile: self, source })
    }
}

/// The dropout mask of a tile.
pub(super) struct TileMask<'t, 'a, E> {
    tile: &'t Tile<'a, E>,
    source: MaskSource,
}

impl<E: KernelFloat> TileMask<'_, '_, E> {
    /// Applies the mask to the row of a query of the tile: to the elements of a buffer from column 0 on, up to that of
    /// the last key.
    pub(super) fn apply(&self, query: usize, source: &[f32], target: &mut [f32]) {
        let Tile { head, queries, keys } = self.tile;
        let Some(places) = &head.ranges.rule().places else {
            let row = head.sizes.keys.next_multiple_of(BATCH);
            let first = head.number * queries.len() + query;
            let number = first * row + keys.start - self.tile.column();
            let source_of_block = self.source.of_block(queries.start / MASK_ROWS);
            dropout::dropout_over(source, target, &source_of_block, number);
            return;
        };
        target.copy_from_slice(source);
        let mask = places.row(self.source, queries.start + query);
        let heads = places.heads.whole();
        let of_batch = head.number / head.sizes.heads * heads;
        let number = of_batch + places.heads.at(head.number % head.sizes.heads);
        let row = (number * mask.of_block + mask.row) * places.padded_keys();
        for (run, place) in places.keys.runs(keys.clone()) {
            let columns = run.start - keys.start..run.end - keys.start;
            let elements = &mut target[self.tile.column()..][columns];
            dropout::drop_run(elements, &mask.source, row + place);
        }
    }

    /// Applies the mask to the row of a query in its own memory.
    pub(super) fn apply_in_place(&self, query: usize, row: &mut [f32]) {
        let mut source = [0.0; KEYS];
        let source = &mut source[..row.len()];
        source.copy_from_slice(row);
        self.apply(query, source, row);
    }
}
