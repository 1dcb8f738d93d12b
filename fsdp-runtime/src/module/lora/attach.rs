//! The traversal that freezes a model and attaches adapters.

use std::collections::{BTreeMap, BTreeSet};

use burn::module::{LoraAdapter, Module, Param, Reparameterizer};
use burn::nn::Initializer;
use burn::tensor::Tensor;

use super::pattern::Scale;
use crate::module::{
    AdapterDropout, AdapterSettings, Child, ConfiguredLora, ModulePath, ParamMapper,
};

/// A mapper that freezes every parameter but those to train, and attaches adapters.
#[derive(Debug)]
pub(super) struct Attach {
    /// Paths of the matrices that get an adapter, each with the adapter's sizes.
    pub(super) adapted: BTreeMap<String, Scale>,
    /// Paths of the parameters that are trained in full.
    pub(super) trained: BTreeSet<String>,
    /// Probability of dropping an element of an adapter's input.
    pub(super) dropout: f64,
    pub(super) rank_stabilised: bool,
    pub(super) path: ModulePath,
}

impl ParamMapper for Attach {
    fn enter(&mut self, child: &'static Child, index: Option<usize>) {
        self.path.enter(child, index);
    }

    fn exit(&mut self) {
        self.path.exit();
    }

    fn param<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.path.join(&[]);
        if self.trained.contains(&path) {
            return param.set_require_grad(true);
        }
        let param = param.set_require_grad(false);
        let Some(&scale) = self.adapted.get(&path) else { return param };
        let dropout = (self.dropout > 0.0).then(|| AdapterDropout::new(self.dropout));
        if dropout.is_none() && !self.rank_stabilised {
            return param.apply_reparameterization(Plain(scale));
        }
        let rank_stabilised = self.rank_stabilised;
        let settings = AdapterSettings { alpha: scale.alpha, rank_stabilised, dropout };
        param.apply_reparameterization(Configured(scale, settings))
    }
}

/// Returns a new adapter of a matrix, without initialising the matrix.
fn new_adapter<const D: usize>(param: &Param<Tensor<D>>, scale: Scale) -> Option<LoraAdapter> {
    let (shape, device) = (param.lazy_shape(), param.lazy_device());
    let &[inputs, outputs] = shape.as_slice() else { return None };
    // PEFT's initialisation: `kaiming_uniform_(a=sqrt(5))` of the first factor, and zeros.
    let bound = 1.0 / (inputs.max(1) as f64).sqrt();
    let first = Initializer::Uniform { min: -bound, max: bound };
    Some(LoraAdapter {
        a: first.init([inputs, scale.rank], &device),
        b: Initializer::Zeros.init([scale.rank, outputs], &device),
        scale: scale.factor,
    })
}

/// Attaches Burn's adapter to one matrix.
struct Plain(Scale);

impl Reparameterizer for Plain {
    type Reparam = LoraAdapter;

    fn reparameterize<const D: usize>(
        &mut self,
        _: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<LoraAdapter>) {
        let adapter = new_adapter(&param, self.0);
        (param, adapter)
    }
}

/// Attaches an adapter with settings to one matrix.
struct Configured(Scale, AdapterSettings);

impl Reparameterizer for Configured {
    type Reparam = ConfiguredLora;

    fn reparameterize<const D: usize>(
        &mut self,
        _: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<ConfiguredLora>) {
        let lora = new_adapter(&param, self.0);
        (param, lora.map(|lora| ConfiguredLora { lora, settings: self.1.clone() }))
    }
}
