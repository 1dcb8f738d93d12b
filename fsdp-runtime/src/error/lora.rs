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
    /// A model that has adapters already, or that is sharded.
    #[error("`{path}` {reason}; adapters are attached once, before `fully_shard`")]
    AlreadyAttached {
        /// Module path of the parameter.
        path: String,
        /// What the parameter is already.
        reason: &'static str,
    },
}
