//! From a [`Config`] to the runtime's options. What the runtime cannot do yet is an error here.

use burn::tensor::FloatDType;

use super::error::{ConfigError, Problem, ProblemKind};
use super::nearest::nearest;
use super::{AutoWrapPolicy, Config, DEFAULT_MIN_NUM_PARAMS};
use crate::launch::LaunchOptions;
use crate::module::{FsdpModule, Node};
use crate::options::MixedPrecisionPolicy;
use crate::options::{ActivationCheckpointing, FsdpOptions, OffloadPolicy, WrapPolicy};

impl Config {
    /// The options to shard a model of type `M` with. Keys the file leaves out keep the defaults of
    /// [`FsdpOptions`].
    ///
    /// # Errors
    ///
    /// [`ConfigError::Invalid`] with every name in `fsdp_transformer_layer_cls_to_wrap` that is no
    /// unit of `M`, and every option that the runtime does not have.
    pub fn options<M: FsdpModule>(&self) -> Result<FsdpOptions, ConfigError> {
        self.options_for(Some(&M::LAYOUT))
    }

    /// Whether the runtime has every option that the file asks for. Names of units are left to
    /// [`options`](Self::options), which knows the model.
    ///
    /// # Errors
    ///
    /// As [`options`](Self::options).
    pub fn check(&self) -> Result<(), ConfigError> {
        self.options_for(None).map(drop)
    }

    pub(super) fn options_for(&self, layout: Option<&Node>) -> Result<FsdpOptions, ConfigError> {
        let mut problems = Vec::new();
        let fsdp = &self.fsdp;
        let mut made = FsdpOptions::new().with_strategy(fsdp.sharding_strategy);
        made = made.with_wrap(self.wrap(layout, &mut problems));
        // The number of processes may not be the file's.
        problems.extend(self.mesh_problem());
        if let Some(ranks) = self.shard_size() {
            made = made.with_shard_size(ranks);
        }
        if let Some(prefetch) = fsdp.backward_prefetch {
            made = made.with_backward_prefetch(prefetch);
        }
        if let Some(prefetch) = fsdp.forward_prefetch {
            made = made.with_forward_prefetch(prefetch);
        }
        if let Some(sync) = fsdp.sync_module_states {
            made = made.with_sync_module_states(sync);
        }
        if let Some(efficient) = fsdp.cpu_ram_efficient_loading {
            made = made.with_cpu_ram_efficient_loading(efficient);
        }
        if fsdp.offload_params {
            made = made.with_offload(OffloadPolicy::Params { pin_memory: true });
        }
        if fsdp.activation_checkpointing {
            made = made.with_activation_checkpointing(ActivationCheckpointing::All);
        }
        match self.mixed_precision.param_dtype() {
            Some(FloatDType::F32) => {}
            Some(dtype) => {
                let policy = MixedPrecisionPolicy::new().with_param_dtype(dtype);
                // As Accelerate sets it: outputs come back in f32, unless all is to be bf16.
                made = made.with_mixed_precision(
                    match self.downcast_bf16 && dtype == FloatDType::BF16 {
                        true => policy,
                        false => policy.with_output_dtype(FloatDType::F32),
                    },
                );
            }
            None => {
                let value = self.mixed_precision.name();
                let instead = "write `bf16`, `fp16` or `'no'`";
                problems.push(self.unsupported("mixed_precision", value, instead));
            }
        }
        self.valid(made, problems)
    }

    /// The options to start thread ranks of one process with.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Invalid`] if the file says no number of ranks, or more than one machine.
    pub fn launch_options(&self) -> Result<LaunchOptions, ConfigError> {
        let mut problems = Vec::new();
        let Some(world) = self.num_processes else {
            let kind = ProblemKind::Missing {
                key: "num_processes",
                instead: "write the number of ranks, such as `num_processes: 2`",
            };
            problems.push(Problem { line: None, kind });
            return self.valid(LaunchOptions::new(1), problems);
        };
        if self.num_machines > 1 {
            let value = self.num_machines.to_string();
            let instead = "thread ranks share one process; start one with `fsdp launch`";
            problems.push(self.unsupported("num_machines", value, instead));
        }
        let options = LaunchOptions::new(world);
        // Else the environment has the word.
        let options = if self.debug { options.with_debug(true) } else { options };
        self.valid(options, problems)
    }

    /// Ranks of a group that holds the whole model, if the file says so in either way.
    fn shard_size(&self) -> Option<usize> {
        let groups = self.fsdp.replicate.filter(|groups| *groups > 1);
        self.fsdp.shard.or_else(|| Some(self.num_processes? / groups?))
    }

    /// Whether the ranks cannot be cut into the groups that the file asks for.
    pub(super) fn mesh_problem(&self) -> Option<Problem> {
        let (groups, world) = (self.fsdp.replicate.unwrap_or(1), self.num_processes?);
        let expected = match self.fsdp.shard {
            Some(shard) if groups * shard != world => format!(
                "dp_replicate_size x dp_shard_size of `parallelism_config`, {groups} x {shard}"
            ),
            None if groups > 1 && !world.is_multiple_of(groups) => {
                format!("a multiple of dp_replicate_size of `parallelism_config`, {groups}")
            }
            _ => return None,
        };
        let (key, value) = ("num_processes".into(), world.to_string());
        let kind = ProblemKind::WrongValue { key, value, expected };
        Some(Problem { line: self.source.line("num_processes"), kind })
    }

    fn wrap(&self, layout: Option<&Node>, problems: &mut Vec<Problem>) -> WrapPolicy {
        let names = &self.fsdp.transformer_layer_cls_to_wrap;
        match self.fsdp.auto_wrap_policy {
            None | Some(AutoWrapPolicy::TransformerBased) if names.is_empty() => {
                WrapPolicy::Annotated
            }
            None | Some(AutoWrapPolicy::TransformerBased) => {
                let Some(layout) = layout else { return WrapPolicy::Annotated };
                let units = layout.unit_names();
                let mut wrapped = Vec::new();
                for name in names {
                    match units.iter().find(|unit| *unit == name) {
                        Some(unit) => wrapped.push(*unit),
                        None => problems.push(Problem {
                            line: self.source.line("fsdp_transformer_layer_cls_to_wrap"),
                            kind: ProblemKind::UnknownUnit {
                                name: name.clone(),
                                model: layout.ty,
                                nearest: nearest(name, units.iter().copied()),
                                units: units.clone(),
                            },
                        }),
                    }
                }
                // Options are constants elsewhere, so they hold a list for good.
                WrapPolicy::Named(Vec::leak(wrapped))
            }
            Some(AutoWrapPolicy::SizeBased) => WrapPolicy::SizeBased {
                min_num_params: self.fsdp.min_num_params.unwrap_or(DEFAULT_MIN_NUM_PARAMS),
            },
            Some(AutoWrapPolicy::NoWrap) => WrapPolicy::NoWrap,
        }
    }

    fn unsupported(
        &self,
        key: &'static str,
        value: impl Into<String>,
        instead: &'static str,
    ) -> Problem {
        let kind = ProblemKind::Unsupported { key, value: value.into(), instead };
        Problem { line: self.source.line(key), kind }
    }

    fn valid<T>(&self, value: T, mut problems: Vec<Problem>) -> Result<T, ConfigError> {
        if problems.is_empty() {
            return Ok(value);
        }
        problems.sort_by_key(|problem| problem.line);
        Err(ConfigError::Invalid { path: self.source.path.clone(), problems })
    }
}
