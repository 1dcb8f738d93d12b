//! Partial sums for norms, the largest magnitude, and unscaling, in one pass over memory.
//!
//! The sum that an element is added to depends only on the element's index, the number of elements
//! and the device, not on the tensor's position in its buffer. So every sharding strategy finds the
//! same norm.
//!
//! Sums are in f32. The largest magnitude is found as an integer: the bits of an f32 without the
//! sign have the order of the magnitudes, with infinity above all finite numbers and NaN above
//! infinity. So the infinity norm and the finite check are exact on every device.

use std::ops::Range;

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::buffer_slice::BufferSlice;
use super::copy::exclusive;
use super::device::{on_cpu, rounds_in_integers};
use super::launch::{Job, Launch, launches};
use super::span::{Span, grid};
use super::sum_kernels::{CPU_BLOCK, Term, fold_kernel, sums_kernel};
use super::tensors::{contiguous, element};
use crate::contract::Sums;
use crate::norm::Norm;

/// Number that divides the number of partial sums of a tensor.
const SUMS_MULTIPLE: usize = 256;
/// Smallest number of elements that are added to one partial sum, and number of partial sums that
/// the fold adds to one output, on devices other than CPUs.
const MIN_ROWS: usize = 32;
/// Largest number of partial sums of a tensor, on devices other than CPUs.
const MAX_SUMS: usize = 1 << 17;
/// Largest number of tensors that share a launch. The compiled kernel contains its body once for
/// each.
const MAX_TENSORS: usize = 8;

/// Division of a tensor's elements among partial sums.
struct SumPlan {
    /// Number of partial sums: a multiple of `SUMS_MULTIPLE`.
    sums: usize,
    /// Number of partial sums that the host reads.
    outputs: usize,
    /// Number of rows of a tile, as [`sums_kernel`] defines it.
    rows: usize,
}

impl SumPlan {
    /// Returns the plan for a tensor of `numel` elements.
    ///
    /// On a CPU a tile belongs to one thread, which reads memory in order. On other devices a row
    /// of a tile has `SUMS_MULTIPLE` elements, so that neighbouring threads read neighbouring
    /// vectors.
    fn new(client: &Client, numel: usize) -> Self {
        if on_cpu(client) {
            let sums = numel.div_ceil(CPU_BLOCK).next_multiple_of(SUMS_MULTIPLE);
            return Self { sums, outputs: sums, rows: CPU_BLOCK };
        }
        let rows = numel.div_ceil(MAX_SUMS).max(MIN_ROWS);
        let sums = numel.div_ceil(SUMS_MULTIPLE * rows).max(1) * SUMS_MULTIPLE;
        let outputs = (sums / MIN_ROWS).next_multiple_of(SUMS_MULTIPLE);
        Self { sums, outputs, rows }
    }
}

/// Buffers of partial sums, f32, and of the bits of largest magnitudes, u32.
struct PartialSums {
    sums: BufferSlice,
    largest: BufferSlice,
}

impl PartialSums {
    fn new(client: &Client, numel: usize) -> Self {
        let buffer = || {
            let handle: Handle = client.empty(numel * size_of::<f32>());
            BufferSlice { handle, start: 0, dtype: DType::F32 }
        };
        Self { sums: buffer(), largest: buffer() }
    }

    fn arguments(&self) -> [BufferArg; 2] {
        [&self.sums, &self.largest].map(BufferSlice::buffer_arg)
    }
}

/// Position of one tensor's partial sums among those of all tensors.
struct Share {
    plan: SumPlan,
    /// Index of the tensor's first partial sum.
    first_sum: usize,
    /// Index of the tensor's first output of the fold.
    first_output: usize,
}

/// Returns the share of each tensor, one after the other.
fn shares(client: &Client, jobs: &[Job]) -> Vec<Share> {
    let (mut first_sum, mut first_output) = (0, 0);
    let share = |job: &Job| {
        let share = Share { plan: SumPlan::new(client, job.numel), first_sum, first_output };
        first_sum += share.plan.sums;
        first_output += share.plan.outputs;
        share
    };
    jobs.iter().map(share).collect()
}

/// Summation of several tensors, whose results the host reads in one transfer.
struct Summation<'a> {
    client: &'a Client,
    jobs: &'a [Job],
    shares: Vec<Share>,
    norm: Norm,
    /// Factor that the elements are multiplied by first, in place.
    factor: Option<f32>,
}

/// Arguments of a launch of [`sums_kernel`] that have an entry for each tensor.
#[derive(Default)]
struct TensorArguments {
    data: Vec<BufferArg>,
    firsts: Vec<usize>,
    counts: Vec<usize>,
    sums_firsts: Vec<usize>,
    threads: Vec<usize>,
    rows: Vec<usize>,
}

impl Summation<'_> {
    /// Adds the elements of each tensor to its partial sums.
    fn add_up(&self, sums: &PartialSums) {
        let launches = launches(self.client, self.jobs, None, MAX_TENSORS);
        // A tensor's first span writes the partial sums, its second span adds its few elements to
        // them.
        for join in [false, true] {
            for launch in &launches {
                let parts = launch.parts.iter();
                let parts: Vec<_> = parts.filter(|(_, span)| (span.start > 0) == join).collect();
                if !parts.is_empty() {
                    self.launch(launch, &parts, join, sums);
                }
            }
        }
    }

    /// Launches the kernel for some spans of a launch; `join` says that they are second spans.
    fn launch(
        &self,
        launch: &Launch<'_>,
        parts: &[&(usize, Span)],
        join: bool,
        sums: &PartialSums,
    ) {
        let (client, width) = (self.client, launch.width);
        let TensorArguments { data, firsts, counts, sums_firsts, threads, rows } =
            self.arguments(width, parts, join);
        let dtype = self.jobs[parts[0].0].slices[0].dtype;
        let (count, dim) = grid(client, threads.iter().sum());
        let [sums, largest] = sums.arguments();
        // SAFETY: `launches` checked that the buffers hold the jobs' elements, and the kernel
        // accesses only those of the spans. Each tensor has a vector of partial sums for each of
        // its threads.
        unsafe {
            sums_kernel::launch_unchecked(
                client,
                count,
                dim,
                width,
                data.into_iter().collect(),
                sums,
                largest,
                firsts.into_iter().collect(),
                counts.into_iter().collect(),
                sums_firsts.into_iter().collect(),
                threads.into_iter().collect(),
                rows.into_iter().collect(),
                self.factor.unwrap_or(1.0),
                self.exponent(),
                0,
                Term::of(self.norm),
                self.factor.is_some(),
                join,
                if on_cpu(client) { 1 } else { SUMS_MULTIPLE / width },
                rounds_in_integers(client, dtype),
                element(dtype),
            );
        }
    }

    /// Returns the kernel arguments for spans of vectors of `width` elements.
    fn arguments(&self, width: usize, parts: &[&(usize, Span)], join: bool) -> TensorArguments {
        let mut arguments = TensorArguments::default();
        for (index, span) in parts {
            let (buffer, first) = span.argument(&self.jobs[*index].slices[0]);
            let Share { plan, first_sum, .. } = &self.shares[*index];
            // Elements of a second span are added to the sums that they would be added to as part
            // of one more vector. On a CPU, where this is not needed, they are added to the first
            // sums.
            let (sums_first, threads, rows) = match (join, on_cpu(self.client)) {
                (false, _) => (0, plan.sums / width, plan.rows),
                (true, true) => (0, span.count, 1),
                (true, false) => {
                    let tile = span.start / (SUMS_MULTIPLE * plan.rows);
                    (tile * SUMS_MULTIPLE + span.start % SUMS_MULTIPLE, span.count, 1)
                }
            };
            arguments.data.push(buffer);
            arguments.firsts.push(first);
            arguments.counts.push(span.count);
            arguments.sums_firsts.push(first_sum / width + sums_first);
            arguments.threads.push(threads);
            arguments.rows.push(rows);
        }
        arguments
    }

    /// Returns the exponent of the norm's terms; 1 where the kernel does not use it.
    fn exponent(&self) -> f32 {
        match self.norm {
            Norm::P(p) => p as f32,
            _ => 1.0,
        }
    }

    /// Adds up the partial sums of each tensor on the device to as many as the host reads.
    fn fold(&self, sums: &PartialSums) -> PartialSums {
        let (client, shares) = (self.client, &self.shares);
        let last = &shares[shares.len() - 1];
        let folded = PartialSums::new(client, last.first_output + last.plan.outputs);
        let mut widths = client.io_optimized_vector_sizes(size_of::<f32>());
        let width = widths.next().unwrap_or(1).min(SUMS_MULTIPLE);
        let bounds = |Share { plan, first_sum, first_output }: &Share| {
            let bounds = [*first_sum, plan.sums, *first_output, plan.outputs];
            bounds.map(|elements| (elements / width) as u32)
        };
        let bounds: Vec<u32> = shares.iter().flat_map(bounds).collect();
        let outputs = shares.iter().map(|share| share.plan.outputs).max();
        let threads = outputs.unwrap_or(SUMS_MULTIPLE) / width;
        let (count, dim) = grid(client, shares.len() * threads);
        let handle = client.create_from_slice(bytemuck::cast_slice(&bounds));
        let ([sums, largest], [folded_sums, folded_largest]) =
            (sums.arguments(), folded.arguments());
        // SAFETY: the buffers were allocated for the shares, and the bounds are those of the
        // shares.
        unsafe {
            fold_kernel::launch_unchecked(
                client,
                count,
                dim,
                width,
                sums,
                largest,
                folded_sums,
                folded_largest,
                BufferArg::from_raw_parts(handle, bounds.len()),
                shares.len(),
                threads,
            );
        }
        folded
    }

    /// Sums all tensors and reads the results.
    fn read(&self) -> Vec<Sums> {
        let (client, jobs, shares) = (self.client, self.jobs, &self.shares);
        let zero = Sums { sum: 0.0, largest: 0.0 };
        if jobs.iter().all(|job| job.numel == 0) {
            return vec![zero; jobs.len()];
        }
        let last = &shares[shares.len() - 1];
        let all = PartialSums::new(client, last.first_sum + last.plan.sums);
        self.add_up(&all);
        let outputs = if on_cpu(client) { all } else { self.fold(&all) };
        let bytes = client
            .read(vec![outputs.sums.handle, outputs.largest.handle])
            .unwrap_or_else(|error| panic!("cannot read the sums of a norm: {error}"));
        let sums: &[f32] = bytemuck::cast_slice(&bytes[0]);
        let largest: &[u32] = bytemuck::cast_slice(&bytes[1]);
        let total = |(job, share): (&Job, &Share)| {
            if job.numel == 0 {
                return zero;
            }
            let range = share.first_output..share.first_output + share.plan.outputs;
            let sum = sums[range.clone()].iter().copied().map(f64::from).sum();
            let largest = largest[range].iter().copied().max().unwrap_or(0);
            Sums { sum, largest: f32::from_bits(largest) }
        };
        jobs.iter().zip(shares).map(total).collect()
    }
}

/// Implements [`Kernels::sums`](crate::Kernels::sums).
pub(super) fn sums(parts: &[(CubeTensor, Range<usize>)], norm: Norm) -> Vec<Sums> {
    let Some((first, _)) = parts.first() else { return Vec::new() };
    let client = first.client.clone();
    let job = |(tensor, range): &(CubeTensor, Range<usize>)| {
        let tensor = contiguous(tensor.clone());
        Job { slices: vec![BufferSlice::of(&tensor).skip(range.start)], numel: range.len() }
    };
    let jobs: Vec<_> = parts.iter().map(job).collect();
    let shares = shares(&client, &jobs);
    Summation { client: &client, jobs: &jobs, shares, norm, factor: None }.read()
}

/// Implements [`Kernels::unscale`](crate::Kernels::unscale).
pub(super) fn unscale(
    tensors: Vec<CubeTensor>,
    factor: f32,
    norm: Norm,
) -> (Vec<CubeTensor>, Vec<Sums>) {
    let tensors: Vec<_> = tensors.into_iter().map(exclusive).collect();
    let Some(client) = tensors.first().map(|tensor| tensor.client.clone()) else {
        return (tensors, Vec::new());
    };
    let job = |tensor: &CubeTensor| Job {
        slices: vec![BufferSlice::of(tensor)],
        numel: tensor.shape().num_elements(),
    };
    let jobs: Vec<_> = tensors.iter().map(job).collect();
    let shares = shares(&client, &jobs);
    let sums = Summation { client: &client, jobs: &jobs, shares, norm, factor: Some(factor) };
    let sums = sums.read();
    (tensors, sums)
}
