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

use super::{Run, Span, contiguous, element, exclusive, grid, rounded, spans};
use crate::kernels::Sums;
use crate::norm::Norm;

/// Sums that are left of each tensor, for the host to add up.
const LEFT: usize = 256;
/// Elements that a sum is made of, and sums, on a device that runs units side by side.
const ROWS: usize = 32;
const MOST: usize = 1 << 17;
/// Vectors that a unit adds up, one after the other, on a device that runs units in turn.
const BLOCK: usize = 64;

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

/// Unit `u` adds up vectors `u·each`, then on in strides of `step`, `rows` of them.
#[cube(launch_unchecked)]
fn sums_kernel<F: Float, N: Size>(
    data: &mut [Vector<F, N>],
    sums: &mut [Vector<f32, N>],
    tops: &mut [Vector<u32, N>],
    from: usize,
    count: usize,
    units: usize,
    each: usize,
    step: usize,
    rows: usize,
    to: usize,
    factor: f32,
    exponent: f32,
    zero: u32,
    #[comptime] term: Term,
    #[comptime] scale: bool,
    #[comptime] join: bool,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < units {
        let mut sum = Vector::<f32, N>::new(0.0f32);
        let mut top = Vector::<u32, N>::new(0u32);
        if comptime!(join) {
            sum = sums[to + ABSOLUTE_POS];
            top = tops[to + ABSOLUTE_POS];
        }
        let mut index = ABSOLUTE_POS * each;
        for _ in 0..rows {
            if index < count {
                let mut x = Vector::<f32, N>::cast_from(data[from + index]);
                if comptime!(scale) {
                    let scaled = Vector::<F, N>::cast_from(x * Vector::new(factor));
                    data[from + index] = scaled;
                    x = Vector::cast_from(scaled);
                }
                let bits = Vector::<u32, N>::reinterpret(x) & Vector::new(0x7FFF_FFFFu32);
                top = max(top, bits);
                if comptime!(term == Term::Magnitude) {
                    sum += Vector::<f32, N>::reinterpret(bits);
                }
                if comptime!(term == Term::Square) {
                    sum += rounded(x * x, zero);
                }
                if comptime!(term == Term::Power) {
                    sum += Vector::powf(Vector::<f32, N>::reinterpret(bits), Vector::new(exponent));
                }
            }
            index += step;
        }
        sums[to + ABSOLUTE_POS] = sum;
        tops[to + ABSOLUTE_POS] = top;
    }
}

/// Adds up `count` vectors of sums, in strides of `units`.
#[cube(launch_unchecked)]
fn fold_kernel<N: Size>(
    sums: &[Vector<f32, N>],
    tops: &[Vector<u32, N>],
    sums_left: &mut [Vector<f32, N>],
    tops_left: &mut [Vector<u32, N>],
    count: usize,
    units: usize,
    to: usize,
) {
    if ABSOLUTE_POS < units {
        let mut sum = Vector::<f32, N>::new(0.0f32);
        let mut top = Vector::<u32, N>::new(0u32);
        let mut index = ABSOLUTE_POS;
        while index < count {
            sum += sums[index];
            top = max(top, tops[index]);
            index += units;
        }
        sums_left[to + ABSOLUTE_POS] = sum;
        tops_left[to + ABSOLUTE_POS] = top;
    }
}

/// Which sum each element goes into.
struct Plan {
    /// Sums there are: a multiple of `LEFT`.
    sums: usize,
    /// Vectors a unit goes on by from its first.
    blocks: bool,
}

impl Plan {
    /// Blocks of one unit on a CPU, whose cache they run through in order; elsewhere strides, so
    /// that neighbouring units read neighbouring vectors.
    fn new(client: &Client, numel: usize) -> Self {
        let blocks = client.properties().hardware.num_cpu_cores.is_some();
        let sums = if blocks {
            numel.div_ceil(BLOCK).next_multiple_of(LEFT)
        } else {
            (numel / ROWS).next_power_of_two().clamp(LEFT, MOST)
        };
        Self { sums: sums.max(LEFT), blocks }
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
}

/// What is asked of one tensor.
struct Request {
    data: Run,
    numel: usize,
    norm: Norm,
    /// What its elements are multiplied by first.
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

fn launch(client: &Client, request: &Request, left: &Partial, at: usize) {
    let plan = Plan::new(client, request.numel);
    let partial = Partial::new(client, plan.sums);
    let spans = spans(client, &[&request.data], request.numel);
    let width = spans.first().map_or(1, |span| span.width);
    let nothing = Span { start: 0, width, count: 0, anywhere: false };
    let body = spans.iter().find(|span| span.start == 0).unwrap_or(&nothing);
    let rest = spans.iter().find(|span| span.start > 0);

    let units = plan.sums / width;
    let (each, step) = if plan.blocks { (BLOCK, 1) } else { (1, units) };
    let rows = if plan.blocks { BLOCK } else { body.count.div_ceil(units) };
    let run = |span: &Span, to: usize, units: usize, [each, step, rows]: [usize; 3], join: bool| {
        let (count, dim) = grid(client, units);
        let (data, from) = span.argument(&request.data);
        let whole = Span { start: 0, width: span.width, count: 0, anywhere: false };
        // SAFETY: `spans` has checked that the buffer holds the elements, and there are as many sums
        // as the units have lanes.
        unsafe {
            sums_kernel::launch_unchecked(
                client,
                count,
                dim,
                span.width,
                data,
                whole.argument(&partial.sums).0,
                whole.argument(&partial.tops).0,
                from,
                span.count,
                units,
                each,
                step,
                rows,
                to,
                request.factor.unwrap_or(1.0),
                request.exponent(),
                0,
                Term::of(request.norm),
                request.factor.is_some(),
                join,
                element(request.data.dtype),
            );
        }
    };
    run(body, 0, units, [each, step, rows], false);
    if let Some(rest) = rest {
        // Each goes into the sum it would go into as part of one more vector.
        let to = if plan.blocks { 0 } else { rest.start % plan.sums };
        run(rest, to, rest.count, [1, rest.count, 1], true);
    }

    let width = client.io_optimized_vector_sizes(size_of::<f32>()).next().unwrap_or(1).min(LEFT);
    let (count, dim) = grid(client, LEFT / width);
    let whole = Span { start: 0, width, count: 0, anywhere: false };
    // SAFETY: there are `plan.sums` sums, and `LEFT` places from `at` on.
    unsafe {
        fold_kernel::launch_unchecked(
            client,
            count,
            dim,
            width,
            whole.argument(&partial.sums).0,
            whole.argument(&partial.tops).0,
            whole.argument(&left.sums).0,
            whole.argument(&left.tops).0,
            plan.sums / width,
            LEFT / width,
            at / width,
        );
    }
}

/// The sums of each request, read back in one transfer.
fn read(client: &Client, requests: &[Request]) -> Vec<Sums> {
    let nothing = Sums { sum: 0.0, largest: 0.0 };
    if requests.iter().all(|request| request.numel == 0) {
        return vec![nothing; requests.len()];
    }
    let full: Vec<_> = requests.iter().filter(|request| request.numel > 0).collect();
    let left = Partial::new(client, full.len() * LEFT);
    for (index, request) in full.into_iter().enumerate() {
        launch(client, request, &left, index * LEFT);
    }
    let bytes = client
        .read(vec![left.sums.handle, left.tops.handle])
        .unwrap_or_else(|error| panic!("cannot read the sums of a norm: {error}"));
    let sums: &[f32] = bytemuck::cast_slice(&bytes[0]);
    let tops: &[u32] = bytemuck::cast_slice(&bytes[1]);
    let sums = sums.chunks_exact(LEFT).map(|sums| sums.iter().copied().map(f64::from).sum());
    let tops = tops.chunks_exact(LEFT).map(|tops| tops.iter().copied().max().unwrap_or(0));
    let mut full = sums.zip(tops).map(|(sum, top)| Sums { sum, largest: f32::from_bits(top) });
    let of = |request: &Request| if request.numel == 0 { None } else { full.next() };
    requests.iter().map(of).map(|sums| sums.unwrap_or(nothing)).collect()
}

/// What each range of its flattened tensor adds to a norm.
pub(crate) fn sums(parts: &[(CubeTensor, Range<usize>)], norm: Norm) -> Vec<Sums> {
    let Some((first, _)) = parts.first() else { return Vec::new() };
    let client = first.client.clone();
    let part = |(tensor, range): &(CubeTensor, Range<usize>)| {
        let tensor = contiguous(tensor.clone());
        Request { data: Run::of(&tensor).from(range.start), numel: range.len(), norm, factor: None }
    };
    read(&client, &parts.iter().map(part).collect::<Vec<_>>())
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
    let request = |tensor: &CubeTensor| {
        let numel = tensor.shape().num_elements();
        Request { data: Run::of(tensor), numel, norm, factor: Some(factor) }
    };
    let sums = read(&client, &tensors.iter().map(request).collect::<Vec<_>>());
    (tensors, sums)
}
