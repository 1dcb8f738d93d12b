//! Comparison of a state dict with a model.

use burn::tensor::DType;

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

/// Compares a state that has the paths `names` with a model. `compare` compares one parameter,
/// given the parameter's dtype.
///
/// # Errors
///
/// [`CheckpointError::StateMismatch`] with every missing, unexpected and different tensor.
pub(super) fn compare_names<'a>(
    model: &dyn ShardedModel,
    names: impl Iterator<Item = &'a String>,
    compare: impl Fn(&ParamSpec, DType) -> Comparison,
) -> Result<(), CheckpointError> {
    let mut differences = Vec::new();
    let mut known = Vec::new();
    model.for_each_param(&mut |param| {
        let spec = model.spec(param.index);
        known.push(spec.path.as_str());
        match compare(spec, param.dtype) {
            Comparison::Missing => differences.push(format!("missing: `{}`", spec.path)),
            Comparison::Different(difference) => {
                differences.push(format!("`{}`: {difference}", spec.path));
            }
            Comparison::Equal => {}
        }
    });
    let unexpected = names.filter(|name| !known.contains(&name.as_str()));
    differences.extend(unexpected.map(|name| format!("unexpected: `{name}`")));
    if differences.is_empty() {
        return Ok(());
    }
    Err(CheckpointError::StateMismatch { differences })
}
