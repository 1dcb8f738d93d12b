//! What options name must be there: a name that fits nothing would silently do nothing.

use super::inventory::Inventory;
use crate::error::ShardError;
use crate::module::Node;
use crate::module::UnitType;
use crate::options::{ActivationCheckpointing, WrapPolicy};

impl Inventory<'_> {
    /// The first type that an option names and that is none of this model's, whose type is laid out as
    /// `layout`: no unit that was found, nor, but for those to checkpoint, one in a part that this model
    /// leaves empty.
    pub(super) fn named_in_vain(&self, layout: &Node) -> Option<ShardError> {
        let (options, units) = (self.options, layout.unit_names());
        let wrapped: Vec<UnitType> = self.units.iter().filter_map(|unit| unit.unit_type).collect();
        let wrapped_names: Vec<&str> = wrapped.iter().map(|unit| unit.name()).collect();
        let known = |unit: &UnitType| {
            // A type of that name that is there is another one.
            let alike = self.types.iter().any(|found| found.name() == unit.name());
            self.types.contains(unit) || units.contains(&unit.name()) && !alike
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
        let named = [
            ("wrap", wrap, &units),
            ("mixed_precision_for", unknown(&precise), &units),
            ("activation_checkpointing", checkpointed.map(|unit| unit.name()), &wrapped_names),
        ];
        named.into_iter().find_map(|(option, absent, there)| {
            let value = format!("a list with `{}`", absent?);
            let expected = format!("the units of this model are {}", names(there));
            Some(ShardError::InvalidOption { option, value, expected })
        })
    }
}

/// Each of them once, quoted.
fn names(units: &[&str]) -> String {
    let once = units.iter().enumerate().filter(|(at, unit)| !units[..*at].contains(unit));
    once.map(|(_, unit)| format!("`{unit}`")).collect::<Vec<_>>().join(", ")
}
