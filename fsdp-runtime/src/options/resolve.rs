//! Checks of the options, and the settings that follow from them for a mesh, a device or a unit.

use burn::tensor::Device;

use super::fsdp_options::FsdpOptions;
use super::policies::{OffloadPolicy, ReshardAfterForward};
use super::precision::MixedPrecisionPolicy;
use super::storage::StoragePolicy;
use crate::backend::{DeviceKind, is_flex};
use crate::error::ShardError;
use crate::layout::{Mesh, StorageType};
use crate::module::UnitType;

impl FsdpOptions {
    /// Returns one line for each option that must be equal on all ranks.
    pub(crate) fn fingerprint_lines(&self) -> Vec<String> {
        let mut lines: Vec<String> = Vec::new();
        for (name, value) in self.compared() {
            let line = format!("option {name}: {value:?}");
            // The first line that differs is reported, so the strategy and the seed come first.
            if name == "seed" { lines.insert(1, line) } else { lines.push(line) }
        }
        lines
    }

    /// Returns every policy of mixed precision: the general one, and those for certain units.
    pub(crate) fn policies(&self) -> impl Iterator<Item = &MixedPrecisionPolicy> {
        let of_units = self.mixed_precision_for.iter().map(|(_, policy)| policy);
        let of_paths = self.mixed_precision_at.iter().map(|(_, policy)| policy);
        std::iter::once(&self.mixed_precision).chain(of_units).chain(of_paths)
    }

    /// Returns whether the unit at `path` has a policy of mixed precision for its type or its path.
    pub(crate) fn has_own_policy(&self, unit: Option<UnitType>, path: &str) -> bool {
        self.mixed_precision_at.iter().any(|(to, _)| to == path)
            || self.mixed_precision_for.iter().any(|(of, _)| Some(*of) == unit)
    }

    /// Returns the policy of mixed precision of the unit at `path`; the type `None` stands for a unit
    /// in a field under `#[fsdp(unit)]`.
    pub(crate) fn policy(&self, unit: Option<UnitType>, path: &str) -> MixedPrecisionPolicy {
        let of_unit = of_unit(&self.mixed_precision_for, &self.mixed_precision_at, unit, path);
        of_unit.unwrap_or(self.mixed_precision)
    }

    /// Returns the storage policy of the parameter at `path` in a unit; the type `None` stands for
    /// a unit in a field under `#[fsdp(unit)]`.
    pub(crate) fn storage_of(&self, unit: Option<UnitType>, path: &str) -> StoragePolicy {
        of_unit(&self.storage_for, &self.storage_at, unit, path).unwrap_or(self.storage)
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

    /// Returns whether ranks that are threads on Flex have their shards in one memory, where they can.
    pub(crate) fn gathers_in_place(&self) -> bool {
        let wanted = self.gather_in_place.unwrap_or(cfg!(not(debug_assertions)));
        wanted && self.offload == OffloadPolicy::None
    }

    /// Returns how many reductions of gradients may run at a time on a device of this kind.
    pub(crate) fn reductions_in_flight(&self, kind: DeviceKind) -> usize {
        self.reductions_in_flight.unwrap_or(match kind {
            // A reduction takes the time of the processor that computes.
            DeviceKind::Flex => 1,
            DeviceKind::Cuda => 2,
            // Ranks on such a device are threads that share it. A reduction is issued once all of
            // them have come to it, so a rank that is ahead blocks less often with more.
            DeviceKind::Other => 5,
        })
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
        self.gradient_divide_factor.map_or(Ok(()), |factor| divide_factor(factor).map(drop))?;
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
        let axes = [
            ("tensor_parallel", self.tensor_parallel),
            ("context_parallel", self.context_parallel),
        ];
        if let Some((option, _)) = axes.into_iter().find(|(_, ranks)| *ranks == 0) {
            return Err(ShardError::InvalidOption {
                option,
                value: "0".into(),
                expected: "use at least 1".into(),
            });
        }
        let mesh = match self.tensor_parallel {
            1 => mesh,
            ranks => mesh.tensor_parallel(ranks)?,
        };
        let mesh = mesh.context_parallel(self.context_parallel)?;
        let mesh = mesh.sequence_parallel(self.sequence_parallel);
        let local = (local / self.tensor_parallel).max(1);
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

    /// Returns whether the gathered parameters of the unit at `path` are freed after forward; the
    /// type `None` stands for a unit in a field under `#[fsdp(unit)]`.
    pub(crate) fn reshard(
        &self,
        unit: Option<UnitType>,
        path: &str,
        mesh: Mesh,
    ) -> Result<ReshardAfterForward, ShardError> {
        let (types, paths) = (&self.reshard_after_forward_for, &self.reshard_after_forward_at);
        let reshard = of_unit(types, paths, unit, path).or(self.reshard_after_forward);
        resolve_reshard(reshard.unwrap_or(self.strategy.reshard_after_forward()), mesh)
    }

    /// Returns the number of gather buffers of an inner nesting level, before lists of units to
    /// prefetch are regarded.
    pub(crate) fn gather_buffers(&self) -> usize {
        self.gather_buffers.max(self.units_ahead.map_or(1, |ahead| ahead + 1))
    }

    /// Returns the number of units that are prefetched while one computes.
    pub(crate) fn units_ahead(&self) -> usize {
        self.units_ahead.unwrap_or(1)
    }
}

/// Returns the setting of the unit or parameter at `path`, in a unit of the type `unit`: the last one
/// whose path leads there, or else the last one of the type.
fn of_unit<T: Copy>(
    types: &[(UnitType, T)],
    paths: &[(String, T)],
    unit: Option<UnitType>,
    path: &str,
) -> Option<T> {
    let of_path = paths.iter().rev().find(|(to, _)| leads_to(to, path)).map(|(_, it)| *it);
    let of_type = || types.iter().rev().find(|(of, _)| Some(*of) == unit).map(|(_, it)| *it);
    of_path.or_else(of_type)
}

/// Returns `Never` for `To(1)` and `Always` for `To` with all ranks, which are equal, and other
/// values as they are.
pub(crate) fn resolve_reshard(
    reshard: ReshardAfterForward,
    mesh: Mesh,
) -> Result<ReshardAfterForward, ShardError> {
    let size = mesh.shard_size().size();
    match reshard {
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

/// Checks a gradient divide factor.
pub(crate) fn divide_factor(factor: f64) -> Result<f64, ShardError> {
    if factor.is_finite() && factor > 0.0 {
        return Ok(factor);
    }
    Err(ShardError::InvalidOption {
        option: "gradient_divide_factor",
        value: factor.to_string(),
        expected: "use a positive number, such as 1 for the sum of the ranks' gradients".into(),
    })
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
            FsdpOptions::new().with_reshard_after_forward(reshard).reshard(None, "", mesh)
        };
        assert_eq!(to(1), Ok(ReshardAfterForward::Never));
        assert_eq!(to(2), Ok(ReshardAfterForward::To(2)));
        assert_eq!(to(4), Ok(ReshardAfterForward::Always));
        for wrong in [0, 3, 8] {
            assert!(to(wrong).unwrap_err().to_string().contains("divisor of 4"));
        }
    }
}
