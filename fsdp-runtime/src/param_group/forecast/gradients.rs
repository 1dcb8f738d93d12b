//! Bytes of gradients in a backward pass.

use std::ops::Range;

use super::super::unit::Unit;
use crate::options::GradientAccumulation;

/// Bytes of each unit's gradients, in layout order.
pub(super) struct Gradients {
    /// Full gradients of the unit and of its enclosing units, whose backward is not over yet.
    ///
    /// Inner units do not count the outermost unit. As a rule it has no tracked input, so its
    /// gradients all arrive at the end of backward. Until then they belong to Burn.
    full: Vec<usize>,
    /// Bytes of `full`, in the dtypes in which gradients arrive.
    arriving: Vec<usize>,
    /// Bytes of `full` while the unit is reduced: its full gradients in the dtypes of the
    /// reduction, their codes if they have any, and its reduced gradients.
    reducing: Vec<usize>,
    /// Reduced gradients of the unit.
    reduced: Vec<usize>,
    /// Full gradients of the unit, in the dtypes in which they are kept between micro-batches.
    held: Vec<usize>,
    /// Whether reduced gradients are stored on the host.
    offloaded: bool,
    /// Number of units in reduction while the gradients of another one arrive.
    others_in_flight: usize,
}

impl Gradients {
    /// Returns the gradients of `units`, of which `in_flight` may be in reduction at a time.
    /// `offloaded` says that reduced gradients are stored on the host.
    pub(super) fn new(units: &[Unit], offloaded: bool, in_flight: usize) -> Self {
        // A parameter's gradient arrives in the dtype of the parameter. It is cast to the dtype of
        // the reduction once all gradients of the unit have arrived.
        let arrive = |unit: &Unit| unit.gradient_bytes().0;
        let held = |unit: &Unit| unit.gradient_bytes().1;
        let nested = |own: &dyn Fn(&Unit) -> usize| {
            let mut enclosing: Vec<usize> = Vec::new();
            let full = units.iter().map(|unit| {
                enclosing.truncate(unit.level);
                enclosing.push(own(unit));
                enclosing.iter().skip(usize::from(unit.level > 0)).sum()
            });
            full.collect()
        };
        let most = |unit: &Unit| arrive(unit).max(held(unit));
        let full: Vec<usize> = nested(&most);
        let arriving = nested(&arrive);
        let reduced = Unit::reduced_bytes;
        let reducing = units.iter().zip(&full);
        let reducing = reducing.map(|(unit, full)| {
            full - most(unit) + held(unit) + reduced(unit) + unit.gradient_code_bytes()
        });
        Self {
            reducing: reducing.collect(),
            full,
            arriving,
            reduced: units.iter().map(reduced).collect(),
            held: units.iter().map(held).collect(),
            offloaded,
            others_in_flight: in_flight - 1,
        }
    }

    /// Returns the most bytes of one backward pass at any moment, on the device and on the host.
    ///
    /// Backward goes through the units in reverse order. With one reduction in flight, the
    /// reduction of a unit ends before the next unit's gradients arrive.
    pub(super) fn once(&self) -> (usize, usize) {
        if self.offloaded {
            return (self.largest(), self.reduced.iter().sum());
        }
        let mut done = 0;
        let mut peak = 0;
        let units = self.full.iter().zip(&self.reducing).zip(&self.reduced);
        for (unit, ((full, reducing), reduced)) in units.enumerate().rev() {
            let in_reduction: usize = self.held[self.others_in_reduction(unit)].iter().sum();
            peak = peak.max(done + in_reduction + full.max(reducing));
            done += reduced;
        }
        (peak.max(done), 0)
    }

    /// Returns the most bytes on the device, at any moment, if full gradients are held until the
    /// last micro-batch.
    ///
    /// The maximum may be in the last backward pass, which reduces one unit after the other: f32
    /// shards can be larger than full gradients in half precision.
    fn all_held(&self) -> usize {
        let mut now: usize = self.held.iter().sum();
        let mut peak = now + self.arriving.iter().max().copied().unwrap_or(0);
        let units = self.arriving.iter().zip(&self.held).zip(&self.reduced);
        for (unit, ((arriving, held), reduced)) in units.enumerate().rev() {
            let in_reduction: usize = self.held[self.others_in_reduction(unit)].iter().sum();
            peak = peak.max(now + in_reduction + arriving.max(reduced));
            now -= held;
            if !self.offloaded {
                now += reduced;
            }
        }
        peak.max(now)
    }

    /// Returns the units that may be in reduction while the gradients of `unit` arrive.
    fn others_in_reduction(&self, unit: usize) -> Range<usize> {
        unit + 1..self.full.len().min(unit + 1 + self.others_in_flight)
    }

    /// Returns the most bytes of gradients at one moment: the full gradients of a unit and of its
    /// enclosing units, and the inputs and results of the running reductions.
    fn largest(&self) -> usize {
        let of_unit = |(unit, (full, reducing)): (usize, (&usize, &usize))| {
            let both = |unit: usize| self.held[unit] + self.reduced[unit];
            full.max(reducing) + self.others_in_reduction(unit).map(both).sum::<usize>()
        };
        self.full.iter().zip(&self.reducing).enumerate().map(of_unit).max().unwrap_or(0)
    }

    /// Returns the most bytes of a backward pass that adds to the gradients of earlier
    /// micro-batches, on the device and on the host.
    pub(super) fn accumulated(&self, accumulation: GradientAccumulation) -> (usize, usize) {
        let reduced = self.reduced.iter().sum();
        match (accumulation, self.offloaded) {
            (GradientAccumulation::HoldUnsharded, false) => (self.all_held(), 0),
            (GradientAccumulation::HoldUnsharded, true) => (self.all_held(), reduced),
            (_, false) => (reduced + self.largest(), 0),
            (_, true) => (self.largest(), reduced),
        }
    }
}
