//! Dropout of attention weights. A kernel writes one bit for each score, which the others read.
//!
//! The bits are those of the masks that blocks of queries have elsewhere: see `attention::MASK_ROWS` and the header of
//! `mask.rs`.

use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::fragments::{CHUNK, Pair, sum_column, sum_row};
use super::plan::Plan;
use super::scores::Sums;
use super::shape::AttentionShape;
use crate::attention::{MaskRow, WeightPlaces};
use crate::cube::philox::{draw_pairs, random_blocks};
use crate::cube::span::grid;
use crate::mask::{BATCH, MaskSource, SIGN};
use crate::philox::LANES;

/// Number of bits of a word of the mask.
const WORD: usize = 32;
/// Largest number of words of a mask: 128 MiB.
const MAX_WORDS: usize = 1 << 25;

/// Returns the number of words of a row of the mask, which has all keys and a padding.
pub(super) fn row_words(keys: usize) -> usize {
    keys.next_multiple_of(BATCH) / WORD
}

/// Returns whether a mask of so many rows is small enough.
pub(super) fn fits(rows: usize, keys: usize) -> bool {
    rows * row_words(keys) <= MAX_WORDS
}

/// A mask: one bit for each score of each query, which is 1 if dropout keeps the weight.
pub(super) struct Mask {
    handle: Handle,
    words: usize,
}

impl Mask {
    /// Returns the mask of the scores of all heads of `batch` rows, each `[queries, keys]`. The places have all
    /// keys.
    pub(super) fn new(
        client: &Client,
        batch: usize,
        places: &WeightPlaces,
        source: &MaskSource,
    ) -> Self {
        let WeightPlaces { heads, queries, keys } = places;
        let (rows, keys) = (batch * heads.len() * queries.len(), keys.len());
        let words = rows * row_words(keys);
        let mask = Self { handle: client.empty(words * size_of::<u32>()), words };
        let of_query = |query| {
            let MaskRow { source, row, of_block } = places.row(*source, query);
            [source.key[0], source.key[1], row as u32, of_block as u32]
        };
        let of_queries: Vec<u32> = (0..queries.len()).flat_map(of_query).collect();
        let of_heads: Vec<u32> = (0..heads.len()).map(|head| heads.at(head) as u32).collect();
        let batches = keys.div_ceil(BATCH);
        let threads = rows * batches;
        let (count, dim) = grid(client, threads);
        let table = |numbers: &[u32]| {
            let handle = client.create_from_slice(bytemuck::cast_slice(numbers));
            // SAFETY: the buffer was made of as many numbers.
            unsafe { BufferArg::from_raw_parts(handle, numbers.len()) }
        };
        // SAFETY: the kernel writes a batch of each row, for which the mask has `BATCH` bits, and reads the four words
        // of each query and the one of each head.
        unsafe {
            flash_mask_kernel::launch_unchecked(
                client,
                count,
                dim,
                mask.argument(),
                table(&of_queries),
                table(&of_heads),
                threads,
                batches,
                queries.len(),
                heads.len(),
                heads.whole(),
                source.counter[0],
                source.counter[1],
                u32::from(source.threshold()),
            );
        }
        mask
    }

    /// Returns the mask as a kernel argument.
    pub(super) fn argument(&self) -> BufferArg {
        // SAFETY: the buffer was made of as many numbers.
        unsafe { BufferArg::from_raw_parts(self.handle.clone(), self.words) }
    }
}

/// Writes the bits of `threads` batches, one for each thread: those of a row one after another.
#[cube(launch_unchecked)]
fn flash_mask_kernel(
    target: &mut [u32],
    of_queries: &[u32],
    of_heads: &[u32],
    threads: usize,
    batches: usize,
    queries: usize,
    heads: usize,
    all_heads: usize,
    place_0: u32,
    place_1: u32,
    threshold: u32,
) {
    let thread = ABSOLUTE_POS;
    if thread < threads {
        let row = thread / batches;
        let (head, query) = (row / queries, row % queries);
        let head = head / heads * all_heads + of_heads[head % heads] as usize;
        // Of its block of queries, the key of the generator, the index of the query, and the number of queries.
        let (key_0, key_1) = (of_queries[4 * query], of_queries[4 * query + 1]);
        let (at, of_block) = (of_queries[4 * query + 2], of_queries[4 * query + 3]);
        let batch = (head * of_block as usize + at as usize) * batches + thread % batches;

        let mut bits = Array::<u32>::new(8usize);
        #[unroll]
        for word in 0..8usize {
            bits[word] = 0u32;
        }
        for lane in 0..comptime!(LANES) {
            let first = batch as u32 * comptime!(LANES as u32) + lane as u32;
            let words = random_blocks::<Const<1>>(first, key_0, key_1, place_0, place_1);
            #[unroll]
            for word in 0..4usize {
                let pairs = draw_pairs::<Const<1>>(&words, word);
                let first = kept(pairs[0].extract(0usize), threshold);
                let second = kept(pairs[1].extract(0usize), threshold);
                let place = 2u32 * lane as u32;
                bits[comptime!(2 * word)] |= first << place;
                bits[comptime!(2 * word + 1)] |= second << place;
            }
        }
        #[unroll]
        for word in 0..8usize {
            target[thread * 8 + word] = bits[word];
        }
    }
}

/// Returns a bit for each of the two draws of a pair, which is 1 if dropout keeps the element.
#[cube]
fn kept(pair: u32, threshold: u32) -> u32 {
    let first = (pair & 0xFFFFu32) ^ comptime!(SIGN);
    let second = (pair >> 16u32) ^ comptime!(SIGN);
    u32::cast_from(first >= threshold) | u32::cast_from(second >= threshold) << 1u32
}

/// Multiplies numbers of scores by `factor`, or by 0 where dropout drops the weight. The rows of the plane begin
/// with query `row`, and the columns with key `column`. `head` is counted over all rows of the batch. `mask` has
/// one buffer or none.
#[cube]
pub(super) fn drop_scores(
    scores: &mut Sums,
    mask: &Sequence<Box<[u32]>>,
    head: usize,
    row: usize,
    column: usize,
    lane: usize,
    factor: f32,
    shape: &AttentionShape,
    #[comptime] plan: Plan,
) {
    let fragments = comptime!(plan.fragments);
    let row_pairs = comptime!(fragments.row_pairs());
    #[unroll]
    for buffer in 0..mask.len() {
        #[unroll]
        for strip in 0..comptime!(plan.strips) {
            #[unroll(plan.unrolls())]
            for at in 0..comptime!(fragments.rows()) {
                let query = min(row + strip * 16 + sum_row(lane, at, fragments), shape.queries - 1);
                let first = (head * shape.queries + query) * shape.mask_words + column / 32;
                #[unroll]
                for tile in 0..comptime!(plan.score_tiles()) {
                    let word = mask[buffer][first + comptime!(tile * CHUNK / WORD)];
                    let of_tile = &mut scores[comptime!(strip * plan.score_tiles() + tile)];
                    #[unroll(plan.unrolls())]
                    for pair in 0..row_pairs {
                        let place =
                            comptime!(tile * CHUNK % WORD) + sum_column(lane, pair, fragments);
                        let index = at * row_pairs + pair;
                        let bits = word >> place as u32;
                        of_tile[index] = dropped(of_tile[index], bits, bits >> 1u32, factor);
                    }
                }
            }
        }
    }
}

/// Does the same for transposed scores: the rows of the plane begin with key `row`, and the columns with query
/// `column`.
#[cube]
pub(super) fn drop_transposed(
    scores: &mut Sums,
    mask: &Sequence<Box<[u32]>>,
    head: usize,
    row: usize,
    column: usize,
    lane: usize,
    factor: f32,
    shape: &AttentionShape,
    #[comptime] plan: Plan,
) {
    let fragments = comptime!(plan.fragments);
    let row_pairs = comptime!(fragments.row_pairs());
    #[unroll]
    for buffer in 0..mask.len() {
        #[unroll]
        for strip in 0..comptime!(plan.strips) {
            // The 16 keys of a strip share a word.
            let key = row + comptime!(strip * 16);
            #[unroll]
            for tile in 0..comptime!(plan.score_tiles()) {
                let of_tile = &mut scores[comptime!(strip * plan.score_tiles() + tile)];
                #[unroll(plan.unrolls())]
                for pair in 0..row_pairs {
                    let query =
                        column + comptime!(tile * CHUNK) + sum_column(lane, pair, fragments);
                    let first = head * shape.queries + min(query, shape.queries - 1);
                    let second = head * shape.queries + min(query + 1, shape.queries - 1);
                    let first = mask[buffer][first * shape.mask_words + key / 32];
                    let second = mask[buffer][second * shape.mask_words + key / 32];
                    #[unroll(plan.unrolls())]
                    for at in 0..comptime!(fragments.rows()) {
                        let place = (key % 32 + sum_row(lane, at, fragments)) as u32;
                        let index = at * row_pairs + pair;
                        of_tile[index] =
                            dropped(of_tile[index], first >> place, second >> place, factor);
                    }
                }
            }
        }
    }
}

/// Returns two numbers times `factor`, each 0 where the lowest bit of its word is 0.
#[cube]
fn dropped(numbers: Pair<f32>, first: u32, second: u32, factor: f32) -> Pair<f32> {
    let mut result = Pair::<f32>::empty();
    let zero = 0.0f32.runtime();
    let kept = numbers * Pair::<f32>::new(factor);
    result.insert(0usize, select(first & 1u32 == 0u32, zero, kept.extract(0usize)));
    result.insert(1usize, select(second & 1u32 == 0u32, zero, kept.extract(1usize)));
    result
}
