//! Sizes of the model: fairseq's GPT-3 family, and one that trains on a laptop.

use std::str::FromStr;

/// Sizes of a decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arch {
    /// Name, for `--arch`.
    pub name: &'static str,
    /// Name in fairseq's `--arch`.
    pub fairseq: Option<&'static str>,
    /// Number of blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Number of attention heads; a divisor of `width`.
    pub heads: usize,
    /// Number of rows of the embedding: the maximum number of kinds of word pieces.
    pub vocabulary: usize,
}

/// Number of rows of fairseq's embedding: GPT-2's word pieces and special tokens, rounded up to a
/// multiple of 8.
const FAIRSEQ_VOCABULARY: usize = 50_272;

impl Arch {
    /// All sizes. Those of GPT-3 are taken from fairseq's `transformer_lm.py`.
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

    /// Returns whether this is the size that trains in two minutes.
    pub fn is_tiny(&self) -> bool {
        self.name == Self::ALL[0].name
    }

    /// Returns the width of the feed-forward block.
    pub fn wide(&self) -> usize {
        4 * self.width
    }
}

impl FromStr for Arch {
    type Err = String;

    /// Parses a name of this program or of fairseq, which has two names for 1.3B.
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
    use crate::common::device::DeviceName;
    use crate::model::GptConfig;

    /// Counts the parameters of the unsharded model without initialising them. Burn counts the tied
    /// embedding twice.
    fn parameters(name: &str) -> usize {
        let arch: Arch = name.parse().unwrap();
        let device = DeviceName::Flex.resolve().unwrap();
        let model =
            GptConfig { arch, positions: 2048, dropout: 0.0, tanh_gelu: false }.init(&device);
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

    /// fairseq's README prints `num. model params: 13,110,865,920`. This counts the tied embedding
    /// twice, and two positions more than here, which fairseq reserves for padding.
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
    fn pytorchs_side_of_the_comparison_has_the_same_sizes() {
        let script = include_str!("../../fsdp-runtime/benches/torch_gpt.py");
        let (_, archs) = script.split_once("ARCHS = {\n").unwrap();
        let (archs, _) = archs.split_once("\n}\n").unwrap();
        let found: Vec<String> = archs.lines().map(|line| line.trim().replace('_', "")).collect();
        let expected = Arch::ALL.map(|arch| {
            let Arch { name, layers, width, heads, vocabulary, .. } = arch;
            format!("\"{name}\": ({layers}, {width}, {heads}, {vocabulary}),")
        });
        assert_eq!(found, expected);
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
