//! Optimizers that need whole matrices, and the parameters they lead to.

use std::collections::BTreeMap;

use burn::module::ParamGroup;
use burn::optim::decay::WeightDecayConfig;
use burn::optim::{AdafactorConfig, AdamWConfig, LambConfig, ModuleOptimizer, MuonConfig};

pub fn lamb() -> ModuleOptimizer {
    LambConfig::new().with_weight_decay(0.1).init()
}

pub fn adafactor() -> ModuleOptimizer {
    AdafactorConfig::new().with_weight_decay(0.1).init()
}

/// Muon takes matrices alone, and is meant for those of the blocks; AdamW gets the rest.
pub fn muon() -> ModuleOptimizer {
    let decay = Some(WeightDecayConfig::new(0.1));
    let blocks = ParamGroup::from_regex(r"^blocks\.\d+\.(up|down)\.weight$").unwrap();
    let muon = MuonConfig::new().with_weight_decay(decay).build();
    AdamWConfig::new().init().with_group(blocks, muon, None)
}

type Named = (&'static str, fn() -> ModuleOptimizer);

pub const OPTIMIZERS: [Named; 3] = [("LAMB", lamb), ("Adafactor", adafactor), ("Muon", muon)];

pub type Parameters = BTreeMap<String, Vec<f32>>;

/// Elements equal to 1e-6, absolute or of the larger one.
pub fn assert_close(found: &Parameters, expected: &Parameters, what: &str) {
    assert!(found.keys().eq(expected.keys()));
    for (path, expected) in expected {
        for (a, b) in found[path].iter().zip(expected) {
            let scale = a.abs().max(b.abs()).max(1.0);
            assert!((a - b).abs() <= 1e-6 * scale, "{what}, `{path}`: {a} {b}");
        }
    }
}
