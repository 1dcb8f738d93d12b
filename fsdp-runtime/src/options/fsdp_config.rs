//! The options as part of a program's configuration, in Burn's way.

use std::fmt;

use burn::config::{Config, config_to_json};
use serde::{Deserialize, Serialize};

use super::fsdp_options::FsdpOptions;
use super::policies::{
    ActivationCheckpointing, BackwardPrefetch, GradientAccumulation, OffloadPolicy,
    ReshardAfterForward, ShardingStrategy, WrapPolicy,
};
use super::precision::MixedPrecisionPolicy;
use super::storage::StoragePolicy;
use crate::error::{Error, ShardError};
use crate::module::{FsdpModule, UnitType};

/// The options of [`fully_shard`](crate::fully_shard) as a Burn [`Config`], which is saved and
/// loaded with a program's other settings. Unit types are named.
///
/// Fields and defaults are those of [`FsdpOptions`], where each is explained. `ignored_params` has
/// no field, since ids of parameters change from one process to the next; add it to what
/// [`init`](Self::init) returns. A key that is no field is an error when a file is loaded.
///
/// # Example
///
/// ```
/// use burn::config::Config;
/// use burn::module::Module;
/// use burn::nn::Linear;
/// use burn::tensor::Tensor;
/// use fsdp_runtime::options::{FsdpConfig, ShardingStrategy, WrapConfig};
/// use fsdp_runtime::fsdp_unit;
///
/// #[derive(Module, Debug)]
/// #[fsdp_unit(root)]
/// pub struct Net {
///     layer: Linear,
/// }
///
/// #[fsdp_unit]
/// impl Net {
///     pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
///         self.layer.forward(x)
///     }
/// }
///
/// #[derive(Config, Debug)]
/// pub struct TrainingConfig {
///     #[config(default = 64)]
///     pub batch_size: usize,
///     pub fsdp: FsdpConfig,
/// }
///
/// # fn main() -> Result<(), fsdp_runtime::Error> {
/// let fsdp = FsdpConfig::new()
///     .with_strategy(ShardingStrategy::ShardGradOp)
///     .with_wrap(WrapConfig::Units(vec!["Net".into()]));
/// let config = TrainingConfig::new(fsdp);
/// let loaded = TrainingConfig::load_binary(config.to_string().as_bytes()).unwrap();
/// assert_eq!(loaded.fsdp, config.fsdp);
/// let options = loaded.fsdp.init::<Net>()?;
/// # let _ = options;
///
/// let misspelt = FsdpConfig::new().with_wrap(WrapConfig::Units(vec!["Nett".into()]));
/// let error = misspelt.init::<Net>().unwrap_err();
/// assert!(error.to_string().contains("`Nett`"));
/// # Ok(())
/// # }
/// ```
// Written out, since `#[derive(Config)]` drops a key that is no field, such as a misspelt one, when
// a file is loaded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FsdpConfig {
    /// Sharding strategy, in files by name, such as `FULL_SHARD`: see
    /// [`FsdpOptions::with_strategy`].
    pub strategy: ShardingStrategy,
    /// Number of ranks in a shard group: see [`FsdpOptions::with_shard_size`].
    pub shard_size: Option<usize>,
    /// Whether gathered parameters are freed after forward, where `None` leaves it to the strategy:
    /// see [`FsdpOptions::with_reshard_after_forward`].
    pub reshard_after_forward: Option<ReshardAfterForward>,
    /// Names of unit types that are resharded in another way: see
    /// [`FsdpOptions::with_reshard_after_forward_for`].
    #[serde(default)]
    pub reshard_after_forward_for: Vec<(String, ReshardAfterForward)>,
    /// Module paths of units that are resharded in another way: see
    /// [`FsdpOptions::with_reshard_after_forward_at`].
    #[serde(default)]
    pub reshard_after_forward_at: Vec<(String, ReshardAfterForward)>,
    /// Whether gathered parameters are freed after the backward of a micro-batch: see
    /// [`FsdpOptions::with_reshard_after_backward`].
    #[serde(default = "on")]
    pub reshard_after_backward: bool,
    /// Which annotated units are gathered separately: see [`FsdpOptions::with_wrap`].
    pub wrap: WrapConfig,
    /// Number of gather buffers of a nesting level: see [`FsdpOptions::with_gather_buffers`].
    pub gather_buffers: usize,
    /// Whether forward gathers the next unit early: see [`FsdpOptions::with_forward_prefetch`].
    pub forward_prefetch: bool,
    /// When a unit is gathered for its backward: see [`FsdpOptions::with_backward_prefetch`].
    pub backward_prefetch: BackwardPrefetch,
    /// Number of units that are prefetched while one computes, where `None` is 1: see
    /// [`FsdpOptions::with_units_ahead`].
    #[serde(default)]
    pub units_ahead: Option<usize>,
    /// Names of unit types, each with those to prefetch in forward: see
    /// [`FsdpOptions::with_forward_prefetch_for`].
    #[serde(default)]
    pub forward_prefetch_for: Vec<(String, Vec<String>)>,
    /// Names of unit types, each with those to prefetch in backward: see
    /// [`FsdpOptions::with_backward_prefetch_for`].
    #[serde(default)]
    pub backward_prefetch_for: Vec<(String, Vec<String>)>,
    /// Module paths of units, each with those to prefetch in forward: see
    /// [`FsdpOptions::with_forward_prefetch_at`].
    #[serde(default)]
    pub forward_prefetch_at: Vec<(String, Vec<String>)>,
    /// Module paths of units, each with those to prefetch in backward: see
    /// [`FsdpOptions::with_backward_prefetch_at`].
    #[serde(default)]
    pub backward_prefetch_at: Vec<(String, Vec<String>)>,
    /// Number of units whose gradients may be in reduction at a time, where `None` is the default
    /// of the device: see [`FsdpOptions::with_reductions_in_flight`].
    pub reductions_in_flight: Option<usize>,
    /// How the gradients of micro-batches are added up: see
    /// [`FsdpOptions::with_gradient_accumulation`].
    pub gradient_accumulation: GradientAccumulation,
    /// Number by which sums of gradients are divided, where `None` is the number of ranks: see
    /// [`FsdpOptions::with_gradient_divide_factor`].
    #[serde(default)]
    pub gradient_divide_factor: Option<f64>,
    /// Dtypes in which units compute and communicate: see [`FsdpOptions::with_mixed_precision`].
    pub mixed_precision: MixedPrecisionPolicy,
    /// Names of unit types with dtypes of their own: see [`FsdpOptions::with_mixed_precision_for`].
    pub mixed_precision_for: Vec<(String, MixedPrecisionPolicy)>,
    /// Module paths of units with dtypes of their own: see
    /// [`FsdpOptions::with_mixed_precision_at`].
    #[serde(default)]
    pub mixed_precision_at: Vec<(String, MixedPrecisionPolicy)>,
    /// Form in which parameters are stored: see [`FsdpOptions::with_storage`].
    #[serde(default)]
    pub storage: StoragePolicy,
    /// Names of unit types with a form of their own: see [`FsdpOptions::with_storage_for`].
    #[serde(default)]
    pub storage_for: Vec<(String, StoragePolicy)>,
    /// Module paths with a form of their own: see [`FsdpOptions::with_storage_at`].
    #[serde(default)]
    pub storage_at: Vec<(String, StoragePolicy)>,
    /// Block of all-gathers in 8 bits, if there are any: see [`FsdpOptions::with_quantized_gathers`].
    #[serde(default)]
    pub quantized_gathers: Option<usize>,
    /// Block of reductions in 8 bits, if there are any: see
    /// [`FsdpOptions::with_quantized_reductions`].
    #[serde(default)]
    pub quantized_reductions: Option<usize>,
    /// State that is stored in host memory: see [`FsdpOptions::with_offload`].
    pub offload: OffloadPolicy,
    /// Which units recompute their forward in backward: see
    /// [`FsdpOptions::with_activation_checkpointing`].
    pub activation_checkpointing: CheckpointingConfig,
    /// Whether recomputed units store their inputs in host memory: see
    /// [`FsdpOptions::with_offload_activations`].
    pub offload_activations: bool,
    /// Number of elements below which a matrix is replicated: see
    /// [`FsdpOptions::with_persist_below`].
    pub persist_below: usize,
    /// Whether rank 0 broadcasts its weights: see [`FsdpOptions::with_sync_module_states`].
    pub sync_module_states: bool,
    /// Whether only one rank initialises a parameter: see
    /// [`FsdpOptions::with_cpu_ram_efficient_loading`].
    pub cpu_ram_efficient_loading: bool,
    /// Whether no rank initialises parameters: see [`FsdpOptions::with_deferred_init`].
    pub deferred_init: bool,
    /// Seed of initialisation and dropout: see [`FsdpOptions::with_seed`].
    pub seed: Option<u64>,
    /// Whether the first steps check the optimizer: see [`FsdpOptions::with_optimizer_check`].
    pub optimizer_check: bool,
}

impl Config for FsdpConfig {}

/// Returns the default of options that are on.
fn on() -> bool {
    true
}

impl fmt::Display for FsdpConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&config_to_json(self))
    }
}

impl Default for FsdpConfig {
    fn default() -> Self {
        Self::new()
    }
}

/// Implements a setter for each field.
macro_rules! setters {
    ($($with:ident: $field:ident: $ty:ty,)+) => {$(
        #[doc = concat!("Sets [`", stringify!($field), "`](Self::", stringify!($field), ").")]
        pub fn $with(mut self, $field: $ty) -> Self {
            self.$field = $field;
            self
        }
    )+};
}

impl FsdpConfig {
    /// Returns the defaults, which are those of [`FsdpOptions`].
    pub fn new() -> Self {
        Self {
            strategy: ShardingStrategy::FullShard,
            shard_size: None,
            reshard_after_forward: None,
            reshard_after_forward_for: Vec::new(),
            reshard_after_forward_at: Vec::new(),
            reshard_after_backward: true,
            wrap: WrapConfig::Annotated,
            gather_buffers: 2,
            forward_prefetch: true,
            backward_prefetch: BackwardPrefetch::Pre,
            units_ahead: None,
            forward_prefetch_for: Vec::new(),
            backward_prefetch_for: Vec::new(),
            forward_prefetch_at: Vec::new(),
            backward_prefetch_at: Vec::new(),
            reductions_in_flight: None,
            gradient_accumulation: GradientAccumulation::ReduceEach,
            gradient_divide_factor: None,
            mixed_precision: MixedPrecisionPolicy::new(),
            mixed_precision_for: Vec::new(),
            mixed_precision_at: Vec::new(),
            storage: StoragePolicy::new(),
            storage_for: Vec::new(),
            storage_at: Vec::new(),
            quantized_gathers: None,
            quantized_reductions: None,
            offload: OffloadPolicy::None,
            activation_checkpointing: CheckpointingConfig::Annotated,
            offload_activations: false,
            persist_below: 0,
            sync_module_states: true,
            cpu_ram_efficient_loading: true,
            deferred_init: false,
            seed: None,
            optimizer_check: true,
        }
    }

    setters! {
        with_strategy: strategy: ShardingStrategy,
        with_shard_size: shard_size: Option<usize>,
        with_reshard_after_forward: reshard_after_forward: Option<ReshardAfterForward>,
        with_reshard_after_forward_for: reshard_after_forward_for: Vec<(String, ReshardAfterForward)>,
        with_reshard_after_forward_at: reshard_after_forward_at: Vec<(String, ReshardAfterForward)>,
        with_reshard_after_backward: reshard_after_backward: bool,
        with_wrap: wrap: WrapConfig,
        with_gather_buffers: gather_buffers: usize,
        with_forward_prefetch: forward_prefetch: bool,
        with_backward_prefetch: backward_prefetch: BackwardPrefetch,
        with_units_ahead: units_ahead: Option<usize>,
        with_forward_prefetch_for: forward_prefetch_for: Vec<(String, Vec<String>)>,
        with_backward_prefetch_for: backward_prefetch_for: Vec<(String, Vec<String>)>,
        with_forward_prefetch_at: forward_prefetch_at: Vec<(String, Vec<String>)>,
        with_backward_prefetch_at: backward_prefetch_at: Vec<(String, Vec<String>)>,
        with_reductions_in_flight: reductions_in_flight: Option<usize>,
        with_gradient_accumulation: gradient_accumulation: GradientAccumulation,
        with_gradient_divide_factor: gradient_divide_factor: Option<f64>,
        with_mixed_precision: mixed_precision: MixedPrecisionPolicy,
        with_mixed_precision_for: mixed_precision_for: Vec<(String, MixedPrecisionPolicy)>,
        with_mixed_precision_at: mixed_precision_at: Vec<(String, MixedPrecisionPolicy)>,
        with_storage: storage: StoragePolicy,
        with_storage_for: storage_for: Vec<(String, StoragePolicy)>,
        with_storage_at: storage_at: Vec<(String, StoragePolicy)>,
        with_quantized_gathers: quantized_gathers: Option<usize>,
        with_quantized_reductions: quantized_reductions: Option<usize>,
        with_offload: offload: OffloadPolicy,
        with_activation_checkpointing: activation_checkpointing: CheckpointingConfig,
        with_offload_activations: offload_activations: bool,
        with_persist_below: persist_below: usize,
        with_sync_module_states: sync_module_states: bool,
        with_cpu_ram_efficient_loading: cpu_ram_efficient_loading: bool,
        with_deferred_init: deferred_init: bool,
        with_seed: seed: Option<u64>,
        with_optimizer_check: optimizer_check: bool,
    }
}

/// Which annotated units are gathered separately: a [`WrapPolicy`] that has unit types by name.
#[derive(Config, Debug, PartialEq)]
pub enum WrapConfig {
    /// Selects all annotated units: [`WrapPolicy::Annotated`].
    Annotated,
    /// Selects units of the types with the given names: [`WrapPolicy::TransformerBased`].
    Units(Vec<String>),
    /// Selects units with at least the given number of parameters: [`WrapPolicy::SizeBased`].
    SizeBased(usize),
    /// Selects only the outermost unit: [`WrapPolicy::NoWrap`].
    NoWrap,
}

/// Which units are recomputed: an [`ActivationCheckpointing`] that has unit types by name.
#[derive(Config, Debug, PartialEq)]
pub enum CheckpointingConfig {
    /// Recomputes no unit: [`ActivationCheckpointing::None`].
    None,
    /// Recomputes the units under `#[fsdp_unit(checkpoint)]`:
    /// [`ActivationCheckpointing::Annotated`].
    Annotated,
    /// Recomputes units of the types with the given names: [`ActivationCheckpointing::Units`].
    Units(Vec<String>),
    /// Recomputes all units but the outermost: [`ActivationCheckpointing::All`].
    All,
}

impl FsdpConfig {
    /// Returns the options for a model of type `M`.
    ///
    /// # Errors
    ///
    /// [`ShardError::InvalidOption`] with the first name that is not a unit of `M`, and the names
    /// of its units.
    pub fn init<M: FsdpModule>(&self) -> Result<FsdpOptions, Error> {
        let units = M::LAYOUT.unit_names();
        let named = |option: &'static str, name: &str| {
            let found = units.iter().copied().find(|unit| *unit == name);
            found.ok_or_else(|| ShardError::InvalidOption {
                option,
                value: format!("`{name}`"),
                expected: format!("use a unit of `{}`: {}", M::LAYOUT.ty, units.join(", ")),
            })
        };
        // Options hold `'static` lists, so that they can be constants. These lists are small, and a
        // program makes its options once.
        let wrap = match &self.wrap {
            WrapConfig::Annotated => WrapPolicy::Annotated,
            WrapConfig::Units(names) => {
                let names = names.iter().map(|name| named("wrap", name));
                WrapPolicy::Named(Vec::leak(names.collect::<Result<_, _>>()?))
            }
            WrapConfig::SizeBased(min_num_params) => {
                WrapPolicy::SizeBased { min_num_params: *min_num_params }
            }
            WrapConfig::NoWrap => WrapPolicy::NoWrap,
        };
        let checkpointing = match &self.activation_checkpointing {
            CheckpointingConfig::None => ActivationCheckpointing::None,
            CheckpointingConfig::Annotated => ActivationCheckpointing::Annotated,
            CheckpointingConfig::Units(names) => {
                let option = "activation_checkpointing";
                let names = names.iter().map(|name| named(option, name).map(UnitType::named));
                ActivationCheckpointing::Units(Vec::leak(names.collect::<Result<_, _>>()?))
            }
            CheckpointingConfig::All => ActivationCheckpointing::All,
        };
        let unit = |option: &'static str, name: &str| named(option, name).map(UnitType::named);
        Ok(FsdpOptions {
            strategy: self.strategy,
            shard_size: self.shard_size,
            reshard_after_forward: self.reshard_after_forward,
            reshard_after_forward_for: of_units(&self.reshard_after_forward_for, |name| {
                unit("reshard_after_forward_for", name)
            })?,
            reshard_after_forward_at: self.reshard_after_forward_at.clone(),
            reshard_after_backward: self.reshard_after_backward,
            wrap,
            gather_buffers: self.gather_buffers,
            forward_prefetch: self.forward_prefetch,
            backward_prefetch: self.backward_prefetch,
            units_ahead: self.units_ahead,
            forward_prefetch_for: prefetched(&self.forward_prefetch_for, |name| {
                unit("forward_prefetch_for", name)
            })?,
            backward_prefetch_for: prefetched(&self.backward_prefetch_for, |name| {
                unit("backward_prefetch_for", name)
            })?,
            forward_prefetch_at: self.forward_prefetch_at.clone(),
            backward_prefetch_at: self.backward_prefetch_at.clone(),
            reductions_in_flight: self.reductions_in_flight,
            gradient_accumulation: self.gradient_accumulation,
            gradient_divide_factor: self.gradient_divide_factor,
            mixed_precision: self.mixed_precision,
            mixed_precision_for: of_units(&self.mixed_precision_for, |name| {
                unit("mixed_precision_for", name)
            })?,
            mixed_precision_at: self.mixed_precision_at.clone(),
            storage: self.storage,
            storage_for: of_units(&self.storage_for, |name| unit("storage_for", name))?,
            storage_at: self.storage_at.clone(),
            quantized_gathers: self.quantized_gathers,
            quantized_reductions: self.quantized_reductions,
            offload: self.offload,
            activation_checkpointing: checkpointing,
            offload_activations: self.offload_activations,
            ignored_params: Vec::new(),
            persist_below: self.persist_below,
            sync_module_states: self.sync_module_states,
            cpu_ram_efficient_loading: self.cpu_ram_efficient_loading,
            deferred_init: self.deferred_init,
            seed: self.seed,
            optimizer_check: self.optimizer_check,
        })
    }
}

/// Returns the settings of units, whose types `find` finds by name.
fn of_units<T: Copy>(
    named: &[(String, T)],
    find: impl Fn(&str) -> Result<UnitType, ShardError>,
) -> Result<Vec<(UnitType, T)>, ShardError> {
    named.iter().map(|(name, setting)| Ok((find(name)?, *setting))).collect()
}

/// Returns the lists of units to prefetch, whose types `find` finds by name.
fn prefetched(
    named: &[(String, Vec<String>)],
    find: impl Fn(&str) -> Result<UnitType, ShardError>,
) -> Result<Vec<(UnitType, Vec<UnitType>)>, ShardError> {
    let list = |(name, ahead): &(String, Vec<String>)| {
        let ahead = ahead.iter().map(|name| find(name)).collect::<Result<_, _>>()?;
        Ok((find(name)?, ahead))
    };
    named.iter().map(list).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_those_of_the_options() {
        let options = FsdpConfig::new().init::<burn::nn::Linear>().unwrap();
        assert_eq!(options, FsdpOptions::new());
    }

    #[test]
    fn a_key_that_is_no_field_is_an_error() {
        let config = FsdpConfig::new().with_shard_size(Some(2)).with_seed(Some(7));
        let text = config.to_string();
        assert_eq!(FsdpConfig::load_binary(text.as_bytes()).unwrap(), config);

        let misspelt = text.replace("\"shard_size\"", "\"shard_sise\"");
        let error = FsdpConfig::load_binary(misspelt.as_bytes()).unwrap_err().to_string();
        assert!(error.contains("unknown field `shard_sise`"), "{error}");
        assert!(error.contains("`shard_size`"), "{error}");
    }
}
