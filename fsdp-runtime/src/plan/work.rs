//! The computation of a step: floating-point operations and activations of each unit.

use burn::tensor::DType;
use serde::Serialize;

use crate::layout::Mesh;
use crate::param_group::plan::shape::{ModelShape, ParamShape, UnitShape};
use crate::param_group::{ParamSpec, Placement, Unit};

/// How much of the forward is repeated in backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Recomputation {
    /// Nothing.
    #[default]
    None,
    /// Every second matrix product, as torchtitan's selective activation checkpointing repeats it.
    /// This crate recomputes whole units only; the setting is for comparisons.
    Selective,
    /// Each unit but the outermost, from its inputs: `ActivationCheckpointing::All`.
    Units,
}

impl Recomputation {
    /// Returns the name: `none`, `selective` or `units`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Selective => "selective",
            Self::Units => "units",
        }
    }
}

/// The batch of one rank in a step. Tensor parallel and context parallel ranks of one group share it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Batch {
    /// Samples of a micro-batch.
    pub samples: usize,
    /// Tokens of a sample.
    pub length: usize,
    /// Micro-batches of a step.
    pub micro_batches: usize,
}

impl Batch {
    /// Creates the batch of a step with one micro-batch.
    pub const fn new(samples: usize, length: usize) -> Self {
        Self { samples, length, micro_batches: 1 }
    }

    /// Sets the number of micro-batches of a step. Default: 1.
    pub const fn with_micro_batches(self, micro_batches: usize) -> Self {
        Self { micro_batches, ..self }
    }

    /// Returns the tokens of a micro-batch.
    pub const fn tokens(&self) -> usize {
        self.samples * self.length
    }
}

/// The computation of one unit for one micro-batch, without that of the units inside it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct UnitWork {
    /// Operations of matrix products with parameters, in the forward.
    pub products: f64,
    /// Those of them with frozen parameters, of which backward computes no gradient.
    pub frozen_products: f64,
    /// Operations of the attention's products, in the forward. Causal attention computes half of the
    /// square of the length.
    pub attention: f64,
    /// Operations of the attention's products over the whole square of the length.
    pub attention_square: f64,
    /// Bytes that the forward saves for backward.
    pub activations: usize,
    /// Bytes of the inputs.
    pub input: usize,
    /// Bytes that live only while the unit's own forward and backward run.
    pub transient: usize,
    /// Sums of activations over tensor parallel ranks in forward, and in backward. Under sequence parallel each
    /// is a reduce-scatter and an all-gather.
    pub tensor_exchanges: usize,
    /// Bytes of the full tensor in such a sum.
    pub tensor_bytes: usize,
    /// Bytes of the keys and values of whole rows, which context parallel ranks gather.
    pub context_bytes: usize,
}

/// What tensor parallel and context parallel ranks share of the activations of a unit of a module, for one token. For
/// [`StepPlan::with_parallel_work`](super::StepPlan::with_parallel_work).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ParallelWork {
    /// Those of the saved elements that are inputs of norms, or other values outside of split layers: each tensor
    /// parallel rank has all of them, or under sequence parallel those of its positions.
    pub residual: usize,
    /// Those of the saved elements that are inputs of split layers, of which each tensor parallel rank has all.
    pub gathered: usize,
    /// Sums of activations over tensor parallel ranks in forward, and in backward.
    pub exchanges: usize,
    /// Elements in such a sum.
    pub exchanged: usize,
    /// Elements of the keys and values, over all heads, which context parallel ranks exchange.
    pub key_values: usize,
}

impl ParallelWork {
    /// Creates the work of a unit that saves `residual` elements outside of split layers, `gathered` elements as
    /// inputs of split layers, and the others in parts.
    pub const fn new(residual: usize, gathered: usize) -> Self {
        Self { residual, gathered, exchanges: 0, exchanged: 0, key_values: 0 }
    }

    /// Sets the number of sums over tensor parallel ranks in forward, as many as in backward, and the elements in
    /// each. Default: none.
    pub const fn with_exchanges(self, exchanges: usize, exchanged: usize) -> Self {
        Self { exchanges, exchanged, ..self }
    }

    /// Sets the elements of keys and values, over all heads. Default: none.
    pub const fn with_key_values(self, key_values: usize) -> Self {
        Self { key_values, ..self }
    }
}

/// Shape of the computation of a unit, for one token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct TokenWork {
    /// Elements of this rank's matrices that each token is multiplied with.
    product_elements: usize,
    /// Those of them that are frozen.
    frozen_elements: usize,
    /// Elements of the queries of all heads.
    attention_width: usize,
    is_causal: bool,
    saved_elements: usize,
    input_elements: usize,
    /// Elements of this rank's logits.
    logits: usize,
    /// Bytes of an activation's element.
    element: usize,
    /// What the ranks share; `None` if tensor parallel ranks divide nothing.
    parallel: Option<ParallelWork>,
    mesh: Mesh,
}

impl TokenWork {
    /// Returns the computation of each unit of a model given by its shapes, on a rank of `mesh`.
    pub(super) fn of_shape(shape: &ModelShape, units: &[Unit], mesh: Mesh) -> Vec<Self> {
        let tensor = mesh.tensor_size().size();
        let own = |param: &ParamShape| match param.split {
            Some(_) => param.numel() / tensor,
            None => param.numel(),
        };
        let head = |unit: &UnitShape| {
            let products = unit.params.iter().filter(|param| !param.is_lookup);
            let matrices = products.filter(|param| param.shape.len() > 1);
            // The outermost unit's product is the projection to the vocabulary.
            let words = |param: &ParamShape| match param.split {
                Some(0) => param.shape[0] / tensor,
                _ => param.shape[0],
            };
            if unit.level == 0 { matrices.map(words).max() } else { None }
        };
        let work = |(shape, unit): (&UnitShape, &Unit)| {
            let is_product = |it: &&ParamShape| !it.is_lookup && it.shape.len() > 1;
            let elements = |of: fn(&ParamShape) -> bool| {
                let products = shape.params.iter().filter(is_product).filter(|it| of(it));
                products.map(own).sum()
            };
            let parallel = ParallelWork {
                residual: shape.residual_elements,
                gathered: shape.gathered_elements,
                exchanges: shape.tensor_exchanges,
                exchanged: shape.exchanged_elements,
                key_values: shape.key_value_elements,
            };
            Self {
                product_elements: elements(|_| true),
                frozen_elements: elements(|it| it.is_frozen),
                attention_width: shape.attention_width,
                is_causal: true,
                saved_elements: shape.saved_elements,
                input_elements: shape.input_elements,
                logits: head(shape).unwrap_or(0),
                element: element_bytes(unit),
                parallel: Some(parallel),
                mesh,
            }
        };
        shape.units.iter().zip(units).map(work).collect()
    }

    /// Returns the computation of each unit of a module. Every matrix counts as one that each token
    /// is multiplied with.
    pub(super) fn of_units(units: &[Unit], mesh: Mesh) -> Vec<Self> {
        let work = |unit: &Unit| {
            let owned =
                unit.params.iter().filter(|it| !matches!(it.placement, Placement::TiedTo(_)));
            let matrices = owned.filter(|it| it.shape.len() > 1);
            let frozen = matrices.clone().filter(|it| !it.is_trained);
            Self {
                product_elements: matrices.map(ParamSpec::numel).sum(),
                frozen_elements: frozen.map(ParamSpec::numel).sum(),
                attention_width: 0,
                is_causal: false,
                saved_elements: 0,
                input_elements: 0,
                logits: 0,
                element: element_bytes(unit),
                parallel: None,
                mesh,
            }
        };
        units.iter().map(work).collect()
    }

    /// Takes matrices out of the products: of `elements` elements, `frozen` of which are frozen.
    pub(super) fn remove_products(&mut self, elements: usize, frozen: usize) {
        self.product_elements -= elements.min(self.product_elements);
        self.frozen_elements -= frozen.min(self.frozen_elements);
    }

    /// Sets the attention of a unit.
    pub(super) fn set_attention(&mut self, width: usize, is_causal: bool) {
        (self.attention_width, self.is_causal) = (width, is_causal);
    }

    /// Sets the elements that the forward of one token saves, and those of its inputs.
    pub(super) fn set_activations(&mut self, saved: usize, inputs: usize) {
        (self.saved_elements, self.input_elements) = (saved, inputs);
    }

    /// Sets what tensor parallel and context parallel ranks share.
    pub(super) fn set_parallel(&mut self, parallel: ParallelWork) {
        self.parallel = Some(parallel);
    }

    /// Returns the computation of one micro-batch.
    pub(super) fn of(&self, batch: Batch, fused_loss: bool) -> UnitWork {
        let (tensor, context) = (self.mesh.tensor_size().size(), self.mesh.context_size().size());
        // Of each row, the positions of this rank.
        let tokens = batch.tokens() / context;
        let parts = if self.mesh.splits_sequence() { tensor } else { 1 };
        let ParallelWork { residual, gathered, exchanges, exchanged, key_values } =
            self.parallel.unwrap_or_default();
        let (heads, whole) = match self.parallel {
            Some(_) => (tensor, residual / parts + gathered),
            None => (1, 0),
        };
        let split = self.saved_elements.saturating_sub(residual + gathered);
        let inputs = if self.parallel.is_some() { parts } else { 1 };
        let width = (self.attention_width / heads) as f64;
        let square = 4.0 * width * tokens as f64 * batch.length as f64;
        // Logits in the dtype that computes and in f32, and the gradient of the latter.
        let logits = if fused_loss { 0 } else { tokens * self.logits * (self.element + 8) };
        let key_values = batch.tokens() * (key_values / heads) * self.element;
        let key_values = if context > 1 { key_values } else { 0 };
        UnitWork {
            products: 2.0 * self.product_elements as f64 * tokens as f64,
            frozen_products: 2.0 * self.frozen_elements as f64 * tokens as f64,
            attention: if self.is_causal { 0.5 * square } else { square },
            attention_square: square,
            activations: (whole + split / heads) * self.element * tokens,
            input: self.input_elements / inputs * self.element * tokens,
            // Keys and values of whole rows, and their gradients.
            transient: logits + 2 * key_values,
            tensor_exchanges: if tensor > 1 { exchanges } else { 0 },
            tensor_bytes: tokens * exchanged * self.element,
            context_bytes: key_values,
        }
    }
}

fn element_bytes(unit: &Unit) -> usize {
    unit.layout.dtype().unwrap_or(DType::F32).size()
}

impl UnitWork {
    /// Returns the operations of the forward.
    pub(super) fn forward(&self) -> f64 {
        self.products + self.attention
    }

    /// Returns the operations of the backward: two products for each of the forward, and one with a
    /// frozen parameter.
    pub(super) fn backward(&self) -> f64 {
        2.0 * self.forward() - self.frozen_products
    }

    /// Returns the part of the forward that backward repeats in a unit that is not recomputed as a
    /// whole.
    pub(super) fn repeated(&self, recomputation: Recomputation) -> f64 {
        match recomputation {
            Recomputation::Selective => 0.5 * self.products,
            _ => 0.0,
        }
    }

    /// Returns the bytes that a recorded forward saves.
    pub(super) fn saved(&self, recomputation: Recomputation) -> usize {
        match recomputation {
            Recomputation::Selective => self.activations / 2,
            _ => self.activations,
        }
    }

    /// Returns the operations that count for the utilisation: the products of forward and backward,
    /// and the whole square of the attention, by convention.
    pub(super) fn model_flops(&self) -> f64 {
        3.0 * (self.products + self.attention_square) - self.frozen_products
    }
}
