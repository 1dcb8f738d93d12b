//! The sizes of the probes with which the first steps of an optimizer are checked.
//!
//! An optimizer keeps the state of probes under ids of their own, in host memory.

use std::collections::BTreeSet;

use super::unit::Unit;

/// Number of elements of the parts of a probe that each sharded, trained parameter has.
pub(crate) const NARROW_ELEMENTS: usize = 80;
/// Number of elements of the part that one parameter of each kind has in addition.
pub(crate) const WIDE_ELEMENTS: usize = 160 * 160;

/// Returns a path without the numbers in it: the kind of a parameter.
pub(crate) fn kind(path: &str) -> String {
    let is_number = |name: &str| name.bytes().all(|byte| byte.is_ascii_digit());
    let names = path.split('.').map(|name| if is_number(name) { "#" } else { name });
    names.collect::<Vec<_>>().join(".")
}

/// Returns the number of elements of all probes of a model.
pub(crate) fn probe_elements(units: &[Unit]) -> usize {
    let checked = units.iter().flat_map(Unit::trained).filter(|entry| entry.is_sharded());
    let paths: Vec<&str> = checked.map(|entry| entry.path.as_str()).collect();
    let kinds: BTreeSet<String> = paths.iter().map(|path| kind(path)).collect();
    paths.len() * NARROW_ELEMENTS + kinds.len() * WIDE_ELEMENTS
}
