//! Burn's optimizers that need whole matrices.

use burn::module::ParamGroup;
use burn::optim::decay::WeightDecayConfig;
use burn::optim::{AdafactorConfig, AdamWConfig, LambConfig, ModuleOptimizer, MuonConfig};

pub fn lamb() -> ModuleOptimizer {
    LambConfig::new().with_weight_decay(0.1).init()
}

pub fn adafactor() -> ModuleOptimizer {
    AdafactorConfig::new().with_weight_decay(0.1).init()
}

/// Muon for the matrices of the blocks, AdamW for all other parameters.
pub fn muon() -> ModuleOptimizer {
    let decay = Some(WeightDecayConfig::new(0.1));
    let blocks = ParamGroup::from_regex(r"^blocks\.\d+\.(up|down)\.weight$").unwrap();
    let muon = MuonConfig::new().with_weight_decay(decay).build();
    AdamWConfig::new().init().with_group(blocks, muon, None)
}

type Named = (&'static str, fn() -> ModuleOptimizer);

pub const OPTIMIZERS: [Named; 3] = [("LAMB", lamb), ("Adafactor", adafactor), ("Muon", muon)];
