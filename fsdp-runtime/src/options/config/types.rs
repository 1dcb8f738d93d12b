//! [`Config`] and the structs it is made of.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::place::Place;
use super::section::FsdpSection;
use super::values::MixedPrecision;

/// Environment variable with the path of the configuration file. `fsdp launch` sets it for each
/// rank.
pub const CONFIG_VARIABLE: &str = "FSDP_CONFIG";

/// Value of `fsdp_min_num_params` if the file does not set it, in elements. Accelerate has the
/// same.
pub const DEFAULT_MIN_NUM_PARAMS: usize = 100_000_000;

/// Settings that start a program's ranks and shard its model, as read from a file. Fields have the
/// names of Accelerate's keys.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// `num_processes`: number of ranks on all machines together. `None` if the file leaves it
    /// open.
    pub num_processes: Option<usize>,
    /// `num_machines`: number of machines, 1 by default.
    pub num_machines: usize,
    /// `machine_rank`: number of this machine, counted from 0.
    pub machine_rank: usize,
    /// `main_process_ip`: host name or address of the machine of rank 0.
    pub main_process_ip: Option<String>,
    /// `main_process_port`: port on the machine of rank 0 to which ranks connect. `None` for the
    /// default of `fsdp launch`: any free port with one machine, 29500 with several.
    pub main_process_port: Option<u16>,
    /// `gpu_ids`: GPUs of this machine to use, in the format of `CUDA_VISIBLE_DEVICES`. `None` for
    /// all.
    pub gpu_ids: Option<String>,
    /// `mpirun_config`: options of `mpirun`. `None` if ranks are not started with `mpirun`.
    pub mpirun: Option<MpirunConfig>,
    /// `use_cpu`: compute on the CPU even if there is a GPU.
    pub use_cpu: bool,
    /// `debug`: compare every collective across ranks before it runs.
    pub debug: bool,
    /// `mixed_precision`: dtype of gathered parameters and of the computation.
    pub mixed_precision: MixedPrecision,
    /// `downcast_bf16`: with `mixed_precision: bf16`, outputs of the model stay in bf16. Otherwise
    /// they are converted to f32.
    pub downcast_bf16: bool,
    /// `fsdp_config`: how the model is sharded.
    pub fsdp: FsdpSection,
    pub(super) source: Source,
}

/// Options of `mpirun`: the keys under `mpirun_config`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MpirunConfig {
    /// `mpirun_hostfile`: file that lists the hosts and their slots. `None` for this host alone, or
    /// for the hosts of the batch system.
    pub hostfile: Option<PathBuf>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            num_processes: None,
            num_machines: 1,
            machine_rank: 0,
            main_process_ip: None,
            main_process_port: None,
            gpu_ids: None,
            mpirun: None,
            use_cpu: false,
            downcast_bf16: false,
            debug: false,
            mixed_precision: MixedPrecision::No,
            fsdp: FsdpSection::default(),
            source: Source::default(),
        }
    }
}

/// Path of the file and places of the keys, for errors that are found after reading.
#[derive(Clone, Debug, Default)]
pub(super) struct Source {
    /// Empty if there is no file.
    pub(super) path: PathBuf,
    /// Place of each key that was read.
    pub(super) places: BTreeMap<&'static str, Place>,
}

impl PartialEq for Source {
    /// Always true: two configurations with equal values are equal, wherever their keys stand.
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Source {
    /// Returns the place of a key; `None` if neither the file nor the command line has the key.
    pub(super) fn place(&self, key: &str) -> Option<Place> {
        self.places.get(key).copied()
    }
}
