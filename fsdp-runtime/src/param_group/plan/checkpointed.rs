//! Which units are checkpointed, and every reason why one cannot be.

use super::inventory::Inventory;
use crate::error::ShardError;
use crate::module::UnitType;
use crate::module::{FsdpModule, Node};
use crate::options::ActivationCheckpointing;

impl Inventory<'_> {
    /// Whether the options have a unit checkpointed.
    pub(super) fn checkpoints<M: FsdpModule>(&self) -> bool {
        match self.options.activation_checkpointing {
            ActivationCheckpointing::None => false,
            ActivationCheckpointing::Annotated => M::CHECKPOINT,
            ActivationCheckpointing::Units(units) => units.contains(&UnitType::of_module::<M>()),
            ActivationCheckpointing::All => true,
        }
    }

    /// The checkpointed unit that the walk is in.
    pub(super) fn checkpointed(&self) -> Option<usize> {
        let unit = self.current();
        if self.units[unit].checkpointed { Some(unit) } else { self.units[unit].within }
    }

    /// A checkpointed unit must have hooked methods that can be run again.
    pub(super) fn can_be_recomputed<M: FsdpModule>(&mut self, unit: usize) {
        if !self.units[unit].checkpointed {
            return;
        }
        let Node { ty, .. } = M::LAYOUT;
        let inputs = M::FORWARDS.iter().flat_map(|method| {
            method.inputs.iter().map(|(input, obstacle)| (method.name, *input, *obstacle))
        });
        for (forward, input, obstacle) in inputs {
            if let Some(obstacle) = obstacle {
                let unit = self.units[unit].name();
                self.fail(ShardError::NotReplayable { unit, ty, forward, input, obstacle });
            }
        }
    }
}
