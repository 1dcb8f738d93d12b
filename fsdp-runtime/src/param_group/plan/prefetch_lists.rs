//! The lists of units to prefetch, by unit type and by module path.

use super::super::control::UnitControl;
use super::super::unit::Unit;
use crate::error::ShardError;
use crate::module::UnitType;
use crate::options::FsdpOptions;

/// Adds the lists of units to prefetch to the units that prefetch them. `types` are the types of the
/// units; a unit in a field has none. A list by path replaces one by type.
pub(super) fn add_prefetch_lists(
    units: &mut [Unit],
    types: &[Option<UnitType>],
    options: &FsdpOptions,
) -> Result<(), ShardError> {
    for (unit, list) in of_types(&options.forward_prefetch_for, types, |unit| unit + 1..types.len())
    {
        units[unit].control.forward_prefetch = Some(list);
    }
    let before = |unit| (0..unit).rev();
    for (unit, list) in of_types(&options.backward_prefetch_for, types, before) {
        units[unit].control.backward_prefetch = Some(list);
    }
    add_lists_at(units, "forward_prefetch_at", &options.forward_prefetch_at, |control, list| {
        control.forward_prefetch = Some(list);
    })?;
    add_lists_at(units, "backward_prefetch_at", &options.backward_prefetch_at, |control, list| {
        control.backward_prefetch = Some(list);
    })
}

/// Returns the list of each unit whose type has one. `following` are the units that come after a unit
/// in the pass, the next one first.
fn of_types<I: Iterator<Item = usize>>(
    lists: &[(UnitType, Vec<UnitType>)],
    types: &[Option<UnitType>],
    following: impl Fn(usize) -> I,
) -> Vec<(usize, Vec<usize>)> {
    let mut found = Vec::new();
    for (of, ahead) in lists {
        for unit in (0..types.len()).filter(|&unit| types[unit] == Some(*of)) {
            let mut list: Vec<usize> = Vec::new();
            for ahead in ahead {
                let is_next = |at: &usize| types[*at] == Some(*ahead) && !list.contains(at);
                list.extend(following(unit).find(is_next));
            }
            found.push((unit, list));
        }
    }
    found
}

/// Adds the lists of one option by module path.
fn add_lists_at(
    units: &mut [Unit],
    option: &'static str,
    lists: &[(String, Vec<String>)],
    set: impl Fn(&mut UnitControl, Vec<usize>),
) -> Result<(), ShardError> {
    for (path, ahead) in lists {
        let find = |path: &String| {
            let found = units.iter().position(|unit| unit.path == *path);
            found.ok_or_else(|| unknown_unit(option, path, units))
        };
        let (unit, ahead) = (find(path)?, ahead.iter().map(find).collect::<Result<_, _>>()?);
        set(&mut units[unit].control, ahead);
    }
    Ok(())
}

/// Returns the error for a path at which the model has no unit.
pub(super) fn unknown_unit(option: &'static str, path: &str, units: &[Unit]) -> ShardError {
    let paths: Vec<&str> = units.iter().map(|unit| &*unit.path).collect();
    let expected = format!("the units of this model are at {paths:?}");
    ShardError::InvalidOption { option, value: format!("{path:?}"), expected }
}
