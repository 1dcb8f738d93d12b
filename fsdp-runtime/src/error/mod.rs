//! The errors of sharded training, one enum per concern.
//!
//! Variants carry data. Their texts say what was wrong, where, and what to do instead.

mod checkpoint;
mod collective;
#[cfg(feature = "train")]
mod learner;
mod lora;
mod not_recomputable;
mod pretrained;
mod schedule;
mod shard;
mod text;

use std::any::Any;
use std::sync::Arc;

use fsdp_kernels::InvalidNorm;

pub use self::checkpoint::CheckpointError;
pub use self::collective::CollectiveError;
#[cfg(feature = "train")]
pub use self::learner::LearnerError;
pub use self::lora::LoraError;
pub use self::not_recomputable::NotRecomputable;
pub use self::pretrained::{LoadError, SaveError};
pub use self::schedule::ScheduleError;
pub use self::shard::ShardError;
pub(crate) use self::text::{with_causes, with_sources};
use crate::layout::{Rank, WorldSize};
pub(crate) use fsdp_kernels::IgnorePoison;

/// Anything that can go wrong in sharded training.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A model that cannot be sharded.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// Adapters that cannot be attached to a model.
    #[error(transparent)]
    Lora(#[from] LoraError),
    /// A collective that did not complete.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// A unit used in a way the schedule cannot serve.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// Weights that cannot be loaded, or do not fit the model.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// Weights that cannot be written.
    #[error(transparent)]
    Save(#[from] SaveError),
    /// A checkpoint folder that cannot be written or read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A training run of Burn's `Learner` that cannot be right on a sharded model.
    #[cfg(feature = "train")]
    #[error(transparent)]
    Learner(#[from] LearnerError),
    /// A launch that ended in an error on one of its ranks.
    #[error(transparent)]
    Launch(#[from] LaunchError),
}

impl From<InvalidNorm> for ShardError {
    fn from(error: InvalidNorm) -> Self {
        Self::InvalidOption {
            option: "norm",
            value: error.exponent.to_string(),
            expected: "use an exponent above 0".into(),
        }
    }
}

impl From<InvalidNorm> for Error {
    fn from(error: InvalidNorm) -> Self {
        ShardError::from(error).into()
    }
}

/// A launch that ended in an error: the first rank that failed, and why.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{}", text(*rank, *world, machine.as_deref(), &**source))]
#[non_exhaustive]
pub struct LaunchError {
    /// The rank that failed first.
    pub rank: Rank,
    /// The number of ranks of the launch.
    pub world: WorldSize,
    /// Name of the machine of the failed rank. `None` if all ranks run on one machine, or if the
    /// ranks had not met yet.
    pub machine: Option<String>,
    /// Error that the failed rank returned, or the message of its panic.
    #[source]
    pub source: Arc<dyn std::error::Error + Send + Sync>,
}

impl LaunchError {
    /// Returns the error of a rank whose machine needs no name, or is not known.
    pub(crate) fn new(
        rank: Rank,
        world: WorldSize,
        source: impl Into<Arc<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self { rank, world, machine: None, source: source.into() }
    }

    /// Returns whether the rank failed because it ran out of memory: above the limit of
    /// [`Fsdp::set_memory_limit`](crate::Fsdp::set_memory_limit), or because the device could not
    /// allocate. It is found by the error's text, since Burn and CubeCL report it in several types.
    pub fn is_out_of_memory(&self) -> bool {
        with_sources(&*self.source).any(|error| says_out_of_memory(&error.to_string()))
    }
}

/// Returns whether a text is that of a failed allocation on a device, or of
/// [`ScheduleError::MemoryLimit`].
fn says_out_of_memory(text: &str) -> bool {
    const TEXTS: [&str; 6] = [
        "bytes on its device, above the limit of",
        "out of memory",
        "out-of-memory",
        "out_of_memory",
        "out of device memory",
        "can't allocate buffer",
    ];
    let text = text.to_lowercase();
    TEXTS.iter().any(|known| text.contains(known))
}

/// Two errors are equal where the rank, the world size, the machine and the text of the cause are.
impl PartialEq for LaunchError {
    fn eq(&self, other: &Self) -> bool {
        self.rank == other.rank
            && self.world == other.world
            && self.machine == other.machine
            && self.source.to_string() == other.source.to_string()
    }
}

/// Returns the text of a launch's error, which names the rank and the machine if there were several.
/// It is one string, so that programs that write to one terminal write it at once.
fn text(
    rank: Rank,
    world: WorldSize,
    machine: Option<&str>,
    source: &dyn std::error::Error,
) -> String {
    match machine {
        _ if world == WorldSize::ONE => source.to_string(),
        Some(machine) => format!("rank {rank} of {world} on {machine}: {source}"),
        None => format!("rank {rank} of {world}: {source}"),
    }
}

/// A rank's panic, as the error [`launch`](crate::launch()) returns for it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("panicked: {message}")]
#[non_exhaustive]
pub struct RankPanic {
    /// The panic's message.
    pub message: String,
}

/// A panic on the thread of a device, as the error [`launch`](crate::launch()) returns for it.
///
/// The device has not run an operation that it was given: what the ranks compute from then on is wrong,
/// or never comes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the thread `{thread}` of a device panicked: {message}; the run is ended, since operations of the device \
     are lost"
)]
#[non_exhaustive]
pub struct DevicePanic {
    /// Name of the thread.
    pub thread: String,
    /// The panic's message.
    pub message: String,
}

/// Ends this rank by unwinding with a typed error, from code of Burn's or the user's that cannot
/// return one.
///
/// [`Fsdp::backward`](crate::Fsdp::backward) and [`launch`](crate::launch()) catch the panic and
/// return the error. The panic hook does not run, because the program has no bug.
pub(crate) fn raise(error: Error) -> ! {
    std::panic::resume_unwind(Box::new(error))
}

/// Returns the text that a program panicked with, if it has one.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> Option<&str> {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied())
}

/// Returns the message of a panic, or the text of the [`Error`] that [`raise`] unwound with.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic_text(panic).map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<Error>().map(ToString::to_string))
        .unwrap_or_else(|| "a panic without a message".into())
}
