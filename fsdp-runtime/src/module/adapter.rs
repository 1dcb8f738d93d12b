//! LoRA adapters with settings that Burn's adapter has no field for.
//!
//! [`ConfiguredLora`] is attached to a parameter in place of Burn's [`LoraAdapter`]. Its parameters have
//! the paths of Burn's, so that records and checkpoints of one load into the other.

use std::fmt::Debug;
use std::sync::Arc;

use burn::module::{
    Content, Devices, LoraAdapter, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper,
    ModuleVisitor, Param, Reparameterization,
};
use burn::tensor::{Device, Tensor};

use super::node::Split;
use super::random::{DrawnMask, RandomSource, RandomStream, Source, Values};

/// Settings of an adapter beside its scale.
#[derive(Clone, Debug)]
pub(crate) struct AdapterSettings {
    /// Numerator of the scale.
    pub(crate) alpha: f64,
    /// Whether the scale is `alpha / sqrt(rank)` in place of `alpha / rank`.
    pub(crate) rank_stabilised: bool,
    /// Dropout of the adapter's input, if there is any.
    pub(crate) dropout: Option<AdapterDropout>,
}

/// Dropout of an adapter's input.
#[derive(Clone, Debug)]
pub(crate) struct AdapterDropout {
    /// Probability of zeroing an element, in `(0, 1)`.
    pub(crate) prob: f64,
    /// Random stream of the masks.
    source: Arc<Source>,
}

impl AdapterDropout {
    /// Returns a dropout whose stream sharding replaces.
    pub(crate) fn new(prob: f64) -> Self {
        Self { prob, source: Source::unsharded() }
    }

    /// Returns the next mask.
    pub(super) fn next_mask(&self) -> DrawnMask {
        self.source.next_mask(self.prob)
    }
}

impl RandomSource for AdapterDropout {
    fn with_stream(self, stream: &Arc<RandomStream>, path: &str, split: Option<Split>) -> Self {
        // The mask is that of the layer's input.
        let values = match split {
            None | Some(Split::Vocab) => Values::Whole,
            Some(Split::Column { .. } | Split::Shared) => Values::AllPositions,
            Some(Split::Row) => Values::Columns,
        };
        Self { source: Source::of_adapter(stream, path, values), ..self }
    }
}

/// A LoRA adapter with settings.
#[derive(Clone, Debug)]
pub(crate) struct ConfiguredLora {
    pub(crate) lora: LoraAdapter,
    pub(crate) settings: AdapterSettings,
}

impl Reparameterization for ConfiguredLora {
    const NAME: &'static str = LoraAdapter::NAME;

    /// Returns the base with the adapter added. Dropout has no effect here, as the layer's input is not
    /// known.
    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        self.lora.apply(base)
    }
}

/// The adapter of a parameter that is not sharded.
pub(crate) struct AttachedLora<'a> {
    pub(crate) lora: &'a LoraAdapter,
    pub(crate) settings: Option<&'a AdapterSettings>,
}

impl<'a> AttachedLora<'a> {
    /// Returns the adapter of a parameter, if it has one and is not sharded.
    pub(crate) fn of<const D: usize>(param: &'a Param<Tensor<D>>) -> Option<Self> {
        match param.reparameterization::<ConfiguredLora>() {
            Some(ConfiguredLora { lora, settings }) => {
                Some(Self { lora, settings: Some(settings) })
            }
            None => param.adapter().map(|lora| Self { lora, settings: None }),
        }
    }
}

/// Forwards every traversal to the adapter, so that paths do not depend on settings.
impl Module for ConfiguredLora {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.lora.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        Self { lora: self.lora.fork(device), ..self }
    }

    fn to_device(self, device: &Device) -> Self {
        Self { lora: self.lora.to_device(device), ..self }
    }

    fn train(self) -> Self {
        Self { lora: self.lora.train(), ..self }
    }

    fn valid(&self) -> Self {
        Self { lora: self.lora.valid(), settings: self.settings.clone() }
    }

    fn materialize(self) -> Self {
        Self { lora: self.lora.materialize(), ..self }
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        self.lora.visit(visitor);
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        Self { lora: self.lora.map(mapper), ..self }
    }
}

impl ModuleDisplayDefault for ConfiguredLora {
    fn content(&self, content: Content) -> Option<Content> {
        self.lora.content(content)
    }
}

impl ModuleDisplay for ConfiguredLora {}
