//! Shapes of GPT and Llama models, by name and by size.

use serde::Serialize;

use super::cluster::UnknownPreset;
use crate::param_group::plan::shape::{ModelShape, ParamShape, UnitShape};

/// Sizes of a decoder: a GPT or a Llama.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Transformer {
    /// Number of layers, each of which is a unit.
    pub layers: usize,
    /// Elements of the residual stream of one token.
    pub hidden: usize,
    /// Heads of the queries.
    pub heads: usize,
    /// Heads of the keys and values.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_width: usize,
    /// Elements of the feed-forward layer of one token.
    pub feed_forward: usize,
    /// Tokens of the vocabulary.
    pub vocabulary: usize,
    /// Learned positions; 0 with rotary ones.
    pub positions: usize,
    /// Whether it is a Llama: gated feed-forward layers, no biases, and a projection to the
    /// vocabulary of its own. A GPT ties the projection to the embedding.
    pub is_llama: bool,
}

/// Names with their sizes: layers, hidden, heads, heads of keys and values, feed-forward,
/// vocabulary, positions.
type Sizes = (&'static str, [usize; 7]);

/// GPT-2 (Radford et al. 2019) and GPT-3 (Brown et al. 2020, table 2.1).
const GPT: [Sizes; 11] = [
    ("gpt2", [12, 768, 12, 12, 3072, 50_257, 1024]),
    ("gpt2-medium", [24, 1024, 16, 16, 4096, 50_257, 1024]),
    ("gpt2-large", [36, 1280, 20, 20, 5120, 50_257, 1024]),
    ("gpt2-xl", [48, 1600, 25, 25, 6400, 50_257, 1024]),
    ("gpt3-125m", [12, 768, 12, 12, 3072, 50_257, 2048]),
    ("gpt3-350m", [24, 1024, 16, 16, 4096, 50_257, 2048]),
    ("gpt3-1.3b", [24, 2048, 16, 16, 8192, 50_257, 2048]),
    ("gpt3-2.7b", [32, 2560, 32, 32, 10_240, 50_257, 2048]),
    ("gpt3-6.7b", [32, 4096, 32, 32, 16_384, 50_257, 2048]),
    ("gpt3-13b", [40, 5120, 40, 40, 20_480, 50_257, 2048]),
    ("gpt3-175b", [96, 12_288, 96, 96, 49_152, 50_257, 2048]),
];

/// Llama 2 (Touvron et al. 2023) and Llama 3 (Dubey et al. 2024, table 3).
const LLAMA: [Sizes; 8] = [
    ("llama2-7b", [32, 4096, 32, 32, 11_008, 32_000, 0]),
    ("llama2-13b", [40, 5120, 40, 40, 13_824, 32_000, 0]),
    ("llama2-70b", [80, 8192, 64, 8, 28_672, 32_000, 0]),
    ("llama3-1b", [16, 2048, 32, 8, 8192, 128_256, 0]),
    ("llama3-3b", [28, 3072, 24, 8, 8192, 128_256, 0]),
    ("llama3-8b", [32, 4096, 32, 8, 14_336, 128_256, 0]),
    ("llama3-70b", [80, 8192, 64, 8, 28_672, 128_256, 0]),
    ("llama3-405b", [126, 16_384, 128, 8, 53_248, 128_256, 0]),
];

impl Transformer {
    /// Returns the names that [`named`](Self::named) knows.
    pub fn names() -> impl Iterator<Item = &'static str> {
        GPT.iter().chain(&LLAMA).map(|(name, _)| *name)
    }

    /// Returns the sizes of a model by its name, such as `gpt2-xl` or `llama3-8b`.
    ///
    /// # Errors
    ///
    /// [`UnknownPreset`] for another name.
    pub fn named(name: &str) -> Result<Self, UnknownPreset> {
        let is_named = |(known, _): &&Sizes| known.eq_ignore_ascii_case(name);
        let found = LLAMA.iter().find(is_named).map(|(_, sizes)| (true, sizes));
        let found = found.or_else(|| GPT.iter().find(is_named).map(|(_, sizes)| (false, sizes)));
        let (is_llama, sizes) =
            found.ok_or_else(|| UnknownPreset::new("model", name, Self::names()))?;
        let [layers, hidden, heads, kv_heads, feed_forward, vocabulary, positions] = *sizes;
        let head_width = hidden / heads;
        Ok(Self {
            layers,
            hidden,
            heads,
            kv_heads,
            head_width,
            feed_forward,
            vocabulary,
            positions,
            is_llama,
        })
    }

    /// Returns the shapes of the model's parameters, under the names of Hugging Face's weights.
    pub fn shape(&self, name: &str) -> ModelShape {
        let layers = (0..self.layers).map(|layer| match self.is_llama {
            true => self.llama_layer(layer),
            false => self.gpt_layer(layer),
        });
        let mut root = UnitShape::new("", 0, self.root());
        self.set_root(&mut root);
        let mut units: Vec<_> = std::iter::once(root).chain(layers).collect();
        for unit in &mut units {
            unit.params = unit.params.drain(..).map(ParamShape::split_by_name).collect();
        }
        ModelShape::new(name, units)
    }

    fn root(&self) -> Vec<ParamShape> {
        let (table, hidden) = ([self.vocabulary, self.hidden], [self.hidden]);
        match self.is_llama {
            true => vec![
                ParamShape::new("model.embed_tokens.weight", table).with_lookup(),
                ParamShape::new("model.norm.weight", hidden),
                ParamShape::new("lm_head.weight", table),
            ],
            false => vec![
                // The projection to the vocabulary multiplies with the table.
                ParamShape::new("wte.weight", table),
                ParamShape::new("wpe.weight", [self.positions, self.hidden]).with_lookup(),
                ParamShape::new("ln_f.weight", hidden),
                ParamShape::new("ln_f.bias", hidden),
            ],
        }
    }

    fn llama_layer(&self, layer: usize) -> UnitShape {
        let path = format!("model.layers.{layer}");
        let (hidden, wide) = (self.hidden, self.feed_forward);
        let (queries, keys) = (self.heads * self.head_width, self.kv_heads * self.head_width);
        let matrix =
            |name: &str, shape: [usize; 2]| ParamShape::new(format!("{path}.{name}"), shape);
        let vector = |name: &str| ParamShape::new(format!("{path}.{name}"), [hidden]);
        let params = vec![
            matrix("self_attn.q_proj.weight", [queries, hidden]),
            matrix("self_attn.k_proj.weight", [keys, hidden]),
            matrix("self_attn.v_proj.weight", [keys, hidden]),
            matrix("self_attn.o_proj.weight", [hidden, queries]),
            matrix("mlp.gate_proj.weight", [wide, hidden]),
            matrix("mlp.up_proj.weight", [wide, hidden]),
            matrix("mlp.down_proj.weight", [hidden, wide]),
            vector("input_layernorm.weight"),
            vector("post_attention_layernorm.weight"),
        ];
        let mut unit = UnitShape::new(path.clone(), 1, params);
        self.set_activations(&mut unit);
        unit
    }

    fn gpt_layer(&self, layer: usize) -> UnitShape {
        let path = format!("h.{layer}");
        let (hidden, wide) = (self.hidden, self.feed_forward);
        let param = |name: &str, shape: &[usize]| ParamShape::new(format!("{path}.{name}"), shape);
        let params = vec![
            param("ln_1.weight", &[hidden]),
            param("ln_1.bias", &[hidden]),
            param("attn.c_attn.weight", &[hidden, 3 * hidden]),
            param("attn.c_attn.bias", &[3 * hidden]),
            param("attn.c_proj.weight", &[hidden, hidden]),
            param("attn.c_proj.bias", &[hidden]),
            param("ln_2.weight", &[hidden]),
            param("ln_2.bias", &[hidden]),
            param("mlp.c_fc.weight", &[hidden, wide]),
            param("mlp.c_fc.bias", &[wide]),
            param("mlp.c_proj.weight", &[wide, hidden]),
            param("mlp.c_proj.bias", &[hidden]),
        ];
        let mut unit = UnitShape::new(path.clone(), 1, params);
        self.set_activations(&mut unit);
        unit
    }

    /// Sets the activations of the outermost unit: the input of the last norm, and that of the projection to the
    /// vocabulary.
    pub(super) fn set_root(&self, root: &mut UnitShape) {
        root.saved_elements = 2 * self.hidden;
        (root.residual_elements, root.gathered_elements) = (self.hidden, self.hidden);
        // Rows of the embedding in forward, and the gradient of the projection's input in backward.
        (root.tensor_exchanges, root.exchanged_elements) = (1, self.hidden);
    }

    /// Sets the attention and the activations of a layer.
    ///
    /// A layer saves the inputs of its norms and of its linear layers. Attention saves queries, keys,
    /// values, its output, and a number for each head; it saves no square of the length. The
    /// feed-forward block saves three tensors if it is gated, as with
    /// [`swiglu`](crate::nn::swiglu), and two otherwise.
    pub(super) fn set_activations(&self, unit: &mut UnitShape) {
        let (queries, keys) = (self.heads * self.head_width, self.kv_heads * self.head_width);
        let wide = if self.is_llama { 3 } else { 2 } * self.feed_forward;
        // The input of the projection after attention is a copy of the output: its heads lie together.
        let attention = 3 * queries + 2 * keys + self.heads;
        unit.attention_width = queries;
        unit.saved_elements = 4 * self.hidden + attention + wide;
        unit.input_elements = self.hidden;
        // Of each block the input of the norm, and that of the first linear layer.
        (unit.residual_elements, unit.gathered_elements) = (2 * self.hidden, 2 * self.hidden);
        (unit.tensor_exchanges, unit.exchanged_elements) = (2, self.hidden);
        (unit.key_value_elements, unit.key_value_heads) = (2 * keys, self.kv_heads);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of parameters of Hugging Face's models.
    #[test]
    fn shapes_have_the_published_numbers_of_parameters() {
        for (name, params) in [
            ("gpt2", 124_439_808),
            ("gpt2-xl", 1_557_611_200),
            ("llama2-7b", 6_738_415_616),
            ("llama2-13b", 13_015_864_320),
            ("llama3-8b", 8_030_261_248),
            ("llama3-70b", 70_553_706_496),
            ("llama3-405b", 405_853_388_800),
        ] {
            let shape = Transformer::named(name).unwrap().shape(name);
            assert_eq!(shape.num_params(), params, "{name}");
        }
        let error = Transformer::named("llama9").unwrap_err().to_string();
        assert!(error.contains("llama9") && error.contains("llama3-8b"), "{error}");
    }
}
