//! The head of a language model, which tensor parallel ranks can split by words.

use burn::config::Config;
use burn::module::{Content, DisplaySettings, Initializer, Module, ModuleDisplay, Param};
use burn::nn::loss::Reduction;
use burn::tensor::{Bool, DType, Device, IndexingUpdateOp, Int, Tensor};

use super::linear::{LinearActivation, linear};
use super::linear_cross_entropy::{LinearCrossEntropyOptions, WeightLayout, linear_cross_entropy};
use super::softmax;
use crate::backend::ops::{ComputedLoss, wide, with_gradients};
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
    /// Under [sequence parallel](crate::FsdpOptions::with_sequence_parallel) the hidden values are those of
    /// [`gather_sequence`](Self::gather_sequence).
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

    /// Returns the hidden values of all positions, of which a rank has a part under
    /// [sequence parallel](crate::FsdpOptions::with_sequence_parallel). Without it they are the same values.
    ///
    /// # Shapes
    ///
    /// - hidden: `[rows, part of the length, d_model]`
    /// - output: `[rows, length, d_model]`
    pub fn gather_sequence(&self, hidden: Tensor<3>) -> Tensor<3> {
        match Sharded::split_of(&self.weight) {
            Some((sharded, _)) => sharded.gather_sequence(hidden),
            None => hidden,
        }
    }

    /// Computes the cross-entropy of the logits and the targets, as
    /// [`linear_cross_entropy`](super::linear_cross_entropy) does.
    ///
    /// Of a split weight each rank makes the logits of its own words, for a chunk of rows at a time, in f32.
    /// The ranks exchange three or four numbers of each row of a chunk. Gradients are computed in forward.
    /// Under [sequence parallel](crate::FsdpOptions::with_sequence_parallel) the hidden values are those of
    /// [`gather_sequence`](Self::gather_sequence).
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

/// Computes the loss from the logits of this rank's words, in chunks of rows, with its gradients.
fn split_cross_entropy(
    ranks: &Sharded,
    split: TensorSplit,
    (hidden, weight): (Tensor<2>, Tensor<2>),
    targets: Tensor<1, Int>,
    options: &LinearCrossEntropyOptions,
) -> Tensor<1> {
    let ([rows, _], [own, _]) = (hidden.dims(), weight.dims());
    let dtype = wide(hidden.dtype());
    let hidden = ranks.share_with_tensor_ranks(hidden);
    with_gradients([&hidden, &weight], |[hidden, weight], wanted| {
        let device = hidden.device();
        let targets = targets.to_device(&device);
        let counts = match options.ignore_index {
            Some(ignored) => targets.clone().not_equal_elem(ignored).float().cast(dtype),
            None => Tensor::ones([rows], (&device, dtype)),
        };
        let smoothing = options.label_smoothing;
        let (targets, others) = ranks.own_ids(targets, (split, own));
        let head = SplitHead { ranks, split, weight, dtype, smoothing };
        let of_weight = wanted[1].then(|| Tensor::zeros(head.weight.dims(), (&device, dtype)));
        let mut sums = Sums { losses: Vec::new(), of_hidden: wanted[0].then(Vec::new), of_weight };
        let chunk = options.chunk(rows, own);
        for start in (0..rows).step_by(chunk) {
            let len = chunk.min(rows - start);
            head.add_rows(
                hidden.clone().narrow(0, start, len),
                SplitTargets {
                    own: targets.clone().narrow(0, start, len).unsqueeze_dim(1),
                    others: others.clone().narrow(0, start, len).unsqueeze_dim(1),
                    counts: counts.clone().narrow(0, start, len).unsqueeze_dim(1),
                },
                &mut sums,
            );
        }
        let one = Tensor::ones([1], (&device, dtype));
        let factor = match options.reduction {
            Reduction::Mean | Reduction::Auto => one / counts.sum().clamp_min(1.0),
            Reduction::BatchMean => one.div_scalar(rows.max(1) as f64),
            Reduction::Sum => one,
        };
        let loss = Tensor::cat(sums.losses, 0).sum() * factor.clone();
        let of_hidden = sums.of_hidden.map(|gradients| Tensor::cat(gradients, 0));
        let gradients = of_hidden.into_iter().chain(sums.of_weight).collect();
        ComputedLoss { loss, factor, gradients }
    })
}

/// A head of which each rank has a part of the words. Tensors are on a device without autodiff.
struct SplitHead<'a> {
    ranks: &'a Sharded,
    split: TensorSplit,
    /// `[own words, d_model]`
    weight: Tensor<2>,
    /// Dtype of logits and sums.
    dtype: DType,
    smoothing: f64,
}

/// Targets of some rows, each `[rows, 1]`.
struct SplitTargets {
    /// Numbers among the words of this rank.
    own: Tensor<2, Int>,
    /// Whether the target is a word of another rank.
    others: Tensor<2, Bool>,
    /// 1 for a row that counts, else 0.
    counts: Tensor<2>,
}

/// Sums over all rows so far.
struct Sums {
    /// Losses of the rows of each chunk, `[rows, 1]`.
    losses: Vec<Tensor<2>>,
    /// Gradients of the hidden values of each chunk, if they are wanted.
    of_hidden: Option<Vec<Tensor<2>>>,
    /// Gradient of the weight, if it is wanted.
    of_weight: Option<Tensor<2>>,
}

impl SplitHead<'_> {
    /// Adds the losses of some rows, and their gradients. The ranks exchange three or four numbers of each
    /// row: the logarithm of the sum of the exponentials of a rank's logits, the target's logit, and the sum
    /// of the logits if the targets are smoothed.
    fn add_rows(&self, hidden: Tensor<2>, targets: SplitTargets, sums: &mut Sums) {
        let SplitTargets { own, others, counts } = targets;
        let product = |a, b| linear(a, b, None, LinearActivation::Identity);
        let logits = product(hidden.clone(), self.weight.clone().transpose()).cast(self.dtype);
        let top = logits.clone().max_dim(1);
        let chosen = logits.clone().gather(1, own.clone()).mask_fill(others.clone(), 0.0);
        let sum = (self.smoothing > 0.0).then(|| logits.clone().sum_dim(1));
        let shares = softmax(logits, 1);
        // The largest share is that of the largest logit.
        let of_part = top - shares.clone().max_dim(1).log();
        let own_numbers = [of_part.clone(), chosen].into_iter().chain(sum).collect();
        let numbers = self.numbers_of_ranks(Tensor::cat(own_numbers, 1));
        let [of_parts, chosen] = [&numbers[0], &numbers[1]];
        let top = of_parts.clone().max_dim(1);
        let of_all = (of_parts.clone() - top.clone()).exp().sum_dim(1).log() + top;
        let rest = 1.0 - self.smoothing;
        let mut losses = of_all.clone() - chosen.clone().sum_dim(1).mul_scalar(rest);
        let words = (self.weight.dims()[0] * self.split.parts) as f64;
        if let Some(sum) = numbers.get(2) {
            losses = losses - sum.clone().sum_dim(1).mul_scalar(self.smoothing / words);
        }
        sums.losses.push(losses * counts.clone());
        if sums.of_hidden.is_none() && sums.of_weight.is_none() {
            return;
        }
        let mut slopes = shares * ((of_part - of_all).exp() * counts.clone());
        if self.smoothing > 0.0 {
            slopes = slopes - counts.clone().mul_scalar(self.smoothing / words);
        }
        let of_targets = counts.mul_scalar(-rest).mask_fill(others, 0.0);
        let slopes = slopes.scatter(1, own, of_targets, IndexingUpdateOp::Add);
        let slopes = slopes.cast(hidden.dtype());
        if let Some(of_hidden) = &mut sums.of_hidden {
            of_hidden.push(product(slopes.clone(), self.weight.clone()).cast(self.dtype));
        }
        if let Some(of_weight) = sums.of_weight.take() {
            sums.of_weight = Some(of_weight + product(slopes.transpose(), hidden).cast(self.dtype));
        }
    }

    /// Returns the columns of this rank's `[rows, columns]`, each as `[rows, ranks]` with those of all ranks.
    fn numbers_of_ranks(&self, own: Tensor<2>) -> Vec<Tensor<2>> {
        let [rows, columns] = own.dims();
        let all = self.ranks.gather_from_tensor_ranks(own);
        let all = all.reshape([rows, self.split.parts, columns]);
        (0..columns).map(|at| all.clone().narrow(2, at, 1).squeeze_dim(2)).collect()
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
