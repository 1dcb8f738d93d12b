//! Rounding to bf16 at random, with bits of Philox4x32-7: the results are those of Flex.

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::prelude::*;
use half::bf16;

use super::buffer_slice::BufferSlice;
use super::device::rounds_in_integers;
use super::philox::random_blocks;
use super::rounding::narrowed;
use super::span::{grid, spans_within};
use super::tensors::{contiguous, empty};
use crate::philox::LANES;
use crate::random_rounding::{BATCH, RandomRounding, RoundedPart};

/// Rounds the `count` vectors of a span. Its first element has `skipped` elements of a batch before it.
///
/// Each of `threads` threads generates `N` neighbouring random blocks, of which the first of all is
/// `block`, and rounds eight vectors of elements. Vectors outside the span are skipped.
#[cube(launch_unchecked)]
fn round_kernel<N: Size>(
    source: &[Vector<f32, N>],
    target: &mut [Vector<bf16, N>],
    from: usize,
    to: usize,
    skipped: usize,
    count: usize,
    threads: usize,
    block: u32,
    key_0: u32,
    key_1: u32,
    place_0: u32,
    place_1: u32,
    #[comptime] integers: bool,
) {
    if ABSOLUTE_POS < threads {
        let width = N::value();
        let groups = comptime!(LANES / width);
        let batch = ABSOLUTE_POS / groups;
        let group = ABSOLUTE_POS % groups;

        let first =
            block + batch as u32 * comptime!(LANES as u32) + group as u32 * comptime!(width as u32);
        let words = random_blocks::<N>(first, key_0, key_1, place_0, place_1);
        // Index in the span of the first element of each vector. It wraps for an element before the
        // span and then exceeds `count`.
        let at = batch * comptime!(BATCH) + group * width - skipped;
        #[unroll]
        for word in 0..4usize {
            let mut halves = Sequence::<Vector<u32, N>>::new();
            halves.push(words[word] & Vector::new(0xFFFFu32));
            halves.push(words[word] >> Vector::new(16u32));
            #[unroll]
            for half in 0..2usize {
                let at = (at + comptime!(half * 4 * LANES + word * LANES)) / width;
                if at < count {
                    target[to + at] = rounded_with(source[from + at], halves[half], integers);
                }
            }
        }
    }
}

/// Rounds `count` elements, each in the part of its row. A thread generates a random block for its element.
#[cube(launch_unchecked)]
fn round_part_kernel<N: Size>(
    source: &[Vector<f32, N>],
    target: &mut [Vector<bf16, N>],
    from: usize,
    to: usize,
    count: usize,
    first: usize,
    len: usize,
    parts: usize,
    part: usize,
    key_0: u32,
    key_1: u32,
    place_0: u32,
    place_1: u32,
    #[comptime] integers: bool,
) {
    let at = ABSOLUTE_POS;
    if at < count {
        let position = first + at;
        let position = (position / len * parts + part) * len + position % len;
        let (batch, index) = (position / comptime!(BATCH), position % comptime!(BATCH));
        let (own, lane) = (index / comptime!(LANES), index % comptime!(LANES));
        let block = batch as u32 * comptime!(LANES as u32) + lane as u32;
        let words = random_blocks::<N>(block, key_0, key_1, place_0, place_1);
        let mut draws = Vector::<u32, N>::new(0u32);
        #[unroll]
        for word in 0..4usize {
            draws = select(own % 4 == word, words[word], draws);
        }
        let draws = draws >> Vector::new(own as u32 / 4u32 * 16u32);
        let draws = draws & Vector::new(0xFFFFu32);
        target[to + at] = rounded_with(source[from + at], draws, integers);
    }
}

/// Rounds a vector with draws of sixteen bits. A NaN keeps its upper bits and becomes quiet.
#[cube]
fn rounded_with<N: Size>(
    elements: Vector<f32, N>,
    draws: Vector<u32, N>,
    #[comptime] integers: bool,
) -> Vector<bf16, N> {
    let bits = Vector::<u32, N>::reinterpret(elements);
    let magnitude = bits & Vector::new(0x7FFF_FFFFu32);
    let number = magnitude.less_than(&Vector::<u32, N>::new(0x7F80_0001u32));
    let rounded = select_many(number, bits + draws, bits | Vector::new(0x40_0000u32));
    let upper = rounded & Vector::new(0xFFFF_0000u32);
    narrowed(Vector::<f32, N>::reinterpret(upper), integers)
}

/// Implements [`Kernels::round_at_random`](crate::Kernels::round_at_random).
///
/// # Panics
///
/// For elements at position 2^32 or further, as indices in the kernel have 32 bits.
pub(super) fn round(tensor: CubeTensor, rounding: &RandomRounding) -> CubeTensor {
    let tensor = contiguous(tensor);
    let target = empty(&tensor, tensor.shape(), DType::BF16);
    let client = tensor.client.clone();
    let (numel, first) = (tensor.shape().num_elements(), rounding.first);
    assert!(first + numel < 1 << 32, "rounding takes elements below 2^32, not {}", first + numel);
    let slices = [&BufferSlice::of(&tensor), &BufferSlice::of(&target)];
    if let Some(part) = rounding.part {
        round_part(&client, slices, numel, (rounding, part));
        return target;
    }
    // The blocks of a vector begin with the first element, whose position is a multiple of the width.
    let aligned = LANES.min(1 << first.trailing_zeros().min(16));
    for span in spans_within(&client, &slices, numel, aligned) {
        let position = first + span.start;
        let skipped = position % BATCH;
        let batches = (skipped + span.count * span.width).div_ceil(BATCH);
        let threads = batches * LANES / span.width;
        let (count, dim) = grid(&client, threads);
        let (read, from) = span.argument(slices[0]);
        let (write, to) = span.argument(slices[1]);
        // SAFETY: `spans_within` checked that both buffers hold the elements; the kernel accesses
        // only the span's vectors.
        unsafe {
            round_kernel::launch_unchecked(
                &client,
                count,
                dim,
                span.width,
                read,
                write,
                from,
                to,
                skipped,
                span.count,
                threads,
                (position / BATCH * LANES) as u32,
                rounding.key[0],
                rounding.key[1],
                rounding.counter[0],
                rounding.counter[1],
                rounds_in_integers(&client, DType::BF16),
            );
        }
    }
    target
}

/// Rounds `numel` elements of a part of the columns of a parameter.
fn round_part(
    client: &Client,
    [source, target]: [&BufferSlice; 2],
    numel: usize,
    (rounding, part): (&RandomRounding, RoundedPart),
) {
    let RoundedPart { len, parts, part } = part;
    let whole = (rounding.first + numel).next_multiple_of(len) * parts;
    assert!(whole < 1 << 32, "rounding takes elements below 2^32, not {whole}");
    assert!(numel <= source.len().min(target.len()), "both buffers have the elements");
    let (count, dim) = grid(client, numel);
    // SAFETY: the assertion checked that both buffers hold the elements; the kernel accesses only these.
    unsafe {
        round_part_kernel::launch_unchecked(
            client,
            count,
            dim,
            1,
            source.buffer_arg(),
            target.buffer_arg(),
            source.start,
            target.start,
            numel,
            rounding.first,
            len,
            parts,
            part,
            rounding.key[0],
            rounding.key[1],
            rounding.counter[0],
            rounding.counter[1],
            rounds_in_integers(client, DType::BF16),
        );
    }
}

#[cfg(all(test, feature = "cpu", feature = "flex"))]
mod tests {
    use burn::backend::Flex;
    use burn::backend::ops::FloatTensorOps;
    use burn::tensor::TensorData;
    use burn_cubecl::{CubeBackend, CubeDevice};
    use cubecl::device::CpuDevice;

    use super::*;
    use crate::Kernels;
    use crate::to_data;

    #[test]
    fn the_bits_of_random_rounding_are_those_of_flex() {
        let device = CubeDevice::Cpu(CpuDevice);
        let part = Some(RoundedPart { len: 70, parts: 3, part: 1 });
        let cases = [(1000, 0), (1000, 8), (127, 120), (129, 3), (1, 127), (4096, 128)];
        let cases =
            cases.into_iter().flat_map(|(len, first)| [(len, first, None), (len, first, part)]);
        for (len, first, part) in cases {
            let elements: Vec<f32> = (0..len).map(|i| (i as f32 * 0.37).sin()).collect();
            let rounding = RandomRounding { key: [1, 2], counter: [3, 4], first, part };
            let data = || TensorData::new(elements.clone(), [len]);
            let on_device = CubeBackend::float_from_data(data(), &device);
            let on_device = CubeBackend::round_at_random(on_device, &rounding);
            let on_host = Flex::float_from_data(data(), &Default::default());
            let on_host = to_data::<Flex>(Flex::round_at_random(on_host, &rounding));
            let on_device = to_data::<CubeBackend>(on_device);
            assert_eq!(on_device.as_bytes(), on_host.as_bytes(), "{len} {first} {part:?}");
        }
    }
}
