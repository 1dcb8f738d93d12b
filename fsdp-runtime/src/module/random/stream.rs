//! The random stream of one model on one rank, and the substreams of the model's layers.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use fsdp_kernels::MaskSource;

use super::part::{DrawnMask, Values};
use super::tape::{self, Draw};
use crate::error::IgnorePoison;
use crate::layout::{Mesh, mix};

/// The random stream of one model on one rank.
///
/// A mask is a function of the seed, the rank, the layer, the step and the call within the step. Ranks that take
/// the same rows have the same masks, of which each uses the part of its own elements.
#[derive(Debug)]
pub struct RandomStream {
    seed: AtomicU64,
    /// Number among the ranks that take different rows.
    rank: u64,
    /// The ranks of the model; `None` for layers that are not sharded.
    mesh: Option<Mesh>,
    step: AtomicU64,
}

impl RandomStream {
    /// Creates the stream of a model at step 0, or of layers that are not sharded.
    pub(crate) fn new(seed: u64, mesh: Option<Mesh>) -> Arc<Self> {
        let rank = mesh.map_or(0, |mesh| mesh.batch_rank().index() as u64);
        let (seed, step) = (AtomicU64::new(seed), AtomicU64::new(0));
        Arc::new(Self { seed, rank, mesh, step })
    }

    /// Advances the step. Called once in every backward pass.
    pub(crate) fn next_step(&self) {
        self.step.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the seed of all masks.
    pub(crate) fn seed(&self) -> u64 {
        self.seed.load(Ordering::Relaxed)
    }

    /// Returns the number of backward passes so far.
    pub(crate) fn step(&self) -> u64 {
        self.step.load(Ordering::Relaxed)
    }

    /// Returns the key and the counter of the random bits with which the parameter at `path` is
    /// rounded in this step. They are equal on all ranks.
    pub(crate) fn rounding(&self, path: &str) -> ([u32; 2], [u32; 2]) {
        /// In place of a rank, so that no mask has the same bits.
        const ROUNDING: u64 = u64::MAX;
        let step = self.step();
        let words = [self.seed(), ROUNDING, hash(path), step >> 32];
        let key = words.into_iter().fold(0, |key, word| mix(key ^ word));
        ([key as u32, (key >> 32) as u32], [step as u32, 0])
    }

    /// Restores the seed and the step from a checkpoint.
    pub(crate) fn restore(&self, seed: u64, step: u64) {
        self.seed.store(seed, Ordering::Relaxed);
        self.step.store(step, Ordering::Relaxed);
    }
}

/// The substream of one layer.
#[derive(Debug)]
pub(crate) struct Source {
    stream: Arc<RandomStream>,
    path: Arc<str>,
    layer: u64,
    values: Values,
    /// Whether the layer is one of dropout, and not an adapter.
    is_layer: bool,
    /// Step of the last call, and the number of calls in that step so far.
    calls: Mutex<(u64, u32)>,
}

impl Source {
    /// Creates the substream of a layer that is not sharded. Distinct numbers give such layers distinct
    /// masks.
    pub(crate) fn unsharded() -> Arc<Self> {
        static LAYERS: AtomicU64 = AtomicU64::new(1);
        let layer = LAYERS.fetch_add(1, Ordering::Relaxed);
        Self::new(RandomStream::new(0, None), (layer, ""), (Values::Whole, true))
    }

    /// Creates the substream of the dropout layer at a module path, which gets these values.
    pub(crate) fn of_layer(stream: &Arc<RandomStream>, path: &str, values: Values) -> Arc<Self> {
        Self::new(stream.clone(), (hash(path), path), (values, true))
    }

    /// Creates the substream of the adapter at a module path, which gets these values.
    pub(crate) fn of_adapter(stream: &Arc<RandomStream>, path: &str, values: Values) -> Arc<Self> {
        Self::new(stream.clone(), (hash(path), path), (values, false))
    }

    /// Creates the substream of the layer with the number `layer`.
    fn new(
        stream: Arc<RandomStream>,
        (layer, path): (u64, &str),
        (values, is_layer): (Values, bool),
    ) -> Arc<Self> {
        let path = path.into();
        Arc::new(Self { stream, path, layer, values, is_layer, calls: Mutex::default() })
    }

    /// Returns the next mask, which drops elements with the probability `prob`. In a recomputation it is the mask
    /// that the first run drew.
    pub(crate) fn next_mask(&self, prob: f64) -> DrawnMask {
        let Draw { key, position, .. } = tape::draw(self.layer, || self.draw());
        let source = MaskSource { key, counter: position, prob };
        let Self { stream, path, values, is_layer, .. } = self;
        let (path, mesh) = (path.clone(), stream.mesh);
        DrawnMask { source, path, mesh, values: *values, is_layer: *is_layer }
    }

    /// Draws a new mask, which counts as one call.
    fn draw(&self) -> Draw {
        let step = self.stream.step();
        let mut calls = self.calls.lock().ignore_poison();
        if calls.0 != step {
            *calls = (step, 0);
        }
        let call = calls.1;
        calls.1 = call.wrapping_add(1);
        // The position holds the low 32 bits of the step; the high bits are part of the key.
        let words = [self.stream.seed(), self.stream.rank, self.layer, step >> 32];
        let key = words.into_iter().fold(0, |key, word| mix(key ^ word));
        let (key, position) = ([key as u32, (key >> 32) as u32], [step as u32, call]);
        Draw { layer: self.layer, key, position }
    }
}

/// Returns the number of the layer at a path.
fn hash(path: &str) -> u64 {
    path.bytes().fold(0, |hash, byte| mix(hash ^ u64::from(byte)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::WorldSize;

    /// Returns the stream of a rank of four that take different rows.
    fn stream(seed: u64, rank: usize) -> Arc<RandomStream> {
        let world = WorldSize::new(4).unwrap();
        RandomStream::new(seed, world.rank(rank).map(|rank| Mesh::new(rank, world)))
    }

    #[test]
    fn roundings_differ_by_seed_path_and_step_and_not_by_rank() {
        let first = stream(1, 0).rounding("a.weight");
        assert_eq!(stream(1, 3).rounding("a.weight"), first);
        let next = stream(1, 0);
        next.next_step();
        let others = [
            stream(2, 0).rounding("a.weight"),
            stream(1, 0).rounding("b.weight"),
            next.rounding("a.weight"),
        ];
        assert!(others.iter().all(|other| *other != first));
    }

    #[test]
    fn masks_differ_by_seed_rank_layer_step_and_call() {
        let source =
            |seed, rank, layer| Source::new(stream(seed, rank), (layer, ""), (Values::Whole, true));
        let first = source(1, 0, 5);
        let drawn = [source(1, 0, 5), source(2, 0, 5), source(1, 1, 5), source(1, 0, 6)]
            .map(|source| source.next_mask(0.5).source());
        assert_eq!(first.next_mask(0.5).source(), drawn[0], "equal inputs give equal masks");
        let call = first.next_mask(0.5).source();
        first.stream.next_step();
        let step = first.next_mask(0.5).source();
        let all = [drawn[0], drawn[1], drawn[2], drawn[3], call, step];
        for (i, a) in all.iter().enumerate() {
            assert!(all[..i].iter().all(|b| a != b));
        }
    }
}
