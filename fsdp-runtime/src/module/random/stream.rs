//! The random stream of one model on one rank, and the substreams of the model's layers.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::tape::{self, Draw};
use crate::error::IgnorePoison;
use crate::layout::mix;

/// The random stream of one model on one rank.
///
/// A mask is a function of the seed, the rank, the layer, the step and the call within the step.
#[derive(Debug)]
pub struct RandomStream {
    seed: AtomicU64,
    rank: u64,
    step: AtomicU64,
}

impl RandomStream {
    /// Creates a stream at step 0.
    pub(crate) fn new(seed: u64, rank: usize) -> Arc<Self> {
        let (seed, step) = (AtomicU64::new(seed), AtomicU64::new(0));
        Arc::new(Self { seed, rank: rank as u64, step })
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
        let path = path.bytes().fold(0, |hash, byte| mix(hash ^ u64::from(byte)));
        let step = self.step();
        let words = [self.seed(), ROUNDING, path, step >> 32];
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
    layer: u64,
    /// Step of the last call, and the number of calls in that step so far.
    calls: Mutex<(u64, u32)>,
}

impl Source {
    /// Creates the substream of a layer that is not sharded. Distinct numbers give such layers distinct
    /// masks.
    pub(crate) fn unsharded() -> Arc<Self> {
        static LAYERS: AtomicU64 = AtomicU64::new(1);
        Self::new(RandomStream::new(0, 0), LAYERS.fetch_add(1, Ordering::Relaxed))
    }

    /// Creates the substream of the layer at a module path.
    pub(crate) fn of_layer(stream: &Arc<RandomStream>, path: &str) -> Arc<Self> {
        let layer = path.bytes().fold(0, |hash, byte| mix(hash ^ u64::from(byte)));
        Self::new(stream.clone(), layer)
    }

    /// Creates the substream of the layer with the number `layer`.
    fn new(stream: Arc<RandomStream>, layer: u64) -> Arc<Self> {
        Arc::new(Self { stream, layer, calls: Mutex::default() })
    }

    /// Returns the key and the position of the next mask. In a recomputation these are the key and
    /// the position that the first run drew.
    pub(crate) fn next(&self) -> ([u32; 2], [u32; 2]) {
        let Draw { key, position, .. } = tape::draw(self.layer, || self.draw());
        (key, position)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roundings_differ_by_seed_path_and_step_and_not_by_rank() {
        let stream = |seed, rank| RandomStream::new(seed, rank);
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
        let source = |seed, rank, layer| Source::new(RandomStream::new(seed, rank), layer);
        let first = source(1, 0, 5);
        let drawn = [source(1, 0, 5), source(2, 0, 5), source(1, 1, 5), source(1, 0, 6)]
            .map(|source| source.next());
        assert_eq!(first.next(), drawn[0], "equal inputs give equal masks");
        let call = first.next();
        first.stream.next_step();
        let step = first.next();
        let all = [drawn[0], drawn[1], drawn[2], drawn[3], call, step];
        for (i, a) in all.iter().enumerate() {
            assert!(all[..i].iter().all(|b| a != b));
        }
    }
}
