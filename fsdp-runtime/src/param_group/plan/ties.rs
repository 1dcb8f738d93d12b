//! Weights that appear in two fields, with a declared tie or without one.

use std::collections::HashMap;

use burn::module::ParamId;

use super::found::{FoundParam, FoundTie, IgnoredParam};
use crate::error::ShardError;

/// Sets `tied_to` of every parameter that a declared tie makes an alias.
///
/// A path of a tie names a parameter, or a module with exactly one matrix. Ties of parameters that
/// this model does not have, because an `Option` is empty, have no effect. Nor has a tie under `if_shared`
/// of two parameters that are no clones of one.
///
/// # Errors
///
/// Returns an error if a tied parameter is ignored, or if the two shapes differ.
pub(super) fn resolve_ties(
    params: &mut [FoundParam],
    ties: &[FoundTie],
    ignored: &[IgnoredParam],
) -> Result<(), ShardError> {
    for tie in ties {
        check_not_ignored(params, tie, ignored)?;
        let FoundTie { first, second, if_shared } = tie;
        let (Some(first), Some(second)) = (managed(params, first), managed(params, second)) else {
            continue;
        };
        if *if_shared && params[first].id != params[second].id {
            continue;
        }
        if params[first].shape != params[second].shape {
            return Err(ShardError::TieShape {
                first: params[first].path.clone(),
                first_shape: params[first].shape.clone(),
                second: params[second].path.clone(),
                second_shape: params[second].shape.clone(),
            });
        }
        unite(params, first, second);
    }
    Ok(())
}

/// Checks that a tie has no ignored parameter. An empty `Option` at the other path makes the tie
/// void.
fn check_not_ignored(
    params: &[FoundParam],
    FoundTie { first, second, if_shared }: &FoundTie,
    ignored: &[IgnoredParam],
) -> Result<(), ShardError> {
    let ignored_at = |path: &str| {
        let entries = ignored.iter().map(|param| &param.spec);
        resolve(entries.map(|entry| (&*entry.path, &*entry.shape)), path)
    };
    let id_at = |path: &str| match managed(params, path) {
        Some(index) => Some(params[index].id),
        None => ignored_at(path).map(|index| ignored[index].id),
    };
    for (path, other) in [(first, second), (second, first)] {
        if managed(params, path).is_none()
            && let Some(other_id) = id_at(other)
            && let Some(index) = ignored_at(path)
            && (!if_shared || ignored[index].id == other_id)
        {
            let ignored = ignored[index].spec.path.clone();
            return Err(ShardError::IgnoredTie { ignored, other: other.to_string() });
        }
    }
    Ok(())
}

/// Makes the owner of `first` the owner of `second` and of all its aliases.
///
/// If the two owners are clones of one parameter, which have the same id, the one that the
/// traversal reaches first becomes the owner.
fn unite(params: &mut [FoundParam], first: usize, second: usize) {
    let (mut owner, mut other) = (owner(params, first), owner(params, second));
    if params[owner].id == params[other].id && other < owner {
        (owner, other) = (other, owner);
    }
    for param in params.iter_mut().filter(|param| param.tied_to == Some(other)) {
        param.tied_to = Some(owner);
    }
    if other != owner {
        params[other].tied_to = Some(owner);
    }
}

/// Returns the number of the managed parameter that a path of a tie names.
fn managed(params: &[FoundParam], path: &str) -> Option<usize> {
    resolve(params.iter().map(|param| (&*param.path, &*param.shape)), path)
}

/// Returns the number of the parameter that a path of a tie names: the parameter at the path, or
/// else the first matrix below it. `params` are paths and shapes.
fn resolve<'a>(
    params: impl Iterator<Item = (&'a str, &'a [usize])> + Clone,
    path: &str,
) -> Option<usize> {
    let below = |name: &str| name.strip_prefix(path).is_some_and(|rest| rest.starts_with('.'));
    let exact = params.clone().position(|(name, _)| name == path);
    exact.or_else(|| params.clone().position(|(name, shape)| shape.len() >= 2 && below(name)))
}

/// Returns the number of the parameter that owns the weight of parameter `index`.
fn owner(params: &[FoundParam], index: usize) -> usize {
    params[index].tied_to.unwrap_or(index)
}

/// Returns whether ties declare the clones `first` and `second`, in the order of the traversal, as
/// one weight.
///
/// They must have the same owner. An owner that is itself a clone of the parameter must be `first`.
fn is_declared(params: &[FoundParam], first: usize, second: usize) -> bool {
    let shared = owner(params, first);
    let foreign = params[shared].id != params[first].id;
    shared == owner(params, second) && (shared == first || foreign)
}

/// Checks that ties declare all clones of a parameter as one weight.
pub(super) fn check_clones(params: &[FoundParam]) -> Result<(), ShardError> {
    let mut seen: HashMap<ParamId, usize> = HashMap::new();
    for (index, param) in params.iter().enumerate() {
        match seen.get(&param.id) {
            Some(&first) if !is_declared(params, first, index) => {
                return Err(ShardError::SharedParameter {
                    first: params[first].path.clone(),
                    second: param.path.clone(),
                });
            }
            Some(_) => {}
            None => {
                seen.insert(param.id, index);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;

    use super::*;
    use crate::param_group::plan::found::Key;

    /// Ties parameters `a`, `b`, `c` and `d` of one shape, and returns the number of each one's
    /// owner. A `?` after the second name stands for `if_shared`.
    fn owners(ties: &[(&str, &str)], id: impl Fn(usize) -> u64) -> Result<Vec<usize>, ShardError> {
        let param = |(index, name): (usize, &str)| FoundParam {
            path: name.into(),
            key: Key { name: name.into(), transposed: false },
            id: ParamId::from(id(index)),
            shape: vec![3, 2],
            dtype: DType::F32,
            layer_split: None,
            split: None,
            frozen: false,
            unit: 0,
            module: 0,
            tied_to: None,
        };
        let mut params: Vec<FoundParam> =
            ["a", "b", "c", "d"].into_iter().enumerate().map(param).collect();
        let tie = |(first, second): &(&str, &str)| FoundTie {
            first: first.to_string(),
            second: second.trim_end_matches('?').to_string(),
            if_shared: second.ends_with('?'),
        };
        let ties: Vec<_> = ties.iter().map(tie).collect();
        resolve_ties(&mut params, &ties, &[])?;
        check_clones(&params)?;
        Ok((0..params.len()).map(|index| owner(&params, index)).collect())
    }

    #[test]
    fn ties_in_any_order_have_one_owner() {
        for (ties, expected) in [
            (&[("a", "b")][..], [0, 0, 2, 3]),
            (&[("a", "b"), ("b", "c")], [0, 0, 0, 3]),
            (&[("a", "c"), ("b", "c")], [1, 1, 1, 3]),
            (&[("a", "b"), ("c", "a")], [2, 2, 2, 3]),
            (&[("a", "b"), ("c", "d"), ("d", "b")], [2, 2, 2, 2]),
            (&[("a", "b"), ("b", "a")], [0, 0, 2, 3]),
        ] {
            let apart = owners(ties, |index| index as u64).unwrap();
            assert_eq!(apart, expected, "{ties:?}");
            // If all four are clones of one parameter and tied, the first one is the owner.
            if expected.iter().all(|owner| *owner == expected[0]) {
                assert_eq!(owners(ties, |_| 7).unwrap(), [0; 4], "{ties:?}");
            }
        }
        // `a` and `c` are clones of one parameter, `b` and `d` are not.
        let two = |index: usize| if index.is_multiple_of(2) { 7 } else { index as u64 };
        assert_eq!(owners(&[("c", "a")], two).unwrap(), [0, 1, 0, 3]);
        assert_eq!(owners(&[("c", "b"), ("b", "a")], two).unwrap(), [0, 0, 0, 3]);
        assert_eq!(owners(&[("b", "a"), ("b", "c")], two).unwrap(), [1, 1, 1, 3]);
        // A tie under a condition holds for clones of one parameter only.
        assert_eq!(
            owners(&[("a", "b?"), ("c", "a?")], |index| index as u64).unwrap(),
            [0, 1, 2, 3]
        );
        assert_eq!(owners(&[("a", "b?"), ("a", "c?")], two).unwrap(), [0, 1, 0, 3]);
        let error = owners(&[("a", "b")], |index| (index as u64).min(2)).unwrap_err();
        assert!(matches!(error, ShardError::SharedParameter { .. }), "{error}");
    }
}
