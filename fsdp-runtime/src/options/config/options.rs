//! Conversion of a [`Config`] to the options of the runtime. An option that the runtime does not
//! have is an error here, not when the file is read.

use burn::tensor::FloatDType;

use super::error::{ConfigError, Note, Problem, ProblemKind};
use super::keys::CONTEXT;
use super::nearest::nearest;
use super::types::{Config, DEFAULT_MIN_NUM_PARAMS};
use super::values::{AutoWrapPolicy, StateDictType};
use crate::launch::LaunchOptions;
use crate::module::{FsdpModule, Node};
use crate::options::MixedPrecisionPolicy;
use crate::options::{ActivationCheckpointing, FsdpOptions, OffloadPolicy, WrapPolicy};

impl Config {
    /// Returns the options to shard a model of type `M` with. Keys that the file leaves out keep
    /// the defaults of [`FsdpOptions`].
    ///
    /// # Errors
    ///
    /// [`ConfigError::Invalid`] with every name in `fsdp_transformer_layer_cls_to_wrap` that is not
    /// a unit of `M`, every option that the runtime does not have, and a `parallelism_config_cp_size` above
    /// 1: see [`options_for_parts`](Self::options_for_parts).
    pub fn options<M: FsdpModule>(&self) -> Result<FsdpOptions, ConfigError> {
        let whole_rows = self.fsdp.context.filter(|ranks| *ranks > 1).map(|ranks| {
            let (key, value) = (CONTEXT.into(), ranks.to_string());
            let expected = "1, as this program passes whole rows; one that passes the parts of \
                            `Mesh::context_part` calls `options_for_parts`"
                .into();
            let kind = ProblemKind::WrongValue { key, value, expected };
            Problem { place: self.source.place(CONTEXT), kind }
        });
        self.options_unless(Some(&M::LAYOUT), whole_rows)
    }

    /// Returns the [`options`](Self::options) of a program that passes parts of rows to the model, as
    /// [`Mesh::context_part`](crate::Mesh::context_part) cuts them. `parallelism_config_cp_size` sets
    /// [`FsdpOptions::with_context_parallel`].
    ///
    /// # Errors
    ///
    /// Those of [`options`](Self::options), but that for `parallelism_config_cp_size`.
    pub fn options_for_parts<M: FsdpModule>(&self) -> Result<FsdpOptions, ConfigError> {
        self.options_for(Some(&M::LAYOUT))
    }

    /// Returns a note if `fsdp_state_dict_type` asks for another form of checkpoints than the
    /// program saves. A program that does not choose the form by
    /// [`state_dict_type`](super::FsdpSection::state_dict_type) prints it with the other notes.
    pub fn state_dict_note(&self, saved: StateDictType) -> Option<Note> {
        let (key, asked) = ("fsdp_state_dict_type", self.fsdp.state_dict_type?);
        if asked == saved {
            return None;
        }
        let instead = match asked {
            StateDictType::Full => {
                "; `state().save_pretrained(..)` and `fsdp merge` write the whole model"
            }
            StateDictType::Local | StateDictType::Sharded => "",
        };
        let (place, value) = (self.source.place(key)?, asked.to_string());
        let reason = format!("the program saves checkpoints as `{saved}`{instead}");
        Some(Note { place, key: key.into(), value, reason, off: false })
    }

    /// Checks that the runtime has every option that the file asks for. Names of units are not
    /// checked; [`options`](Self::options) checks them, because it knows the model.
    ///
    /// # Errors
    ///
    /// Those of [`options`](Self::options).
    pub fn check(&self) -> Result<(), ConfigError> {
        self.options_for(None).map(drop)
    }

    /// Returns the [`options`](Self::options) for a model with the units in `layout`. With `None`,
    /// names of units are not checked.
    pub(super) fn options_for(&self, layout: Option<&Node>) -> Result<FsdpOptions, ConfigError> {
        self.options_unless(layout, None)
    }

    /// Returns the options, unless there is a problem: the given one, or one that is found.
    fn options_unless(
        &self,
        layout: Option<&Node>,
        problem: Option<Problem>,
    ) -> Result<FsdpOptions, ConfigError> {
        let mut problems: Vec<_> = problem.into_iter().collect();
        let fsdp = &self.fsdp;
        let mut options = FsdpOptions::new().with_strategy(fsdp.sharding_strategy);
        options = options.with_wrap(self.wrap_policy(layout, &mut problems));
        // Checked again here, because the launcher may have started another number of processes
        // than the file says.
        problems.extend(self.shard_group_problem());
        if let Some(ranks) = fsdp.tensor {
            options = options.with_tensor_parallel(ranks);
        }
        if let Some(ranks) = fsdp.context {
            options = options.with_context_parallel(ranks);
        }
        if let Some(exchange) = fsdp.context_exchange {
            options = options.with_context_exchange(exchange);
        }
        if let Some(ranks) = self.shard_size() {
            options = options.with_shard_size(ranks);
        }
        options = fsdp.set_plain(options);
        if fsdp.offload_params {
            options = options.with_offload(OffloadPolicy::Params { pin_memory: true });
        }
        if fsdp.activation_checkpointing {
            options = options.with_activation_checkpointing(ActivationCheckpointing::All);
        }
        options = options.with_offload_activations(fsdp.activation_checkpointing_offload);
        match self.mixed_precision.param_dtype() {
            Some(FloatDType::F32) => {}
            Some(dtype) => options = options.with_mixed_precision(self.precision_policy(dtype)),
            None => {
                let value = self.mixed_precision.name();
                let instead = "write `bf16`, `fp16` or `'no'`";
                problems.push(self.unsupported("mixed_precision", value, instead));
            }
        }
        self.unless_invalid(options, problems)
    }

    /// Returns the options to start ranks as threads of one process with.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Invalid`] if the file has no `num_processes`, or more than one machine.
    pub fn launch_options(&self) -> Result<LaunchOptions, ConfigError> {
        let mut problems = Vec::new();
        let Some(world) = self.num_processes else {
            let kind = ProblemKind::Missing {
                key: "num_processes",
                instead: "write the number of ranks, such as `num_processes: 2`",
            };
            problems.push(Problem { place: None, kind });
            return self.unless_invalid(LaunchOptions::new(1), problems);
        };
        if self.num_machines > 1 {
            let value = self.num_machines.to_string();
            let instead = "ranks that are threads share one process; start processes with \
                           `fsdp launch`";
            problems.push(self.unsupported("num_machines", value, instead));
        }
        let options = LaunchOptions::new(world);
        // Without `debug: true`, the environment variable decides.
        let options = if self.debug { options.with_debug(true) } else { options };
        self.unless_invalid(options, problems)
    }

    /// Returns the units to gather on their own. Adds a problem for each name that is not a unit.
    fn wrap_policy(&self, layout: Option<&Node>, problems: &mut Vec<Problem>) -> WrapPolicy {
        match self.fsdp.auto_wrap_policy {
            None | Some(AutoWrapPolicy::TransformerBased) => match layout {
                Some(layout) if !self.fsdp.transformer_layer_cls_to_wrap.is_empty() => {
                    self.named_units(layout, problems)
                }
                _ => WrapPolicy::Annotated,
            },
            Some(AutoWrapPolicy::SizeBased) => WrapPolicy::SizeBased {
                min_num_params: self.fsdp.min_num_params.unwrap_or(DEFAULT_MIN_NUM_PARAMS),
            },
            Some(AutoWrapPolicy::NoWrap) => WrapPolicy::NoWrap,
        }
    }

    fn named_units(&self, layout: &Node, problems: &mut Vec<Problem>) -> WrapPolicy {
        let units = layout.unit_names();
        let mut wrapped = Vec::new();
        for name in &self.fsdp.transformer_layer_cls_to_wrap {
            match units.iter().find(|unit| *unit == name) {
                Some(unit) => wrapped.push(*unit),
                None => problems.push(Problem {
                    place: self.source.place("fsdp_transformer_layer_cls_to_wrap"),
                    kind: ProblemKind::UnknownUnit {
                        name: name.clone(),
                        model: layout.ty,
                        nearest: nearest(name, units.iter().copied()),
                        units: units.clone(),
                    },
                }),
            }
        }
        // The policy holds a `'static` list, so that options can be constants. The list is small,
        // and a program makes its options once.
        WrapPolicy::Named(Vec::leak(wrapped))
    }

    /// Returns the policy for parameters in `dtype`. As in Accelerate, outputs are converted to
    /// f32, except with `downcast_bf16`.
    fn precision_policy(&self, dtype: FloatDType) -> MixedPrecisionPolicy {
        let policy = MixedPrecisionPolicy::new().with_param_dtype(dtype);
        if self.downcast_bf16 && dtype == FloatDType::BF16 {
            policy
        } else {
            policy.with_output_dtype(FloatDType::F32)
        }
    }

    fn unsupported(
        &self,
        key: &'static str,
        value: impl Into<String>,
        instead: &'static str,
    ) -> Problem {
        let kind = ProblemKind::Unsupported { key, value: value.into(), instead };
        Problem { place: self.source.place(key), kind }
    }

    /// Returns `value` if there are no problems, otherwise the problems in the order of their
    /// lines.
    fn unless_invalid<T>(&self, value: T, mut problems: Vec<Problem>) -> Result<T, ConfigError> {
        if problems.is_empty() {
            return Ok(value);
        }
        problems.sort_by_key(|problem| problem.place);
        Err(ConfigError::Invalid { path: self.source.path.clone(), problems })
    }
}
