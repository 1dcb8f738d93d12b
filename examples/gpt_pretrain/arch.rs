//! The sizes a model can have: fairseq's GPT-3 family, and one that trains on a laptop.

use std::str::FromStr;

/// The shape of a decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arch {
    /// Its name here.
    pub name: &'static str,
    /// Its name in fairseq's `--arch`.
    pub fairseq: Option<&'static str>,
    /// Blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Attention heads; the width is a multiple of them.
    pub heads: usize,
    /// Rows of the embedding: the most word pieces there can be.
    pub vocabulary: usize,
}

/// The rows of fairseq's embedding: GPT-2's word pieces and special ones, filled up to a multiple of 8.
const FAIRSEQ_VOCABULARY: usize = 50_272;

impl Arch {
    /// All of them. The GPT-3 sizes are those of fairseq's `transformer_lm.py`.
    pub const ALL: [Self; 6] = [
        Self { name: "tiny", fairseq: None, layers: 2, width: 128, heads: 4, vocabulary: 512 },
        Self::gpt3("small", "transformer_lm_gpt3_small", 12, 768, 12),
        Self::gpt3("1.3B", "transformer_lm_gpt3_xl", 24, 2048, 32),
        Self::gpt3("2.7B", "transformer_lm_gpt3_2_7", 32, 2560, 32),
        Self::gpt3("6.7B", "transformer_lm_gpt3_6_7", 32, 4096, 32),
        Self::gpt3("13B", "transformer_lm_gpt3_13", 40, 5120, 40),
    ];

    const fn gpt3(
        name: &'static str,
        fairseq: &'static str,
        layers: usize,
        width: usize,
        heads: usize,
    ) -> Self {
        let vocabulary = FAIRSEQ_VOCABULARY;
        Self { name, fairseq: Some(fairseq), layers, width, heads, vocabulary }
    }

    /// Whether it is the one that trains in two minutes.
    pub fn is_tiny(&self) -> bool {
        self.fairseq.is_none()
    }

    /// Width of the feed-forward part.
    pub fn wide(&self) -> usize {
        4 * self.width
    }

    /// Bytes of what a forward over `rows` samples of `length` keeps for its backward: on the device,
    /// and in the host's memory.
    ///
    /// An estimate, counted from the operations: each block keeps about 27 vectors of the model's
    /// width a token (norms, projections, the feed-forward part at four times the width, residuals and
    /// masks) and 3 numbers a head and pair of tokens; the logits are there three times at the
    /// loss, in f32. The gradient of the output's weight comes first and stays until the embedding's
    /// joins it. A checkpointed block keeps its input alone, and one of them at a time all the rest.
    /// More than 2^60 bytes are told as so many.
    pub fn activation_bytes(&self, rows: usize, length: usize, kept: Kept) -> (usize, usize) {
        let [rows, length, element_size, width, heads, layers, vocabulary] =
            [rows, length, kept.element_size, self.width, self.heads, self.layers, self.vocabulary]
                .map(|number| number as u128);
        let of_block = 27 * width + 3 * heads * length;
        let of_blocks = match kept.blocks {
            KeptBlocks::Whole => layers * of_block,
            KeptBlocks::Inputs => layers * width + of_block,
            KeptBlocks::OnHost => of_block,
        };
        let numbers = rows * length * (of_blocks + 3 * width) + vocabulary * width;
        let logits = rows * length * 3 * vocabulary;
        let on_host = match kept.blocks {
            KeptBlocks::OnHost => rows * length * layers * width * element_size,
            _ => 0,
        };
        let bytes = |bytes: u128| bytes.min(1 << 60) as usize;
        (bytes(numbers * element_size + logits * 4), bytes(on_host))
    }
}

/// What a forward keeps for its backward.
#[derive(Clone, Copy, Debug)]
pub struct Kept {
    /// Bytes of a number.
    pub element_size: usize,
    /// What is kept of the blocks.
    pub blocks: KeptBlocks,
}

/// What is kept of the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeptBlocks {
    /// Whatever their operations keep.
    Whole,
    /// Their inputs, on the device.
    Inputs,
    /// Their inputs, in the host's memory.
    OnHost,
}

impl FromStr for Arch {
    type Err = String;

    /// By its name here or in fairseq, where 1.3B goes by two.
    fn from_str(name: &str) -> Result<Self, String> {
        let name = if name == "transformer_lm_gpt3_1_3" { "1.3B" } else { name };
        let known = |arch: &&Self| arch.name == name || arch.fairseq == Some(name);
        Self::ALL.iter().find(known).copied().ok_or_else(|| {
            let names = Self::ALL.map(|arch| arch.name).join(", ");
            format!("expected {names}, or fairseq's name such as transformer_lm_gpt3_13")
        })
    }
}

#[cfg(test)]
mod tests {
    use burn::module::Module;

    use super::*;
    use crate::device::DeviceName;
    use crate::model::GptConfig;

    /// Parameters of the unsharded model, of which no value is drawn. Burn counts the tied embedding at
    /// both of its places.
    fn parameters(name: &str) -> usize {
        let arch: Arch = name.parse().unwrap();
        let device = DeviceName::Flex.resolve().unwrap();
        let model = GptConfig { arch, positions: 2048, dropout: 0.0 }.init(&device);
        struct Count(usize);
        impl burn::module::ModuleVisitor for Count {
            fn visit_float<const D: usize>(
                &mut self,
                param: &burn::module::Param<burn::tensor::Tensor<D>>,
            ) {
                assert!(!param.is_initialized());
                self.0 += param.lazy_shape().num_elements();
            }
        }
        let mut count = Count(0);
        model.visit(&mut count);
        count.0
    }

    /// fairseq's README prints `num. model params: 13,110,865,920`: the tied embedding counted at both
    /// places, and two more positions, which its padding takes.
    #[test]
    fn the_largest_has_as_many_parameters_as_fairseqs() {
        assert_eq!(parameters("13B") + 2 * 5120, 13_110_865_920);
    }

    #[test]
    fn the_others_are_as_large_as_their_names() {
        for (name, published) in
            [("small", 125e6), ("1.3B", 1.3e9), ("2.7B", 2.7e9), ("6.7B", 6.7e9), ("13B", 13e9)]
        {
            let arch: Arch = name.parse().unwrap();
            let once = (parameters(name) - arch.vocabulary * arch.width) as f64;
            assert!((once / published - 1.0).abs() < 0.03, "{name}: {once}");
        }
    }

    #[test]
    fn fairseqs_names_are_known() {
        for (name, expected) in [
            ("transformer_lm_gpt3_xl", "1.3B"),
            ("transformer_lm_gpt3_1_3", "1.3B"),
            ("transformer_lm_gpt3_6_7", "6.7B"),
            ("tiny", "tiny"),
        ] {
            assert_eq!(name.parse::<Arch>().unwrap().name, expected);
        }
        assert!("175B".parse::<Arch>().unwrap_err().contains("13B"));
        assert!(Arch::ALL.iter().all(|arch| arch.width.is_multiple_of(arch.heads)));
    }
}
