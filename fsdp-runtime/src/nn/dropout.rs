//! Dropout whose masks are a function of where and when they are drawn.
//!
//! Burn's generators are one a process: thread ranks draw from them in whatever order they run, so
//! `burn::nn::Dropout` differs from run to run there. This one draws from a counter-based generator,
//! keyed by seed, rank and layer, at the position (step, call, element).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::config::Config;
use burn::module::{Flag, Module, Param};
use burn::tensor::Tensor;

use crate::backend::kernels::MaskSource;
use crate::backend::ops::dropout_tracked;
use crate::layout::mix;
use crate::module::{
    FsdpModule, Kind, Node, ParamMapper, ParamVisitor, RandomSource, RandomStream, Source,
};

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
        let source = Source::new(RandomStream::new(0, 0), layer);
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
        dropout_tracked(&source, input)
    }
}

impl RandomSource for Dropout {
    fn with_stream(mut self, stream: &Arc<RandomStream>, path: &str) -> Self {
        let layer = path.bytes().fold(0, |hash, byte| mix(hash ^ u64::from(byte)));
        self.source = Source::new(stream.clone(), layer);
        self
    }
}

impl FsdpModule for Dropout {
    const LAYOUT: Node = Node::plain("Dropout", Kind::Constant);

    fn visit_params<W: ParamVisitor>(&self, walk: &mut W) {
        walk.random_source(self);
    }

    fn map_params<A: ParamMapper>(self, attach: &mut A) -> Self {
        attach.random_source(self)
    }
}
