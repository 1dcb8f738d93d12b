//! The simulation of a step: the actions of a rank on a virtual clock.
//!
//! Ranks are symmetric, so one rank stands for all, with the bandwidth that each rank has. It has two
//! rows. The computation runs the actions in order. The communication runs collectives in issue
//! order, each after the computation that was issued before it.

use super::cluster::Cluster;
use super::collective::{Spread, exchanges, issued};
use super::estimate::{Estimate, Moment, Row, Span, SpanKind};
use super::step::StepPlan;
use super::work::{Batch, UnitWork};
use crate::param_group::Unit;
use crate::plan::rehearsal::{Action, Part};

impl StepPlan {
    /// Returns the time and the memory of a step on a cluster.
    pub fn estimate(&self, batch: Batch, cluster: &Cluster) -> Estimate {
        Simulation::new(self, batch, cluster).run()
    }

    /// Returns `cluster` with the efficiency of its device with which a step takes the measured
    /// time, in seconds. The efficiency is between 0.1 % and 100 % of the peak.
    ///
    /// A step whose time is that of its collectives has no such efficiency; then the nearest one is
    /// returned.
    #[must_use]
    pub fn calibrated(&self, batch: Batch, cluster: &Cluster, measured: f64) -> Cluster {
        let mut cluster = cluster.clone();
        let (mut low, mut high) = (1e-3f64, 1.0f64);
        for _ in 0..40 {
            cluster.accelerator.efficiency = (low * high).sqrt();
            match self.estimate(batch, &cluster).step > measured {
                true => low = cluster.accelerator.efficiency,
                false => high = cluster.accelerator.efficiency,
            }
        }
        cluster
    }
}

/// A running simulation.
struct Simulation<'a> {
    plan: &'a StepPlan,
    batch: Batch,
    cluster: &'a Cluster,
    work: Vec<UnitWork>,
    /// Seconds of one operation.
    seconds_per_flop: f64,
    /// Time until which each row is busy.
    compute: f64,
    communication: f64,
    /// End of each unit's running all-gather and reduction.
    gathered: Vec<f64>,
    reduced: Vec<f64>,
    spans: Vec<Span>,
    memory: MemoryClock,
}

/// Bytes that change within a step.
struct MemoryClock {
    gradients: usize,
    activations: usize,
    /// Full gradients of each unit, as they are counted at present.
    full: Vec<usize>,
    /// Whether the reduced gradients of each unit are counted, after an earlier micro-batch.
    reduced: Vec<bool>,
    moments: Vec<Moment>,
}

impl MemoryClock {
    fn new(units: usize) -> Self {
        let (full, reduced) = (vec![0; units], vec![false; units]);
        Self { gradients: 0, activations: 0, full, reduced, moments: Vec::new() }
    }

    fn mark(&mut self, time: f64) {
        let (gradients, activations) = (self.gradients, self.activations);
        self.moments.push(Moment { time, gradients, activations });
    }
}

impl<'a> Simulation<'a> {
    fn new(plan: &'a StepPlan, batch: Batch, cluster: &'a Cluster) -> Self {
        let units = plan.units.len();
        let device = &cluster.accelerator;
        let is_half = plan.units.iter().any(|unit| unit.layout.dtype().is_some_and(is_half));
        let peak = if is_half { device.half_flops } else { device.single_flops };
        let ranks = plan.mesh.all_ranks().size().min(cluster.per_machine);
        let sharing = if cluster.shares_device { ranks as f64 } else { 1.0 };
        Self {
            work: plan.work(batch),
            seconds_per_flop: sharing / (peak * device.efficiency),
            compute: 0.0,
            communication: 0.0,
            gathered: vec![0.0; units],
            reduced: vec![0.0; units],
            spans: Vec::new(),
            memory: MemoryClock::new(units),
            plan,
            batch,
            cluster,
        }
    }

    /// Runs the step.
    fn run(mut self) -> Estimate {
        self.memory.mark(0.0);
        for action in self.plan.actions(self.batch.micro_batches).0 {
            match action {
                Action::Gather { unit, from_host, .. } => {
                    self.copy(unit, from_host);
                    self.communicate(&action);
                    self.gathered[unit] = self.communication;
                }
                Action::AwaitGather { unit } => self.wait(unit, self.gathered[unit]),
                Action::Reshard { .. } => {}
                Action::Compute { unit, part } => self.compute(unit, part),
                Action::Gradients { unit } => self.arrive(unit),
                Action::Reduce { unit, to_host, .. } => {
                    self.begin_reduction(unit);
                    self.communicate(&action);
                    self.copy(unit, to_host);
                    self.reduced[unit] = self.communication;
                }
                Action::AwaitReduce { unit } => {
                    self.wait(unit, self.reduced[unit]);
                    self.end_reduction(unit);
                }
            }
        }
        self.optimizer();
        self.finish()
    }

    fn span(&mut self, row: Row, kind: SpanKind, unit: Option<usize>, seconds: f64, bytes: usize) {
        let clock = match row {
            Row::Compute => &mut self.compute,
            Row::Communication => &mut self.communication,
        };
        let begin = *clock;
        *clock += seconds;
        if seconds > 0.0 {
            self.spans.push(Span { row, kind, unit, begin, end: begin + seconds, bytes });
        }
    }

    /// Runs the collectives of an action, after the computation so far.
    fn communicate(&mut self, action: &Action) {
        for issued in issued(action) {
            self.communication = self.communication.max(self.compute);
            let per_machine = self.cluster.per_machine;
            let spread = Spread::new(issued.peers, self.plan.mesh, per_machine);
            let seconds = spread.seconds(issued.operation, issued.bytes, self.cluster);
            let kind = SpanKind::Collective(issued.operation);
            self.span(Row::Communication, kind, Some(issued.unit), seconds, issued.bytes);
        }
    }

    /// Copies bytes between host and device, on the communication thread.
    fn copy(&mut self, unit: usize, bytes: usize) {
        if bytes > 0 {
            self.communication = self.communication.max(self.compute);
            let seconds =
                bytes as f64 / (self.cluster.host.bandwidth * self.cluster.link_efficiency);
            self.span(Row::Communication, SpanKind::Copy, Some(unit), seconds, bytes);
        }
    }

    fn wait(&mut self, unit: usize, until: f64) {
        let seconds = (until - self.compute).max(0.0);
        self.span(Row::Compute, SpanKind::Wait, Some(unit), seconds, 0);
    }

    fn compute(&mut self, unit: usize, part: Part) {
        let work = self.work[unit];
        let recomputation = self.plan.recomputation();
        let is_recomputed = self.plan.units[unit].recomputed;
        let (saved, transient) = (work.saved(recomputation), work.transient);
        let (kind, flops) = match part {
            Part::Forward | Part::FirstRun => (SpanKind::Forward, work.forward()),
            Part::Recompute => (SpanKind::Recompute, work.forward()),
            Part::Backward => {
                let repeated = work.repeated(recomputation) * self.seconds_per_flop;
                self.span(Row::Compute, SpanKind::Recompute, Some(unit), repeated, 0);
                (SpanKind::Backward, work.backward())
            }
        };
        self.memory.activations += transient;
        self.memory.mark(self.compute);
        self.span(Row::Compute, kind, Some(unit), flops * self.seconds_per_flop, 0);
        for (operation, peers, bytes) in exchanges(&work, part, self.plan.mesh, recomputation) {
            // The computation needs the result at once.
            self.communication = self.communication.max(self.compute);
            let spread = Spread::new(peers, self.plan.mesh, self.cluster.per_machine);
            let seconds = spread.seconds(operation, bytes, self.cluster);
            let kind = SpanKind::Collective(operation);
            self.span(Row::Communication, kind, Some(unit), seconds, bytes);
            self.wait(unit, self.communication);
        }
        self.memory.activations -= transient;
        match part {
            Part::Forward | Part::Recompute => self.memory.activations += saved,
            Part::FirstRun if is_recomputed => self.memory.activations += work.input,
            Part::FirstRun => {}
            Part::Backward => {
                self.memory.activations -= saved;
                if is_recomputed {
                    self.memory.activations -= work.input;
                }
            }
        }
        self.memory.mark(self.compute);
    }

    /// Counts the full gradients of a unit, in the dtypes in which they arrive, and then in those in
    /// which they wait for their reduction.
    fn arrive(&mut self, unit: usize) {
        let (arriving, held) = self.plan.units[unit].gradient_bytes();
        self.count_full(unit, self.memory.full[unit] + arriving);
        self.memory.mark(self.compute);
        self.count_full(unit, held);
    }

    /// Counts the full gradients of a unit with the given bytes, in place of those so far.
    fn count_full(&mut self, unit: usize, bytes: usize) {
        let full = std::mem::replace(&mut self.memory.full[unit], bytes);
        self.memory.gradients = self.memory.gradients + bytes - full;
    }

    fn begin_reduction(&mut self, unit: usize) {
        let of_unit = &self.plan.units[unit];
        self.memory.gradients += of_unit.reduced_bytes() + of_unit.gradient_code_bytes();
        self.memory.mark(self.compute);
    }

    fn end_reduction(&mut self, unit: usize) {
        self.count_full(unit, 0);
        let of_unit = &self.plan.units[unit];
        self.memory.gradients -= of_unit.gradient_code_bytes();
        let was_counted = std::mem::replace(&mut self.memory.reduced[unit], true);
        if was_counted || self.plan.offloads() {
            self.memory.gradients -= of_unit.reduced_bytes();
        }
        self.memory.mark(self.compute);
    }

    /// Runs the optimizer, which reads and writes parameters and state, and reads gradients.
    fn optimizer(&mut self) {
        let stepped: usize = self.plan.units.iter().map(Unit::reduced_bytes).sum();
        let moved = stepped * (3 + 2 * self.plan.moments());
        let bandwidth = match self.plan.offloads() {
            // The host's memory, which all ranks of a machine share.
            true => HOST_BANDWIDTH / self.cluster.per_machine as f64,
            false => self.cluster.accelerator.memory_bandwidth * self.cluster.memory_efficiency,
        };
        let ranks = self.plan.mesh.all_ranks().size().min(self.cluster.per_machine);
        let sharing = if self.cluster.shares_device { ranks as f64 } else { 1.0 };
        let seconds = moved as f64 * sharing / bandwidth;
        self.span(Row::Compute, SpanKind::Optimizer, None, seconds, moved);
        self.memory.mark(self.compute);
    }

    fn finish(self) -> Estimate {
        let total = |wanted: &dyn Fn(&Span) -> bool| -> f64 {
            let wanted = self.spans.iter().filter(|span| wanted(span));
            // The sum of no `f64` is -0.0.
            wanted.map(|span| span.end - span.begin).fold(0.0, |sum, seconds| sum + seconds)
        };
        let of_kind = |kind: SpanKind| total(&|span| span.kind == kind);
        let recompute = of_kind(SpanKind::Recompute);
        let compute = of_kind(SpanKind::Forward) + of_kind(SpanKind::Backward) + recompute;
        let step = self.compute;
        let mesh = self.plan.mesh;
        let ranks_of_rows = mesh.tensor_size().size() * mesh.context_size().size();
        let tokens = (self.batch.tokens() * self.batch.micro_batches) as f64 / ranks_of_rows as f64;
        let flops: f64 = self.work.iter().map(UnitWork::model_flops).sum();
        let device = &self.cluster.accelerator;
        let is_half = self.plan.units.iter().any(|unit| unit.layout.dtype().is_some_and(is_half));
        let peak = if is_half { device.half_flops } else { device.single_flops };
        let activations = self.memory.moments.iter().map(|it| it.activations).max().unwrap_or(0);
        Estimate {
            step,
            compute,
            recompute,
            optimizer: of_kind(SpanKind::Optimizer),
            communication: total(&|span| span.row == Row::Communication),
            exposed: of_kind(SpanKind::Wait),
            tokens_per_second: tokens / step,
            utilization: flops * self.batch.micro_batches as f64 / (step * peak),
            dollars_per_billion_tokens: device.dollars_per_hour / 3600.0 * step / tokens * 1e9,
            memory: self.plan.memory(self.batch.micro_batches).with_activations(activations),
            usable: self.cluster.usable(),
            spans: self.spans,
            moments: self.memory.moments,
        }
    }
}

/// Bandwidth of the memory of a host with two processors, in bytes per second: 8 channels of
/// DDR5-4800 each, of which updates reach about two thirds.
const HOST_BANDWIDTH: f64 = 400e9;

fn is_half(dtype: burn::tensor::DType) -> bool {
    dtype.size() == 2
}
