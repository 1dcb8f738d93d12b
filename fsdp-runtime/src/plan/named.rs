//! What options name must be there: a name that fits nothing would silently do nothing.

use super::inventory::Inventory;
use crate::error::ShardError;
use crate::options::{ActivationCheckpointing, WrapPolicy};
use crate::unit::Node;

impl Inventory<'_> {
    /// Every type that an option names is one of this model's, whose type is laid out as `layout`: a
    /// unit there, or, of those to checkpoint, one that was found.
    pub(super) fn found_all_named(&mut self, layout: &Node) {
        let options = self.options;
        let units = layout.unit_names();
        let found: Vec<&str> =
            self.units.iter().filter_map(|unit| Some(unit.unit_type?.name())).collect();
        let wrap = match options.wrap {
            WrapPolicy::TransformerBased(named) => named.iter().map(|unit| unit.name()).collect(),
            WrapPolicy::Named(named) => named.to_vec(),
            _ => Vec::new(),
        };
        let checkpointed = match options.activation_checkpointing {
            ActivationCheckpointing::Units(named) => named.iter().map(|unit| unit.name()).collect(),
            _ => Vec::new(),
        };
        let precise = options.unit_precision.iter().map(|(unit, _)| unit.name()).collect();
        for (option, named, there) in [
            ("wrap", wrap, &units),
            ("mixed_precision_for", precise, &units),
            ("activation_checkpointing", checkpointed, &found),
        ] {
            if let Some(absent) = named.into_iter().find(|name| !there.contains(name)) {
                self.fail(ShardError::InvalidOption {
                    option,
                    value: format!("a list with `{absent}`"),
                    expected: format!("the units of this model are {}", names(there)),
                });
            }
        }
    }
}

/// Each of them once, quoted.
fn names(units: &[&str]) -> String {
    let once = units.iter().enumerate().filter(|(at, unit)| !units[..*at].contains(unit));
    once.map(|(_, unit)| format!("`{unit}`")).collect::<Vec<_>>().join(", ")
}
