//! What options name must be there: a name that fits nothing would silently do nothing.

use super::inventory::Inventory;
use crate::error::ShardError;
use crate::options::{ActivationCheckpointing, WrapPolicy};
use crate::unit::Node;
use crate::unit_type::UnitType;

impl Inventory<'_> {
    /// Every type that an option names is one of this model's, whose type is laid out as `layout`: a unit
    /// that was found, or, but for those to checkpoint, one in a part that this model leaves empty.
    pub(super) fn found_all_named(&mut self, layout: &Node) {
        let options = self.options;
        let units = layout.unit_names();
        let found: Vec<UnitType> = self.types.clone();
        let wrapped: Vec<UnitType> = self.units.iter().filter_map(|unit| unit.unit_type).collect();
        let names_of = |types: &[UnitType]| types.iter().map(|unit| unit.name()).collect();
        let wrapped_names: Vec<&str> = names_of(&wrapped);
        let found_names: Vec<&str> = names_of(&found);
        // A type of that name that is there is another one.
        let known = |unit: &UnitType| {
            found.contains(unit)
                || units.contains(&unit.name()) && !found_names.contains(&unit.name())
        };
        let unknown =
            |named: &[UnitType]| named.iter().find(|unit| !known(unit)).map(|unit| unit.name());
        let wrap = match options.wrap {
            WrapPolicy::TransformerBased(named) => unknown(named),
            WrapPolicy::Named(named) => named.iter().copied().find(|name| !units.contains(name)),
            _ => None,
        };
        let precise: Vec<_> = options.unit_precision.iter().map(|(unit, _)| *unit).collect();
        let checkpointed = match options.activation_checkpointing {
            ActivationCheckpointing::Units(named) => named.iter().find(|it| !wrapped.contains(it)),
            _ => None,
        };
        for (option, absent, there) in [
            ("wrap", wrap, &units),
            ("mixed_precision_for", unknown(&precise), &units),
            ("activation_checkpointing", checkpointed.map(|unit| unit.name()), &wrapped_names),
        ] {
            if let Some(absent) = absent {
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
