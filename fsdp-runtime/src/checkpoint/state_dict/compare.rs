//! Comparison of a state dict with a model.

use std::collections::HashMap;

use burn::tensor::DType;

use super::report::Found;
use super::selection::Selection;
use crate::checkpoint::sharded_model::ShardedModel;
use crate::error::CheckpointError;
use crate::param_group::ParamSpec;

/// Whether a state has a parameter, and fits it.
pub(super) enum Comparison {
    /// The state has no tensor for the parameter.
    Missing,
    /// The state's tensor differs from the parameter.
    Different(String),
    /// The state's tensor fits the parameter.
    Equal,
}

impl From<Option<String>> for Comparison {
    fn from(difference: Option<String>) -> Self {
        difference.map_or(Self::Equal, Self::Different)
    }
}

/// Compares a state that has the paths `names` with the selected parameters of a model. `compare`
/// compares one parameter, given the parameter's dtype.
///
/// # Errors
///
/// [`CheckpointError::StateMismatch`] with every different tensor, and with every missing and
/// unexpected one unless the selection is lenient.
pub(super) fn compare_names<'a>(
    model: &dyn ShardedModel,
    selection: &Selection,
    names: impl Iterator<Item = &'a String>,
    compare: impl Fn(&ParamSpec, DType) -> Comparison,
) -> Result<Found, CheckpointError> {
    let (mut found, mut differences) = (Found::default(), Vec::new());
    // Whether each path of the model is selected.
    let mut known = HashMap::new();
    model.for_each_param(&mut |param| {
        let spec = model.spec(param.index);
        let selected = selection.contains(param.index);
        known.insert(spec.path.as_str(), selected);
        if !selected {
            return;
        }
        match compare(spec, param.dtype) {
            Comparison::Missing if selection.lenient => {
                found.missing.insert(spec.path.clone());
            }
            Comparison::Missing => differences.push(format!("missing: `{}`", spec.path)),
            Comparison::Different(difference) => {
                differences.push(format!("`{}`: {difference}", spec.path));
            }
            Comparison::Equal => _ = found.loaded.insert(spec.path.clone()),
        }
    });
    differences.extend(sort_others(names, &known, selection, &mut found));
    if differences.is_empty() {
        return Ok(found);
    }
    Err(CheckpointError::StateMismatch { differences })
}

/// Adds the keys of a state that are not loaded to `found`. `known` says of each path of the model
/// whether it is selected. Returns a text for each key that the model lacks, unless the selection
/// is lenient.
pub(super) fn sort_others<'a>(
    names: impl Iterator<Item = &'a String>,
    known: &HashMap<&str, bool>,
    selection: &Selection,
    found: &mut Found,
) -> Vec<String> {
    let mut differences = Vec::new();
    for name in names {
        match known.get(name.as_str()) {
            Some(true) => {}
            Some(false) => _ = found.filtered.insert(name.clone()),
            None if selection.lenient => _ = found.unexpected.insert(name.clone()),
            None => differences.push(format!("unexpected: `{name}`")),
        }
    }
    differences
}
