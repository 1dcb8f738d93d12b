//! Dropout of a part of a tensor, whose elements have the random bits that they have in the whole one. A thread
//! generates a random block for its element.

use burn::backend::TensorMetadata;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use crate::cube::buffer_slice::BufferSlice;
use crate::cube::device::rounds_in_integers;
use crate::cube::philox::{draw_pairs, random_blocks};
use crate::cube::rounding::narrowed;
use crate::cube::span::grid;
use crate::cube::tensors::{contiguous, element, empty};
use crate::mask::{BATCH, MaskPart, MaskSource, Places, SIGN};
use crate::philox::LANES;

/// Places of a part of a dimension: two blocks.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Dim {
    whole: usize,
    len: usize,
    first: usize,
    first_len: usize,
    second: usize,
}

/// Returns the place of an element of the part in the whole dimension.
#[cube]
fn place(dim: &Dim, local: usize) -> usize {
    let is_first = local < dim.first_len;
    // A place that is not taken may wrap.
    select(is_first, dim.first + local, dim.second + local - dim.first_len)
}

/// Applies dropout to `numel` elements.
#[cube(launch_unchecked)]
fn dropout_part_kernel<F: Float, N: Size>(
    source: &[Vector<F, N>],
    target: &mut [Vector<F, N>],
    from: usize,
    to: usize,
    numel: usize,
    a: Dim,
    b: Dim,
    c: Dim,
    d: Dim,
    key_0: u32,
    key_1: u32,
    place_0: u32,
    place_1: u32,
    threshold: u32,
    keep: f32,
    #[comptime] integers: bool,
    #[define(F)] _dtype: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at < numel {
        let row = at / d.len;
        let matrix = row / c.len;
        let of_a = place(&a, matrix / b.len);
        let of_b = of_a * b.whole + place(&b, matrix % b.len);
        let of_c = of_b * c.whole + place(&c, row % c.len);
        let number = of_c * d.whole + place(&d, at % d.len);

        let (batch, index) = (number / comptime!(BATCH), number % comptime!(BATCH));
        let (lane, half) = (index % comptime!(2 * LANES) / 2, index / comptime!(2 * LANES));
        // Fewer than 2^32 blocks are generated.
        let block = batch as u32 * comptime!(LANES as u32) + lane as u32;
        let words = random_blocks::<Const<1>>(block, key_0, key_1, place_0, place_1);
        let mut pair = 0u32;
        #[unroll]
        for word in 0..4usize {
            let pairs = draw_pairs::<Const<1>>(&words, word);
            let (odd, even) = (pairs[0].extract(0usize), pairs[1].extract(0usize));
            let of_word = select(half % 2 == 0, odd, even);
            pair = select(half / 2 == word, of_word, pair);
        }
        let draw = (pair >> (index as u32 % 2u32 * 16u32)) & 0xFFFFu32;
        let is_dropped = (draw ^ comptime!(SIGN)) < threshold;
        let wide = Vector::<f32, N>::cast_from(source[from + at]) * Vector::new(keep);
        let zero = Vector::<f32, N>::new(0.0f32);
        target[to + at] = narrowed(select(is_dropped, zero, wide), integers);
    }
}

/// Implements [`Kernels::dropout_part`](crate::Kernels::dropout_part).
///
/// # Panics
///
/// If the part has another number of elements than the tensor, or if the whole has 2^32 elements or more.
pub(in crate::cube) fn dropout_part(
    tensor: CubeTensor,
    mask: &MaskSource,
    part: &MaskPart,
) -> CubeTensor {
    let tensor = contiguous(tensor);
    let (numel, whole) = (tensor.shape().num_elements(), part.whole_numel());
    assert_eq!(numel, part.numel(), "the part has the elements of the tensor");
    assert!(whole < 1 << 32, "dropout takes fewer than 2^32 elements, not {whole}");
    let target = empty(&tensor, tensor.shape(), tensor.dtype);
    if numel == 0 {
        return target;
    }
    let (client, dtype) = (tensor.client.clone(), element(tensor.dtype));
    let [source, written] = [&tensor, &target].map(BufferSlice::of);
    let [a, b, c, d] = part.dims().each_ref().map(dim);
    let (count, cube_dim) = grid(&client, numel);
    // SAFETY: both buffers have `numel` elements, which the kernel stays within.
    unsafe {
        dropout_part_kernel::launch_unchecked(
            &client,
            count,
            cube_dim,
            1,
            source.buffer_arg(),
            written.buffer_arg(),
            source.start,
            written.start,
            numel,
            a,
            b,
            c,
            d,
            mask.key[0],
            mask.key[1],
            mask.counter[0],
            mask.counter[1],
            u32::from(mask.threshold()),
            mask.keep_in(tensor.dtype),
            rounds_in_integers(&client, tensor.dtype),
            dtype,
        );
    }
    target
}

fn dim(places: &Places) -> DimLaunch {
    let [[first, first_len], [second, _]] = places.block_numbers();
    DimLaunch::new(places.whole(), places.len(), first, first_len, second)
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use burn::backend::Flex;
    use burn::tensor::{DType, TensorData};
    use burn_cubecl::{CubeBackend, CubeDevice};

    use super::*;
    use crate::{Kernels, cast, to_data};

    fn dropped<B: Kernels>(
        device: &B::Device,
        dtype: DType,
        source: &MaskSource,
        part: &MaskPart,
    ) -> TensorData {
        let numbers: Vec<f32> = (0..part.numel()).map(|at| (at % 97) as f32 / 8.0 + 1.0).collect();
        let shape = [numbers.len()];
        let tensor = B::float_from_data(TensorData::new(numbers, shape), device);
        to_data::<B>(B::dropout_part(cast::<B>(tensor, dtype), source, part))
    }

    #[test]
    fn a_part_has_the_bits_of_flex_and_of_the_host() {
        let device = CubeDevice::Cpu(cubecl::device::CpuDevice);
        let source = MaskSource { key: [5, 6], counter: [7, 8], prob: 0.3 };
        let all = Places::all;
        let two = Places::blocks(12, [2..4, 8..10]);
        let one = Places::blocks(10, [5..10, 10..10]);
        for dims in [
            [all(2), all(3), two, one],
            [all(2), all(1), two, all(70)],
            [all(1), one, all(40), Places::blocks(900, [300..600, 900..900])],
        ] {
            let part = MaskPart::new(dims);
            for dtype in [DType::F32, DType::BF16] {
                let found = dropped::<CubeBackend>(&device, dtype, &source, &part);
                let expected = dropped::<Flex>(&Default::default(), dtype, &source, &part);
                found.assert_eq(&expected, true);
                let mask = source.mask_of(&part);
                let is_zero = expected.iter::<f32>().map(|element| element == 0.0);
                assert!(is_zero.eq(mask.iter().map(|element| *element == 0.0)), "{part:?}");
            }
        }
    }
}
