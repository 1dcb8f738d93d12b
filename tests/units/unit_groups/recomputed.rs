//! Groups of fields in units that are recomputed.

use super::*;

/// A unit that is recomputed, with a group of its own.
#[derive(Module, Debug)]
#[fsdp_unit]
struct Pair {
    #[fsdp(unit = "both")]
    up: Linear,
    #[fsdp(unit = "both")]
    down: Linear,
    own: Linear,
}

#[fsdp_unit(field_units)]
impl Pair {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        x.clone() + self.down.forward(gelu(self.own.forward(self.up.forward(x))))
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Pairs {
    embed: Embedding,
    pairs: Vec<Pair>,
}

#[fsdp_unit]
impl Pairs {
    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let x = self.embed.forward(tokens);
        self.pairs.iter().fold(x, |x, pair| pair.forward(x))
    }
}

impl Pairs {
    fn new(device: &Device) -> Self {
        let pair = |_| Pair { up: linear(device), down: linear(device), own: linear(device) };
        let embed = EmbeddingConfig::new(VOCABULARY, WIDTH).init(device);
        Self { embed, pairs: (0..3).map(pair).collect() }
    }
}

#[test]
fn a_group_is_recomputed_with_its_unit() {
    let plain = train(2, FsdpOptions::new(), Pairs::new, Pairs::forward);
    let all = ActivationCheckpointing::All;
    let options = FsdpOptions::new().with_activation_checkpointing(all);
    let recomputed = train(2, options, Pairs::new, Pairs::forward);
    assert_same(&recomputed, &plain);
    assert_eq!(recomputed.counts.single_gathers, 0);
    // The embedding's root, three pairs and three groups.
    assert_eq!(recomputed.counts.reduce_scatters, 2 * STEPS * 7);
    assert_eq!(plain.counts.reduce_scatters, 2 * STEPS * 7);
}
