//! The memory of a sharded model on one rank, by kind.

use std::fmt;

use super::super::mib::mib;

/// Bytes of one kind of memory on one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// Bytes that are in use at present.
    pub now: usize,
    /// Most bytes at any moment since the model was sharded.
    pub peak: usize,
}

/// Memory that one rank uses for a sharded model, by kind.
///
/// Activations that Burn's operations keep in the autodiff graph are not counted. `Display` prints a
/// table in MiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Memory {
    /// Shards of sharded parameters.
    pub shards: Usage,
    /// Replicated parameters, such as vectors. If they are stored on the host, the device counts
    /// copies for unsharded units.
    pub replicated: Usage,
    /// Gather buffers, and copies of shards that are cast or moved to the device for an all-gather.
    pub gathered: Usage,
    /// Full gradients until they are reduced, and reduced gradients until the next forward. If
    /// reduced gradients are stored on the host, the device counts them until they are copied
    /// there.
    pub gradients: Usage,
    /// Inputs of units under activation checkpointing, from forward to backward, and what
    /// [`nn::Linear`](crate::nn::Linear), [`attention`](crate::nn::attention),
    /// [`linear_cross_entropy`](crate::nn::linear_cross_entropy) and
    /// [`recompute`](crate::nn::recompute) keep for backward, if they are called in a unit's forward. The
    /// input of a linear layer does not count. An input of `recompute` counts in full, also if it is a
    /// gathered parameter.
    pub activations: Usage,
    /// The optimizer's state, and the copy in f32 of a parameter that is stored in bf16, while it is
    /// stepped.
    ///
    /// The optimizers of [`optim`](crate::optim) report their state at each step. That of any other is
    /// counted once [`Stats::record_optimizer`](crate::model::Stats::record_optimizer) has measured it.
    pub optimizer: Usage,
    /// Moving averages of the parameters, which [`Ema`](crate::optim::Ema) keeps.
    pub averages: Usage,
    /// Sum of all kinds. Its peak may be below the sum of the kinds' peaks.
    pub total: Usage,
    /// Whether an optimizer of another crate has stepped the model and was not measured, so that
    /// [`optimizer`](Self::optimizer) and [`total`](Self::total) lack its state.
    pub lacks_optimizer: bool,
}

impl Memory {
    /// Returns every kind with its name, and the total last.
    pub fn kinds(&self) -> impl Iterator<Item = (&'static str, Usage)> + use<> {
        self.parts().into_iter().chain([("total", self.total)])
    }

    /// Returns every kind with its name, without the total.
    fn parts(&self) -> [(&'static str, Usage); 7] {
        [
            ("shards", self.shards),
            ("replicated", self.replicated),
            ("gathered", self.gathered),
            ("gradients", self.gradients),
            ("activations", self.activations),
            ("optimizer", self.optimizer),
            ("averages", self.averages),
        ]
    }

    /// Returns a kind by its name.
    ///
    /// # Panics
    ///
    /// Panics for a name that [`kinds`](Self::kinds) does not have. All names are constants.
    fn kind_mut(&mut self, name: &'static str) -> &mut Usage {
        match name {
            "shards" => &mut self.shards,
            "replicated" => &mut self.replicated,
            "gathered" => &mut self.gathered,
            "gradients" => &mut self.gradients,
            "activations" => &mut self.activations,
            "optimizer" => &mut self.optimizer,
            "averages" => &mut self.averages,
            _ => unreachable!("`{name}` is no kind of memory"),
        }
    }

    /// Returns the present bytes of a kind, by its name.
    pub(super) fn now(mut self, name: &'static str) -> usize {
        self.kind_mut(name).now
    }

    /// Sets the present bytes of a kind, by its name.
    pub(super) fn set(&mut self, name: &'static str, bytes: usize) {
        let usage = self.kind_mut(name);
        *usage = Usage { now: bytes, peak: usage.peak.max(bytes) };
        self.update_total();
    }

    /// Returns the memory whose kinds have these bytes, now and at most. Kinds that are left out have 0
    /// bytes, and the total is that of the others.
    pub(crate) fn of_kinds(kinds: impl Iterator<Item = (&'static str, usize)>) -> Self {
        let mut memory = Self::default();
        kinds
            .filter(|(name, _)| *name != "total")
            .for_each(|(name, bytes)| memory.set(name, bytes));
        memory.without_peaks()
    }

    /// Returns the present bytes, with peaks that begin now.
    pub(super) fn without_peaks(mut self) -> Self {
        for (name, usage) in self.parts() {
            *self.kind_mut(name) = Usage { now: usage.now, peak: usage.now };
        }
        self.total = Usage::default();
        self.update_total();
        self
    }

    /// Sets the total to the sum of the other kinds.
    fn update_total(&mut self) {
        let now = self.parts().iter().map(|(_, usage)| usage.now).sum();
        self.total = Usage { now, peak: self.total.peak.max(now) };
    }
}

impl fmt::Display for Memory {
    /// Prints a table in MiB: one row for each kind and one for the total. Averages have a row where
    /// there are any.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<12}{:>12}{:>12}", "MiB per rank", "now", "peak")?;
        for (name, usage) in self.kinds() {
            if name == "averages" && usage.peak == 0 {
                continue;
            }
            if name == "optimizer" && self.lacks_optimizer {
                let call = "call `stats().record_optimizer(&optimizer)`";
                write!(f, "\n{name:<12}not recorded: {call}")?;
                continue;
            }
            write!(f, "\n{name:<12}{:>12.2}{:>12.2}", mib(usage.now), mib(usage.peak))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_prints_a_table_in_mib() {
        let mib = |now: usize, peak: usize| Usage { now: now << 20, peak: peak << 20 };
        let memory = Memory {
            shards: mib(512, 512),
            replicated: Usage { now: 3 << 18, peak: 3 << 18 },
            gathered: mib(0, 1024),
            gradients: mib(256, 768),
            activations: Usage::default(),
            optimizer: mib(1024, 1024),
            averages: Usage::default(),
            total: Usage { now: 7171 << 18, peak: 13_315 << 18 },
            lacks_optimizer: false,
        };
        let expected = "\
MiB per rank         now        peak
shards            512.00      512.00
replicated          0.75        0.75
gathered            0.00     1024.00
gradients         256.00      768.00
activations         0.00        0.00
optimizer        1024.00     1024.00
total            1792.75     3328.75";
        assert_eq!(memory.to_string(), expected);
        let averaged = Memory { averages: mib(2, 3), ..memory }.to_string();
        assert!(averaged.contains("averages            2.00        3.00"), "{averaged}");
        let lacking = Memory { lacks_optimizer: true, ..memory }.to_string();
        let line = lacking.lines().find(|line| line.starts_with("optimizer")).unwrap();
        assert_eq!(line, "optimizer   not recorded: call `stats().record_optimizer(&optimizer)`");
    }
}
