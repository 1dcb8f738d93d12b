//! The configuration file: Accelerate's, key for key.
//!
//! A file that `accelerate config` wrote for FSDP is read as it is. Keys that mean nothing here come
//! back as [`Note`]s; unknown keys and values are errors that name the line and the nearest right
//! one, all of them at once. `fsdp-runtime/docs/config.md` lists every key.
//!
//! This file owns the [`Config`]; `keys.rs` names the keys, `read.rs` and `write.rs` go between
//! the two, and `options.rs` makes runtime options of it.

mod error;
mod keys;
mod nearest;
mod options;
mod read;
#[cfg(test)]
mod tests;
mod values;
mod write;
mod yaml;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

pub use error::{ConfigError, Note, Problem, ProblemKind};
pub use values::{AutoWrapPolicy, MixedPrecision, StateDictType};

use crate::launch::env::RankEnv;
use crate::options::{BackwardPrefetch, ShardingStrategy};

/// The variable in which `fsdp launch` tells a program which configuration file to read.
pub const CONFIG_VARIABLE: &str = "FSDP_CONFIG";

pub use crate::launch::DEBUG_VARIABLE;

/// `fsdp_min_num_params` where the file has none: Accelerate's default.
pub const DEFAULT_MIN_NUM_PARAMS: usize = 100_000_000;

/// How a program is started and its model sharded, under Accelerate's names.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// `num_processes`: ranks on all machines together.
    pub num_processes: Option<usize>,
    /// `num_machines`.
    pub num_machines: usize,
    /// `machine_rank`: this machine's number, counted from 0.
    pub machine_rank: usize,
    /// `main_process_ip`: name or address of the machine of rank 0.
    pub main_process_ip: Option<String>,
    /// `main_process_port`: the port at which ranks meet there; `None` for any that is free.
    pub main_process_port: Option<u16>,
    /// `gpu_ids`: the GPUs of this machine to use, as `CUDA_VISIBLE_DEVICES` takes them; `None` for
    /// all.
    pub gpu_ids: Option<String>,
    /// `mpirun_config`: ranks are started by `mpirun`.
    pub mpirun: Option<MpirunConfig>,
    /// `use_cpu`: no GPU, even where there is one.
    pub use_cpu: bool,
    /// `debug`: every collective is compared across ranks before it runs.
    pub debug: bool,
    /// `mixed_precision`.
    pub mixed_precision: MixedPrecision,
    /// `downcast_bf16`: under `mixed_precision: bf16` outputs stay in bf16 as well.
    pub downcast_bf16: bool,
    /// `fsdp_config`.
    pub fsdp: FsdpConfig,
    source: Source,
}

/// How `mpirun` is called: the keys under `mpirun_config`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MpirunConfig {
    /// `mpirun_hostfile`: the machines and their places; `None` for this machine, or those of the
    /// batch system.
    pub hostfile: Option<PathBuf>,
}

/// How the model is sharded: the keys under `fsdp_config`. `None` leaves the choice to the runtime.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct FsdpConfig {
    /// `fsdp_sharding_strategy`, or what `fsdp_reshard_after_forward` says in its place.
    pub sharding_strategy: ShardingStrategy,
    /// `fsdp_auto_wrap_policy`.
    pub auto_wrap_policy: Option<AutoWrapPolicy>,
    /// `fsdp_transformer_layer_cls_to_wrap`: names of unit types; empty for all of them.
    pub transformer_layer_cls_to_wrap: Vec<String>,
    /// `fsdp_min_num_params`: elements, for `SIZE_BASED_WRAP`.
    pub min_num_params: Option<usize>,
    /// `fsdp_backward_prefetch`, in older files `fsdp_backward_prefetch_policy`.
    pub backward_prefetch: Option<BackwardPrefetch>,
    /// `fsdp_forward_prefetch`.
    pub forward_prefetch: Option<bool>,
    /// `fsdp_offload_params`: fragments rest on the host.
    pub offload_params: bool,
    /// `fsdp_activation_checkpointing`: all units but the outermost recompute their activations in
    /// backward; otherwise those under `#[fsdp_unit(checkpoint)]`.
    pub activation_checkpointing: bool,
    /// `fsdp_state_dict_type`.
    pub state_dict_type: Option<StateDictType>,
    /// `fsdp_cpu_ram_efficient_loading`: one rank initialises a weight, the others receive it.
    pub cpu_ram_efficient_loading: Option<bool>,
    /// `fsdp_sync_module_states`: rank 0's weights are broadcast.
    pub sync_module_states: Option<bool>,
    /// `parallelism_config_dp_replicate_size`: groups of ranks that hold the whole model each.
    pub replicate: Option<usize>,
    /// `parallelism_config_dp_shard_size`: ranks of such a group.
    pub shard: Option<usize>,
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
            fsdp: FsdpConfig::default(),
            source: Source::default(),
        }
    }
}

impl Default for FsdpConfig {
    fn default() -> Self {
        Self {
            sharding_strategy: ShardingStrategy::FullShard,
            auto_wrap_policy: None,
            transformer_layer_cls_to_wrap: Vec::new(),
            min_num_params: None,
            backward_prefetch: None,
            forward_prefetch: None,
            offload_params: false,
            activation_checkpointing: false,
            state_dict_type: None,
            cpu_ram_efficient_loading: None,
            sync_module_states: None,
            replicate: None,
            shard: None,
        }
    }
}

/// Where the keys stood, for later errors. Not part of a configuration's value.
#[derive(Clone, Debug, Default)]
struct Source {
    path: PathBuf,
    lines: BTreeMap<&'static str, usize>,
}

impl PartialEq for Source {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Source {
    fn line(&self, key: &str) -> Option<usize> {
        self.lines.get(key).copied()
    }
}

impl Config {
    /// Reads a file.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Read`], [`ConfigError::Syntax`], or [`ConfigError::Invalid`] with every
    /// unknown key, unknown value and contradiction.
    pub fn read(path: impl AsRef<Path>) -> Result<(Self, Vec<Note>), ConfigError> {
        let path = path.as_ref();
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.into(), source })?;
        Self::parse(&text, path)
    }

    /// Reads the text of a file; `path` names it in errors.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub fn parse(text: &str, path: impl AsRef<Path>) -> Result<(Self, Vec<Note>), ConfigError> {
        read::read(text, path.as_ref())
    }

    /// Reads the file that `fsdp launch` names in [`CONFIG_VARIABLE`]; `None` if it names none.
    /// `num_processes` is the number that the launcher has started, as its flags override the file.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub fn from_env() -> Result<Option<(Self, Vec<Note>)>, ConfigError> {
        Self::from_variables(|name| std::env::var_os(name))
    }

    fn from_variables(
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Option<(Self, Vec<Note>)>, ConfigError> {
        let Some(path) = variable(CONFIG_VARIABLE).filter(|path| !path.is_empty()) else {
            return Ok(None);
        };
        let (mut config, notes) = Self::read(PathBuf::from(path))?;
        // Variables that make no sense are for whoever asks for the rank to report.
        if let Ok(Some(place)) = RankEnv::from_variables(variable) {
            config.num_processes = Some(place.world.size());
        }
        Ok(Some((config, notes)))
    }

    /// Writes a file that Accelerate reads as well. Its directory is made if need be.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Write`].
    pub fn write(&self, path: impl AsRef<Path>) -> Result<(), ConfigError> {
        let path = path.as_ref();
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        directory
            .map_or(Ok(()), std::fs::create_dir_all)
            .and_then(|()| std::fs::write(path, self.to_yaml()))
            .map_err(|source| ConfigError::Write { path: path.into(), source })
    }

    /// The text of a file that Accelerate reads as well.
    pub fn to_yaml(&self) -> String {
        write::to_yaml(self)
    }
}
