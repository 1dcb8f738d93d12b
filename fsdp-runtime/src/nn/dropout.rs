//! Dropout whose masks depend only on where and when they are drawn.
//!
//! Burn has one random generator per process, which ranks that are threads share in whatever order
//! they run; the masks of `burn::nn::Dropout` then differ from run to run. This layer uses a
//! counter-based generator: the key is derived from seed, rank and layer, the counter from step,
//! call and element.

use std::sync::Arc;

use burn::config::Config;
use burn::module::{Flag, Module, Param};
use burn::tensor::{Device, Tensor};

use crate::backend::ops::dropout_tracked;
use crate::module::{
    DrawnMask, FsdpModule, Kind, Node, ParamMapper, ParamVisitor, RandomSource, RandomStream,
    RunningForward, Source, Split, SplitColumns, Values,
};

/// Configuration of a [`Dropout`] layer.
#[derive(Config, Debug)]
pub struct DropoutConfig {
    /// Probability of zeroing an element, in `[0, 1)`, with a resolution of 1/65,536.
    pub prob: f64,
}

impl DropoutConfig {
    /// Returns a dropout layer with this probability.
    ///
    /// # Panics
    ///
    /// Panics if `prob` is not in `[0, 1)`, as `burn::nn::DropoutConfig` does.
    pub fn init(&self) -> Dropout {
        assert!(
            (0.0..1.0).contains(&self.prob),
            "dropout probability {} is not in [0, 1)",
            self.prob
        );
        let training = Param::from_bool(true);
        Dropout { prob: self.prob, training, source: Source::unsharded() }
    }
}

/// Zeroes elements at random during training and scales the others by `1 / (1 - prob)`.
///
/// In a sharded model the masks depend only on the seed of [`FsdpOptions`](crate::FsdpOptions), the
/// rank, the layer's path, the step and the call, so runs repeat exactly on every engine and
/// device.
///
/// # Parts of tensors
///
/// Ranks that take the same rows draw one mask for the whole tensor, and each uses the elements of its own part.
/// So the number of [tensor](crate::FsdpOptions::with_tensor_parallel),
/// [sequence](crate::FsdpOptions::with_sequence_parallel) and
/// [context](crate::FsdpOptions::with_context_parallel) parallel ranks changes no mask, of tensors
/// `[.., positions, features]`. A layer that gets the outputs of `column` layers, or drops weights of attention of
/// their heads, is a field under `#[fsdp(column)]`.
#[derive(Module, Debug)]
pub struct Dropout {
    /// Probability of zeroing an element, in `[0, 1)`.
    pub prob: f64,
    /// Whether the layer drops elements while training; `freeze` clears it.
    pub training: Param<Flag>,
    /// Random stream of the masks.
    #[module(skip)]
    source: Arc<Source>,
}

impl Dropout {
    /// Applies dropout to a tensor on an autodiff device; on other devices returns it unchanged.
    ///
    /// # Shapes
    ///
    /// - input and output: any shape
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        match self.next_mask(&input.device()) {
            Some(mask) => dropout_tracked(&RunningForward::mask(&mask, &input.dims()), input),
            None => input,
        }
    }

    /// Returns the next mask, or `None` if the layer drops nothing on this device.
    pub(super) fn next_mask(&self, device: &Device) -> Option<DrawnMask> {
        if !self.training.is_enabled() || !device.is_autodiff() || self.prob == 0.0 {
            return None;
        }
        Some(self.source.next_mask(self.prob))
    }
}

impl RandomSource for Dropout {
    fn with_stream(mut self, stream: &Arc<RandomStream>, path: &str, split: Option<Split>) -> Self {
        let values = match split {
            Some(Split::Column { .. }) => Values::Columns,
            _ => Values::Whole,
        };
        self.source = Source::of_layer(stream, path, values);
        self
    }
}

impl FsdpModule for Dropout {
    const LAYOUT: Node = Node::plain("Dropout", Kind::Constant);

    fn visit_params<V: ParamVisitor>(&self, visitor: &mut V) {
        visitor.random_source(self);
    }

    fn map_params<P: ParamMapper>(self, mapper: &mut P) -> Self {
        mapper.random_source(self)
    }
}

impl SplitColumns for Dropout {}
