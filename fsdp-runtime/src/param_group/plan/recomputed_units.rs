//! Units whose forward is recomputed in backward, and the reasons why one cannot be.

use crate::error::ShardError;
use crate::module::{FsdpModule, Node, UnitType};
use crate::options::ActivationCheckpointing;

/// Returns whether the policy recomputes units of type `M`.
pub(super) fn recomputes<M: FsdpModule>(policy: ActivationCheckpointing) -> bool {
    match policy {
        ActivationCheckpointing::None => false,
        ActivationCheckpointing::Annotated => M::RECOMPUTED,
        ActivationCheckpointing::Units(units) => units.contains(&UnitType::of_module::<M>()),
        ActivationCheckpointing::All => true,
    }
}

/// Returns the first reason why the hooked methods of `M` cannot be recomputed, if there is one.
///
/// `unit` is the name of the unit in the error.
pub(super) fn not_recomputable<M: FsdpModule>(unit: &str) -> Option<ShardError> {
    let Node { ty, .. } = M::LAYOUT;
    M::FORWARDS.iter().find_map(|method| {
        method.inputs.iter().find_map(|&(input, reason)| {
            let (unit, forward) = (unit.to_string(), method.name);
            Some(ShardError::NotRecomputable { unit, ty, forward, input, reason: reason? })
        })
    })
}
