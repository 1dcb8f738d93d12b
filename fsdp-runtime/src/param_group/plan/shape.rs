//! The names and shapes of a model's parameters, from which units are laid out without a module.

use burn::module::ParamId;
use burn::tensor::DType;
use serde::Serialize;

use super::super::unit::Unit;
use super::found::{FoundParam, FoundUnit, Key};
use super::model::{lay_out, split_along};
use crate::backend::DeviceKind;
use crate::error::ShardError;
use crate::layout::Mesh;
use crate::options::{ActivationCheckpointing, FsdpOptions};

/// The units of a model, each with the names and shapes of its parameters.
///
/// The first unit is the outermost one. The others follow in the order of their forwards, each after
/// the unit that encloses it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ModelShape {
    /// Name of the model, for tables.
    pub name: String,
    /// Units, in the order of their forwards.
    pub units: Vec<UnitShape>,
}

/// A unit of a [`ModelShape`].
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct UnitShape {
    /// Module path; empty for the outermost unit.
    pub path: String,
    /// Number of units that enclose this one.
    pub level: usize,
    /// Parameters, without those of units inside.
    pub params: Vec<ParamShape>,
    /// Elements of the attention layers' queries of one token, over all heads; 0 without attention.
    pub attention_width: usize,
    /// Elements that the forward of one token saves for backward, with matrices in one dtype.
    pub saved_elements: usize,
    /// Elements of the inputs of one token.
    pub input_elements: usize,
    /// Those of `saved_elements` that are inputs of norms: each tensor parallel rank has all of them, or under
    /// sequence parallel those of its positions.
    pub residual_elements: usize,
    /// Those of `saved_elements` that are inputs of split layers, of which each tensor parallel rank has all.
    pub gathered_elements: usize,
    /// Sums of activations over tensor parallel ranks in forward, and in backward.
    pub tensor_exchanges: usize,
    /// Elements of one token in such a sum.
    pub exchanged_elements: usize,
    /// Elements of the keys and values of one token, over all heads.
    pub key_value_elements: usize,
    /// Heads of the keys and values, of which each tensor parallel rank has a part; 0 without attention.
    pub key_value_heads: usize,
}

/// A parameter of a [`UnitShape`].
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ParamShape {
    /// Module path.
    pub path: String,
    /// Shape of the full parameter.
    pub shape: Vec<usize>,
    /// Whether rows are looked up, as in an embedding. Other matrices are multiplied with every
    /// token.
    pub is_lookup: bool,
    /// Whether the parameter is not trained: it has no gradient and no optimizer state.
    pub is_frozen: bool,
    /// Dimension along which tensor parallel ranks split the parameter, if they do.
    pub split: Option<usize>,
}

impl ParamShape {
    /// Creates a parameter that every token is multiplied with.
    pub fn new(path: impl Into<String>, shape: impl Into<Vec<usize>>) -> Self {
        Self { path: path.into(), shape: shape.into(), ..Self::default() }
    }

    /// Says that rows of the parameter are looked up.
    pub fn with_lookup(self) -> Self {
        Self { is_lookup: true, ..self }
    }

    /// Says that the parameter is not trained.
    pub fn with_frozen(self) -> Self {
        Self { is_frozen: true, ..self }
    }

    /// Says along which dimension tensor parallel ranks split the parameter.
    pub fn with_split(self, dim: usize) -> Self {
        Self { split: Some(dim), ..self }
    }

    /// Splits a parameter as its name in Hugging Face's GPT-2, BERT, Llama, Mistral and Qwen models says: by
    /// outputs for queries, keys, values and the first products of a feed-forward block, by inputs for the second,
    /// and by words for embeddings of words and heads.
    pub(crate) fn split_by_name(self) -> Self {
        /// Parts of names, with the dimension for `[outputs, inputs]`.
        const NAMES: [(&[&str], usize); 3] = [
            (
                &[
                    "q_proj.",
                    "k_proj.",
                    "v_proj.",
                    "gate_proj.",
                    "up_proj.",
                    "query.",
                    "key.",
                    "value.",
                    "intermediate.",
                ],
                0,
            ),
            (&["o_proj.weight", "down_proj.weight", "output.dense.weight"], 1),
            (&["embed_tokens.", "word_embeddings.", "lm_head.", "wte."], 0),
        ];
        // GPT-2 has `[inputs, outputs]`.
        let of_gpt = match &*self.path {
            path if path.ends_with("c_attn.weight") || path.ends_with("c_fc.weight") => Some(1),
            path if path.ends_with("c_attn.bias") || path.ends_with("c_fc.bias") => Some(0),
            path if path.ends_with("c_proj.weight") => Some(0),
            _ => None,
        };
        let is_named = |names: &[&str]| names.iter().any(|name| self.path.contains(name));
        let named = || NAMES.iter().find(|(names, _)| is_named(names)).map(|(_, dim)| *dim);
        let split = of_gpt.or_else(named);
        Self { split, ..self }
    }

    /// Returns the number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }
}

impl UnitShape {
    /// Creates a unit inside `level` others.
    pub fn new(path: impl Into<String>, level: usize, params: Vec<ParamShape>) -> Self {
        Self { path: path.into(), level, params, ..Self::default() }
    }
}

impl ModelShape {
    /// Creates a model of the given units, the outermost one first.
    pub fn new(name: impl Into<String>, units: Vec<UnitShape>) -> Self {
        Self { name: name.into(), units }
    }

    /// Returns the number of elements of all parameters.
    pub fn num_params(&self) -> usize {
        self.units.iter().flat_map(|unit| &unit.params).map(ParamShape::numel).sum()
    }

    /// Freezes all parameters and adds LoRA adapters of `rank` to each matrix of the units inside the
    /// outermost one, as [`LoraConfig`](crate::lora::LoraConfig) does to their linear layers. The
    /// outermost unit, with embeddings and head, has none.
    #[must_use]
    pub fn with_lora(mut self, rank: usize) -> Self {
        for unit in &mut self.units {
            let mut adapters = Vec::new();
            for param in &mut unit.params {
                param.is_frozen = true;
                if let (1.., false, &[rows, columns]) =
                    (unit.level, param.is_lookup, &param.shape[..])
                {
                    let adapter = |name, shape, split: bool, dim| {
                        let param = ParamShape::new(format!("{}.{name}", param.path), shape);
                        if split { param.with_split(dim) } else { param }
                    };
                    let split = param.split;
                    adapters.push(adapter("lora_a", [rows, rank], split == Some(0), 0));
                    adapters.push(adapter("lora_b", [rank, columns], split == Some(1), 1));
                    // The product of the input and the first factor.
                    unit.saved_elements += rank;
                }
            }
            unit.params.extend(adapters);
        }
        self
    }

    /// Checks that each tensor parallel rank has whole heads.
    fn check_heads(&self, mesh: Mesh) -> Result<(), ShardError> {
        let ranks = mesh.tensor_size().size();
        let heads = self.units.iter().map(|unit| unit.key_value_heads);
        match heads.into_iter().find(|heads| !heads.is_multiple_of(ranks)) {
            Some(heads) => Err(ShardError::InvalidOption {
                option: "tensor_parallel",
                value: ranks.to_string(),
                expected: format!("use a divisor of {heads}, the heads of keys and values"),
            }),
            None => Ok(()),
        }
    }

    /// Lays out the units for the rank of `mesh`. `kind` is that of the device that computes.
    ///
    /// # Errors
    ///
    /// [`ShardError::EmptyModel`] if there is no parameter, and the errors of the options.
    pub(crate) fn lay_out(
        &self,
        mesh: Mesh,
        options: &FsdpOptions,
        kind: DeviceKind,
    ) -> Result<Vec<Unit>, ShardError> {
        if self.num_params() == 0 {
            return Err(ShardError::EmptyModel { model: "of a plan" });
        }
        self.check_heads(mesh)?;
        let recomputes = options.activation_checkpointing == ActivationCheckpointing::All;
        let mut recomputed_at: Option<(usize, usize)> = None;
        let mut units = Vec::new();
        let mut params = Vec::new();
        for (number, unit) in self.units.iter().enumerate() {
            recomputed_at = recomputed_at.filter(|(_, level)| unit.level > *level);
            let recomputed = recomputes && unit.level > 0 && recomputed_at.is_none();
            units.push(FoundUnit {
                path: unit.path.clone(),
                ty: "",
                level: unit.level,
                field: false,
                unit_type: None,
                recomputed,
                within: recomputed_at.map(|(unit, _)| unit),
                params_before: params.len(),
                group: None,
            });
            if recomputed {
                recomputed_at = Some((number, unit.level));
            }
            params.extend(unit.params.iter().map(|param| FoundParam {
                path: param.path.clone(),
                key: Key { name: param.path.clone(), transposed: false },
                id: ParamId::new(),
                shape: param.shape.clone(),
                dtype: DType::F32,
                layer_split: None,
                split: None,
                frozen: param.is_frozen,
                unit: number,
                module: 0,
                tied_to: None,
            }));
        }
        let splits = self.units.iter().flat_map(|unit| &unit.params).map(|param| param.split);
        split_along(&mut params, &splits.collect::<Vec<_>>(), mesh)?;
        Ok(lay_out(&params, units, (mesh, kind), options)?.0)
    }
}
