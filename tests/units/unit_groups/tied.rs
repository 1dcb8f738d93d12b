//! A weight in two fields of a group.

use super::*;

/// A model whose weight is in two fields of a group.
#[derive(Module, Debug)]
#[fsdp_unit(root, tie("embed.weight" = "decoder"))]
struct Tied {
    #[fsdp(unit = "vocabulary")]
    embed: Embedding,
    blocks: Vec<Block>,
    #[fsdp(unit = "vocabulary")]
    output: Output,
    #[fsdp(unit = "vocabulary", key = "lm_decoder")]
    decoder: Decoder,
}

#[derive(Module, FsdpModule, Debug)]
struct Decoder {
    weight: Param<Tensor<2>>,
}

impl Decoder {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        x.matmul(self.weight.val().transpose().unsqueeze())
    }
}

#[derive(Module, FsdpModule, Debug)]
struct Output {
    norm: LayerNorm,
}

impl Output {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.norm.forward(x)
    }
}

/// The same model, with the weight in the root.
#[derive(Module, Debug)]
#[fsdp_unit(root, tie("embed.weight" = "decoder"))]
struct TiedInRoot {
    embed: Embedding,
    blocks: Vec<Block>,
    output: Output,
    decoder: Decoder,
}

macro_rules! tied {
    ($model:ident $(, $field_units:ident)?) => {
        impl $model {
            fn new(device: &Device) -> Self {
                let embed: Embedding = EmbeddingConfig::new(VOCABULARY, WIDTH).init(device);
                let decoder = Decoder { weight: embed.weight.clone() };
                let output = Output { norm: LayerNormConfig::new(WIDTH).init(device) };
                let blocks = (0..2).map(|_| block(device)).collect();
                Self { embed, blocks, output, decoder }
            }
        }

        #[fsdp_unit$(($field_units))?]
        impl $model {
            fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
                let x = self.embed.forward(tokens);
                let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
                self.decoder.forward(self.output.forward(x))
            }
        }
    };
}

tied!(Tied, field_units);
tied!(TiedInRoot);

#[test]
fn a_group_may_hold_a_tied_weight() {
    for world in [1, 2, 3] {
        let root = train(world, FsdpOptions::new(), TiedInRoot::new, TiedInRoot::forward);
        let tied = train(world, FsdpOptions::new(), Tied::new, Tied::forward);
        assert_same(&tied, &root);
        assert_eq!(tied.counts.single_gathers, 0);
        assert_eq!(tied.counts.reduce_scatters, root.counts.reduce_scatters, "one for each unit");
    }
}
