//! Dropout whose masks are a function of where and when they are drawn.
//!
//! Burn's generators are one a process: thread ranks draw from them in whatever order they run, so
//! `burn::nn::Dropout` differs from run to run there. This one draws from a counter-based generator,
//! keyed by seed, rank and layer, at the position (step, call, element).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use burn::config::Config;
use burn::module::{Flag, Module, Param};
use burn::tensor::Tensor;

use super::tape::{self, Draw};
use crate::kernels::{self, MaskSource};
use crate::unit::{Attach, FsdpModule, Kind, Node, Walk};

/// The randomness of one model on one rank.
#[derive(Debug)]
pub(crate) struct Stream {
    seed: AtomicU64,
    rank: u64,
    step: AtomicU64,
}

impl Stream {
    pub(crate) fn new(seed: u64, rank: usize) -> Arc<Self> {
        let (seed, step) = (AtomicU64::new(seed), AtomicU64::new(0));
        Arc::new(Self { seed, rank: rank as u64, step })
    }

    /// Moves on, once every backward pass.
    pub(crate) fn next_step(&self) {
        self.step.fetch_add(1, Ordering::Relaxed);
    }

    /// The seed all masks come from.
    pub(crate) fn seed(&self) -> u64 {
        self.seed.load(Ordering::Relaxed)
    }

    /// Backward passes until now.
    pub(crate) fn step(&self) -> u64 {
        self.step.load(Ordering::Relaxed)
    }

    /// Goes on where another run's stream was.
    pub(crate) fn restore(&self, seed: u64, step: u64) {
        self.seed.store(seed, Ordering::Relaxed);
        self.step.store(step, Ordering::Relaxed);
    }
}

/// A layer's place in its stream.
#[derive(Debug)]
struct Source {
    stream: Arc<Stream>,
    layer: u64,
    /// The step of the last call, and how many calls it has had.
    calls: Mutex<(u64, u32)>,
}

impl Source {
    fn new(stream: Arc<Stream>, layer: u64) -> Arc<Self> {
        Arc::new(Self { stream, layer, calls: Mutex::default() })
    }

    /// The key and the place of the next mask.
    fn next(&self) -> ([u32; 2], [u32; 2]) {
        let Draw { key, place, .. } = tape::draw(self.layer, || self.draw());
        (key, place)
    }

    fn draw(&self) -> Draw {
        let step = self.stream.step();
        let mut calls = self.calls.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if calls.0 != step {
            *calls = (step, 0);
        }
        let call = calls.1;
        calls.1 = call.wrapping_add(1);
        // Steps beyond 2^32 change the key.
        let words = [self.stream.seed(), self.stream.rank, self.layer, step >> 32];
        let key = words.into_iter().fold(0, |key, word| mix(key ^ word));
        let (key, place) = ([key as u32, (key >> 32) as u32], [step as u32, call]);
        Draw { layer: self.layer, key, place }
    }
}

/// SplitMix64's finaliser: spreads every bit over all.
pub(crate) fn mix(word: u64) -> u64 {
    let word = word.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

/// Configuration of a [`Dropout`] layer.
#[derive(Config, Debug)]
pub struct DropoutConfig {
    /// The probability of zeroing an element, in `[0, 1)`; resolved to 1/65,536.
    pub prob: f64,
}

impl DropoutConfig {
    /// Initialises the layer.
    ///
    /// # Panics
    ///
    /// When `prob` is not in `[0, 1)`, as Burn's own does.
    pub fn init(&self) -> Dropout {
        assert!(
            (0.0..1.0).contains(&self.prob),
            "dropout probability {} is not in [0, 1)",
            self.prob
        );
        // Until the model is sharded every layer has a number of its own.
        static LAYERS: AtomicU64 = AtomicU64::new(1);
        let layer = LAYERS.fetch_add(1, Ordering::Relaxed);
        let source = Source::new(Stream::new(0, 0), layer);
        Dropout { prob: self.prob, training: Param::from_bool(true), source }
    }
}

/// Zeroes elements at random during training and scales the others by `1 / (1 - prob)`.
///
/// In a sharded model the masks depend on the seed of
/// [`FsdpOptions`](crate::FsdpOptions), the rank, the layer's path, the step and the call, and on
/// nothing else: runs repeat exactly on every engine and device.
#[derive(Module, Debug)]
pub struct Dropout {
    /// The probability of zeroing an element.
    pub prob: f64,
    /// Whether the layer takes part in training; cleared by `freeze`.
    pub training: Param<Flag>,
    #[module(skip)]
    source: Arc<Source>,
}

impl Dropout {
    /// Applies dropout.
    ///
    /// # Shapes
    ///
    /// - input and output: `[..]`
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let device = input.device();
        if !self.training.is_enabled() || !device.is_autodiff() || self.prob == 0.0 {
            return input;
        }
        let (key, place) = self.source.next();
        let source = MaskSource { key, place, prob: self.prob };
        kernels::dropout_tracked(&source, input)
    }

    /// The layer with its place in a sharded model's stream.
    pub(crate) fn with_stream(mut self, stream: &Arc<Stream>, path: &str) -> Self {
        let layer = path.bytes().fold(0, |hash, byte| mix(hash ^ u64::from(byte)));
        self.source = Source::new(stream.clone(), layer);
        self
    }
}

impl FsdpModule for Dropout {
    const LAYOUT: Node = Node::plain("Dropout", Kind::Constant);

    fn walk<W: Walk>(&self, walk: &mut W) {
        walk.dropout(self);
    }

    fn attach<A: Attach>(self, attach: &mut A) -> Self {
        attach.dropout(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_differ_by_seed_rank_layer_step_and_call() {
        let source = |seed, rank, layer| Source::new(Stream::new(seed, rank), layer);
        let first = source(1, 0, 5);
        let drawn = [source(1, 0, 5), source(2, 0, 5), source(1, 1, 5), source(1, 0, 6)]
            .map(|source| source.next());
        assert_eq!(first.next(), drawn[0], "the same everywhere gives the same mask");
        let call = first.next();
        first.stream.next_step();
        let step = first.next();
        let all = [drawn[0], drawn[1], drawn[2], drawn[3], call, step];
        for (i, a) in all.iter().enumerate() {
            assert!(all[..i].iter().all(|b| a != b));
        }
    }
}
