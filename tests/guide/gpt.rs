use burn::module::Module;
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::gelu;
use burn::tensor::{Device, Int, Tensor};
use fsdp_runtime::fsdp_unit;

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Block {
    norm_1: LayerNorm,
    attention: MultiHeadAttention,
    norm_2: LayerNorm,
    up: Linear,
    down: Linear,
}

#[fsdp_unit]
impl Block {
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let mixed = self.attention.forward(MhaInput::self_attn(self.norm_1.forward(x.clone())));
        let x = x + mixed.context;
        x.clone() + self.down.forward(gelu(self.up.forward(self.norm_2.forward(x))))
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
pub struct Gpt {
    words: Embedding,
    blocks: Vec<Block>,
    head: Linear,
}

#[fsdp_unit]
impl Gpt {
    pub fn forward(&self, words: Tensor<2, Int>) -> Tensor<3> {
        let x = self.words.forward(words);
        self.head.forward(self.blocks.iter().fold(x, |x, block| block.forward(x)))
    }
}

impl Gpt {
    /// 1.41 billion parameters: 24 blocks of width 2,048, and 50,257 words.
    pub fn new(device: &Device) -> Self {
        let norm = || LayerNormConfig::new(2048).init(device);
        let block = |_| Block {
            norm_1: norm(),
            attention: MultiHeadAttentionConfig::new(2048, 16).init(device),
            norm_2: norm(),
            up: LinearConfig::new(2048, 8192).init(device),
            down: LinearConfig::new(8192, 2048).init(device),
        };
        Self {
            words: EmbeddingConfig::new(50257, 2048).init(device),
            blocks: (0..24).map(block).collect(),
            head: LinearConfig::new(2048, 50257).with_bias(false).init(device),
        }
    }
}
