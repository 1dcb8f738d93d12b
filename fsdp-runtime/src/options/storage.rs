//! The forms in which ranks store parameters.

use serde::{Deserialize, Serialize};

use crate::error::ShardError;
use crate::layout::StorageType;

/// The forms in which ranks store the parameters of units between uses, and send them in all-gathers.
///
/// Parameters that are trained are stored in f32. A parameter is *frozen* if it requires no gradient
/// when [`fully_shard`](crate::fully_shard) is called. On a device without autodiff all are.
///
/// A frozen parameter that is stored in another form than f32 cannot be trained later: its use
/// after it was unfrozen is [`ScheduleError::FrozenStorage`](crate::ScheduleError::FrozenStorage).
///
/// ```
/// use fsdp_runtime::{FsdpOptions, StoragePolicy, StorageType};
///
/// // QLoRA: the frozen base in 4 bits.
/// let options = FsdpOptions::new()
///     .with_storage(StoragePolicy::new().with_frozen(StorageType::NF4));
/// # let _ = options;
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[must_use]
pub struct StoragePolicy {
    frozen: StorageType,
}

impl StoragePolicy {
    /// Returns a policy by which all parameters are stored in f32.
    pub const fn new() -> Self {
        Self { frozen: StorageType::F32 }
    }

    /// Sets the form of frozen parameters. Default: [`StorageType::F32`].
    pub const fn with_frozen(mut self, storage: StorageType) -> Self {
        self.frozen = storage;
        self
    }

    /// Returns the form of frozen parameters.
    pub(crate) fn frozen(self) -> StorageType {
        self.frozen
    }

    /// Checks the block sizes.
    pub(crate) fn check(self) -> Result<(), ShardError> {
        let Some(expected) = self.frozen.wrong_block() else { return Ok(()) };
        Err(ShardError::InvalidOption {
            option: "storage",
            value: self.frozen.to_string(),
            expected: expected.into(),
        })
    }
}
