//! The choice of where ranks run: as threads or as processes, on one device or on a GPU each.

use burn::tensor::Device;

use super::engine::Engine;
use super::env::RankEnv;
use super::error::EngineError;
use super::options::NumRanks;
use crate::layout::WorldSize;

/// Location of the ranks of a launch, which also decides how they communicate.
#[derive(Clone, Debug)]
pub(super) enum RankLocation {
    /// Threads of this process, on one device.
    Threads(usize),
    /// Threads of this process, with a GPU each.
    #[cfg_attr(
        not(feature = "nccl"),
        allow(dead_code, reason = "not constructed without the engine")
    )]
    ThreadsOnGpus(usize),
    /// Processes over MPI; this process is one of them.
    #[cfg_attr(
        not(feature = "mpi"),
        allow(dead_code, reason = "not constructed without the engine")
    )]
    Process(RankEnv),
    /// Processes with a GPU each; this process is one of them.
    #[cfg_attr(
        not(feature = "nccl"),
        allow(dead_code, reason = "not constructed without the engine")
    )]
    ProcessOnGpu(RankEnv),
}

/// The device of a launch, and the GPUs that ranks can have.
#[derive(Clone, Debug)]
pub(super) struct DeviceGpus {
    /// The device's name, for errors.
    pub(super) device: String,
    /// Number of GPUs from the device's index on; `None` where the device is not a CUDA device.
    pub(super) from_here: Option<usize>,
    /// Index of the device among the machine's GPUs.
    pub(super) first: usize,
}

impl DeviceGpus {
    /// Finds the GPUs that ranks on `device` can have.
    ///
    /// # Errors
    ///
    /// [`EngineError::Cuda`] for a CUDA device that cannot be used.
    pub(super) fn of(device: &Device) -> Result<Self, EngineError> {
        let name = format!("{:?}", device.clone().inner());
        #[cfg(feature = "nccl")]
        if let Some(first) = crate::collectives::cuda::index_of(device) {
            let count = crate::collectives::cuda::device_count()?;
            crate::collectives::cuda::require_device(first)?;
            return Ok(Self { device: name, from_here: Some(count - first), first });
        }
        Ok(Self { device: name, from_here: None, first: 0 })
    }
}

impl RankLocation {
    /// Chooses the location from the options of the launch, the launcher's environment variables,
    /// and the GPUs of the machine.
    pub(super) fn new(
        engine: Engine,
        ranks: NumRanks,
        started: Option<RankEnv>,
        gpus: &DeviceGpus,
    ) -> Result<Self, EngineError> {
        let on_gpus = gpus.from_here.is_some();
        if engine == Engine::Nccl && !cfg!(feature = "nccl") {
            return Err(EngineError::NotCompiled { engine, feature: "cuda" });
        }
        if engine == Engine::Nccl && !on_gpus {
            return Err(EngineError::NotCuda { device: gpus.device.clone() });
        }
        let Some(started) = started else {
            let asked = ranks.asked();
            return match engine {
                Engine::Mpi => Err(EngineError::NotStarted { world: asked }),
                _ => Self::threads(engine, asked, gpus),
            };
        };
        let (world, launcher) = (started.world, started.launcher);
        let one = world == WorldSize::ONE;
        match engine {
            Engine::Local if !one => {
                Err(EngineError::SeveralProcesses { started: world, launcher })
            }
            // One process can run any number of thread ranks.
            Engine::Local | Engine::Auto | Engine::Nccl if one => {
                let asked = match ranks {
                    NumRanks::Exactly(asked) => asked,
                    NumRanks::StartedOr(_) => 1,
                };
                Self::threads(engine, asked, gpus)
            }
            _ => match ranks {
                NumRanks::Exactly(asked) if asked != world.size() => {
                    Err(EngineError::WorldMismatch { asked, started: world, launcher })
                }
                _ if engine != Engine::Mpi && on_gpus => Ok(Self::ProcessOnGpu(started)),
                _ if cfg!(feature = "mpi") => Ok(Self::Process(started)),
                _ if engine == Engine::Mpi => {
                    Err(EngineError::NotCompiled { engine, feature: "mpi" })
                }
                _ => {
                    let device = gpus.device.clone();
                    Err(EngineError::NoMpi { launcher, started: world, device })
                }
            },
        }
    }

    /// Chooses threads with a GPU each where there are enough GPUs, else threads on one device.
    fn threads(engine: Engine, asked: usize, gpus: &DeviceGpus) -> Result<Self, EngineError> {
        let DeviceGpus { from_here, first, .. } = *gpus;
        match (engine, from_here) {
            (Engine::Nccl, Some(gpus)) if asked > gpus => {
                Err(EngineError::TooFewGpus { ranks: asked, gpus, first })
            }
            (Engine::Nccl, _) => Ok(Self::ThreadsOnGpus(asked)),
            (Engine::Auto, Some(gpus)) if asked > 1 && asked <= gpus => {
                Ok(Self::ThreadsOnGpus(asked))
            }
            _ => Ok(Self::Threads(asked)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::env::Launcher;
    use super::*;

    fn started(world: usize) -> Option<RankEnv> {
        let world = WorldSize::new(world).unwrap();
        let rank = world.ranks().next().unwrap();
        let launcher = Launcher::OpenMpi;
        Some(RankEnv {
            rank,
            world,
            local_rank: 0,
            local_world: None,
            launcher,
            main_process: None,
        })
    }

    /// Describes a device without GPUs, or a CUDA device with this many GPUs.
    fn gpus(from_here: Option<usize>) -> DeviceGpus {
        DeviceGpus { device: "a device".into(), from_here, first: 0 }
    }

    fn location(
        engine: Engine,
        ranks: NumRanks,
        started: Option<RankEnv>,
    ) -> Result<RankLocation, EngineError> {
        RankLocation::new(engine, ranks, started, &gpus(None))
    }

    #[test]
    fn a_program_started_by_itself_runs_thread_ranks() {
        for engine in [Engine::Auto, Engine::Local] {
            let location = location(engine, NumRanks::Exactly(3), None);
            assert!(matches!(location, Ok(RankLocation::Threads(3))), "{location:?}");
        }
        let error = location(Engine::Mpi, NumRanks::Exactly(3), None).unwrap_err();
        assert!(error.to_string().contains("mpirun -n 3"), "{error}");
        let threads = location(Engine::Auto, NumRanks::Exactly(3), started(1));
        assert!(matches!(threads, Ok(RankLocation::Threads(3))), "{threads:?}");
        let threads = location(Engine::Auto, NumRanks::StartedOr(3), started(1));
        assert!(matches!(threads, Ok(RankLocation::Threads(1))), "{threads:?}");
    }

    #[test]
    fn a_world_of_another_size_than_requested_is_an_error() {
        let error = location(Engine::Auto, NumRanks::Exactly(4), started(2)).unwrap_err();
        assert!(matches!(error, EngineError::WorldMismatch { asked: 4, .. }), "{error}");
        let error = location(Engine::Local, NumRanks::Exactly(2), started(2)).unwrap_err();
        assert!(matches!(error, EngineError::SeveralProcesses { .. }), "{error}");
        let location = location(Engine::Auto, NumRanks::StartedOr(4), started(2));
        if cfg!(feature = "mpi") {
            assert!(
                matches!(&location, Ok(RankLocation::Process(env)) if env.world.size() == 2),
                "{location:?}"
            );
        } else {
            let error = location.unwrap_err().to_string();
            for part in ["2 processes", "apt-get install openmpi-bin", "--features mpi"] {
                assert!(error.contains(part), "{error}");
            }
        }
    }

    #[test]
    fn threads_get_a_gpu_each_if_there_are_enough() {
        let on = |engine, ranks, count| {
            RankLocation::new(engine, NumRanks::Exactly(ranks), None, &gpus(Some(count)))
        };
        assert!(
            matches!(on(Engine::Auto, 1, 4), Ok(RankLocation::Threads(1))),
            "one rank needs no NCCL"
        );
        assert!(matches!(on(Engine::Auto, 4, 4), Ok(RankLocation::ThreadsOnGpus(4))));
        assert!(
            matches!(on(Engine::Auto, 4, 1), Ok(RankLocation::Threads(4))),
            "the ranks share the GPU"
        );
        assert!(matches!(on(Engine::Local, 4, 4), Ok(RankLocation::Threads(4))));
        if cfg!(feature = "nccl") {
            assert!(matches!(on(Engine::Nccl, 1, 1), Ok(RankLocation::ThreadsOnGpus(1))));
            let error = on(Engine::Nccl, 4, 2).unwrap_err();
            let expected = EngineError::TooFewGpus { ranks: 4, gpus: 2, first: 0 };
            assert_eq!(error, expected);
        }
    }

    #[test]
    fn processes_on_gpus_use_nccl() {
        let on =
            |engine| RankLocation::new(engine, NumRanks::StartedOr(1), started(2), &gpus(Some(2)));
        assert!(matches!(on(Engine::Auto), Ok(RankLocation::ProcessOnGpu(_))));
        if cfg!(feature = "nccl") {
            assert!(matches!(on(Engine::Nccl), Ok(RankLocation::ProcessOnGpu(_))));
            let error = location(Engine::Nccl, NumRanks::StartedOr(1), started(2)).unwrap_err();
            assert!(matches!(error, EngineError::NotCuda { .. }), "{error}");
        } else {
            let error = location(Engine::Nccl, NumRanks::StartedOr(1), started(2)).unwrap_err();
            assert!(error.to_string().contains("--features cuda"), "{error}");
        }
    }
}
