//! Partial sums for norms with the finite check, and unscaling, in one pass over memory.
//!
//! What an element is added to depends on its index, the number of elements and the device alone,
//! not on where the tensor lies in its buffer: every strategy finds the same norm.
//!
//! Sums are in f32. The largest magnitude is found as an integer, its bits without the sign, which
//! order as the magnitudes do, with infinity and then NaN above all others. So it tells both the
//! infinity norm and whether all elements are finite, exactly, on every device.

use std::ops::Range;

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::batch::{Batch, Job, batches};
use super::{Run, contiguous, element, exclusive, grid, in_integers, narrowed, on_cpu, rounded};
use crate::backend::Norm;
use crate::backend::kernels::Sums;

/// Sums of each tensor are a multiple of this.
const LEAST: usize = 256;
/// On a device that runs units side by side: elements that a sum is made of, at least, and sums of a
/// tensor, at most. As many of those are added up again before the host reads them.
const ROWS: usize = 32;
const MOST: usize = 1 << 17;
/// On a device that runs units in turn: neighbouring vectors that a sum is made of.
const BLOCK: usize = 512;
/// Tensors that share a launch, at most: the kernel's body is there once for each.
const TOGETHER: usize = 8;

/// What an element adds to the sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Term {
    /// Nothing.
    Nothing,
    Magnitude,
    Square,
    Power,
}

impl Term {
    fn of(norm: Norm) -> Self {
        match norm {
            Norm::One => Self::Magnitude,
            Norm::Two => Self::Square,
            Norm::Inf => Self::Nothing,
            Norm::P(_) => Self::Power,
        }
    }
}

/// Units go through a part in tiles: `lanes` neighbouring units go through `lanes · rows` vectors together,
/// row by row.
#[cube(launch_unchecked)]
fn sums_kernel<F: Float, N: Size>(
    data: &mut Sequence<Box<[Vector<F, N>]>>,
    sums: &mut [Vector<f32, N>],
    tops: &mut [Vector<u32, N>],
    firsts: &Sequence<usize>,
    counts: &Sequence<usize>,
    places: &Sequence<usize>,
    units: &Sequence<usize>,
    rows: &Sequence<usize>,
    factor: f32,
    exponent: f32,
    zero: u32,
    #[comptime] term: Term,
    #[comptime] scale: bool,
    #[comptime] join: bool,
    #[comptime] lanes: usize,
    #[comptime] integers: bool,
    #[define(F)] _dtype: ElemType,
) {
    let mut unit = ABSOLUTE_POS;
    #[unroll]
    for part in 0..counts.len() {
        if unit < units[part] {
            let place = places[part] + unit;
            let mut sum = Vector::<f32, N>::new(0.0f32);
            let mut top = Vector::<u32, N>::new(0u32);
            if comptime!(join) {
                sum = sums[place];
                top = tops[place];
            }
            let first = firsts[part];
            let tile = rows[part] * comptime!(lanes);
            let mut index = unit / comptime!(lanes) * tile;
            let end = min(index + tile, counts[part]);
            index += unit % comptime!(lanes);
            if comptime!(lanes == 1) {
                // Four streams: memory answers them side by side where each comes to a new page, and
                // sums of four need not wait for each other.
                let quarter = comptime!(BLOCK / 4);
                if index + comptime!(BLOCK) == end {
                    let mut at = first + index;
                    let last = at + quarter;
                    while at < last {
                        let a = magnitude(data, part, at, factor, scale, integers);
                        let b = magnitude(data, part, at + quarter, factor, scale, integers);
                        let c = magnitude(data, part, at + 2 * quarter, factor, scale, integers);
                        let d = magnitude(data, part, at + 3 * quarter, factor, scale, integers);
                        top = max(top, max(max(a, b), max(c, d)));
                        sum += (addend(a, exponent, zero, term) + addend(b, exponent, zero, term))
                            + (addend(c, exponent, zero, term) + addend(d, exponent, zero, term));
                        at += 1;
                    }
                    index = end;
                }
            }
            while index < end {
                let bits = magnitude(data, part, first + index, factor, scale, integers);
                top = max(top, bits);
                sum += addend(bits, exponent, zero, term);
                index += comptime!(lanes);
            }
            sums[place] = sum;
            tops[place] = top;
        }
        // Below 0 it wraps, beyond every count.
        unit -= units[part];
    }
}

/// The bits of an element's magnitude in f32, after it was multiplied if asked.
#[cube]
fn magnitude<F: Float, N: Size>(
    data: &mut Sequence<Box<[Vector<F, N>]>>,
    #[comptime] part: usize,
    at: usize,
    factor: f32,
    #[comptime] scale: bool,
    #[comptime] integers: bool,
) -> Vector<u32, N> {
    let mut x = Vector::<f32, N>::cast_from(data[part][at]);
    if comptime!(scale) {
        let scaled = narrowed::<F, N>(x * Vector::new(factor), integers);
        data.index_mut(part)[at] = scaled;
        x = Vector::cast_from(scaled);
    }
    Vector::<u32, N>::reinterpret(x) & Vector::new(0x7FFF_FFFFu32)
}

/// What an element of this magnitude adds to a sum.
#[cube]
fn addend<N: Size>(
    bits: Vector<u32, N>,
    exponent: f32,
    zero: u32,
    #[comptime] term: Term,
) -> Vector<f32, N> {
    let x = Vector::<f32, N>::reinterpret(bits);
    let mut addend = Vector::<f32, N>::new(0.0f32);
    if comptime!(term == Term::Magnitude) {
        addend = x;
    }
    if comptime!(term == Term::Square) {
        addend = rounded(x * x, zero);
    }
    if comptime!(term == Term::Power) {
        addend = Vector::powf(x, Vector::new(exponent));
    }
    addend
}

/// Adds up the sums of each part, `units` of them side by side, in strides of as many. `bounds` has
/// where a part's begin and how many there are, where those left begin and their number, in vectors.
#[cube(launch_unchecked)]
fn fold_kernel<N: Size>(
    sums: &[Vector<f32, N>],
    tops: &[Vector<u32, N>],
    sums_left: &mut [Vector<f32, N>],
    tops_left: &mut [Vector<u32, N>],
    bounds: &[u32],
    parts: usize,
    units: usize,
) {
    let part = ABSOLUTE_POS / units;
    if part < parts {
        let unit = ABSOLUTE_POS % units;
        let from = bounds[part * 4] as usize;
        let count = bounds[part * 4 + 1] as usize;
        let to = bounds[part * 4 + 2] as usize;
        let left = bounds[part * 4 + 3] as usize;
        if unit < left {
            let mut sum = Vector::<f32, N>::new(0.0f32);
            let mut top = Vector::<u32, N>::new(0u32);
            let mut index = unit;
            while index < count {
                sum += sums[from + index];
                top = max(top, tops[from + index]);
                index += left;
            }
            sums_left[to + unit] = sum;
            tops_left[to + unit] = top;
        }
    }
}

/// Which sum each element of a tensor goes into.
struct Plan {
    /// Sums there are: a multiple of `LEAST`.
    sums: usize,
    /// Those that the host reads.
    left: usize,
    /// Rows of a tile.
    rows: usize,
}

impl Plan {
    /// Tiles of one unit on a CPU, whose cache it runs through in order; elsewhere of `LEAST` elements
    /// a row, so that neighbouring units read neighbouring vectors.
    fn new(client: &Client, numel: usize) -> Self {
        if on_cpu(client) {
            let sums = numel.div_ceil(BLOCK).next_multiple_of(LEAST);
            return Self { sums, left: sums, rows: BLOCK };
        }
        let rows = numel.div_ceil(MOST).max(ROWS);
        let sums = numel.div_ceil(LEAST * rows).max(1) * LEAST;
        Self { sums, left: (sums / ROWS).next_multiple_of(LEAST), rows }
    }
}

/// Two buffers of sums.
struct Partial {
    sums: Run,
    tops: Run,
}

impl Partial {
    fn new(client: &Client, numel: usize) -> Self {
        let run = || {
            let handle: Handle = client.empty(numel * size_of::<f32>());
            Run { handle, at: 0, dtype: DType::F32 }
        };
        Self { sums: run(), tops: run() }
    }

    fn arguments(&self) -> [BufferArg; 2] {
        [&self.sums, &self.tops].map(Run::argument)
    }
}

/// What is asked of tensors.
struct Request {
    norm: Norm,
    /// What their elements are multiplied by first.
    factor: Option<f32>,
}

impl Request {
    fn exponent(&self) -> f32 {
        match self.norm {
            Norm::P(p) => p as f32,
            _ => 1.0,
        }
    }
}

/// A tensor's sums among those of all.
struct Share {
    plan: Plan,
    /// The first of them, and the first of those left.
    at: usize,
    left: usize,
}

/// Where each tensor's sums lie.
fn shares(client: &Client, jobs: &[Job<1>]) -> Vec<Share> {
    let (mut at, mut left) = (0, 0);
    let share = |job: &Job<1>| {
        let share = Share { plan: Plan::new(client, job.numel), at, left };
        at += share.plan.sums;
        left += share.plan.left;
        share
    };
    jobs.iter().map(share).collect()
}

/// Adds up each tensor's elements to its sums.
fn add_up(client: &Client, request: &Request, jobs: &[Job<1>], shares: &[Share], sums: &Partial) {
    let blocks = on_cpu(client);
    let batches = batches(client, jobs, None, TOGETHER);
    // First spans make the sums, second ones add their few elements to them.
    for join in [false, true] {
        for Batch { width, parts, .. } in &batches {
            let parts: Vec<_> = parts.iter().filter(|(_, span)| (span.start > 0) == join).collect();
            if parts.is_empty() {
                continue;
            }
            let (mut data, mut firsts, mut places) = (Vec::new(), Vec::new(), Vec::new());
            let (mut units, mut rows) = (Vec::new(), Vec::new());
            for (index, span) in &parts {
                let (buffer, first) = span.argument(&jobs[*index].runs[0]);
                let Share { plan, at, .. } = &shares[*index];
                // A second span's elements go into the sums they would go into as part of one more
                // vector; on a CPU, where that is not needed, into the first.
                let (place, unit, row) = match (join, blocks) {
                    (false, _) => (0, plan.sums / width, plan.rows),
                    (true, true) => (0, span.count, 1),
                    (true, false) => {
                        let tile = span.start / (LEAST * plan.rows);
                        (tile * LEAST + span.start % LEAST, span.count, 1)
                    }
                };
                data.push(buffer);
                firsts.push(first);
                places.push(at / width + place);
                units.push(unit);
                rows.push(row);
            }
            let dtype = jobs[parts[0].0].runs[0].dtype;
            let (count, dim) = grid(client, units.iter().sum());
            let [sums, tops] = sums.arguments();
            // SAFETY: `batches` has checked that the buffers hold the jobs' elements, of which the
            // kernel touches those of the spans; and each part has as many sums as its units have
            // lanes.
            unsafe {
                sums_kernel::launch_unchecked(
                    client,
                    count,
                    dim,
                    *width,
                    data.into_iter().collect(),
                    sums,
                    tops,
                    firsts.into_iter().collect(),
                    parts.iter().map(|(_, span)| span.count).collect(),
                    places.into_iter().collect(),
                    units.into_iter().collect(),
                    rows.into_iter().collect(),
                    request.factor.unwrap_or(1.0),
                    request.exponent(),
                    0,
                    Term::of(request.norm),
                    request.factor.is_some(),
                    join,
                    if blocks { 1 } else { LEAST / width },
                    in_integers(client, dtype),
                    element(dtype),
                );
            }
        }
    }
}

/// Adds up each tensor's sums to those that are left of them.
fn fold(client: &Client, shares: &[Share], sums: &Partial) -> Partial {
    let last = &shares[shares.len() - 1];
    let left = Partial::new(client, last.left + last.plan.left);
    let width = client.io_optimized_vector_sizes(size_of::<f32>()).next().unwrap_or(1).min(LEAST);
    let vectors = |numbers: [usize; 4]| numbers.map(|number| (number / width) as u32);
    let bounds = |share: &Share| vectors([share.at, share.plan.sums, share.left, share.plan.left]);
    let bounds: Vec<u32> = shares.iter().flat_map(bounds).collect();
    let units = shares.iter().map(|share| share.plan.left).max().unwrap_or(LEAST) / width;
    let (count, dim) = grid(client, shares.len() * units);
    let handle = client.create_from_slice(bytemuck::cast_slice(&bounds));
    let ([sums, tops], [sums_left, tops_left]) = (sums.arguments(), left.arguments());
    // SAFETY: the bounds are those of the shares, which the buffers were made for.
    unsafe {
        fold_kernel::launch_unchecked(
            client,
            count,
            dim,
            width,
            sums,
            tops,
            sums_left,
            tops_left,
            BufferArg::from_raw_parts(handle, bounds.len()),
            shares.len(),
            units,
        );
    }
    left
}

/// The sums of each tensor, read back in one transfer.
fn read(client: &Client, request: &Request, jobs: &[Job<1>]) -> Vec<Sums> {
    let nothing = Sums { sum: 0.0, largest: 0.0 };
    if jobs.iter().all(|job| job.numel == 0) {
        return vec![nothing; jobs.len()];
    }
    let shares = shares(client, jobs);
    let last = &shares[shares.len() - 1];
    let all = Partial::new(client, last.at + last.plan.sums);
    add_up(client, request, jobs, &shares, &all);
    let left = if on_cpu(client) { all } else { fold(client, &shares, &all) };
    let bytes = client
        .read(vec![left.sums.handle, left.tops.handle])
        .unwrap_or_else(|error| panic!("cannot read the sums of a norm: {error}"));
    let sums: &[f32] = bytemuck::cast_slice(&bytes[0]);
    let tops: &[u32] = bytemuck::cast_slice(&bytes[1]);
    let of = |(job, share): (&Job<1>, &Share)| {
        if job.numel == 0 {
            return nothing;
        }
        let range = share.left..share.left + share.plan.left;
        let sum = sums[range.clone()].iter().copied().map(f64::from).sum();
        let top = tops[range].iter().copied().max().unwrap_or(0);
        Sums { sum, largest: f32::from_bits(top) }
    };
    jobs.iter().zip(&shares).map(of).collect()
}

/// What each range of its flattened tensor adds to a norm.
pub(crate) fn sums(parts: &[(CubeTensor, Range<usize>)], norm: Norm) -> Vec<Sums> {
    let Some((first, _)) = parts.first() else { return Vec::new() };
    let client = first.client.clone();
    let job = |(tensor, range): &(CubeTensor, Range<usize>)| {
        let tensor = contiguous(tensor.clone());
        Job { runs: [Run::of(&tensor).from(range.start)], numel: range.len() }
    };
    let jobs: Vec<_> = parts.iter().map(job).collect();
    read(&client, &Request { norm, factor: None }, &jobs)
}

/// Multiplies the tensors by `factor`, in their own memory where nothing shares it, and tells what
/// each adds to a norm then.
pub(crate) fn unscale(
    tensors: Vec<CubeTensor>,
    factor: f32,
    norm: Norm,
) -> (Vec<CubeTensor>, Vec<Sums>) {
    let tensors: Vec<_> = tensors.into_iter().map(exclusive).collect();
    let Some(client) = tensors.first().map(|tensor| tensor.client.clone()) else {
        return (tensors, Vec::new());
    };
    let job =
        |tensor: &CubeTensor| Job { runs: [Run::of(tensor)], numel: tensor.shape().num_elements() };
    let jobs: Vec<_> = tensors.iter().map(job).collect();
    let sums = read(&client, &Request { norm, factor: Some(factor) }, &jobs);
    (tensors, sums)
}
