//! How ranks on GPUs find each other: each looks at its GPU and its NCCL, all hear of it, and only
//! then is a communicator made.

use std::collections::HashMap;
use std::error::Error as StdError;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::NcclGroup;
use super::communicator::{Communicator, Watch};
use super::error::NcclJoinError;
use super::lane::Lane;
use super::sys::{Library, library, ncclUniqueId};
use super::{Op, blame};
use crate::collectives::cuda::{NcclVersion, nccl_version};
use crate::collectives::store::Host;
use crate::layout::Rank;

type Boxed = Box<dyn StdError + Send + Sync>;

/// What a rank tells of itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Told {
    /// The GPU, or why it cannot be used.
    gpu: Result<[u8; 16], String>,
    nccl: (i32, i32, i32),
}

/// What a rank needs of its own.
struct Own {
    library: Arc<Library>,
    lane: Lane,
    gpu: [u8; 16],
    nccl: NcclVersion,
}

impl Own {
    fn find(gpu: usize) -> Result<Self, NcclJoinError> {
        let library = library()?;
        let nccl = nccl_version()?;
        let lane = Lane::new(gpu)?;
        let gpu = lane.uuid()?;
        Ok(Self { library, lane, gpu, nccl })
    }
}

impl NcclGroup {
    /// The group of all ranks that meet at `host`, this one with the GPU of the index `gpu`. All call
    /// it.
    pub(crate) fn world(host: Host, gpu: usize) -> Result<Self, Boxed> {
        let joined = || -> Result<Communicator, Boxed> {
            let own = ready(&host, gpu)?;
            communicator(&host, own.library, own.lane)
        };
        match joined() {
            Ok(communicator) => Ok(Self::new(host, communicator)),
            Err(error) => {
                // The others hear of it first.
                host.leave();
                Err(error)
            }
        }
    }

    /// As [`world`](Self::world), with a NCCL of the test's own.
    #[cfg(test)]
    pub(crate) fn on_host(host: Host, library: Arc<Library>) -> Result<Self, Boxed> {
        let communicator = communicator(&host, library, Lane::Host)?;
        Ok(Self::new(host, communicator))
    }
}

/// This rank's GPU and NCCL, once every rank has one.
fn ready(host: &Host, gpu: usize) -> Result<Own, Boxed> {
    let own = Own::find(gpu);
    let told = match &own {
        Ok(own) => {
            Told { gpu: Ok(own.gpu), nccl: (own.nccl.major, own.nccl.minor, own.nccl.patch) }
        }
        Err(error) => Told { gpu: Err(error.to_string()), nccl: (0, 0, 0) },
    };
    let all = host.exchange(&Op::new("all_gather", "the GPUs"), told);
    // A rank's own error says more than that the others have ended.
    let own = own?;
    agree(host.members(), &all?)?;
    Ok(own)
}

/// Makes the communicator of all.
fn communicator(host: &Host, library: Arc<Library>, lane: Lane) -> Result<Communicator, Boxed> {
    let op = Op::new("broadcast", "the identifier of NCCL");
    let own = match host.index() {
        0 => library.unique_id().map(|id| id.internal.to_vec()).map_err(|error| error.to_string()),
        _ => Ok(Vec::new()),
    };
    let told = host.exchange(&op, own)?;
    let not_ready = |reason| NcclJoinError::PeerNotReady { rank: host.members()[0], reason };
    let id = (*told[0]).clone().map_err(not_ready)?;
    let other_length = |_| not_ready("its identifier of NCCL has another length".into());
    let id = ncclUniqueId { internal: id.try_into().map_err(other_length)? };
    let (size, index) = (host.members().len(), host.index());
    let op = Op::new("all_gather", "the communicator of NCCL");
    let mut watch = Watch::of_setup(host);
    let made = Communicator::new(library, Arc::new(lane), id, size, index, &mut watch);
    let made = made.map_err(|trouble| blame(host, &op, trouble))?;
    // Nobody begins while others cannot yet be reached.
    host.exchange(&op, ())?;
    Ok(made)
}

/// Whether every rank has a GPU, each its own, and one NCCL.
fn agree(members: &[Rank], all: &[Arc<Told>]) -> Result<(), NcclJoinError> {
    let mut of_gpu = HashMap::new();
    for (&rank, told) in members.iter().zip(all) {
        match &told.gpu {
            Err(reason) => {
                return Err(NcclJoinError::PeerNotReady { rank, reason: reason.clone() });
            }
            Ok(gpu) => {
                if let Some(first) = of_gpu.insert(*gpu, rank) {
                    return Err(NcclJoinError::GpuShared { first, second: rank });
                }
            }
        }
    }
    let text = |(major, minor, patch)| NcclVersion { major, minor, patch }.to_string();
    match members.iter().zip(all).find(|(_, told)| told.nccl != all[0].nccl) {
        Some((&rank, told)) => Err(NcclJoinError::NcclDiffers {
            first: members[0],
            expected: text(all[0].nccl),
            rank,
            found: text(told.nccl),
        }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::WorldSize;

    fn told(gpu: u8) -> Told {
        Told { gpu: Ok([gpu; 16]), nccl: (2, 18, 5) }
    }

    fn agreed(all: Vec<Told>) -> Result<(), NcclJoinError> {
        let members: Vec<Rank> = WorldSize::new(all.len()).unwrap().ranks().collect();
        agree(&members, &all.into_iter().map(Arc::new).collect::<Vec<_>>())
    }

    #[test]
    fn ranks_with_a_gpu_each_and_one_nccl_agree() {
        assert_eq!(agreed(vec![told(1), told(2), told(3)]), Ok(()));
    }

    #[test]
    fn a_gpu_that_two_ranks_use_is_refused_with_both() {
        let error = agreed(vec![told(1), told(2), told(1)]).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("rank 0") && text.contains("rank 2"), "{text}");
        assert!(text.contains("engine `local`"), "{text}");
    }

    #[test]
    fn a_rank_without_a_gpu_is_named_on_every_rank() {
        let without = Told { gpu: Err("no CUDA device was found".into()), nccl: (0, 0, 0) };
        let text = agreed(vec![told(1), without]).unwrap_err().to_string();
        assert!(text.contains("rank 1") && text.contains("no CUDA device was found"), "{text}");
    }

    #[test]
    fn different_versions_are_named() {
        let later = Told { nccl: (2, 20, 3), ..told(2) };
        let text = agreed(vec![told(1), later]).unwrap_err().to_string();
        assert!(
            text.contains("2.18.5") && text.contains("rank 1") && text.contains("2.20.3"),
            "{text}"
        );
    }
}
