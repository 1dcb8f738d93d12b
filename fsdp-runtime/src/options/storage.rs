//! The forms in which ranks store parameters.

use serde::{Deserialize, Serialize};

use crate::error::ShardError;
use crate::layout::StorageType;

/// The forms in which ranks store the parameters of units between uses, and send them in all-gathers.
///
/// A parameter is *frozen* if it requires no gradient when [`fully_shard`](crate::fully_shard) is
/// called, and *trained* if it does. On a device without autodiff all are frozen.
///
/// A frozen parameter that is stored in another form than f32 cannot be trained later: its use
/// after it was unfrozen is [`ScheduleError::FrozenStorage`](crate::errors::ScheduleError::FrozenStorage).
///
/// # Training in bf16
///
/// A trained parameter in bf16 has no copy in f32 between steps. An optimizer gets it in f32, one
/// parameter after the other, and the result is rounded at random: up with the probability with which
/// the mean of the rounded values is the exact value. Rounding to the nearest would lose every update
/// below half a unit of the last place. The random bits depend on the seed of
/// [`FsdpOptions::with_seed`](crate::FsdpOptions::with_seed), the number of backward passes, the
/// module path of the parameter and the position of the element in it alone. So values do not depend
/// on the number of ranks, the strategy or the wrapping, and a run that is resumed from a checkpoint
/// continues to the bit.
///
/// `F32` with a [`MixedPrecisionPolicy`](crate::options::MixedPrecisionPolicy) in bf16 is the alternative with a
/// master in f32: shards are stored in f32, and cast to bf16 for each all-gather.
///
/// ```
/// use fsdp_runtime::options::{StoragePolicy, StorageType};
/// use fsdp_runtime::FsdpOptions;
///
/// // QLoRA: the frozen base in 4 bits.
/// let options = FsdpOptions::new()
///     .with_storage(StoragePolicy::new().with_frozen(StorageType::NF4));
/// // All weights in bf16, trained or not.
/// let half = StoragePolicy::new().with_trained(StorageType::Bf16).with_frozen(StorageType::Bf16);
/// # let _ = (options, half);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[must_use]
pub struct StoragePolicy {
    trained: StorageType,
    frozen: StorageType,
}

impl StoragePolicy {
    /// Returns a policy by which all parameters are stored in f32.
    pub const fn new() -> Self {
        Self { trained: StorageType::F32, frozen: StorageType::F32 }
    }

    /// Sets the form of trained parameters: [`StorageType::F32`], the default, or
    /// [`StorageType::Bf16`]. Gradients and the optimizer's state are in f32 in either case.
    pub const fn with_trained(mut self, storage: StorageType) -> Self {
        self.trained = storage;
        self
    }

    /// Sets the form of frozen parameters. Default: [`StorageType::F32`].
    pub const fn with_frozen(mut self, storage: StorageType) -> Self {
        self.frozen = storage;
        self
    }

    /// Returns the form of parameters that are frozen, or of those that are trained.
    pub(crate) fn of(self, frozen: bool) -> StorageType {
        if frozen { self.frozen } else { self.trained }
    }

    /// Checks the block sizes, and that trained parameters have no codes.
    pub(crate) fn check(self) -> Result<(), ShardError> {
        let invalid = |storage: StorageType, expected: &str| ShardError::InvalidOption {
            option: "storage",
            value: storage.to_string(),
            expected: expected.into(),
        };
        if self.trained.is_coded() {
            let expected = "store trained parameters in f32 or bf16, and only frozen ones in codes";
            return Err(invalid(self.trained, expected));
        }
        match self.frozen.wrong_block() {
            Some(expected) => Err(invalid(self.frozen, expected)),
            None => Ok(()),
        }
    }
}
