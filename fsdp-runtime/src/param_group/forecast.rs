//! What a rank will need for a model, before anything of the model is there.
//!
//! The arithmetic is the layout's own: [`MemoryForecast`] lays the module out as
//! [`fully_shard`](crate::fully_shard) does and adds up what the schedule will count in
//! [`Fsdp::memory`](crate::Fsdp::memory). A parameter that is not initialised stays so.

use std::collections::BTreeMap;
use std::fmt;

use crate::error::ShardError;
use crate::layout::Mesh;
use crate::module::FsdpModule;
use crate::options::{FsdpOptions, GradientAccumulation, OffloadPolicy, ReshardAfterForward};
use crate::param_group::plan::Plan;
use crate::param_group::{Unit, gather_buffer_plan};

/// Bytes that one rank will hold at most, by kind, while it trains. The kinds are those of
/// [`Memory`](crate::Memory), and activations, which are Burn's and can only be estimated by who
/// knows the model. Every parameter is taken to be trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct MemoryForecast {
    /// Shards of sharded parameters.
    pub shards: usize,
    /// Parameters that every rank holds whole.
    pub replicated: usize,
    /// The buffers that parameters are gathered in, and what is cast or copied to be sent there.
    pub gathered: usize,
    /// Gradients at the height of a backward pass.
    pub gradients: usize,
    /// The optimizer's state; 0 until [`with_optimizer`](Self::with_optimizer) says what it holds.
    pub optimizer: usize,
    /// Activations; 0 until [`with_activations`](Self::with_activations) says how many.
    pub activations: usize,
    /// What rests in the host's memory in place of the device's.
    pub host: HostForecast,
    /// Gradients where those of several backward passes are added up: on the device, on the host.
    accumulated: (usize, usize),
    /// Bytes of the parameters that this rank steps.
    stepped: usize,
    offloaded: bool,
}

/// The host's part of a [`MemoryForecast`], in bytes: nothing without an
/// [`OffloadPolicy`](crate::OffloadPolicy) but activations that are offloaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct HostForecast {
    /// Shards of sharded parameters.
    pub shards: usize,
    /// Parameters that every rank holds whole.
    pub replicated: usize,
    /// Reduced gradients.
    pub gradients: usize,
    /// The optimizer's state.
    pub optimizer: usize,
    /// The inputs of checkpointed units; 0 until
    /// [`with_host_activations`](MemoryForecast::with_host_activations) says how many.
    pub activations: usize,
}

impl HostForecast {
    /// Every kind with its name, the total last.
    pub const fn kinds(&self) -> [(&'static str, usize); 6] {
        [
            ("shards", self.shards),
            ("replicated", self.replicated),
            ("gradients", self.gradients),
            ("optimizer", self.optimizer),
            ("activations", self.activations),
            ("total", self.total()),
        ]
    }

    /// All of them together.
    pub const fn total(&self) -> usize {
        self.shards + self.replicated + self.gradients + self.optimizer + self.activations
    }
}

impl MemoryForecast {
    /// What the rank of `mesh` will hold of `module` under `options`. All ranks are taken to be on
    /// one machine, where that matters: the hybrid strategies without a shard size.
    ///
    /// # Errors
    ///
    /// Those of [`fully_shard`](crate::fully_shard): a model that cannot be sharded, or an option
    /// out of its range.
    pub fn new<M: FsdpModule>(
        module: &M,
        mesh: Mesh,
        options: &FsdpOptions,
    ) -> Result<Self, ShardError> {
        options.check()?;
        let mesh = options.mesh(mesh, mesh.world.size())?;
        let reshard = options.reshard(mesh)?;
        let units = Plan::new(module, mesh, options)?.units;
        let held = units.iter().map(Unit::held_bytes);
        let (shards, replicated) =
            held.fold((0, 0), |(a, b), (shards, replicated)| (a + shards, b + replicated));
        let offloaded = options.offload != OffloadPolicy::None;
        let gradients = Gradients::of(&units, offloaded);
        let (on_device, on_host) = gradients.once();
        let on_device_alone = |bytes| if offloaded { 0 } else { bytes };
        Ok(Self {
            shards: match options.offload {
                OffloadPolicy::OptimizerOnly => units.iter().map(Unit::sent_bytes).sum(),
                _ => on_device_alone(shards),
            },
            replicated: match offloaded {
                true => copied(&units, ring(&units, reshard, options.slots)),
                false => replicated,
            },
            gathered: gathered(&units, reshard, options.slots) + sending(&units, options.offload),
            gradients: on_device,
            optimizer: 0,
            activations: 0,
            host: match offloaded {
                true => {
                    let host = HostForecast::default();
                    HostForecast { shards, replicated, gradients: on_host, ..host }
                }
                false => HostForecast::default(),
            },
            accumulated: gradients.accumulated(options.gradient_accumulation),
            stepped: shards + replicated,
            offloaded,
        })
    }

    /// With an optimizer that holds `moments` floats for each parameter: two for Adam and AdamW
    /// (three with `amsgrad`), one for SGD with momentum.
    pub const fn with_optimizer(mut self, moments: usize) -> Self {
        let bytes = moments * self.stepped;
        if self.offloaded {
            self.host.optimizer = bytes;
        } else {
            self.optimizer = bytes;
        }
        self
    }

    /// With gradients of several micro-batches added up by
    /// [`Fsdp::accumulate`](crate::Fsdp::accumulate).
    pub const fn with_accumulation(mut self) -> Self {
        (self.gradients, self.host.gradients) = self.accumulated;
        self
    }

    /// With `bytes` of activations.
    pub const fn with_activations(mut self, bytes: usize) -> Self {
        self.activations = bytes;
        self
    }

    /// With `bytes` of inputs of checkpointed units in the host's memory.
    pub const fn with_host_activations(mut self, bytes: usize) -> Self {
        self.host.activations = bytes;
        self
    }

    /// Every kind with its name, the total last, of the device alone.
    pub const fn kinds(&self) -> [(&'static str, usize); 7] {
        [
            ("shards", self.shards),
            ("replicated", self.replicated),
            ("gathered", self.gathered),
            ("gradients", self.gradients),
            ("optimizer", self.optimizer),
            ("activations", self.activations),
            ("total", self.total()),
        ]
    }

    /// All of them together, of the device alone.
    pub const fn total(&self) -> usize {
        self.shards
            + self.replicated
            + self.gathered
            + self.gradients
            + self.optimizer
            + self.activations
    }

    /// Whether a rank that may hold `available` bytes on its device can train.
    ///
    /// # Errors
    ///
    /// [`MemoryError::DoesNotFit`], which prints this table.
    pub fn check(&self, available: usize) -> Result<(), MemoryError> {
        if self.total() > available {
            return Err(MemoryError::DoesNotFit { available, forecast: Box::new(*self) });
        }
        Ok(())
    }

    /// Whether a rank that may hold `available` bytes in the host's memory can train. `with_device`
    /// says that its device has no memory of its own, so that both parts lie there.
    ///
    /// # Errors
    ///
    /// [`MemoryError::HostDoesNotFit`], which prints this table.
    pub fn check_host(&self, available: usize, with_device: bool) -> Result<(), MemoryError> {
        let needed = self.host.total() + if with_device { self.total() } else { 0 };
        if needed > available {
            return Err(MemoryError::HostDoesNotFit {
                needed,
                available,
                forecast: Box::new(*self),
            });
        }
        Ok(())
    }
}

impl fmt::Display for MemoryForecast {
    /// A table in MiB.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<12}{:>12}", "MiB a rank", "at most")?;
        let on_host = self.host.total() > 0;
        if on_host {
            write!(f, "{:>12}", "on the host")?;
        }
        let host = self.host.kinds();
        for (name, bytes) in self.kinds() {
            write!(f, "\n{name:<12}{:>12.2}", mib(bytes))?;
            if let (true, Some((_, bytes))) = (on_host, host.iter().find(|(kind, _)| *kind == name))
            {
                write!(f, "{:>12.2}", mib(*bytes))?;
            }
        }
        Ok(())
    }
}

/// A model that its ranks have no room for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// A rank needs more than there is.
    #[error(
        "a rank needs {:.2} MiB and has {:.2} MiB; use more ranks, a smaller batch, shorter \
         samples, half precision, offload or activation checkpointing\n{forecast}",
        mib(forecast.total()),
        mib(*available)
    )]
    DoesNotFit {
        /// Bytes that a rank may hold.
        available: usize,
        /// What it needs.
        forecast: Box<MemoryForecast>,
    },
    /// A rank needs more of the host's memory than there is.
    #[error(
        "a rank needs {:.2} MiB of the host's memory and has {:.2} MiB; use more ranks on other \
         machines, or keep more on the device\n{forecast}",
        mib(*needed),
        mib(*available)
    )]
    HostDoesNotFit {
        /// Bytes that it needs there, those of its device included where they lie there.
        needed: usize,
        /// Bytes that it may hold.
        available: usize,
        /// What it needs.
        forecast: Box<MemoryForecast>,
    },
}

fn mib(bytes: usize) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Units of a nesting level that can be unsharded at once.
fn ring(units: &[Unit], reshard: ReshardAfterForward, slots: usize) -> usize {
    if reshard == ReshardAfterForward::Never { units.len() } else { slots }
}

/// Bytes of what every rank holds whole, copied to the device for units that are unsharded: of each
/// nesting level as many as have buffers, and all that need none, which stay until backward.
fn copied(units: &[Unit], ring: usize) -> usize {
    let mut levels: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for unit in units.iter().filter(|unit| unit.gathers) {
        levels.entry(unit.level).or_default().push(unit.whole_bytes());
    }
    let of_level = |mut bytes: Vec<usize>| {
        bytes.sort_unstable_by_key(|bytes| std::cmp::Reverse(*bytes));
        bytes.into_iter().take(ring).sum::<usize>()
    };
    let others = units.iter().filter(|unit| !unit.gathers).map(Unit::whole_bytes);
    levels.into_values().map(of_level).chain(others).sum()
}

/// Bytes of the buffers, as the schedule allocates them.
fn gathered(units: &[Unit], reshard: ReshardAfterForward, slots: usize) -> usize {
    let mut buffers = gather_buffer_plan(units, ring(units, reshard, slots)).buffers;
    if let ReshardAfterForward::To(size) = reshard {
        buffers.extend(units.iter().flat_map(|unit| unit.parts(size)));
    }
    buffers.iter().map(|(numel, dtype)| numel * dtype.size()).sum()
}

/// Bytes of the shards that are made to be sent, of the unit that has the most: one all-gather runs
/// after the other.
fn sending(units: &[Unit], offload: OffloadPolicy) -> usize {
    let of = |unit: &Unit| unit.sending_bytes(offload != OffloadPolicy::None);
    match offload {
        // They stay.
        OffloadPolicy::OptimizerOnly => 0,
        _ => units.iter().map(of).max().unwrap_or(0),
    }
}

/// The gradients of each unit in bytes, in layout order.
struct Gradients {
    /// Full ones of the unit and of the units around it, which begin before it and end after it. Those
    /// of the outermost unit all arrive at the end: nothing that it takes is tracked, as a rule, and
    /// until then they are Burn's.
    full: Vec<usize>,
    /// As `full`, in the type in which they arrive.
    arriving: Vec<usize>,
    /// As `full`, with the unit's own in the type in which they are reduced, and what they are reduced
    /// to beside them.
    reducing: Vec<usize>,
    /// What is left of the unit's own once they are reduced.
    reduced: Vec<usize>,
    /// The unit's own, full, as they are held from one pass to the next.
    held: Vec<usize>,
    /// Whether the reduced ones rest on the host.
    offloaded: bool,
}

impl Gradients {
    fn of(units: &[Unit], offloaded: bool) -> Self {
        // They arrive in one type, and are in the other when all have.
        let arrive = |unit: &Unit| unit.gradient_bytes().0;
        let held = |unit: &Unit| unit.gradient_bytes().1;
        let nested = |own: &dyn Fn(&Unit) -> usize| {
            let mut around: Vec<usize> = Vec::new();
            let full = units.iter().map(|unit| {
                around.truncate(unit.level);
                around.push(own(unit));
                around.iter().skip(usize::from(unit.level > 0)).sum()
            });
            full.collect()
        };
        let most = |unit: &Unit| arrive(unit).max(held(unit));
        let full: Vec<usize> = nested(&most);
        let arriving = nested(&arrive);
        let reduced = |unit: &Unit| unit.held_bytes().0 + unit.held_bytes().1;
        let reducing = units.iter().zip(&full);
        let reducing = reducing.map(|(unit, full)| full - most(unit) + held(unit) + reduced(unit));
        Self {
            reducing: reducing.collect(),
            full,
            arriving,
            reduced: units.iter().map(reduced).collect(),
            held: units.iter().map(held).collect(),
            offloaded,
        }
    }

    /// The most that one backward pass has at once. It goes through the layout from its end, and a
    /// reduction is awaited before the next unit's gradients arrive. On the device, on the host.
    fn once(&self) -> (usize, usize) {
        if self.offloaded {
            return (self.largest(), self.reduced.iter().sum());
        }
        let mut done = 0;
        let mut peak = 0;
        let units = self.full.iter().zip(&self.reducing).zip(&self.reduced);
        for ((full, reducing), reduced) in units.rev() {
            peak = peak.max(done + full.max(reducing));
            done += reduced;
        }
        (peak.max(done), 0)
    }

    /// The most while full gradients of all units are held, or, where more, what the last pass has
    /// while it reduces one unit after the other: shards in f32 may be larger than full gradients in
    /// half precision.
    fn all_held(&self) -> usize {
        let mut now: usize = self.held.iter().sum();
        let mut peak = now + self.arriving.iter().max().copied().unwrap_or(0);
        let units = self.arriving.iter().zip(&self.held).zip(&self.reduced);
        for ((arriving, held), reduced) in units.rev() {
            peak = peak.max(now + arriving.max(reduced));
            now -= held;
            if !self.offloaded {
                now += reduced;
            }
        }
        peak.max(now)
    }

    fn largest(&self) -> usize {
        self.full.iter().chain(&self.reducing).max().copied().unwrap_or(0)
    }

    /// The most where other passes of the same step came before.
    fn accumulated(&self, accumulation: GradientAccumulation) -> (usize, usize) {
        let reduced = self.reduced.iter().sum();
        match (accumulation, self.offloaded) {
            (GradientAccumulation::ReduceEach, false) => (reduced + self.largest(), 0),
            (GradientAccumulation::ReduceEach, true) => (self.largest(), reduced),
            (GradientAccumulation::HoldUnsharded, false) => (self.all_held(), 0),
            (GradientAccumulation::HoldUnsharded, true) => (self.all_held(), reduced),
        }
    }
}
