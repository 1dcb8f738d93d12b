//! Errors of attaching LoRA adapters.

use super::text::{lines, names};

/// A configuration of LoRA that does not fit the model.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LoraError {
    /// A rank of 0.
    #[error("the LoRA rank is 0; it must be at least 1")]
    Rank,
    /// An alpha that is not a finite number above 0.
    #[error("the LoRA alpha is {alpha}; it must be a finite number above 0")]
    Alpha {
        /// The value that was given.
        alpha: f64,
    },
    /// A dropout outside of `[0, 1)`.
    #[error("the LoRA dropout is {prob}; it must be at least 0 and less than 1")]
    Dropout {
        /// The probability that was given.
        prob: f64,
    },
    /// A dropout of layers that add an adapter to their weight, and so have no input of the adapter.
    #[error(
        "LoRA dropout needs layers of `fsdp_runtime::nn::Linear`; these, with `*` for an index, are \
         `burn::nn::Linear`, which adds an adapter to its weight:{}",
        lines(layers)
    )]
    DropoutLayers {
        /// The layers, each by its path, and by its checkpoint key where that differs.
        layers: Vec<String>,
    },
    /// A pattern of layers with another rank or alpha that cannot be used.
    #[error("`{setting}` has `{pattern}`, which {reason}")]
    Pattern {
        /// Name of the setting, as in PEFT.
        setting: &'static str,
        /// The pattern.
        pattern: String,
        /// Description of the fault.
        reason: String,
    },
    /// A pattern that matches no layer with an adapter.
    #[error(
        "`{setting}` has `{pattern}`, which matches no layer with an adapter; these layers, with `*` for \
         an index, have one:{}",
        lines(candidates)
    )]
    UnmatchedPattern {
        /// Name of the setting, as in PEFT.
        setting: &'static str,
        /// The pattern.
        pattern: String,
        /// Layers with adapters, each by its path, and by its checkpoint key where that differs.
        candidates: Vec<String>,
    },
    /// Target modules that name no linear layer, or unit types that have none.
    #[error(
        "no linear layer matches {}; the model's linear layers, with `*` for an index:{}",
        names(targets),
        lines(candidates)
    )]
    Targets {
        /// Names of target modules, or of unit types, that match nothing.
        targets: Vec<String>,
        /// Linear layers that could have adapters, each by its path, and by its checkpoint key
        /// where that differs.
        candidates: Vec<String>,
    },
    /// Numbers of blocks in which no target lies.
    #[error(
        "`layers_to_transform` has {missing:?}; the numbers of the blocks with target modules are {found:?}"
    )]
    LayersToTransform {
        /// The numbers that no block with a target has.
        missing: Vec<usize>,
        /// The numbers of the blocks with targets.
        found: Vec<usize>,
    },
    /// Modules to save that name no module.
    #[error(
        "no module matches {} of the modules to save; the model's modules, with `*` for an index:{}",
        names(modules),
        lines(candidates)
    )]
    ModulesToSave {
        /// Names of modules to save that match nothing.
        modules: Vec<String>,
        /// Modules with parameters, each by its path, and by its checkpoint key where that differs.
        candidates: Vec<String>,
    },
    /// Excluded modules that name no module.
    #[error(
        "no module matches {} of the excluded modules; the model's modules, with `*` for an index:{}",
        names(modules),
        lines(candidates)
    )]
    ExcludedModules {
        /// Names of excluded modules that match nothing.
        modules: Vec<String>,
        /// Modules with parameters, each by its path, and by its checkpoint key where that differs.
        candidates: Vec<String>,
    },
    /// A model that has adapters already, or that is sharded.
    #[error("`{path}` {reason}; adapters are attached once, before `fully_shard`")]
    AlreadyAttached {
        /// Module path of the parameter.
        path: String,
        /// What the parameter is already.
        reason: &'static str,
    },
}
