//! The table of a language model's words, which tensor parallel ranks can split.

use burn::config::Config;
use burn::module::{Content, DisplaySettings, Initializer, Module, ModuleDisplay, Param};
use burn::tensor::{Device, Int, Tensor, module};

use crate::backend::ops::embedding_tracked;
use crate::module::{FsdpModule, Node, ParamMapper, ParamVisitor, Sharded, SplitVocabulary};

/// Configuration of an [`Embedding`] layer. Its fields and defaults are those of
/// `burn::nn::EmbeddingConfig`, and `padding_idx` of PyTorch's `nn.Embedding`.
#[derive(Config, Debug)]
pub struct EmbeddingConfig {
    /// Number of rows of the table.
    pub n_embedding: usize,
    /// Size of a row.
    pub d_model: usize,
    /// Initialisation of the table. Default: normal with mean 0 and standard deviation 1.
    #[config(default = "Initializer::Normal{mean:0.0, std:1.0}")]
    pub initializer: Initializer,
    /// Id whose row gets no gradient from lookups, as the models of transformers have it for `pad_token_id`.
    /// Unlike PyTorch's, the row is initialised as the others are. Default: none.
    #[config(default = "None")]
    pub padding_idx: Option<usize>,
}

impl EmbeddingConfig {
    /// Initialises the layer.
    ///
    /// # Panics
    ///
    /// If `padding_idx` is no row of the table.
    pub fn init(&self, device: &Device) -> Embedding {
        let shape = [self.n_embedding, self.d_model];
        if let Some(id) = self.padding_idx {
            let rows = self.n_embedding;
            assert!(
                id < rows,
                "`padding_idx` must be below the {rows} rows of the table, and is {id}"
            );
        }
        Embedding { weight: self.initializer.init(shape, device), padding_idx: self.padding_idx }
    }
}

/// Looks up rows of a table.
///
/// The layer replaces `burn::nn::Embedding`: records, the checkpoint key, initialisation and results are the
/// same. The gradient of a table is written once, on Flex that of an f32 table: each row of a looked up id gets
/// the sum of its gradients, in order.
///
/// Under `#[fsdp(vocab)]` each [tensor parallel](crate::FsdpOptions::with_tensor_parallel) rank has a part of the
/// rows. A rank looks up the ids that it has, and the ranks add their results, of which all but one are zeros.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct Embedding {
    /// Table, `[n_embedding, d_model]`.
    pub weight: Param<Tensor<2>>,
    /// Id whose row gets no gradient from lookups.
    pub padding_idx: Option<usize>,
}

impl Embedding {
    /// Returns the row of each id. A lookup of `padding_idx` gives its row no gradient. A head that is tied to
    /// the table does.
    ///
    /// # Shapes
    ///
    /// - ids: `[rows, length]`
    /// - output: `[rows, length, d_model]`; of a split table under
    ///   [sequence parallel](crate::FsdpOptions::with_sequence_parallel), this rank's part of the length
    pub fn forward(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let table = self.weight.val();
        let padding = self.padding_idx.map(|id| ids.clone().equal_elem(id as i64));
        let without_padding = |rows: Tensor<3>| match padding {
            Some(is_padding) => rows.clone().mask_where(is_padding.unsqueeze_dim(2), rows.detach()),
            None => rows,
        };
        let Some((sharded, split)) = Sharded::split_of(&self.weight) else {
            return without_padding(rows(table, ids));
        };
        let [own, _] = table.dims();
        let (ids, others) = sharded.own_ids(ids, (split, own));
        let rows = rows(table, ids).mask_fill(others.unsqueeze_dim(2), 0.0);
        sharded.leave_split(without_padding(rows))
    }
}

/// Returns the row of each id, by a kernel or by Burn's operation.
fn rows(table: Tensor<2>, ids: Tensor<2, Int>) -> Tensor<3> {
    embedding_tracked(&table, &ids).unwrap_or_else(|| module::embedding(table, ids))
}

impl SplitVocabulary for Embedding {}

impl From<burn::nn::Embedding> for Embedding {
    fn from(layer: burn::nn::Embedding) -> Self {
        Self { weight: layer.weight, padding_idx: None }
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
        let content = content.add("n_embedding", &n_embedding).add("d_model", &d_model);
        match &self.padding_idx {
            Some(id) => content.add("padding_idx", id).optional(),
            None => content.optional(),
        }
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

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;

    use super::*;

    #[test]
    fn lookups_of_padding_give_no_gradient() {
        let device = Device::flex().autodiff();
        let config = EmbeddingConfig::new(4, 2);
        let plain = config.init(&device);
        let padded = Embedding { padding_idx: Some(2), ..plain.clone() };
        let ids = Tensor::from_data([[2, 0, 2], [3, 3, 2]], &device);
        let rows = [&plain, &padded].map(|layer| layer.forward(ids.clone()));
        rows[1].clone().into_data().assert_eq(&rows[0].clone().into_data(), true);
        let gradient = |layer: &Embedding, rows: Tensor<3>| {
            let grads = rows.sum().backward();
            layer.weight.grad(&grads).expect("a gradient").into_data()
        };
        let [of_plain, of_padded] = rows;
        let expected = TensorData::from([[1f32; 2], [0.0; 2], [3.0; 2], [2.0; 2]]);
        gradient(&plain, of_plain).assert_eq(&expected, true);
        let expected = TensorData::from([[1f32; 2], [0.0; 2], [0.0; 2], [2.0; 2]]);
        gradient(&padded, of_padded).assert_eq(&expected, true);
    }

    #[test]
    #[should_panic(expected = "`padding_idx` must be below the 4 rows of the table, and is 4")]
    fn padding_beyond_the_table_is_refused() {
        EmbeddingConfig::new(4, 2).with_padding_idx(Some(4)).init(&Device::flex());
    }
}
