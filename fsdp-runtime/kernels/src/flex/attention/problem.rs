//! Sizes and slices of one attention, and its division into tiles.

use std::ops::Range;

use crate::attention::{AttentionRule, MASK_ROWS};
use crate::flex::product::Matrix;
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
    pub(super) heads: usize,
    pub(super) queries: usize,
    pub(super) keys: usize,
    /// Elements of a query and a key.
    pub(super) width: usize,
    /// Elements of a value.
    pub(super) value_width: usize,
}

/// One attention on contiguous tensors.
#[derive(Clone, Copy)]
pub(super) struct Problem<'a> {
    pub(super) sizes: Sizes,
    pub(super) query: &'a [f32],
    pub(super) key: &'a [f32],
    pub(super) value: &'a [f32],
    /// Number to add to all scores of a key, `[batch, keys]`: 0 or negative infinity.
    pub(super) bias: Option<&'a [f32]>,
    pub(super) rule: &'a AttentionRule,
}

/// The part of a [`Problem`] that belongs to one head of one batch element.
#[derive(Clone, Copy)]
pub(super) struct Head<'a> {
    pub(super) sizes: Sizes,
    pub(super) query: &'a [f32],
    pub(super) key: &'a [f32],
    pub(super) value: &'a [f32],
    bias: Option<&'a [f32]>,
    rule: &'a AttentionRule,
    /// Number of the head over all batch elements.
    number: usize,
}

impl<'a> Problem<'a> {
    /// Returns the head of this number, counted over all batch elements.
    pub(super) fn head(&self, number: usize) -> Head<'a> {
        let Sizes { heads, queries, keys, width, value_width } = self.sizes;
        let of_batch = number / heads * keys;
        Head {
            sizes: self.sizes,
            query: &self.query[number * queries * width..][..queries * width],
            key: &self.key[number * keys * width..][..keys * width],
            value: &self.value[number * keys * value_width..][..keys * value_width],
            bias: self.bias.map(|bias| &bias[of_batch..][..keys]),
            rule: self.rule,
            number,
        }
    }
}

impl<'a> Head<'a> {
    /// Returns the factor of the scores.
    pub(super) fn scale(&self) -> f32 {
        self.rule.scale as f32
    }

    /// Returns the number of keys that a query sees: all, or under `causal` those up to its own
    /// position, where the last query has the position of the last key.
    fn visible(&self, query: usize) -> usize {
        let Sizes { queries, keys, .. } = self.sizes;
        if self.rule.causal { (query + 1 + keys).saturating_sub(queries).min(keys) } else { keys }
    }

    /// Returns the tiles of queries.
    pub(super) fn query_tiles(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let queries = self.sizes.queries;
        (0..queries).step_by(QUERIES).map(move |start| start..(start + QUERIES).min(queries))
    }

    /// Returns the tiles of these queries and the keys that some of them see.
    pub(super) fn tiles(&self, queries: Range<usize>) -> impl Iterator<Item = Tile<'a>> {
        let keys = self.visible(queries.end - 1);
        let tile = move |start| Tile::new(*self, queries.clone(), start..(start + KEYS).min(keys));
        (0..keys).step_by(KEYS).map(tile)
    }
}

/// Some queries of a head, and some of the keys that they see.
pub(super) struct Tile<'a> {
    pub(super) head: Head<'a>,
    pub(super) queries: Range<usize>,
    pub(super) keys: Range<usize>,
}

impl<'a> Tile<'a> {
    fn new(head: Head<'a>, queries: Range<usize>, keys: Range<usize>) -> Self {
        Self { head, queries, keys }
    }

    /// Returns the queries, one a row.
    pub(super) fn query(&self) -> Matrix<'a> {
        rows(self.head.query, &self.queries, self.head.sizes.width)
    }

    /// Returns the keys, one a row.
    pub(super) fn key(&self) -> Matrix<'a> {
        rows(self.head.key, &self.keys, self.head.sizes.width)
    }

    /// Returns the values, one a row.
    pub(super) fn value(&self) -> Matrix<'a> {
        rows(self.head.value, &self.keys, self.head.sizes.value_width)
    }

    /// Returns the numbers to add to the scores of the keys.
    pub(super) fn bias(&self) -> Option<&'a [f32]> {
        self.head.bias.map(|bias| &bias[self.keys.clone()])
    }

    /// Returns how many of the tile's keys each query sees, from the first on.
    pub(super) fn visible(&self) -> [usize; QUERIES] {
        let (start, len) = (self.keys.start, self.keys.len());
        let mut visible = [0; QUERIES];
        for (visible, query) in visible.iter_mut().zip(self.queries.clone()) {
            *visible = self.head.visible(query).saturating_sub(start).min(len);
        }
        visible
    }

    /// Returns the source of the tile's dropout mask, and for each query the number of the mask's
    /// element that belongs to the tile's first key.
    pub(super) fn mask(&self) -> Option<(MaskSource, impl Fn(usize) -> usize)> {
        let source = self.head.rule.dropout?.of_block(self.queries.start / MASK_ROWS);
        let row = self.head.sizes.keys.next_multiple_of(BATCH);
        let (first, start) = (self.head.number * self.queries.len(), self.keys.start);
        Some((source, move |query| (first + query) * row + start))
    }
}

/// Returns the rows in the range.
pub(super) fn rows<'a>(elements: &'a [f32], range: &Range<usize>, width: usize) -> Matrix<'a> {
    let elements = &elements[range.start * width..range.end * width];
    Matrix::new(elements, [range.len(), width], width)
}
