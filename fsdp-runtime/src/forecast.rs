//! What a rank will need for a model, before anything of the model is there.
//!
//! The arithmetic is the layout's own: [`MemoryForecast`] lays the module out as
//! [`fully_shard`](crate::fully_shard) does and adds up what the schedule will count in
//! [`Fsdp::memory`](crate::Fsdp::memory). A parameter that is not initialised stays so.

use std::fmt;

use crate::error::ShardError;
use crate::group::{Unit, slot_plan};
use crate::mesh::Mesh;
use crate::options::{FsdpOptions, GradientAccumulation, ReshardAfterForward};
use crate::plan::Plan;
use crate::unit::FsdpModule;

/// Bytes that one rank will hold at most, by kind, while it trains. The kinds are those of
/// [`Memory`](crate::Memory), and activations, which are Burn's and can only be estimated by who
/// knows the model. Every parameter is taken to be trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct MemoryForecast {
    /// Fragments of sharded parameters.
    pub fragments: usize,
    /// Parameters that every rank holds whole.
    pub replicated: usize,
    /// The buffers that parameters are gathered in.
    pub gathered: usize,
    /// Gradients at the height of a backward pass.
    pub gradients: usize,
    /// The optimizer's state; 0 until [`with_optimizer`](Self::with_optimizer) says what it holds.
    pub optimizer: usize,
    /// Activations; 0 until [`with_activations`](Self::with_activations) says how many.
    pub activations: usize,
    /// Gradients where those of several backward passes are added up.
    accumulated: usize,
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
        let (fragments, replicated) =
            held.fold((0, 0), |(a, b), (fragments, replicated)| (a + fragments, b + replicated));
        Ok(Self {
            fragments,
            replicated,
            gathered: gathered(&units, reshard, options.slots),
            gradients: Gradients::of(&units).once(),
            accumulated: Gradients::of(&units).accumulated(options.gradient_accumulation),
            optimizer: 0,
            activations: 0,
        })
    }

    /// With an optimizer that holds `moments` floats for each parameter: two for Adam and AdamW
    /// (three with `amsgrad`), one for SGD with momentum.
    pub const fn with_optimizer(mut self, moments: usize) -> Self {
        self.optimizer = moments * (self.fragments + self.replicated);
        self
    }

    /// With gradients of several micro-batches added up by
    /// [`Fsdp::accumulate`](crate::Fsdp::accumulate).
    pub const fn with_accumulation(mut self) -> Self {
        self.gradients = self.accumulated;
        self
    }

    /// With `bytes` of activations.
    pub const fn with_activations(mut self, bytes: usize) -> Self {
        self.activations = bytes;
        self
    }

    /// Every kind with its name, the total last.
    pub const fn kinds(&self) -> [(&'static str, usize); 7] {
        [
            ("fragments", self.fragments),
            ("replicated", self.replicated),
            ("gathered", self.gathered),
            ("gradients", self.gradients),
            ("optimizer", self.optimizer),
            ("activations", self.activations),
            ("total", self.total()),
        ]
    }

    /// All of them together.
    pub const fn total(&self) -> usize {
        self.fragments
            + self.replicated
            + self.gathered
            + self.gradients
            + self.optimizer
            + self.activations
    }

    /// Whether a rank that may hold `available` bytes can train.
    ///
    /// # Errors
    ///
    /// [`MemoryError::DoesNotFit`], which prints this table.
    pub const fn check(&self, available: usize) -> Result<(), MemoryError> {
        if self.total() > available {
            return Err(MemoryError::DoesNotFit { available, forecast: *self });
        }
        Ok(())
    }
}

impl fmt::Display for MemoryForecast {
    /// A table in MiB.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<12}{:>12}", "MiB a rank", "at most")?;
        for (name, bytes) in self.kinds() {
            write!(f, "\n{name:<12}{:>12.2}", mib(bytes))?;
        }
        Ok(())
    }
}

/// A model that its ranks have no room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// A rank needs more than there is.
    #[error(
        "a rank needs {:.2} MiB and has {:.2} MiB; use more ranks, a smaller batch or shorter \
         samples\n{forecast}",
        mib(forecast.total()),
        mib(*available)
    )]
    DoesNotFit {
        /// Bytes that a rank may hold.
        available: usize,
        /// What it needs.
        forecast: MemoryForecast,
    },
}

fn mib(bytes: usize) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Bytes of the buffers, as the schedule allocates them.
fn gathered(units: &[Unit], reshard: ReshardAfterForward, slots: usize) -> usize {
    let ring = if reshard == ReshardAfterForward::Never { units.len() } else { slots };
    let slots = slot_plan(units, ring).slots;
    let buffers: usize = slots.iter().map(|(numel, dtype)| numel * dtype.size()).sum();
    let parts: usize = match reshard {
        ReshardAfterForward::To(size) => {
            let part = |unit: &Unit| Some(unit.part_len(size)? * unit.precision.param.size());
            units.iter().filter_map(part).sum()
        }
        _ => 0,
    };
    buffers + parts
}

/// The gradients of each unit in bytes, in layout order.
struct Gradients {
    /// Full ones of the unit and of the units around it, which begin before it and end after it. Those
    /// of the outermost unit all arrive at the end: nothing that it takes is tracked, as a rule, and
    /// until then they are Burn's.
    full: Vec<usize>,
    /// What is left of the unit's own once they are reduced.
    reduced: Vec<usize>,
    /// Full ones of the whole model.
    all: usize,
}

impl Gradients {
    fn of(units: &[Unit]) -> Self {
        let own = |unit: &Unit| unit.num_params() * unit.precision.param.size();
        let mut around: Vec<usize> = Vec::new();
        let full = units.iter().map(|unit| {
            around.truncate(unit.level);
            around.push(own(unit));
            around.iter().skip(usize::from(unit.level > 0)).sum()
        });
        let full = full.collect();
        let reduced = units.iter().map(Unit::held_bytes).map(|(a, b)| a + b).collect();
        Self { full, reduced, all: units.iter().map(own).sum() }
    }

    /// The most that one backward pass has at once. It goes through the layout from its end, and a
    /// reduction is awaited before the next unit's gradients arrive.
    fn once(&self) -> usize {
        let mut done = 0;
        let mut peak = 0;
        for (full, reduced) in self.full.iter().zip(&self.reduced).rev() {
            peak = peak.max(done + full);
            done += reduced;
        }
        peak
    }

    /// The most where other passes of the same step came before.
    fn accumulated(&self, accumulation: GradientAccumulation) -> usize {
        let kept = match accumulation {
            GradientAccumulation::ReduceEach => self.reduced.iter().sum(),
            GradientAccumulation::HoldUnsharded => self.all,
        };
        kept + self.full.iter().max().copied().unwrap_or(0)
    }
}
