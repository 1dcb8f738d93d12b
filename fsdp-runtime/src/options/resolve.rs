//! Checks of the options, and the settings that follow from them for a mesh, a device or a unit.

use std::fmt::Debug;

use burn::tensor::Device;

use super::fsdp_options::FsdpOptions;
use super::policies::{OffloadPolicy, ReshardAfterForward};
use super::precision::MixedPrecisionPolicy;
use super::storage::StoragePolicy;
use crate::backend::is_flex;
use crate::error::ShardError;
use crate::layout::{Mesh, StorageType};
use crate::module::UnitType;

impl FsdpOptions {
    /// Returns one line for each option that must be equal on all ranks.
    pub(crate) fn fingerprint_lines(&self) -> Vec<String> {
        // Ids of parameters differ between processes, so `ignored_params` is left out.
        let Self {
            strategy,
            shard_size,
            reshard_after_forward,
            wrap,
            gather_buffers,
            forward_prefetch,
            backward_prefetch,
            reductions_in_flight,
            gradient_accumulation,
            mixed_precision,
            mixed_precision_for,
            storage,
            storage_for,
            storage_at,
            quantized_gathers,
            quantized_reductions,
            offload,
            activation_checkpointing,
            offload_activations,
            ignored_params: _,
            persist_below,
            sync_module_states,
            cpu_ram_efficient_loading,
            deferred_init,
            seed,
            optimizer_check,
        } = self;
        let options: [(&str, &dyn Debug); 25] = [
            ("strategy", strategy),
            ("seed", seed),
            ("shard_size", shard_size),
            ("reshard_after_forward", reshard_after_forward),
            ("wrap", wrap),
            ("gather_buffers", gather_buffers),
            ("forward_prefetch", forward_prefetch),
            ("backward_prefetch", backward_prefetch),
            ("reductions_in_flight", reductions_in_flight),
            ("gradient_accumulation", gradient_accumulation),
            ("mixed_precision", mixed_precision),
            ("mixed_precision_for", mixed_precision_for),
            ("storage", storage),
            ("storage_for", storage_for),
            ("storage_at", storage_at),
            ("quantized_gathers", quantized_gathers),
            ("quantized_reductions", quantized_reductions),
            ("offload", offload),
            ("activation_checkpointing", activation_checkpointing),
            ("offload_activations", offload_activations),
            ("persist_below", persist_below),
            ("sync_module_states", sync_module_states),
            ("cpu_ram_efficient_loading", cpu_ram_efficient_loading),
            ("deferred_init", deferred_init),
            ("optimizer_check", optimizer_check),
        ];
        options.iter().map(|(name, value)| format!("option {name}: {value:?}")).collect()
    }

    /// Returns every policy of mixed precision: the general one, and those for certain units.
    pub(crate) fn policies(&self) -> impl Iterator<Item = &MixedPrecisionPolicy> {
        let of_units = self.mixed_precision_for.iter().map(|(_, policy)| policy);
        std::iter::once(&self.mixed_precision).chain(of_units)
    }

    /// Returns the policy of mixed precision that `mixed_precision_for` sets for a type of unit.
    fn policy_of_type(&self, unit: Option<UnitType>) -> Option<MixedPrecisionPolicy> {
        let is_unit = |(of, _): &&(UnitType, MixedPrecisionPolicy)| Some(*of) == unit;
        self.mixed_precision_for.iter().rev().find(is_unit).map(|(_, policy)| *policy)
    }

    /// Returns whether `mixed_precision_for` sets a policy for a type of unit.
    pub(crate) fn has_own_policy(&self, unit: Option<UnitType>) -> bool {
        self.policy_of_type(unit).is_some()
    }

    /// Returns the policy of mixed precision of a unit; `None` stands for a unit in a field under
    /// `#[fsdp(unit)]`.
    pub(crate) fn policy(&self, unit: Option<UnitType>) -> MixedPrecisionPolicy {
        self.policy_of_type(unit).unwrap_or(self.mixed_precision)
    }

    /// Returns the storage policy of the parameter at `path` in a unit; the type `None` stands for
    /// a unit in a field under `#[fsdp(unit)]`.
    pub(crate) fn storage_of(&self, unit: Option<UnitType>, path: &str) -> StoragePolicy {
        let leads_there = |(to, _): &&(String, StoragePolicy)| leads_to(to, path);
        let is_unit = |(of, _): &&(UnitType, StoragePolicy)| Some(*of) == unit;
        let of_path = || self.storage_at.iter().rev().find(leads_there).map(|(_, policy)| *policy);
        let of_type = || self.storage_for.iter().rev().find(is_unit).map(|(_, policy)| *policy);
        of_path().or_else(of_type).unwrap_or(self.storage)
    }

    /// Returns every storage policy: the general one, and those for certain units and paths.
    fn storage_policies(&self) -> impl Iterator<Item = &StoragePolicy> {
        let of_units = self.storage_for.iter().map(|(_, policy)| policy);
        let of_paths = self.storage_at.iter().map(|(_, policy)| policy);
        std::iter::once(&self.storage).chain(of_units).chain(of_paths)
    }

    /// Returns whether some policy stores parameters in another form than f32.
    fn stores_differently(&self) -> bool {
        self.storage_policies().any(|policy| *policy != StoragePolicy::new())
    }

    /// Returns the form in which gradients are sent, if they are quantised.
    pub(crate) fn gradient_codes(&self) -> Option<StorageType> {
        self.quantized_reductions.map(|block| StorageType::Int8 { block })
    }

    /// Returns the form in which trained matrices are sent, if they are quantised.
    pub(crate) fn weight_codes(&self) -> Option<StorageType> {
        self.quantized_gathers.map(|block| StorageType::Int8 { block })
    }

    /// Returns whether the options treat frozen parameters differently from trained ones.
    pub(crate) fn knows_frozen(&self) -> bool {
        self.stores_differently() || self.quantized_gathers.is_some()
    }

    /// Returns the device that computes: the model's device, or the rank's under an offload policy.
    pub(crate) fn compute_device(&self, model: &Device, rank: &Device) -> Device {
        let device = if self.offload == OffloadPolicy::None { model } else { rank };
        device.clone()
    }

    /// Returns how many reductions of gradients may run at a time, given the device that computes.
    pub(crate) fn reductions_in_flight(&self, device: &Device) -> usize {
        // On Flex a reduction takes the time of the processor that computes.
        self.reductions_in_flight.unwrap_or(if is_flex(device) { 1 } else { 2 })
    }

    /// Checks that the parameters of a model on the device `model` can be offloaded from `device`,
    /// which computes.
    pub(crate) fn check_offload(&self, model: &Device, device: &Device) -> Result<(), ShardError> {
        if self.offload == OffloadPolicy::None || model == device || is_flex(model) {
            return Ok(());
        }
        Err(ShardError::InvalidOption {
            option: "offload",
            value: format!("{:?} of a model on {model:?}", self.offload),
            expected: format!(
                "build the model on {device:?}, where this rank computes, or on Flex"
            ),
        })
    }

    /// Checks the options that need no knowledge of the model or the mesh.
    pub(crate) fn check(&self) -> Result<(), ShardError> {
        let buffers = ("gather_buffers", Some(self.gather_buffers));
        let reductions = ("reductions_in_flight", self.reductions_in_flight);
        for (option, number) in [buffers, reductions] {
            if number == Some(0) {
                return Err(ShardError::InvalidOption {
                    option,
                    value: "0".into(),
                    expected: "use at least 1".into(),
                });
            }
        }
        self.storage_policies().try_for_each(|policy| policy.check())?;
        let gathers = ("quantized_gathers", self.weight_codes());
        for (option, codes) in [gathers, ("quantized_reductions", self.gradient_codes())] {
            if let Some((codes, expected)) = codes.and_then(|it| Some((it, it.wrong_block()?))) {
                let value = codes.block().to_string();
                let expected = expected.into();
                return Err(ShardError::InvalidOption { option, value, expected });
            }
        }
        if self.offload != OffloadPolicy::None && cfg!(not(feature = "flex")) {
            return Err(ShardError::InvalidOption {
                option: "offload",
                value: format!("{:?}", self.offload),
                expected:
                    "build with the feature `flex`, whose backend runs the optimizer on the host"
                        .into(),
            });
        }
        Ok(())
    }

    /// Returns `mesh` with the shard groups of the strategy; this machine has `local` ranks.
    pub(crate) fn mesh(&self, mesh: Mesh, local: usize) -> Result<Mesh, ShardError> {
        if !self.strategy.is_hybrid() {
            return Ok(mesh);
        }
        if self.shard_size == Some(0) {
            return Err(ShardError::InvalidOption {
                option: "shard_size",
                value: "0".into(),
                expected: format!("use a divisor of the {} ranks", mesh.world),
            });
        }
        Ok(mesh.grouped(self.shard_size.unwrap_or(local))?)
    }

    /// Returns whether gathered parameters are freed after forward. Returns `Never` for `To(1)` and
    /// `Always` for `To` with all ranks, which are equal.
    pub(crate) fn reshard(&self, mesh: Mesh) -> Result<ReshardAfterForward, ShardError> {
        let size = mesh.shard_size().size();
        match self.reshard_after_forward.unwrap_or(self.strategy.reshard_after_forward()) {
            ReshardAfterForward::To(1) => Ok(ReshardAfterForward::Never),
            ReshardAfterForward::To(to) if to == size => Ok(ReshardAfterForward::Always),
            ReshardAfterForward::To(to) if to == 0 || !size.is_multiple_of(to) => {
                Err(ShardError::InvalidOption {
                    option: "reshard_after_forward",
                    value: format!("To({to})"),
                    expected: format!("use a divisor of {size}, the ranks that share parameters"),
                })
            }
            reshard => Ok(reshard),
        }
    }
}

/// Returns whether a module path is that of a parameter, or of a module that contains it.
pub(crate) fn leads_to(path: &str, param: &str) -> bool {
    let rest = param.strip_prefix(path);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_leads_to_what_is_below_it() {
        for path in ["blocks", "blocks.1", "blocks.1.up", "blocks.1.up.weight"] {
            assert!(leads_to(path, "blocks.1.up.weight"), "{path}");
        }
        for path in ["", "block", "blocks.1.u", "up.weight", "blocks.1.up.weight.row"] {
            assert!(!leads_to(path, "blocks.1.up.weight"), "{path}");
        }
    }

    #[test]
    fn the_number_of_ranks_to_reshard_to_divides_the_shard_group() {
        use crate::layout::{Rank, WorldSize};
        let mesh = Mesh::new(Rank::ZERO, WorldSize::new(4).unwrap());
        let to = |to| {
            let reshard = ReshardAfterForward::To(to);
            FsdpOptions::new().with_reshard_after_forward(reshard).reshard(mesh)
        };
        assert_eq!(to(1), Ok(ReshardAfterForward::Never));
        assert_eq!(to(2), Ok(ReshardAfterForward::To(2)));
        assert_eq!(to(4), Ok(ReshardAfterForward::Always));
        for wrong in [0, 3, 8] {
            assert!(to(wrong).unwrap_err().to_string().contains("divisor of 4"));
        }
    }
}
