//! Types that options name but that the model does not have.
//!
//! Such a name would have no effect, so it is an error.

use super::found::Found;
use crate::error::ShardError;
use crate::module::{Node, UnitType};
use crate::options::{ActivationCheckpointing, FsdpOptions, WrapPolicy};

/// Returns an error for the first type that an option names and that the model does not have.
///
/// `root` is the layout tree of the model's type. It has the units of every part that the type
/// declares, such as an `Option` that is empty in this model; naming these is no error, except for
/// activation checkpointing.
pub(super) fn unknown_type(
    found: &Found,
    root: &Node,
    options: &FsdpOptions,
) -> Option<ShardError> {
    let declared = root.unit_names();
    let wrapped: Vec<UnitType> = found.units.iter().filter_map(|unit| unit.unit_type).collect();
    let wrapped_names: Vec<&str> = wrapped.iter().map(|unit| unit.name()).collect();
    let is_known = |unit: &UnitType| {
        // The tree has names only. If the model contains another type of this name, the tree's name
        // is that type's.
        let other = found.types.iter().any(|found| found.name() == unit.name());
        found.types.contains(unit) || declared.contains(&unit.name()) && !other
    };
    let unknown =
        |named: &[UnitType]| named.iter().find(|unit| !is_known(unit)).map(|unit| unit.name());
    let wrap = match options.wrap {
        WrapPolicy::TransformerBased(named) => unknown(named),
        WrapPolicy::Named(named) => named.iter().copied().find(|name| !declared.contains(name)),
        _ => None,
    };
    let with_policy: Vec<_> = options.mixed_precision_for.iter().map(|(unit, _)| *unit).collect();
    let with_storage: Vec<_> = options.storage_for.iter().map(|(unit, _)| *unit).collect();
    let resharded = &options.reshard_after_forward_for;
    let with_reshard: Vec<_> = resharded.iter().map(|(unit, _)| *unit).collect();
    let in_lists = |lists: &[(UnitType, Vec<UnitType>)]| -> Vec<UnitType> {
        lists.iter().flat_map(|(unit, ahead)| std::iter::once(*unit).chain(ahead.clone())).collect()
    };
    let with_forward = in_lists(&options.forward_prefetch_for);
    let with_backward = in_lists(&options.backward_prefetch_for);
    let recomputed = match options.activation_checkpointing {
        ActivationCheckpointing::Units(named) => named.iter().find(|it| !wrapped.contains(it)),
        _ => None,
    };
    let checks = [
        ("wrap", wrap, &declared),
        ("mixed_precision_for", unknown(&with_policy), &declared),
        ("storage_for", unknown(&with_storage), &declared),
        ("reshard_after_forward_for", unknown(&with_reshard), &declared),
        ("forward_prefetch_for", unknown(&with_forward), &declared),
        ("backward_prefetch_for", unknown(&with_backward), &declared),
        ("activation_checkpointing", recomputed.map(|unit| unit.name()), &wrapped_names),
    ];
    checks.into_iter().find_map(|(option, absent, present)| {
        let value = format!("a list with `{}`", absent?);
        let expected = format!("the units of this model are {}", unique(present));
        Some(ShardError::InvalidOption { option, value, expected })
    })
}

/// Returns the names in backticks, each of them once, separated by commas.
fn unique(names: &[&str]) -> String {
    let once = names.iter().enumerate().filter(|(at, name)| !names[..*at].contains(name));
    once.map(|(_, name)| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}
