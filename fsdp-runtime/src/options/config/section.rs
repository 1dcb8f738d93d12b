//! [`FsdpSection`]: the keys under `fsdp_config`. Rows of the table of options with a `field` add a
//! field each, which is read, written and converted here. Keys with other values than their option
//! are fields that are written out, and so are their reading (`read/`), writing (`write.rs`) and
//! conversion (`options.rs`).

use super::values::{AutoWrapPolicy, Named, StateDictType, boolean};
use crate::options::table::option_rows;
use crate::options::{BackwardPrefetch, ContextExchange, FsdpOptions, ShardingStrategy};

/// A field that has the values of its option; `None` if the file does not have the key.
pub(super) trait PlainField {
    /// Sets the field to the value of a text. A text that is no value makes the field `None`.
    fn parse(&mut self, text: &str);

    /// Returns the text of the value in a file.
    fn text(&self) -> Option<String>;

    /// Returns the names of the values; none for a Boolean.
    fn names(&self) -> &'static [&'static str];
}

impl PlainField for Option<bool> {
    fn parse(&mut self, text: &str) {
        *self = boolean(text);
    }

    fn text(&self) -> Option<String> {
        self.map(|value| value.to_string())
    }

    fn names(&self) -> &'static [&'static str] {
        &[]
    }
}

impl<T: Named> PlainField for Option<T> {
    fn parse(&mut self, text: &str) {
        *self = T::named_or_numbered(text.trim());
    }

    fn text(&self) -> Option<String> {
        self.map(|value| value.name_in_file().into())
    }

    fn names(&self) -> &'static [&'static str] {
        T::NAMES
    }
}

/// Makes [`FsdpSection`] of the rows of the table that have a `field`.
macro_rules! fsdp_section {
    ($(
        $(#[$serde:meta])*
        $vis:vis $name:ident($builder:ident): $kind:ident($ty:ty) = $value:expr, {
            help: $help:literal,
            default: $default:literal,
            range: $range:literal,
            keys: $keys:expr,
            $(field: $field:ident = $key:literal,)?
        }
    )*) => {
        /// Settings that shard the model: the keys under `fsdp_config` and `parallelism_config`.
        /// `None` stands for the default of [`FsdpOptions`](crate::FsdpOptions).
        #[derive(Clone, Debug, Default, PartialEq)]
        #[non_exhaustive]
        pub struct FsdpSection {
            /// `fsdp_sharding_strategy`, or the strategy that `fsdp_reshard_after_forward` stands
            /// for.
            pub sharding_strategy: ShardingStrategy,
            /// `fsdp_auto_wrap_policy`: which annotated units are gathered on their own.
            pub auto_wrap_policy: Option<AutoWrapPolicy>,
            /// `fsdp_transformer_layer_cls_to_wrap`: names of unit types. Empty for all unit types.
            pub transformer_layer_cls_to_wrap: Vec<String>,
            /// `fsdp_min_num_params`: minimum size of a unit under `SIZE_BASED_WRAP`, in elements.
            pub min_num_params: Option<usize>,
            /// `fsdp_offload_params`: store parameters, gradients and optimizer state in host
            /// memory.
            pub offload_params: bool,
            /// `fsdp_activation_checkpointing`: all units but the outermost recompute their
            /// activations in backward. If false, only the units under `#[fsdp_unit(checkpoint)]`
            /// do.
            pub activation_checkpointing: bool,
            /// `fsdp_activation_checkpointing_offload`: inputs of units that recompute their
            /// activations are stored in host memory until backward.
            pub activation_checkpointing_offload: bool,
            /// `fsdp_state_dict_type`: form in which the program saves checkpoints.
            pub state_dict_type: Option<StateDictType>,
            $($(
                #[doc = concat!("`", $key, "`. ", $help, ".")]
                pub $field: Option<$ty>,
            )?)*
            /// `parallelism_config_dp_replicate_size`: number of shard groups. Each group of ranks
            /// holds a whole copy of the model.
            pub replicate: Option<usize>,
            /// `parallelism_config_dp_shard_size`: number of ranks in a shard group.
            pub shard: Option<usize>,
            /// `parallelism_config_tp_size`: number of tensor parallel ranks.
            pub tensor: Option<usize>,
            /// `parallelism_config_cp_size`: number of context parallel ranks.
            pub context: Option<usize>,
            /// `parallelism_config_cp_comm_strategy`: how context parallel ranks exchange keys and values.
            pub context_exchange: Option<ContextExchange>,
        }

        impl FsdpSection {
            /// Returns the fields that have the values of their options, each with its key.
            pub(super) fn plain_fields(&self) -> Vec<(&'static str, &dyn PlainField)> {
                vec![$($(($key, &self.$field),)?)*]
            }

            /// Returns the field of a key that has the values of its option.
            pub(super) fn plain_field(&mut self, key: &str) -> Option<&mut dyn PlainField> {
                match key {
                    $($($key => Some(&mut self.$field),)?)*
                    _ => None,
                }
            }

            /// Sets the options of these fields.
            pub(super) fn set_plain(&self, mut options: FsdpOptions) -> FsdpOptions {
                $($(
                    if let Some(value) = self.$field {
                        options = options.$builder(value);
                    }
                )?)*
                options
            }
        }
    };
}
option_rows!(fsdp_section);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::config::{Config, DEFAULT_MIN_NUM_PARAMS, Overrides};
    use crate::options::table::{file_key, file_keys};

    fn options(key: &str, value: &str) -> FsdpOptions {
        let mut overrides = Overrides::default();
        if !value.is_empty() {
            overrides.set(key, value).unwrap();
        }
        let (config, _) = Config::read_with(None, &overrides).unwrap();
        config.options_for(None).unwrap_or_else(|error| panic!("{key}: {value}: {error}"))
    }

    #[test]
    fn default_answers_are_the_default_options_and_choices_are_values() {
        let mut asked = 0;
        for key in file_keys() {
            let Some(question) = key.question else { continue };
            asked += 1;
            assert_eq!(options(key.name, question.default), FsdpOptions::new(), "{}", key.name);
            let names: Vec<&str> = question.choices.iter().map(|(name, _)| *name).collect();
            assert!(names.is_empty() || names.contains(&question.default), "{}", key.name);
            for name in names.into_iter().filter(|name| *name != "fp8") {
                let _ = options(key.name, name);
            }
        }
        assert_eq!(asked, 11);
        let minimum = file_key("fsdp_min_num_params").unwrap().question.unwrap().default;
        assert_eq!(minimum, DEFAULT_MIN_NUM_PARAMS.to_string());
    }

    #[test]
    fn plain_fields_set_their_options() {
        let mut section = FsdpSection::default();
        let keys: Vec<&str> = section.plain_fields().into_iter().map(|(key, _)| key).collect();
        assert_eq!(keys.len(), 4);
        for key in keys {
            let boolean = file_key(key).unwrap().value == Some("BOOL");
            let other = if boolean { "false" } else { "NO_PREFETCH" };
            assert_ne!(options(key, other), FsdpOptions::new(), "{key}");
            let field = section.plain_field(key).unwrap();
            field.parse(other);
            assert_eq!(field.text().as_deref(), Some(other));
            field.parse("neither");
            assert_eq!(field.text(), None);
        }
        assert!(section.plain_field("fsdp_offload_params").is_none());
    }
}
