//! The options as part of a program's configuration, in Burn's way.

use std::fmt;

use burn::config::{Config, config_to_json};
use burn::tensor::FloatDType;
use serde::{Deserialize, Serialize};

use super::fsdp_options::FsdpOptions;
use super::policies::{
    ActivationCheckpointing, BackwardPrefetch, ContextExchange, GradientAccumulation,
    OffloadPolicy, ReshardAfterForward, ShardingStrategy, WrapPolicy,
};
use super::precision::MixedPrecisionPolicy;
use super::storage::StoragePolicy;
use super::table::option_rows;
use crate::error::{Error, ShardError};
use crate::module::{FsdpModule, Node, UnitType};

/// Returns the type of a field, by the kind of its row.
macro_rules! field_type {
    (by_type($ty:ty)) => { Vec<(String, $ty)> };
    (by_module($ty:ty)) => { Vec<(String, $ty)> };
    (by_path($ty:ty)) => { Vec<(String, $ty)> };
    (lists_by_type($ty:ty)) => { Vec<(String, Vec<String>)> };
    (wrap($ty:ty)) => { WrapConfig };
    (recompute($ty:ty)) => { CheckpointingConfig };
    (plain($ty:ty)) => { $ty };
}

/// Returns the default of a field, by the kind of its row: `$value` is that of [`FsdpOptions`].
macro_rules! default_of {
    (wrap = $value:expr) => {
        WrapConfig::Annotated
    };
    (recompute = $value:expr) => {
        CheckpointingConfig::Annotated
    };
    ($kind:ident = $value:expr) => {
        $value
    };
}

/// Returns the value of [`FsdpOptions`] for a field, by the kind of its row. `$types` are the [`Types`]
/// of the model, and `$option` is the name of the option.
macro_rules! value_of {
    (by_type, $field:expr, $types:expr, $option:expr) => {
        of_types(&$field, |name| $types.unit($option, name))?
    };
    (by_module, $field:expr, $types:expr, $option:expr) => {
        of_types(&$field, |name| $types.module($option, name))?
    };
    (lists_by_type, $field:expr, $types:expr, $option:expr) => {
        lists_of_types(&$field, |name| $types.unit($option, name))?
    };
    (wrap, $field:expr, $types:expr, $option:expr) => {
        $field.policy(|name| $types.unit($option, name))?
    };
    (recompute, $field:expr, $types:expr, $option:expr) => {
        $field.policy(|name| $types.unit($option, name))?
    };
    ($kind:ident, $field:expr, $types:expr, $option:expr) => {
        Clone::clone(&$field)
    };
}

/// Makes [`FsdpConfig`] of the rows of the table.
macro_rules! fsdp_config {
    ($(
        $(#[$serde:meta])*
        $vis:vis $name:ident($builder:ident): $kind:ident($ty:ty) = $value:expr, {
            help: $help:literal,
            $($rest:tt)*
        }
    )*) => {
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
        // Written out, since `#[derive(Config)]` drops a key that is no field, such as a misspelt one,
        // when a file is loaded.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct FsdpConfig {
            $(
                #[doc = concat!($help, ": see [`FsdpOptions::", stringify!($builder), "`].")]
                $(#[$serde])*
                pub $name: field_type!($kind($ty)),
            )*
        }

        impl FsdpConfig {
            /// Returns the defaults, which are those of [`FsdpOptions`].
            pub fn new() -> Self {
                Self { $($name: default_of!($kind = $value),)* }
            }

            $(
                #[doc = concat!("Sets [`", stringify!($name), "`](Self::", stringify!($name), ").")]
                pub fn $builder(mut self, $name: field_type!($kind($ty))) -> Self {
                    self.$name = $name;
                    self
                }
            )*

            /// Returns the options for a model with these types.
            fn options(&self, types: &Types) -> Result<FsdpOptions, ShardError> {
                Ok(FsdpOptions {
                    $($name: value_of!($kind, self.$name, types, stringify!($name)),)*
                    ignored_params: Vec::new(),
                })
            }
        }
    };
}
option_rows!(fsdp_config);

impl Config for FsdpConfig {}

/// Returns the default of options that count ranks.
fn one() -> usize {
    1
}

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

impl FsdpConfig {
    /// Returns the options for a model of type `M`.
    ///
    /// # Errors
    ///
    /// [`ShardError::InvalidOption`] with the first name that is not a unit of `M`, and the names
    /// of its units. For `buffer_dtype_for`, with the first name that is not a module of `M`.
    pub fn init<M: FsdpModule>(&self) -> Result<FsdpOptions, Error> {
        let Node { ty: model, .. } = M::LAYOUT;
        let (units, modules) = (M::LAYOUT.unit_names(), M::LAYOUT.type_names());
        Ok(self.options(&Types { model, units, modules })?)
    }
}

/// The names of the types in a model.
struct Types {
    /// Type name of the model.
    model: &'static str,
    units: Vec<&'static str>,
    /// All types, units included.
    modules: Vec<&'static str>,
}

impl Types {
    /// Returns the unit type with this name, which the option `option` has.
    fn unit(&self, option: &'static str, name: &str) -> Result<&'static str, ShardError> {
        self.find("unit", &self.units, option, name)
    }

    /// Returns the type with this name, which the option `option` has.
    fn module(&self, option: &'static str, name: &str) -> Result<&'static str, ShardError> {
        self.find("module", &self.modules, option, name)
    }

    fn find(
        &self,
        what: &str,
        known: &[&'static str],
        option: &'static str,
        name: &str,
    ) -> Result<&'static str, ShardError> {
        let found = known.iter().copied().find(|known| *known == name);
        found.ok_or_else(|| ShardError::InvalidOption {
            option,
            value: format!("`{name}`"),
            expected: format!("use a {what} of `{}`: {}", self.model, known.join(", ")),
        })
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

// Policies hold `'static` lists, so that options can be constants. These lists are small, and a
// program makes its options once.

impl WrapConfig {
    /// Returns the policy with the types that `find` finds by name.
    fn policy(
        &self,
        find: impl Fn(&str) -> Result<&'static str, ShardError>,
    ) -> Result<WrapPolicy, ShardError> {
        Ok(match self {
            Self::Annotated => WrapPolicy::Annotated,
            Self::Units(names) => {
                let names = names.iter().map(|name| find(name));
                WrapPolicy::Named(Vec::leak(names.collect::<Result<_, _>>()?))
            }
            Self::SizeBased(min_num_params) => {
                WrapPolicy::SizeBased { min_num_params: *min_num_params }
            }
            Self::NoWrap => WrapPolicy::NoWrap,
        })
    }
}

impl CheckpointingConfig {
    /// Returns the policy with the types that `find` finds by name.
    fn policy(
        &self,
        find: impl Fn(&str) -> Result<&'static str, ShardError>,
    ) -> Result<ActivationCheckpointing, ShardError> {
        Ok(match self {
            Self::None => ActivationCheckpointing::None,
            Self::Annotated => ActivationCheckpointing::Annotated,
            Self::Units(names) => {
                let types = names.iter().map(|name| find(name).map(UnitType::named));
                ActivationCheckpointing::Units(Vec::leak(types.collect::<Result<_, _>>()?))
            }
            Self::All => ActivationCheckpointing::All,
        })
    }
}

/// Returns the settings of units, whose types `find` finds by name.
fn of_types<T: Copy>(
    named: &[(String, T)],
    find: impl Fn(&str) -> Result<&'static str, ShardError>,
) -> Result<Vec<(UnitType, T)>, ShardError> {
    named.iter().map(|(name, setting)| Ok((UnitType::named(find(name)?), *setting))).collect()
}

/// Returns the lists of units to prefetch, whose types `find` finds by name.
fn lists_of_types(
    named: &[(String, Vec<String>)],
    find: impl Fn(&str) -> Result<&'static str, ShardError>,
) -> Result<Vec<(UnitType, Vec<UnitType>)>, ShardError> {
    let unit = |name: &String| find(name).map(UnitType::named);
    let list = |(name, ahead): &(String, Vec<String>)| {
        let ahead = ahead.iter().map(unit).collect::<Result<_, _>>()?;
        Ok((unit(name)?, ahead))
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
