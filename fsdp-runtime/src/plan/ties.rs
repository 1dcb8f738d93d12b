//! Weights at two places: those that are declared as one, and those that are not.

use std::collections::HashMap;

use burn::module::ParamId;

use super::Item;
use crate::error::ShardError;

/// Resolves declared ties: a path names a parameter, or a module with exactly one matrix.
pub(super) fn tie(items: &mut [Item], ties: &[(String, String)]) -> Result<(), ShardError> {
    let resolve = |items: &[Item], path: &str| -> Option<usize> {
        if let Some(exact) = items.iter().position(|item| item.path == path) {
            return Some(exact);
        }
        let below = |item: &Item| {
            item.shape.len() >= 2
                && item.path.strip_prefix(path).is_some_and(|rest| rest.starts_with('.'))
        };
        items.iter().position(below)
    };
    for (first, second) in ties {
        // Both exist in the static tree; an `Option` on the way may be empty in this model.
        let (Some(first), Some(second)) = (resolve(items, first), resolve(items, second)) else {
            continue;
        };
        if items[first].shape != items[second].shape {
            return Err(ShardError::TieShape {
                first: items[first].path.clone(),
                first_shape: items[first].shape.clone(),
                second: items[second].path.clone(),
                second_shape: items[second].shape.clone(),
            });
        }
        // A chain of ties ends at one owner.
        let owner = items[first].tied_to.unwrap_or(first);
        items[second].tied_to = Some(owner);
    }
    Ok(())
}

/// One parameter at two places that no tie declares.
pub(super) fn shared(items: &[Item]) -> Result<(), ShardError> {
    let mut seen: HashMap<ParamId, usize> = HashMap::new();
    for (index, item) in items.iter().enumerate() {
        match seen.get(&item.id) {
            Some(&first) if item.tied_to != Some(first) => {
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
