//! The engine of a launch: whether ranks are threads or processes, and how they communicate.

use std::fmt;
use std::str::FromStr;

use crate::error::ShardError;

/// Form of the ranks (threads or processes), and the library by which they communicate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Engine {
    /// Chooses by the device and by how the program was started.
    ///
    /// This is `Nccl` on CUDA devices if each of several ranks has a GPU of its own. Otherwise it
    /// is `Mpi` in a program that was started as several processes, and `Local` in any other.
    #[default]
    Auto,
    /// Ranks are threads of one process.
    Local,
    /// Ranks are processes that Open MPI's `mpirun` has started. Needs the feature `mpi`.
    Mpi,
    /// Ranks are threads or processes with a GPU each and communicate over NCCL. Needs the feature
    /// `cuda`.
    Nccl,
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Local => "local",
            Self::Mpi => "mpi",
            Self::Nccl => "nccl",
        })
    }
}

impl FromStr for Engine {
    type Err = ShardError;

    fn from_str(text: &str) -> Result<Self, ShardError> {
        let known = [Self::Auto, Self::Local, Self::Mpi, Self::Nccl];
        known.into_iter().find(|engine| engine.to_string() == text).ok_or_else(|| {
            ShardError::InvalidOption {
                option: "engine",
                value: text.into(),
                expected: "use auto, local, mpi or nccl".into(),
            }
        })
    }
}
