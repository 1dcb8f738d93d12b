//! Attention without its score matrix: arguments, and the form in blocks of queries.

mod blocks;
pub(super) mod composed;
mod key_ranges;
mod segments;

use std::ops::Range;

#[cfg(feature = "cube")]
pub(super) use self::blocks::{Block, BlockOps, backward, forward};
pub use self::key_ranges::KeyRanges;
pub use self::segments::{Segments, SplitSegment};
use super::mask::{BATCH, MaskSource, Places};

/// Queries whose dropout masks are numbered together: element (batch, head, query, key) of a block of
/// queries has the number that it has in a mask of shape `[batch, heads, queries, keys]`, with the
/// keys padded to whole batches of the random generator. The last block of queries may be smaller.
pub const MASK_ROWS: usize = 128;

/// Numbers and flags of an attention.
#[derive(Clone, Debug)]
pub struct AttentionRule {
    /// Whether a query sees only the keys up to its own position. The last query has the position of
    /// the last key.
    pub causal: bool,
    /// Positions by which the key that a query sees differs from its own: fewer than this. At least 1.
    pub window: Option<usize>,
    /// Segments of queries and keys, of which there are as many: a query sees the keys of its own one. Or the
    /// range of keys that each query sees ([`Segments::of_ranges`]).
    pub segments: Option<Segments>,
    /// Factor of the products of queries and keys.
    pub scale: f64,
    /// Dropout of the attention weights.
    pub dropout: Option<MaskSource>,
    /// Which of more weights these are, for their dropout masks; `None` for all.
    pub places: Option<WeightPlaces>,
}

/// Places of the weights of an attention among those of a larger one, of which a rank computes a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightPlaces {
    /// Those of the heads of the queries.
    pub heads: Places,
    /// Those of the queries.
    pub queries: Places,
    /// Those of the keys.
    pub keys: Places,
}

impl WeightPlaces {
    /// Returns the places of all weights.
    pub const fn all(heads: usize, [queries, keys]: [usize; 2]) -> Self {
        let (queries, keys) = (Places::all(queries), Places::all(keys));
        Self { heads: Places::all(heads), queries, keys }
    }

    /// Returns the queries of the range in runs that lie in one block of [`MASK_ROWS`] each.
    pub(crate) fn query_runs(&self, queries: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let of_run = |(run, place): (Range<usize>, usize)| {
            let (mut start, mut place) = (run.start, place);
            std::iter::from_fn(move || {
                let end = run.end.min(start + MASK_ROWS - place % MASK_ROWS);
                let part = start..end;
                (place, start) = (place + part.len(), end);
                (!part.is_empty()).then_some(part)
            })
        };
        self.queries.runs(queries).flat_map(of_run)
    }

    /// Returns the masks of the block of queries to which a query of the part belongs.
    pub(crate) fn row(&self, source: MaskSource, query: usize) -> MaskRow {
        let place = self.queries.at(query);
        let block = place / MASK_ROWS;
        let start = block * MASK_ROWS;
        let of_block = MASK_ROWS.min(self.queries.whole() - start);
        MaskRow { source: source.of_block(block), row: place - start, of_block }
    }

    /// Returns the number of all keys, padded to whole batches of the random generator.
    pub(crate) fn padded_keys(&self) -> usize {
        self.keys.whole().next_multiple_of(BATCH)
    }
}

/// The masks of the block of queries that a query belongs to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MaskRow {
    pub(crate) source: MaskSource,
    /// Index of the query in the block.
    pub(crate) row: usize,
    /// Number of queries of the block.
    pub(crate) of_block: usize,
}

impl AttentionRule {
    /// Returns the rule by which every query sees every key, without dropout.
    pub fn new(scale: f64) -> Self {
        Self { causal: false, window: None, segments: None, scale, dropout: None, places: None }
    }

    /// Returns whether the rule hides keys from some queries.
    pub fn hides(&self) -> bool {
        self.causal || self.window.is_some() || self.segments.is_some()
    }
}

/// Tensors that attention reads, of one dtype.
///
/// `key_heads` divides `heads`. Head `h` of the queries uses head `h / (heads / key_heads)` of the keys
/// and values.
#[derive(Clone, Debug)]
pub struct AttentionTensors<T> {
    /// `[batch, heads, queries, width]`
    pub query: T,
    /// `[batch, key_heads, keys, width]`
    pub key: T,
    /// `[batch, key_heads, keys, value width]`
    pub value: T,
    /// Number to add to all scores of a key, `[batch, keys]`: 0 or negative infinity.
    pub bias: Option<T>,
}

impl<T> AttentionTensors<T> {
    /// Returns references to the tensors.
    pub fn each_ref(&self) -> AttentionTensors<&T> {
        let Self { query, key, value, bias } = self;
        AttentionTensors { query, key, value, bias: bias.as_ref() }
    }

    /// Applies `f` to each tensor.
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> AttentionTensors<U> {
        AttentionTensors {
            query: f(self.query),
            key: f(self.key),
            value: f(self.value),
            bias: self.bias.map(f),
        }
    }

    /// Returns query, key, value, and the bias if there is one.
    pub fn into_vec(self) -> Vec<T> {
        [self.query, self.key, self.value].into_iter().chain(self.bias).collect()
    }

    /// Returns the tensors of a list that [`into_vec`](Self::into_vec) returned.
    pub fn from_vec(tensors: Vec<T>) -> Self {
        let mut tensors = tensors.into_iter();
        let mut next = || tensors.next().expect("query, key and value");
        let (query, key, value) = (next(), next(), next());
        Self { query, key, value, bias: tensors.next() }
    }
}

impl MaskSource {
    /// Returns the source of the masks of one block of [`MASK_ROWS`] queries.
    pub fn of_block(self, block: usize) -> Self {
        let key = u64::from(self.key[1]) << 32 | u64::from(self.key[0]);
        let key = crate::mix(key ^ crate::mix(block as u64));
        Self { key: [key as u32, (key >> 32) as u32], ..self }
    }
}
