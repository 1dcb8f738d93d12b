//! The traversal that freezes a model and attaches adapters.

use std::collections::BTreeSet;

use burn::module::{LoraAdapter, Module, Param, Reparameterizer};
use burn::nn::Initializer;
use burn::tensor::Tensor;

use crate::module::{Child, ModulePath, ParamMapper};

/// A mapper that freezes every parameter but those to train, and attaches adapters.
#[derive(Debug)]
pub(super) struct Attach {
    pub(super) rank: usize,
    /// Factor of the product of the low-rank matrices.
    pub(super) scale: f64,
    /// Paths of the matrices that get an adapter.
    pub(super) adapted: BTreeSet<String>,
    /// Paths of the parameters that are trained in full.
    pub(super) trained: BTreeSet<String>,
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
        if !self.adapted.contains(&path) {
            return param;
        }
        param.apply_reparameterization(Adapter { rank: self.rank, scale: self.scale })
    }
}

/// Attaches an adapter to one matrix, without initialising the matrix.
struct Adapter {
    rank: usize,
    scale: f64,
}

impl Reparameterizer for Adapter {
    type Reparam = LoraAdapter;

    fn reparameterize<const D: usize>(
        &mut self,
        _: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<LoraAdapter>) {
        let (shape, device) = (param.lazy_shape(), param.lazy_device());
        let &[inputs, outputs] = shape.as_slice() else { return (param, None) };
        // PEFT's initialisation: `kaiming_uniform_(a=sqrt(5))` of the first factor, and zeros.
        let bound = 1.0 / (inputs.max(1) as f64).sqrt();
        let first = Initializer::Uniform { min: -bound, max: bound };
        let adapter = LoraAdapter {
            a: first.init([inputs, self.rank], &device),
            b: Initializer::Zeros.init([self.rank, outputs], &device),
            scale: self.scale,
        };
        (param, Some(adapter))
    }
}
