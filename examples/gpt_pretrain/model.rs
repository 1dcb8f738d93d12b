//! GPT-2's decoder, in plain Burn, with annotations for sharding.
//!
//! `#[fsdp_unit]` marks a unit: a module whose parameters are gathered with one all-gather. Here
//! each block is a unit, and the other parameters belong to the outermost unit (`root`). `tie`
//! declares that two parameters are the same one. The rest does not depend on FSDP: without the
//! annotations the same code trains the model unsharded.

use burn::module::{Initializer, Module, Param};
use burn::tensor::{Device, Int, Tensor};
use fsdp_runtime::nn::{
    AttentionOptions, Dropout, DropoutConfig, Embedding, EmbeddingConfig, LayerNorm,
    LayerNormConfig, Linear, LinearActivation, LinearConfig, LinearCrossEntropyOptions, attention,
    linear_cross_entropy, positions,
};
use fsdp_runtime::prelude::*;

use crate::arch::Arch;

/// Standard deviation of GPT-2's initial matrices.
const INIT_STD: f64 = 0.02;

/// Decoder that predicts the next word piece at every position.
#[derive(Module, Debug)]
#[fsdp_unit(root, tie("tokens" = "output"))]
pub struct Gpt {
    tokens: Embedding,
    /// Output weight, `[vocabulary, width]`; the same parameter as the embedding's.
    output: Param<Tensor<2>>,
    positions: Embedding,
    dropout: Dropout,
    blocks: Vec<Block>,
    norm: LayerNorm,
}

/// Causal self-attention and a feed-forward block, each with layer normalization before it and a
/// residual connection.
#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Block {
    attention_norm: LayerNorm,
    attention: Attention,
    norm: LayerNorm,
    #[fsdp(column)]
    up: Linear,
    #[fsdp(row)]
    down: Linear,
    dropout: Dropout,
    /// Whether the GELU is its tanh approximation, as in OpenAI's weights.
    tanh_gelu: bool,
}

/// Multi-head causal self-attention.
#[derive(Module, FsdpModule, Debug)]
pub struct Attention {
    #[fsdp(column)]
    query: Linear,
    #[fsdp(column)]
    key: Linear,
    #[fsdp(column)]
    value: Linear,
    #[fsdp(row)]
    output: Linear,
    heads: usize,
}

#[fsdp_unit]
impl Gpt {
    /// Computes the logits of the next word piece at every position.
    ///
    /// # Shapes
    ///
    /// - `ids`: `[rows, length]`
    /// - output: `[rows * length, vocabulary]`
    pub fn forward(&self, ids: Tensor<2, Int>) -> Tensor<2> {
        self.hidden(ids).matmul(self.output.val().transpose())
    }

    /// Computes the mean loss of the predictions at every position, without all logits at once.
    ///
    /// # Shapes
    ///
    /// - `ids`: `[rows, length]`
    /// - `targets`: `[rows * length]`
    /// - output: `[1]`
    pub fn forward_loss(&self, ids: Tensor<2, Int>, targets: Tensor<1, Int>) -> Tensor<1> {
        let options = LinearCrossEntropyOptions::new();
        linear_cross_entropy(self.hidden(ids), self.output.val(), targets, options)
    }

    /// Computes the hidden values that the logits are made of, `[rows * length, width]`.
    fn hidden(&self, ids: Tensor<2, Int>) -> Tensor<2> {
        let [rows, length] = ids.dims();
        let positions = positions(length, &ids.device()).unsqueeze();
        let x = self.tokens.forward(ids) + self.positions.forward(positions);
        let x = self.blocks.iter().fold(self.dropout.forward(x), |x, block| block.forward(x));
        let x = self.norm.forward(x);
        let [.., width] = x.dims();
        x.reshape([rows * length, width])
    }
}

#[fsdp_unit]
impl Block {
    /// Applies the block.
    ///
    /// # Shapes
    ///
    /// - `x` and output: `[rows, length, width]`
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let attended = self.attention.forward(self.attention_norm.forward(x.clone()));
        let (normed, x) = self.norm.forward_residual(self.dropout.forward(attended), x);
        let wide = self.wide(normed);
        x + self.dropout.forward(self.down.forward(wide))
    }
}

impl Block {
    /// Applies the first layer of the feed-forward part, with its activation.
    fn wide(&self, x: Tensor<3>) -> Tensor<3> {
        let gelu = if self.tanh_gelu { LinearActivation::GeluTanh } else { LinearActivation::Gelu };
        self.up.forward_activated(x, gelu)
    }

    /// Applies the block to the word pieces after those in the cache, without dropout.
    fn next(&self, x: Tensor<3>, cache: &mut Option<KeyValue>) -> Tensor<3> {
        let attended = self.attention.next(self.attention_norm.forward(x.clone()), Some(cache));
        let (normed, x) = self.norm.forward_residual(attended, x);
        let wide = self.wide(normed);
        x + self.down.forward(wide)
    }
}

/// Keys and values of the word pieces so far, so that only those of new ones are computed.
#[derive(Clone, Debug, Default)]
pub struct Cache {
    blocks: Vec<Option<KeyValue>>,
    len: usize,
}

/// Keys and values of a block, `[rows, heads, length, width / heads]`.
type KeyValue = (Tensor<4>, Tensor<4>);

impl Cache {
    /// Returns the number of word pieces so far.
    pub fn len(&self) -> usize {
        self.len
    }
}

impl Gpt {
    /// Computes the logits of the word piece after `ids`, which follow those in the cache, and adds
    /// them to the cache. There is no dropout.
    ///
    /// It is no forward of the sharded model: all units must be kept gathered.
    ///
    /// # Shapes
    ///
    /// - `ids`: `[1, length]`
    /// - output: `[1, vocabulary]`
    pub fn next_logits(&self, ids: Tensor<2, Int>, cache: &mut Cache) -> Tensor<2> {
        let [_, length] = ids.dims();
        let (start, end) = (cache.len as i64, (cache.len + length) as i64);
        let positions = Tensor::arange(start..end, &ids.device()).unsqueeze();
        let mut x = self.tokens.forward(ids) + self.positions.forward(positions);
        cache.blocks.resize(self.blocks.len(), None);
        for (block, cache) in self.blocks.iter().zip(&mut cache.blocks) {
            x = block.next(x, cache);
        }
        cache.len += length;
        let last = x.narrow(1, length - 1, 1);
        let [.., width] = last.dims();
        self.norm.forward(last).reshape([1, width]).matmul(self.output.val().transpose())
    }
}

impl Attention {
    /// Applies the attention.
    ///
    /// # Shapes
    ///
    /// - `x` and output: `[rows, length, width]`
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.next(x, None)
    }

    /// Applies the attention to the word pieces after those in the cache, and adds them to it.
    fn next(&self, x: Tensor<3>, cache: Option<&mut Option<KeyValue>>) -> Tensor<3> {
        let [rows, length, width] = x.dims();
        let layers = [&self.query, &self.key, &self.value];
        let [query, mut key, mut value] = Linear::forward_each(layers, x).map(|projected| {
            // A tensor parallel rank has a part of the heads.
            let shape = [rows as i32, length as i32, -1, (width / self.heads) as i32];
            projected.reshape(shape).swap_dims(1, 2)
        });
        let causal = AttentionOptions::new().with_causal(true);
        if let Some(cache) = cache {
            if let Some((keys, values)) = cache.take() {
                key = Tensor::cat(vec![keys, key], 2);
                value = Tensor::cat(vec![values, value], 2);
            }
            *cache = Some((key.clone(), value.clone()));
        }
        let context = attention(query, key, value, causal);
        let context = context.swap_dims(1, 2).reshape([rows as i32, length as i32, -1]);
        self.output.forward(context)
    }
}

/// Configuration of a GPT.
#[derive(Clone, Copy, Debug)]
pub struct GptConfig {
    /// Sizes.
    pub arch: Arch,
    /// Maximum length of a sample, in word pieces.
    pub positions: usize,
    /// Dropout probability of the embeddings and of the attention's and feed-forward block's
    /// output.
    pub dropout: f64,
    /// Whether the GELU is its tanh approximation.
    pub tanh_gelu: bool,
}

impl GptConfig {
    /// Builds the model. As in GPT-2, matrices are initialised from a normal distribution, and
    /// those whose output is added to the residual stream have a standard deviation smaller by a
    /// factor of `sqrt(2 * layers)`. The initialisation is lazy: `fully_shard` runs it for one
    /// parameter after another.
    pub fn init(&self, device: &Device) -> Gpt {
        let Arch { layers, width, vocabulary, .. } = self.arch;
        let matrix = normal(INIT_STD);
        let embedding =
            |rows| EmbeddingConfig::new(rows, width).with_initializer(matrix.clone()).init(device);
        let tokens: Embedding = embedding(vocabulary);
        Gpt {
            output: tokens.weight.clone(),
            tokens,
            positions: embedding(self.positions),
            dropout: DropoutConfig::new(self.dropout).init(),
            blocks: (0..layers).map(|_| self.block(device)).collect(),
            norm: LayerNormConfig::new(width).init(device),
        }
    }

    fn block(&self, device: &Device) -> Block {
        let Arch { layers, width, heads, .. } = self.arch;
        let wide = self.arch.wide();
        let linear = |from, to, std| {
            let linear = LinearConfig::new(from, to).with_initializer(normal(std)).init(device);
            Linear { bias: Some(Initializer::Zeros.init([to], device)), ..linear }
        };
        let residual = INIT_STD / ((2 * layers) as f64).sqrt();
        Block {
            attention_norm: LayerNormConfig::new(width).init(device),
            attention: Attention {
                query: linear(width, width, INIT_STD),
                key: linear(width, width, INIT_STD),
                value: linear(width, width, INIT_STD),
                output: linear(width, width, residual),
                heads,
            },
            norm: LayerNormConfig::new(width).init(device),
            up: linear(width, wide, INIT_STD),
            down: linear(wide, width, residual),
            dropout: DropoutConfig::new(self.dropout).init(),
            tanh_gelu: self.tanh_gelu,
        }
    }
}

fn normal(std: f64) -> Initializer {
    Initializer::Normal { mean: 0.0, std }
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;

    use super::*;
    use crate::common::device::DeviceName;

    const SMALL: Arch =
        Arch { name: "test", fairseq: None, layers: 8, width: 32, heads: 4, vocabulary: 50 };

    fn logits(model: &Gpt, ids: &[i32], device: &Device) -> Vec<f32> {
        let input = TensorData::new(ids.to_vec(), [1, ids.len()]);
        model.forward(Tensor::from_data(input, device)).into_data().try_into_vec_as().unwrap()
    }

    #[test]
    fn the_loss_is_that_of_the_logits() {
        let device = DeviceName::Auto.resolve().unwrap();
        device.seed(4);
        let model =
            GptConfig { arch: SMALL, positions: 40, dropout: 0.0, tanh_gelu: false }.init(&device);
        let ids: Vec<i32> = (0..80).map(|at| at * 7 % 50).collect();
        let input = || Tensor::from_data(TensorData::new(ids.clone(), [2, 40]), &device);
        let targets: Vec<i32> = ids.iter().map(|id| (id + 3) % 50).collect();
        let targets = Tensor::<1, Int>::from_data(TensorData::new(targets, [80]), &device);
        let loss = model.forward_loss(input(), targets.clone()).into_scalar::<f32>();
        let burns = burn::nn::loss::CrossEntropyLossConfig::new().init(&device);
        let expected = burns.forward(model.forward(input()), targets).into_scalar::<f32>();
        assert!((loss - expected).abs() < 1e-5, "{loss} {expected}");
    }

    /// Runs with autodiff and without it.
    #[test]
    fn a_later_word_changes_no_earlier_logit() {
        let device = DeviceName::Auto.resolve().unwrap();
        for device in [device.clone(), device.autodiff()] {
            device.seed(3);
            let model = GptConfig { arch: SMALL, positions: 40, dropout: 0.0, tanh_gelu: false }
                .init(&device);
            let ids: Vec<i32> = (0..40).map(|at| at * 7 % 50).collect();
            let before = logits(&model, &ids, &device);
            for changed in [1, 17, 39] {
                let mut ids = ids.clone();
                ids[changed] = (ids[changed] + 1) % 50;
                let after = logits(&model, &ids, &device);
                assert_eq!(after.len(), before.len());
                let (same, other) = before.split_at(changed * 50);
                let close = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-6;
                assert!(same.iter().zip(&after).all(close), "{changed}");
                assert!(!other.iter().zip(&after[changed * 50..]).all(close), "{changed}");
            }
        }
    }

    #[test]
    fn initial_weights_are_gpt_2s() {
        let device = DeviceName::Auto.resolve().unwrap();
        device.seed(1);
        let model =
            GptConfig { arch: SMALL, positions: 40, dropout: 0.0, tanh_gelu: false }.init(&device);
        let std = |tensor: Tensor<2>| {
            let data = tensor.into_data().try_into_vec_as::<f32>().unwrap();
            (data.iter().map(|x| f64::from(x * x)).sum::<f64>() / data.len() as f64).sqrt()
        };
        let block = &model.blocks[3];
        for (found, expected) in [
            (std(model.tokens.weight.val()), 0.02),
            (std(block.attention.query.weight.val()), 0.02),
            (std(block.up.weight.val()), 0.02),
            (std(block.attention.output.weight.val()), 0.02 / 4.0),
            (std(block.down.weight.val()), 0.02 / 4.0),
        ] {
            assert!((found / expected - 1.0).abs() < 0.1, "{found} {expected}");
        }
        let (tokens, output) = (model.tokens.weight.val(), model.output.val());
        assert_eq!(tokens.into_data(), output.into_data(), "one weight");
    }

    /// A tied parameter is stored, gathered and counted once.
    #[test]
    fn the_tied_weight_counts_once() {
        let config = GptConfig { arch: SMALL, positions: 40, dropout: 0.0, tanh_gelu: false };
        let device = DeviceName::Auto.resolve().unwrap();
        let counted = launch(LaunchOptions::new(2).with_device(device), move |worker| {
            let model = fully_shard(config.init(worker.device()), &worker, FsdpOptions::new())?;
            Ok::<_, fsdp_runtime::Error>((model.num_params(), model.stats().wrapping().units.len()))
        })
        .unwrap();
        let of_block = 12 * 32 * 32 + 13 * 32;
        let expected = 50 * 32 + 40 * 32 + 8 * of_block + 2 * 32;
        assert_eq!(counted, [(expected, 9), (expected, 9)]);
    }
}
