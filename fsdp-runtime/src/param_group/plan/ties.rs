//! Weights at two places: those that are declared as one, and those that are not.

use std::collections::HashMap;

use burn::module::ParamId;

use super::IgnoredParam;
use super::inventory::Item;
use crate::error::ShardError;

/// Resolves declared ties: a path names a parameter, or a module with exactly one matrix.
/// None of them may be ignored.
pub(super) fn tie(
    items: &mut [Item],
    ties: &[(String, String)],
    ignored: &[IgnoredParam],
) -> Result<(), ShardError> {
    for (first, second) in ties {
        let at = |path| resolve(items.iter().map(|item| (&*item.path, &*item.shape)), path);
        let ignored_at = |path| {
            let entries = ignored.iter().map(|param| &param.entry);
            resolve(entries.map(|entry| (&*entry.path, &*entry.shape)), path)
        };
        let (at_first, at_second) = (at(first), at(second));
        // Both exist in the static tree; an `Option` on the way may be empty in this model.
        let there = |own: Option<usize>, path| own.is_some() || ignored_at(path).is_some();
        for (own, path, (at_other, other)) in
            [(at_first, first, (at_second, second)), (at_second, second, (at_first, first))]
        {
            if own.is_none()
                && there(at_other, other)
                && let Some(place) = ignored_at(path)
            {
                let ignored = ignored[place].entry.path.clone();
                return Err(ShardError::IgnoredTie { ignored, other: other.clone() });
            }
        }
        let (Some(first), Some(second)) = (at_first, at_second) else { continue };
        if items[first].shape != items[second].shape {
            return Err(ShardError::TieShape {
                first: items[first].path.clone(),
                first_shape: items[first].shape.clone(),
                second: items[second].path.clone(),
                second_shape: items[second].shape.clone(),
            });
        }
        // Places that are tied, in whatever order, have one owner; of clones, which have one id, it is
        // the place that a walk comes to first.
        let (mut owner, mut other) = (owner(items, first), owner(items, second));
        if items[owner].id == items[other].id && other < owner {
            (owner, other) = (other, owner);
        }
        for item in items.iter_mut().filter(|item| item.tied_to == Some(other)) {
            item.tied_to = Some(owner);
        }
        if other != owner {
            items[other].tied_to = Some(owner);
        }
    }
    Ok(())
}

/// Which of these parameters, of paths and shapes, a path names: itself, or the first matrix below it.
fn resolve<'a>(
    params: impl Iterator<Item = (&'a str, &'a [usize])> + Clone,
    path: &str,
) -> Option<usize> {
    let below = |name: &str| name.strip_prefix(path).is_some_and(|rest| rest.starts_with('.'));
    let exact = params.clone().position(|(name, _)| name == path);
    exact.or_else(|| params.clone().position(|(name, shape)| shape.len() >= 2 && below(name)))
}

/// The place that holds the weight of place `index`.
fn owner(items: &[Item], index: usize) -> usize {
    items[index].tied_to.unwrap_or(index)
}

/// Whether a tie holds for a parameter that is at two places: they have one owner, which is the first
/// of them where it is one of them.
fn share(items: &[Item], first: usize, second: usize) -> bool {
    let held = owner(items, first);
    held == owner(items, second) && (held == first || items[held].id != items[first].id)
}

/// One parameter at two places that no tie declares.
pub(super) fn shared(items: &[Item]) -> Result<(), ShardError> {
    let mut seen: HashMap<ParamId, usize> = HashMap::new();
    for (index, item) in items.iter().enumerate() {
        match seen.get(&item.id) {
            Some(&first) if !share(items, first, index) => {
                return Err(ShardError::SharedParameter {
                    first: items[first].path.clone(),
                    second: item.path.clone(),
                });
            }
            Some(_) => {}
            None => {
                seen.insert(item.id, index);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;

    use super::*;
    use crate::param_group::plan::Key;

    /// Weights `a`, `b`, `c` and `d` of one shape, tied as told: who owns each.
    fn owners(ties: &[(&str, &str)], id: impl Fn(usize) -> u64) -> Result<Vec<usize>, ShardError> {
        let item = |(index, name): (usize, &str)| Item {
            path: name.into(),
            key: Key { name: name.into(), transposed: false },
            id: ParamId::from(id(index)),
            shape: vec![3, 2],
            dtype: DType::F32,
            unit: 0,
            tied_to: None,
        };
        let mut items: Vec<Item> = ["a", "b", "c", "d"].into_iter().enumerate().map(item).collect();
        let ties: Vec<_> = ties.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect();
        tie(&mut items, &ties, &[])?;
        shared(&items)?;
        Ok((0..items.len()).map(|index| owner(&items, index)).collect())
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
            // Clones of one parameter, where all of them are tied: the first place is the owner.
            if expected.iter().all(|owner| *owner == expected[0]) {
                assert_eq!(owners(ties, |_| 7).unwrap(), [0; 4], "{ties:?}");
            }
        }
        // Clones among others.
        let two = |index: usize| if index.is_multiple_of(2) { 7 } else { index as u64 };
        assert_eq!(owners(&[("c", "a")], two).unwrap(), [0, 1, 0, 3]);
        assert_eq!(owners(&[("c", "b"), ("b", "a")], two).unwrap(), [0, 0, 0, 3]);
        assert_eq!(owners(&[("b", "a"), ("b", "c")], two).unwrap(), [1, 1, 1, 3]);
        let error = owners(&[("a", "b")], |index| (index as u64).min(2)).unwrap_err();
        assert!(matches!(error, ShardError::SharedParameter { .. }), "{error}");
    }
}
