//! Kernels of the cross-entropy of rows of logits. Computed in f32.

use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::iota::iota;
use super::rounding::narrowed;
use super::rows::{Team, own_lane, own_team, power, team_max, team_sum};

/// Variant of [`row_losses_kernel`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct LossOptions {
    /// Whether a share of the expected distribution is even over all classes.
    pub(super) smoothing: bool,
    /// Whether the gradients of the logits are written.
    pub(super) slopes: bool,
    /// Whether the last vector of a row has elements that are no logits.
    pub(super) tail: bool,
}

/// Shape of the rows of a launch, and the distribution that is expected of them.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct LossRows {
    /// Number of rows.
    rows: usize,
    /// Index of the first row among the rows of all launches.
    first: usize,
    /// Number of rows of all launches.
    all: usize,
    /// Number of vectors that have logits of a row.
    count: usize,
    /// Number of vectors from one row to the next.
    stride: usize,
    classes: u32,
    /// Target of rows that do not count.
    ignored: f32,
    /// Expected share of the target, in addition to the even share.
    share: f32,
    /// Expected share of each class.
    even: f32,
    /// Negative infinity, which WGSL has no literal for.
    lowest: f32,
}

/// What is expected of a row.
#[derive(CubeType, Clone, Copy)]
struct Expected {
    /// Whether the row counts.
    counts: bool,
    /// Target, or class 0 if the target is no class.
    class: usize,
    /// Expected share of the class, in addition to the even share.
    share: f32,
}

/// Returns what is expected of a row with this target.
#[cube]
fn expected(target: f32, shape: &LossRows) -> Expected {
    let is_class = target >= 0.0f32 && target < f32::cast_from(shape.classes);
    let class = u32::cast_from(select(is_class, target, 0.0f32.runtime())) as usize;
    let share = select(is_class, shape.share, 0.0f32.runtime());
    Expected { counts: target != shape.ignored, class, share }
}

/// Returns a vector of logits with the bias. `bias` has one buffer or none.
#[cube]
fn biased<F: Float, N: Size>(
    logits: Vector<F, N>,
    bias: &Sequence<Box<[Vector<F, N>]>>,
    index: usize,
) -> Vector<f32, N> {
    let mut logits = Vector::<f32, N>::cast_from(logits);
    #[unroll]
    for at in 0..bias.len() {
        logits += Vector::cast_from(bias[at][index]);
    }
    logits
}

/// Returns vector `index` of a row, with `other` in place of the elements that are no logits.
#[cube]
fn of_classes<N: Size>(
    elements: Vector<f32, N>,
    other: f32,
    index: usize,
    shape: &LossRows,
    #[comptime] options: LossOptions,
    #[comptime] team: Team,
) -> Vector<f32, N> {
    let mut elements = elements;
    if comptime!(options.tail) {
        let classes = iota::<N>() + Vector::new((index * comptime!(team.width)) as u32);
        let is_class = classes.less_than(&Vector::<u32, N>::new(shape.classes));
        elements = select_many(is_class, elements, Vector::new(other));
    }
    elements
}

/// Returns element `at` of a vector.
#[cube]
fn picked<N: Size>(vector: Vector<f32, N>, at: usize, #[comptime] team: Team) -> f32 {
    let mut element = vector.extract(0usize);
    #[unroll]
    for index in 1..comptime!(team.width) {
        element = select(at == comptime!(index), vector.extract(index), element);
    }
    element
}

/// What the loss of a row and the gradients of its logits are computed of.
#[derive(CubeType, Clone, Copy)]
struct Statistics {
    /// Largest logit.
    top: f32,
    /// Sum of the exponentials of the logits less the largest.
    sum: f32,
    /// Sum of the logits under smoothing, else 0.
    total: f32,
}

/// Returns the statistics of the first `end` vectors of a row, which are found in one pass: each thread
/// keeps the largest logit so far, and scales its sum when it finds a larger one. All threads of the cube
/// must call it.
// The logits are only read. CubeCL turns no mutable reference into a shared one.
#[cube]
fn statistics<F: Float, N: Size>(
    logits: &mut [Vector<F, N>],
    bias: &Sequence<Box<[Vector<F, N>]>>,
    first: usize,
    end: usize,
    shape: &LossRows,
    shared: &mut Shared<[Vector<f32, N>]>,
    #[comptime] options: LossOptions,
    #[comptime] team: Team,
) -> Statistics {
    let mut tops = Vector::<f32, N>::new(f32::MIN);
    let mut sums = Vector::<f32, N>::new(0.0f32);
    let mut totals = Vector::<f32, N>::new(0.0f32);
    let mut index = own_lane(team);
    while index < end {
        let read = biased(logits[first + index], bias, index);
        let logit = of_classes(read, shape.lowest, index, shape, options, team);
        // A NaN is not above, and its power is NaN.
        let is_above = tops.less_than(&logit);
        let ratio = power(select_many(is_above, tops - logit, logit - tops));
        let scaled = select_many(is_above, sums * ratio, sums);
        sums = scaled + select_many(is_above, Vector::new(1.0f32), ratio);
        tops = select_many(is_above, logit, tops);
        if comptime!(options.smoothing) {
            totals += of_classes(read, 0.0f32, index, shape, options, team);
        }
        index += comptime!(team.lanes);
    }
    let top = team_max(tops, shared, team);
    let sum = team_sum(sums * power(tops - Vector::new(top)), shared, team);
    let mut total = 0.0f32.runtime();
    if comptime!(options.smoothing) {
        total = team_sum(totals, shared, team);
    }
    Statistics { top, sum, total }
}

/// Replaces the logits of a row, which begins at vector `first`, by the gradients of the row's loss.
#[cube]
fn replace<F: Float, N: Size>(
    logits: &mut [Vector<F, N>],
    bias: &Sequence<Box<[Vector<F, N>]>>,
    first: usize,
    expected: &Expected,
    statistics: &Statistics,
    shape: &LossRows,
    #[comptime] team: Team,
    #[comptime] integers: bool,
) {
    let zero = Vector::<f32, N>::new(0.0f32);
    let top = Vector::<f32, N>::new(statistics.top);
    let scale = Vector::<f32, N>::new(1.0f32 / statistics.sum);
    let width = comptime!(team.width);
    let (own, element) = (expected.class / width, expected.class % width);
    let mut index = own_lane(team);
    while index < shape.count {
        let mut slope = zero;
        if expected.counts {
            let logit = biased(logits[first + index], bias, index);
            slope = power(logit - top) * scale - Vector::new(shape.even);
            if index == own {
                let is_class = iota::<N>().equal(&Vector::new(element as u32));
                slope -= select_many(is_class, Vector::new(expected.share), zero);
            }
        }
        logits[first + index] = narrowed(slope, integers);
        index += comptime!(team.lanes);
    }
}

/// Writes the losses of rows, and for each row 1 if it counts and 0 if not, which follow the losses of
/// all launches in `results`. A row that does not count has the loss 0. Replaces the logits by the
/// gradients of the losses, if the options say so. `bias` has one buffer or none.
#[cube(launch_unchecked)]
pub(super) fn row_losses_kernel<F: Float, N: Size>(
    logits: &mut [Vector<F, N>],
    bias: &Sequence<Box<[Vector<F, N>]>>,
    targets: &[f32],
    results: &mut [f32],
    shape: LossRows,
    #[comptime] options: LossOptions,
    #[comptime] team: Team,
    #[comptime] integers: bool,
    #[define(F)] _dtype: ElemType,
) {
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(team.threads);
    let own = own_team(team);
    // Surplus teams process the last row as well, as all threads of a cube must meet. They do not write.
    let row = min(own, shape.rows - 1);
    let first = row * shape.stride;
    let expected = expected(targets[shape.first + row], &shape);
    // Read before the threads of the team meet, after which one of them replaces it.
    let own_vector = expected.class / comptime!(team.width);
    let of_target = picked(
        biased(logits[first + own_vector], bias, own_vector),
        expected.class % comptime!(team.width),
        team,
    );
    // The logits of a row that does not count are not read.
    let end = select(expected.counts, shape.count, 0usize.runtime());
    let statistics = statistics(logits, bias, first, end, &shape, &mut shared, options, team);

    if own < shape.rows && own_lane(team) == 0 {
        let (share, top) = (expected.share, statistics.top);
        let mut loss = f32::ln(statistics.sum) + share * (top - of_target) + (1.0f32 - share) * top;
        if comptime!(options.smoothing) {
            loss -= shape.even * statistics.total;
        }
        let zero = 0.0f32.runtime();
        results[shape.first + row] = select(expected.counts, loss, zero);
        results[shape.all + shape.first + row] = select(expected.counts, 1.0f32.runtime(), zero);
    }
    if comptime!(options.slopes) {
        let is_own = own < shape.rows;
        if is_own {
            replace(logits, bias, first, &expected, &statistics, &shape, team, integers);
        }
    }
}

/// Adds up the losses of all rows, whose `results` are those of [`row_losses_kernel`], in a fixed order.
/// Divides by the number of rows that count if `mean`. Also writes the factor of the gradients. A launch
/// has one team.
#[cube(launch_unchecked)]
pub(super) fn loss_kernel<N: Size>(
    results: &[Vector<f32, N>],
    loss: &mut [f32],
    factor: &mut [f32],
    rows: usize,
    #[comptime] mean: bool,
    #[comptime] team: Team,
) {
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(team.threads);
    let mut losses = Vector::<f32, N>::new(0.0f32);
    let mut counted = Vector::<f32, N>::new(0.0f32);
    let mut row = own_lane(team);
    while row < rows {
        losses += results[row];
        counted += results[rows + row];
        row += comptime!(team.lanes);
    }
    let sum = team_sum(losses, &mut shared, team);
    // Without rows that count the sum is 0, and so is the mean.
    let counted = max(team_sum(counted, &mut shared, team), 1.0f32.runtime());
    if ABSOLUTE_POS == 0 {
        if comptime!(mean) {
            loss[0] = sum / counted;
            factor[0] = 1.0f32 / counted;
        } else {
            loss[0] = sum;
            factor[0] = 1.0f32.runtime();
        }
    }
}
