//! The table of a language model's words, which tensor parallel ranks can split.

use burn::config::Config;
use burn::module::{Content, DisplaySettings, Initializer, Module, ModuleDisplay, Param};
use burn::tensor::{Device, Int, Tensor, module};

use crate::backend::ops::embedding_tracked;
use crate::module::{FsdpModule, Node, ParamMapper, ParamVisitor, Sharded, SplitVocabulary};

/// Configuration of an [`Embedding`] layer. Its fields and defaults are those of
/// `burn::nn::EmbeddingConfig`.
#[derive(Config, Debug)]
pub struct EmbeddingConfig {
    /// Number of rows of the table.
    pub n_embedding: usize,
    /// Size of a row.
    pub d_model: usize,
    /// Initialisation of the table. Default: normal with mean 0 and standard deviation 1.
    #[config(default = "Initializer::Normal{mean:0.0, std:1.0}")]
    pub initializer: Initializer,
}

impl EmbeddingConfig {
    /// Initialises the layer.
    pub fn init(&self, device: &Device) -> Embedding {
        let shape = [self.n_embedding, self.d_model];
        Embedding { weight: self.initializer.init(shape, device) }
    }
}

/// Looks up rows of a table.
///
/// The layer replaces `burn::nn::Embedding`: records, the checkpoint key, initialisation and results are the
/// same. On Flex the gradient of an f32 table is written once. Under `#[fsdp(vocab)]` each [tensor parallel](crate::FsdpOptions::with_tensor_parallel) rank has a
/// part of the rows. A rank looks up the ids that it has, and the ranks add their results, of which all but
/// one are zeros.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct Embedding {
    /// Table, `[n_embedding, d_model]`.
    pub weight: Param<Tensor<2>>,
}

impl Embedding {
    /// Returns the row of each id.
    ///
    /// # Shapes
    ///
    /// - ids: `[rows, length]`
    /// - output: `[rows, length, d_model]`
    pub fn forward(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let table = self.weight.val();
        let Some((sharded, split)) = Sharded::split_of(&self.weight) else {
            return rows(table, ids);
        };
        let [own, _] = table.dims();
        let (ids, others) = sharded.own_ids(ids, (split, own));
        let rows = rows(table, ids).mask_fill(others.unsqueeze_dim(2), 0.0);
        sharded.sum_over_tensor_ranks(rows)
    }
}

/// Returns the row of each id, by a kernel or by Burn's operation.
fn rows(table: Tensor<2>, ids: Tensor<2, Int>) -> Tensor<3> {
    embedding_tracked(&table, &ids).unwrap_or_else(|| module::embedding(table, ids))
}

impl SplitVocabulary for Embedding {}

impl From<burn::nn::Embedding> for Embedding {
    fn from(layer: burn::nn::Embedding) -> Self {
        Self { weight: layer.weight }
    }
}

impl From<Embedding> for burn::nn::Embedding {
    fn from(layer: Embedding) -> Self {
        Self { weight: layer.weight }
    }
}

impl ModuleDisplay for Embedding {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let [n_embedding, d_model] = self.weight.shape().dims();
        content.add("n_embedding", &n_embedding).add("d_model", &d_model).optional()
    }
}

impl FsdpModule for Embedding {
    const LAYOUT: Node = <burn::nn::Embedding as FsdpModule>::LAYOUT;

    fn visit_params<V: ParamVisitor>(&self, visitor: &mut V) {
        if let [weight] = Self::LAYOUT.children {
            self.weight.visit_field(weight, visitor);
        }
    }

    fn map_params<P: ParamMapper>(mut self, mapper: &mut P) -> Self {
        if let [weight] = Self::LAYOUT.children {
            self.weight = self.weight.map_field(weight, mapper);
        }
        self
    }
}
