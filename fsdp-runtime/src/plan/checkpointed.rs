//! Which units are checkpointed, and every reason why one cannot be.

use super::Inventory;
use crate::error::ShardError;
use crate::options::ActivationCheckpointing;
use crate::unit::{FsdpModule, Node};
use crate::unit_type::UnitType;

impl Inventory {
    /// Whether the options have a unit checkpointed, which notes its type.
    pub(super) fn checkpoints<M: FsdpModule>(&mut self) -> bool {
        let ty = UnitType::of_module::<M>();
        self.types.push(ty);
        match self.checkpointing {
            ActivationCheckpointing::None => false,
            ActivationCheckpointing::Annotated => M::CHECKPOINT,
            ActivationCheckpointing::Units(units) => units.contains(&ty),
            ActivationCheckpointing::All => true,
        }
    }

    /// The checkpointed unit that the walk is in.
    pub(super) fn checkpointed(&self) -> Option<usize> {
        let unit = self.current();
        if self.units[unit].checkpointed { Some(unit) } else { self.units[unit].within }
    }

    /// A checkpointed unit must have hooked methods that can be run again.
    pub(super) fn can_be_replayed<M: FsdpModule>(&mut self, unit: usize) {
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

    /// A type that is named and not found would silently do nothing.
    pub(super) fn found_all_checkpointed(&mut self) {
        let ActivationCheckpointing::Units(units) = self.checkpointing else { return };
        if let Some(unit) = units.iter().find(|unit| !self.types.contains(unit)) {
            self.fail(ShardError::InvalidOption {
                option: "activation_checkpointing",
                value: format!("Units, with `{}`", unit.name()),
                expected: "use types of units of this model, as the wrap policy leaves them".into(),
            });
        }
    }
}
