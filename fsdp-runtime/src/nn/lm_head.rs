//! The head of a language model, which tensor parallel ranks can split by words.

use burn::config::Config;
use burn::module::{Content, DisplaySettings, Initializer, Module, ModuleDisplay, Param};
use burn::nn::loss::Reduction;
use burn::tensor::{DType, Device, Int, Tensor};

use super::linear_cross_entropy::{LinearCrossEntropyOptions, WeightLayout, linear_cross_entropy};
use crate::layout::TensorSplit;
use crate::module::{
    Child, FsdpModule, Kind, Node, ParamMapper, ParamVisitor, Sharded, SplitVocabulary,
};

/// Configuration of an [`LmHead`].
#[derive(Config, Debug)]
pub struct LmHeadConfig {
    /// Size of the last dimension of inputs.
    pub d_model: usize,
    /// Number of words.
    pub n_words: usize,
    /// Initialisation of the weight. Default: uniform within `±1 / √d_model`, as in PyTorch's linear layer.
    #[config(default = "Initializer::KaimingUniform{gain:1.0/f64::sqrt(3.0), fan_out_only:false}")]
    pub initializer: Initializer,
}

impl LmHeadConfig {
    /// Initialises the head.
    pub fn init(&self, device: &Device) -> LmHead {
        let shape = [self.n_words, self.d_model];
        let weight =
            self.initializer.init_with(shape, Some(self.d_model), Some(self.n_words), device);
        LmHead { weight }
    }
}

/// The output layer of a language model, without a bias: `hidden · weightᵀ`.
///
/// The weight has the layout of an embedding's table, so that the two can be one parameter. Checkpoint key
/// and layout are those of transformers' `lm_head`. Under `#[fsdp(vocab)]` each
/// [tensor parallel](crate::FsdpOptions::with_tensor_parallel) rank has a part of the words.
/// [`cross_entropy`](Self::cross_entropy) then computes the loss from the ranks' parts, and no rank has all
/// logits.
///
/// # Example
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use fsdp_runtime::nn::{LinearCrossEntropyOptions, LmHeadConfig};
///
/// # fn main() {
/// # #[cfg(feature = "flex")] {
/// let device = Device::flex();
/// let head = LmHeadConfig::new(32, 1000).init(&device);
/// let hidden = Tensor::<2>::random([6, 32], Distribution::Default, &device);
/// assert_eq!(head.forward(hidden.clone()).dims(), [6, 1000]);
/// let targets = Tensor::from_ints([5, 999, 0, 6, 7, 8], &device);
/// let loss = head.cross_entropy(hidden, targets, LinearCrossEntropyOptions::new());
/// assert!(loss.into_scalar::<f32>() > 0.0);
/// # }
/// # }
/// ```
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct LmHead {
    /// Weight, `[n_words, d_model]`.
    pub weight: Param<Tensor<2>>,
}

impl LmHead {
    /// Computes the logits of all words.
    ///
    /// # Shapes
    ///
    /// - hidden: `[.., d_model]`
    /// - output: `[.., n_words]`
    pub fn forward<const D: usize>(&self, hidden: Tensor<D>) -> Tensor<D> {
        let weight = self.weight.val().transpose();
        match Sharded::split_of(&self.weight) {
            Some((sharded, _)) => {
                let hidden = sharded.share_with_tensor_ranks(hidden);
                sharded.gather_from_tensor_ranks(hidden.matmul(weight.unsqueeze()))
            }
            None => hidden.matmul(weight.unsqueeze()),
        }
    }

    /// Computes the cross-entropy of the logits and the targets, as
    /// [`linear_cross_entropy`](super::linear_cross_entropy) does.
    ///
    /// Of a split weight each rank makes the logits of its own words, for all rows at once, in f32. The ranks
    /// exchange the largest logit of each row, and then the sum of the exponentials and the target's logit.
    ///
    /// # Shapes
    ///
    /// - hidden: `[rows, d_model]`
    /// - targets: `[rows]`, each a word from 0 on, or the ignored index
    /// - output: `[1]`
    ///
    /// # Panics
    ///
    /// Those of [`linear_cross_entropy`](super::linear_cross_entropy), and for options with a bias or with
    /// [`WeightLayout::Linear`].
    pub fn cross_entropy(
        &self,
        hidden: Tensor<2>,
        targets: Tensor<1, Int>,
        options: LinearCrossEntropyOptions,
    ) -> Tensor<1> {
        assert!(
            options.layout == WeightLayout::Embedding && options.bias.is_none(),
            "the weight of an `LmHead` has the layout of an embedding, and no bias"
        );
        match Sharded::split_of(&self.weight) {
            Some((sharded, split)) => {
                let weight = self.weight.val();
                split_cross_entropy(sharded, split, (hidden, weight), targets, &options)
            }
            None => linear_cross_entropy(hidden, self.weight.val(), targets, options),
        }
    }
}

/// Computes the loss from the logits of this rank's words.
fn split_cross_entropy(
    ranks: &Sharded,
    split: TensorSplit,
    (hidden, weight): (Tensor<2>, Tensor<2>),
    targets: Tensor<1, Int>,
    options: &LinearCrossEntropyOptions,
) -> Tensor<1> {
    let ([rows, _], [own, _]) = (hidden.dims(), weight.dims());
    let dtype = if hidden.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let hidden = ranks.share_with_tensor_ranks(hidden);
    let logits = hidden.matmul(weight.transpose()).cast(dtype);
    // The largest logit of a row changes no result, and takes no gradient.
    let largest = ranks.gather_from_tensor_ranks(logits.clone().detach().max_dim(1)).max_dim(1);
    let shifted = logits - largest;
    let counts = match options.ignore_index {
        Some(ignored) => targets.clone().not_equal_elem(ignored).float().cast(dtype),
        None => Tensor::ones([rows], (&shifted.device(), dtype)),
    };
    let (at, others) = ranks.own_ids(targets, (split, own));
    let at = at.unsqueeze_dim(1);
    let chosen = shifted.clone().gather(1, at).mask_fill(others.unsqueeze_dim(1), 0.0);
    // One exchange for all sums of a row.
    let smoothing = options.label_smoothing;
    let mut own_sums = vec![shifted.clone().exp().sum_dim(1), chosen];
    if smoothing > 0.0 {
        own_sums.push(shifted.sum_dim(1));
    }
    let sums = ranks.sum_over_tensor_ranks(Tensor::cat(own_sums, 1));
    let column = |at| sums.clone().narrow(1, at, 1);
    let mut losses = column(0).log() - column(1).mul_scalar(1.0 - smoothing);
    if smoothing > 0.0 {
        let words = (own * split.parts) as f64;
        losses = losses - column(2).mul_scalar(smoothing / words);
    }
    let loss = (losses.squeeze_dim::<1>(1) * counts.clone()).sum();
    match options.reduction {
        Reduction::Mean | Reduction::Auto => loss / counts.sum().clamp_min(1.0),
        Reduction::BatchMean => loss.div_scalar(rows.max(1) as f64),
        Reduction::Sum => loss,
    }
}

impl SplitVocabulary for LmHead {}

impl ModuleDisplay for LmHead {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let [n_words, d_model] = self.weight.shape().dims();
        content.add("d_model", &d_model).add("n_words", &n_words).optional()
    }
}

impl FsdpModule for LmHead {
    const LAYOUT: Node = Node {
        ty: "LmHead",
        kind: Kind::Module,
        children: &[Child::plain("weight", &<Param<Tensor<2>> as FsdpModule>::LAYOUT)],
        ties: &[],
    };

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
