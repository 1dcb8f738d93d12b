//! Forming the process group of all ranks: each rank checks its GPU and its NCCL, all ranks compare
//! the results, and only then is a communicator formed.

use std::collections::HashMap;
use std::error::Error as StdError;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::communicator::NcclCommunicator;
use super::error::NcclJoinError;
use super::group::NcclGroup;
use super::in_flight::InFlight;
use super::stream::Gpu;
use super::sys::{Library, library, ncclUniqueId};
use super::watch::Watch;
use crate::collectives::cuda::{NCCL_STREAM_VARIABLE, NcclVersion, nccl_version};
use crate::collectives::op::Op;
use crate::collectives::store::HostGroup;
use crate::layout::Rank;

type Boxed = Box<dyn StdError + Send + Sync>;

/// Variable that lets ranks share a GPU if it is `1`. NCCL takes them for ranks of several machines if
/// each has another `NCCL_HOSTID`. For tests on a machine with one GPU.
const SHARED_GPU_VARIABLE: &str = "FSDP_NCCL_TEST_SHARED_GPU";

/// Report of a rank to the others before they form a communicator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct RankReport {
    /// Unique identifier of the rank's GPU, or why the rank cannot use it.
    gpu: Result<[u8; 16], String>,
    /// Version of the rank's NCCL.
    nccl: (i32, i32, i32),
}

/// The GPU and the NCCL of this rank.
struct RankDevice {
    library: Arc<Library>,
    gpu: Gpu,
    uuid: [u8; 16],
    nccl: NcclVersion,
}

impl RankDevice {
    /// Loads NCCL, and opens the GPU with this index.
    fn open(gpu: usize) -> Result<Self, NcclJoinError> {
        let library = library()?;
        let nccl = nccl_version()?;
        let gpu = Gpu::open(gpu)?;
        let uuid = gpu.uuid()?;
        Ok(Self { library, gpu, uuid, nccl })
    }
}

impl NcclGroup {
    /// Forms the process group of all ranks that share `host`; this rank uses the GPU with the
    /// index `gpu`. All ranks call it.
    pub(crate) fn world(host: HostGroup, gpu: usize) -> Result<Self, Boxed> {
        let is_on_stream = std::env::var(NCCL_STREAM_VARIABLE).as_deref() != Ok("0");
        let may_share_gpu = std::env::var(SHARED_GPU_VARIABLE).as_deref() == Ok("1");
        let joined = || -> Result<_, Boxed> {
            let device = open_and_compare(&host, gpu, may_share_gpu)?;
            let in_flight = is_on_stream.then(InFlight::start).transpose()?;
            Ok((form_communicator(&host, device.library, device.gpu)?, in_flight))
        };
        match joined() {
            Ok((communicator, in_flight)) => {
                // A GPU that members share has one thread, which cannot wait for itself.
                let launches_together = host.is_of_threads() && !may_share_gpu;
                Ok(Self::new(host, communicator, in_flight.map(Arc::new), launches_together))
            }
            Err(error) => {
                // Gives the other ranks time to receive the error.
                host.leave();
                Err(error)
            }
        }
    }

    /// Forms the process group of all ranks, with a NCCL that works in host memory.
    #[cfg(test)]
    pub(crate) fn on_host(
        host: HostGroup,
        library: Arc<Library>,
        is_on_stream: bool,
    ) -> Result<Self, Boxed> {
        let in_flight = is_on_stream.then(InFlight::start).transpose()?.map(Arc::new);
        let communicator = form_communicator(&host, library, Gpu::Host)?;
        let launches_together = host.is_of_threads();
        Ok(Self::new(host, communicator, in_flight, launches_together))
    }
}

/// Opens this rank's GPU and NCCL, and returns them once every rank has succeeded in doing so.
fn open_and_compare(
    host: &HostGroup,
    gpu: usize,
    may_share_gpu: bool,
) -> Result<RankDevice, Boxed> {
    let device = RankDevice::open(gpu);
    let report = match &device {
        Ok(device) => {
            let NcclVersion { major, minor, patch } = device.nccl;
            RankReport { gpu: Ok(device.uuid), nccl: (major, minor, patch) }
        }
        Err(error) => RankReport { gpu: Err(error.to_string()), nccl: (0, 0, 0) },
    };
    let reports = host.exchange(&Op::new("all_gather", "the GPUs"), report);
    // This rank's own error says more than an error of the exchange.
    let device = device?;
    compare(host.members(), &reports?, may_share_gpu)?;
    Ok(device)
}

/// Forms the communicator of all ranks.
fn form_communicator(
    host: &HostGroup,
    library: Arc<Library>,
    gpu: Gpu,
) -> Result<NcclCommunicator, Boxed> {
    let op = Op::new("broadcast", "the identifier of NCCL");
    let own_id = match host.index() {
        0 => library.unique_id().map(|id| id.internal.to_vec()).map_err(|error| error.to_string()),
        _ => Ok(Vec::new()),
    };
    let ids = host.exchange(&op, own_id)?;
    let not_ready = |reason| NcclJoinError::PeerNotReady { rank: host.members()[0], reason };
    let id = (*ids[0]).clone().map_err(not_ready)?;
    let wrong_length = |_| not_ready("its identifier of NCCL has another length".into());
    let id = ncclUniqueId { internal: id.try_into().map_err(wrong_length)? };
    let (size, index) = (host.members().len(), host.index());
    let op = Op::new("all_gather", "the communicator of NCCL");
    let mut watch = Watch::of_setup(host);
    let formed = NcclCommunicator::new(library, Arc::new(gpu), id, size, index, &mut watch);
    let formed = formed.map_err(|error| error.end_run(host, &op))?;
    // No rank starts a collective before every rank has its communicator.
    host.exchange(&op, ())?;
    Ok(formed)
}

/// Checks that every rank has a GPU, of its own unless they may share one, and that all have the same
/// version of NCCL.
fn compare(
    members: &[Rank],
    reports: &[Arc<RankReport>],
    may_share: bool,
) -> Result<(), NcclJoinError> {
    let mut user_of_gpu = HashMap::new();
    for (&rank, report) in members.iter().zip(reports) {
        match &report.gpu {
            Err(reason) => {
                return Err(NcclJoinError::PeerNotReady { rank, reason: reason.clone() });
            }
            Ok(gpu) => {
                if let Some(first) = user_of_gpu.insert(*gpu, rank)
                    && !may_share
                {
                    return Err(NcclJoinError::GpuShared { first, second: rank });
                }
            }
        }
    }
    let text = |(major, minor, patch)| NcclVersion { major, minor, patch }.to_string();
    match members.iter().zip(reports).find(|(_, report)| report.nccl != reports[0].nccl) {
        Some((&rank, report)) => Err(NcclJoinError::NcclDiffers {
            first: members[0],
            expected: text(reports[0].nccl),
            rank,
            found: text(report.nccl),
        }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::WorldSize;

    fn report(gpu: u8) -> RankReport {
        RankReport { gpu: Ok([gpu; 16]), nccl: (2, 18, 5) }
    }

    fn compared(reports: Vec<RankReport>) -> Result<(), NcclJoinError> {
        let members: Vec<Rank> = WorldSize::new(reports.len()).unwrap().ranks().collect();
        compare(&members, &reports.into_iter().map(Arc::new).collect::<Vec<_>>(), false)
    }

    #[test]
    fn ranks_with_a_gpu_each_and_one_nccl_agree() {
        assert_eq!(compared(vec![report(1), report(2), report(3)]), Ok(()));
    }

    #[test]
    fn a_gpu_that_two_ranks_use_is_refused_with_both() {
        let error = compared(vec![report(1), report(2), report(1)]).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("rank 0") && text.contains("rank 2"), "{text}");
        assert!(text.contains("engine `local`"), "{text}");
    }

    #[test]
    fn a_rank_without_a_gpu_is_named_on_every_rank() {
        let without = RankReport { gpu: Err("no CUDA device was found".into()), nccl: (0, 0, 0) };
        let text = compared(vec![report(1), without]).unwrap_err().to_string();
        assert!(text.contains("rank 1") && text.contains("no CUDA device was found"), "{text}");
    }

    #[test]
    fn different_versions_are_named() {
        let later = RankReport { nccl: (2, 20, 3), ..report(2) };
        let text = compared(vec![report(1), later]).unwrap_err().to_string();
        assert!(
            text.contains("2.18.5") && text.contains("rank 1") && text.contains("2.20.3"),
            "{text}"
        );
    }
}
