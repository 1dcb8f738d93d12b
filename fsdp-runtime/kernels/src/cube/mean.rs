//! Means of the gradients of N ranks: added in f32 in the given order, then divided.

use std::collections::BTreeMap;

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::buffer_slice::BufferSlice;
use super::launch::{Job, launches};
use super::tensors::{contiguous, element, empty};
use super::tile::{Tile, begin, end, own_tile};
use crate::contract::RankMean;

/// Largest number of parts that one launch adds. The next launch adds further parts to its sums.
const MAX_PARTS: usize = 8;

/// Largest number of buffers of a launch. The compiled kernel contains its body once for each mean.
const MAX_BUFFERS: usize = 48;

/// Computes several means over equally many parts. Adds the vectors of all parts; if `join`, to the
/// sums in the target. If `divide`, divides the result.
///
/// `parts` and `firsts` hold the first parts of all means, then the second parts, and so on.
#[cube(launch_unchecked)]
fn mean_kernel<I: Float, N: Size>(
    parts: &Sequence<Box<[Vector<I, N>]>>,
    targets: &mut Sequence<Box<[Vector<f32, N>]>>,
    firsts: &Sequence<usize>,
    target_firsts: &Sequence<usize>,
    counts: &Sequence<usize>,
    tiles: &Sequence<usize>,
    divisor: f32,
    #[comptime] ranks: usize,
    #[comptime] join: bool,
    #[comptime] divide: bool,
    #[comptime] tile: Tile,
    #[define(I)] _dtype: ElemType,
) {
    let mut at = own_tile(tile);
    let means = counts.len().comptime();
    #[unroll]
    for mean in 0..means {
        if at < tiles[mean] {
            let end = end(at, counts[mean], tile);
            let mut index = begin(at, tile);
            let to = target_firsts[mean];
            while index < end {
                let mut sum = Vector::<f32, N>::cast_from(parts[mean][firsts[mean] + index]);
                if comptime!(join) {
                    sum = targets[mean][to + index] + sum;
                }
                #[unroll]
                for rank in 1..ranks {
                    let part = comptime!(rank * means + mean);
                    sum += Vector::cast_from(parts[part][firsts[part] + index]);
                }
                if comptime!(divide) {
                    sum /= Vector::new(divisor);
                }
                targets.index_mut(mean)[to + index] = sum;
                index += comptime!(tile.lanes);
            }
        }
        // A tile of this mean is done: its index wraps below 0 and exceeds the counts of all later
        // means.
        at -= tiles[mean];
    }
}

/// Implements [`Kernels::rank_means`](crate::Kernels::rank_means).
pub(super) fn means(means: Vec<RankMean<CubeTensor>>) -> Vec<CubeTensor> {
    // Means of one divisor and number of parts can share launches. The slices of a job are the
    // parts, and the target last.
    let (mut targets, mut groups) = (Vec::new(), BTreeMap::<_, Vec<Job>>::new());
    for RankMean { parts, divisor, shape } in means {
        let (dtype, numel) = (parts[0].0.dtype, shape.num_elements());
        if let ([(part, 0)], 1, DType::F32) = (&parts[..], divisor, dtype)
            && part.is_contiguous()
            && part.shape().num_elements() == numel
        {
            // The mean of one tensor is that tensor.
            let (client, device, handle) = (&part.client, &part.device, &part.handle);
            let (client, device, handle) = (client.clone(), device.clone(), handle.clone());
            targets.push(CubeTensor::new_contiguous(client, device, shape, handle, dtype));
            continue;
        }
        let target = empty(&parts[0].0, shape, DType::F32);
        let part = |(part, start): (CubeTensor, usize)| {
            assert_eq!(part.dtype, dtype, "the parts of a mean have one dtype");
            BufferSlice::of(&contiguous(part)).skip(start)
        };
        let group = groups.entry((divisor, parts.len())).or_default();
        let slices = parts.into_iter().map(part).chain([BufferSlice::of(&target)]).collect();
        group.push(Job { slices, numel });
        targets.push(target);
    }
    for ((divisor, parts), jobs) in groups {
        launch_group(&targets[0].client, &jobs, parts, divisor);
    }
    targets
}

/// Launches means over `parts` parts each, with at most [`MAX_PARTS`] of them at a time.
fn launch_group(client: &Client, jobs: &[Job], parts: usize, divisor: usize) {
    for begin in (0..parts).step_by(MAX_PARTS) {
        let end = parts.min(begin + MAX_PARTS);
        let stage = |Job { slices, numel }: &Job| {
            let slices = slices[begin..end].iter().chain(&slices[parts..]);
            Job { slices: slices.cloned().collect(), numel: *numel }
        };
        let jobs: Vec<_> = jobs.iter().map(stage).collect();
        let divide = end == parts && divisor > 1;
        launch_stage(client, &jobs, begin > 0, divide.then_some(divisor));
    }
}

/// Adds the parts of each job, its slices but the last, to the last one's elements if `join`, and
/// divides the sums by `divisor` if there is one.
fn launch_stage(client: &Client, jobs: &[Job], join: bool, divisor: Option<usize>) {
    let ranks = jobs[0].slices.len() - 1;
    for launch in launches(client, jobs, None, MAX_BUFFERS / (ranks + 1)) {
        let (count, dim) = launch.grid(client);
        let dtype = launch.first_job().slices[0].dtype;
        // SAFETY: `launches` checked that the buffers hold the jobs' elements; the kernel accesses
        // only those of the launch's spans.
        unsafe {
            mean_kernel::launch_unchecked(
                client,
                count,
                dim,
                launch.width,
                (0..ranks).flat_map(|rank| launch.buffers::<Vec<_>>(rank)).collect(),
                launch.buffers(ranks),
                (0..ranks).flat_map(|rank| launch.firsts::<Vec<_>>(rank)).collect(),
                launch.firsts(ranks),
                launch.counts(),
                launch.tiles(),
                divisor.unwrap_or(1) as f32,
                ranks,
                join,
                divisor.is_some(),
                launch.tile,
                element(dtype),
            );
        }
    }
}

#[cfg(all(test, feature = "cpu", feature = "flex"))]
mod tests {
    use burn::backend::Flex;
    use burn::tensor::{Shape, TensorData};
    use burn_cubecl::CubeBackend;

    use super::*;
    use crate::{Kernels, cast, to_data};

    /// Number of parts, first element, length, divisor and dtype of a mean.
    type Mean = (usize, usize, usize, usize, DType);

    fn means<B: Kernels>(device: &B::Device, means: &[Mean]) -> Vec<Vec<f32>> {
        let mean = |&(parts, start, len, divisor, dtype): &Mean| {
            let part = |rank: usize| {
                let element = |at: usize| ((at * 31 + rank * 7919 + len) % 61) as f32 * 0.25 - 7.0;
                let elements: Vec<f32> = (0..start + len + 3).map(element).collect();
                let data = TensorData::new(elements, [start + len + 3]);
                (cast::<B>(B::float_from_data(data, device), dtype), start)
            };
            RankMean { parts: (0..parts).map(part).collect(), divisor, shape: Shape::from([len]) }
        };
        let means = B::rank_means(means.iter().map(mean).collect());
        means.into_iter().map(|mean| to_data::<B>(mean).iter().collect()).collect()
    }

    /// More means than share a launch, of several lengths, offsets and dtypes, some of more parts
    /// than one launch adds.
    #[test]
    fn means_that_share_launches_have_the_bits_of_flex() {
        let lens = [5, 64, 70_000, 1, 4096];
        let dtypes = [DType::F32, DType::F16];
        let mean = |index: usize| {
            let (parts, divisor) = [(2, 2), (1, 1), (11, 11), (2, 2)][index % 4];
            (parts, [0, 8, 3][index % 3], lens[index % 5], divisor, dtypes[index % 7 % 2])
        };
        let requests: Vec<Mean> = (0..45).map(mean).collect();
        let device = burn_cubecl::CubeDevice::Cpu(cubecl::device::CpuDevice);
        let found = means::<CubeBackend>(&device, &requests);
        let expected = means::<Flex>(&Default::default(), &requests);
        assert_eq!(found.len(), requests.len());
        assert_eq!(found, expected);
        assert!(means::<CubeBackend>(&device, &[]).is_empty());
    }
}
