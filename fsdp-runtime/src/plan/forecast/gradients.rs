//! Bytes of gradients in a backward pass.

use crate::options::GradientAccumulation;
use crate::param_group::Unit;

/// Bytes of each unit's gradients, in layout order.
pub(super) struct Gradients {
    /// Full gradients of the unit, of its enclosing units, and of the groups of fields around it,
    /// whose backward is not over yet.
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
    /// Units in the order in which their gradients arrive.
    order: Vec<usize>,
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
            let full = units.iter().enumerate().map(|(number, unit)| {
                enclosing.truncate(unit.level);
                enclosing.push(own(unit));
                let around = units[..number]
                    .iter()
                    .filter(|other| other.group.as_ref().is_some_and(|group| number < group.until));
                let nested: usize = enclosing.iter().skip(usize::from(unit.level > 0)).sum();
                nested + around.map(own).sum::<usize>()
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
            order: arrival_order(units),
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
    /// With one reduction in flight, the reduction of a unit ends before the next unit's gradients
    /// arrive.
    pub(super) fn once(&self) -> (usize, usize) {
        if self.offloaded {
            return (self.largest(), self.reduced.iter().sum());
        }
        let mut done = 0;
        let mut peak = 0;
        for (at, &unit) in self.order.iter().enumerate() {
            let full = self.full[unit].max(self.reducing[unit]);
            peak = peak.max(done + self.held_in_reduction(at) + full);
            done += self.reduced[unit];
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
        for (at, &unit) in self.order.iter().enumerate() {
            let more = self.arriving[unit].max(self.reduced[unit]);
            peak = peak.max(now + self.held_in_reduction(at) + more);
            now -= self.held[unit];
            if !self.offloaded {
                now += self.reduced[unit];
            }
        }
        peak.max(now)
    }

    /// Returns the units that may be in reduction while the gradients of the unit at position `at` of
    /// the order arrive.
    fn others_in_reduction(&self, at: usize) -> &[usize] {
        &self.order[at.saturating_sub(self.others_in_flight)..at]
    }

    /// Returns the bytes of the full gradients of these units.
    fn held_in_reduction(&self, at: usize) -> usize {
        self.others_in_reduction(at).iter().map(|unit| self.held[*unit]).sum()
    }

    /// Returns the most bytes of gradients at one moment: the full gradients of a unit and of its
    /// enclosing units, and the inputs and results of the running reductions.
    fn largest(&self) -> usize {
        let of_unit = |(at, unit): (usize, &usize)| {
            let both = |unit: &usize| self.held[*unit] + self.reduced[*unit];
            let others: usize = self.others_in_reduction(at).iter().map(both).sum();
            self.full[*unit].max(self.reducing[*unit]) + others
        };
        self.order.iter().enumerate().map(of_unit).max().unwrap_or(0)
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

/// Returns the units in the order in which their gradients arrive.
///
/// Backward goes through the units in reverse. Gradients of a unit without a tracked input arrive at
/// the end, because Burn orders operations by their distance from the leaves. There the outermost
/// unit comes first: Burn finds its last layers before those of inner units.
fn arrival_order(units: &[Unit]) -> Vec<usize> {
    let (last, first): (Vec<usize>, Vec<usize>) =
        (0..units.len()).partition(|unit| units[*unit].takes_model_input);
    first.into_iter().rev().chain(last).collect()
}
