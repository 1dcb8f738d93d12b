//! Kernels on tensors of random sizes, which begin at random offsets in the memory of another
//! tensor.

use std::ops::Range;

use burn::optim::Optimizer;
use burn::tensor::{Device, FloatDType, Tensor};
use fsdp_runtime::Norm;
use fsdp_runtime::kernels::{self, MaskSource};
use fsdp_runtime::optim::{AdamConfig, AdamWConfig, SgdConfig};
use proptest::prelude::*;

use super::support::{
    assert_as_many, assert_close, bits, device, devices, dtypes, numbers, rounds_correctly, tensor,
};

/// The most elements of a tensor: several blocks and tasks of every kernel.
const MOST: usize = 70_000;

/// Returns the range of a tensor within another.
fn within() -> impl Strategy<Value = Range<usize>> {
    // Half of them small, as biases are.
    let len = prop_oneof![0..300usize, 0..MOST];
    (0..80usize, len).prop_map(|(start, len)| start..start + len)
}

/// Returns a tensor of numbers that begins inside the memory of another.
fn inside(seed: u64, at: &Range<usize>, device: &Device, dtype: FloatDType) -> Tensor<1> {
    tensor(&numbers(seed, at.end + 3, 10.0), device, dtype).slice(at.clone())
}

/// Returns one of the dtypes that the device supports.
fn pick(device: &Device, number: usize) -> FloatDType {
    let all: Vec<_> = dtypes(device).collect();
    all[number % all.len()]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(24) })]

    #[test]
    fn casts_are_plain_operations(
        at in within(),
        (from, to) in (0..3usize, 0..3usize),
        divisor in prop_oneof![Just(None), (1..9u8).prop_map(|by| Some(f32::from(by)))],
    ) {
        for device in devices() {
            let (from, to) = (pick(&device, from), pick(&device, to));
            let source = inside(1, &at, &device, from);
            let ours = kernels::cast(source, to, divisor).unwrap();
            let flex = Device::flex();
            let wide = inside(1, &at, &flex, from).cast(FloatDType::F32);
            let expected = wide.div_scalar(divisor.unwrap_or(1.0)).cast(to);
            prop_assert_eq!(bits(&ours), bits(&expected), "{:?} to {:?} on {:?}", from, to, &device);
        }
    }

    #[test]
    fn parts_of_any_lengths_are_packed_and_unpacked(
        lens in proptest::collection::vec((0..40usize, prop_oneof![0..80usize, 0..5000usize]), 1..40),
        (from, to) in (0..3usize, 0..3usize),
        skip in 0..70usize,
    ) {
        let mut end = 0;
        let mut ranges = Vec::new();
        for (gap, len) in lens {
            ranges.push(end + gap..end + gap + len);
            end += gap + len;
        }
        for device in devices() {
            let (from, to) = (pick(&device, from), pick(&device, to));
            let part = |range: &Range<usize>| {
                inside(range.start as u64, &(skip..skip + range.len()), &device, from)
            };
            let buffer = tensor(&numbers(7, end + 1, 1.0), &device, to);
            let mut expected = bits(&buffer);
            let parts: Vec<_> = ranges.iter().map(|range| (part(range), range.start)).collect();
            for (part, at) in parts.iter().filter(|(part, _)| part.dims()[0] > 0) {
                let part = bits(&part.clone().cast(to));
                expected[*at..at + part.len()].copy_from_slice(&part);
            }
            let packed = kernels::pack(parts, buffer).unwrap();
            prop_assert_eq!(bits(&packed), &expected[..], "{:?} to {:?} on {:?}", from, to, &device);
            let unpacked = kernels::unpack(packed, &ranges, to, None).unwrap();
            assert_as_many(&unpacked, &ranges);
            for (unpacked, range) in unpacked.iter().zip(&ranges) {
                prop_assert_eq!(bits(unpacked), &expected[range.clone()], "{:?}", range);
            }
        }
    }

    #[test]
    fn means_of_any_range_are_sums_in_order_divided(
        at in within(),
        ranks in 1..7usize,
        dtype in 0..3usize,
    ) {
        for device in devices() {
            let dtype = pick(&device, dtype);
            let part = |rank| tensor(&numbers(rank as u64, at.end + 2, 10.0), &device, dtype);
            let parts: Vec<_> = (0..ranks).map(part).collect();
            let ours = kernels::mean(&parts, at.clone(), ranks).unwrap();
            let host = |part: &Tensor<1>| -> Vec<f32> { part.to_data().iter::<f32>().collect() };
            let parts: Vec<Vec<f32>> = parts.iter().map(host).collect();
            let mean = |at: usize| {
                parts[1..].iter().fold(parts[0][at], |sum, part| sum + part[at]) / ranks as f32
            };
            let expected: Vec<f32> = at.clone().map(mean).collect();
            let expected = tensor(&expected, &Device::flex(), FloatDType::F32);
            if rounds_correctly(&device) {
                prop_assert_eq!(bits(&ours), bits(&expected), "{:?} on {:?}", dtype, &device);
            } else {
                assert_close(&ours, &expected, 1e-6, "a mean");
            }
        }
    }

    #[test]
    fn sums_are_those_of_f64(at in within(), dtype in 0..3usize) {
        for device in devices() {
            let dtype = pick(&device, dtype);
            let part = inside(3, &at, &device, dtype);
            let sums = kernels::norm_sums(std::slice::from_ref(&part), Norm::Two).unwrap()[0];
            let exact: f64 = part.to_data().iter::<f64>().map(|x| x * x).sum();
            prop_assert!((sums.sum - exact).abs() <= 1e-5 * exact, "{} {}", sums.sum, exact);
            let (unscaled, after) = kernels::unscale(vec![part.clone()], 0.5, Norm::Inf).unwrap();
            // Half of a number is exact, except next to 0.
            let expected = part.cast(FloatDType::F32).mul_scalar(0.5).cast(dtype);
            prop_assert_eq!(bits(&unscaled[0]), bits(&expected));
            prop_assert!((f64::from(after[0].largest) - f64::from(sums.largest) / 2.0).abs() <= 1e-8);
        }
    }

    #[test]
    fn dropout_has_the_bits_of_flex(
        at in within(),
        (key, counter) in (any::<[u32; 2]>(), any::<[u32; 2]>()),
        prob in 0.0..0.99f64,
        dtype in 0..3usize,
    ) {
        let Some(device) = device() else { return Ok(()) };
        let dtype = pick(&device, dtype);
        let source = MaskSource { key, counter, prob };
        let dropped = |device: &Device| {
            kernels::dropout(inside(5, &at, device, dtype), &source).unwrap()
        };
        prop_assert_eq!(bits(&dropped(&device)), bits(&dropped(&Device::flex())));
    }

    #[test]
    fn steps_are_those_of_flex(at in within(), which in 0..4usize) {
        let Some(device) = device() else { return Ok(()) };
        let run = |device: &Device| match which {
            0 => stepped(&AdamWConfig::new().with_weight_decay(0.1).build(), &at, device),
            1 => stepped(&AdamConfig::new().with_amsgrad(true).build(), &at, device),
            2 => stepped(&SgdConfig::new().with_weight_decay(0.1).build(), &at, device),
            _ => stepped(&SgdConfig::new().with_momentum(0.9).build(), &at, device),
        };
        let (ours, twin) = (run(&device), run(&Device::flex()));
        if rounds_correctly(&device) {
            prop_assert_eq!(bits(&ours), bits(&twin));
        } else {
            assert_close(&ours, &twin, 1e-5, "a step");
        }
    }
}

/// Returns a parameter after two steps. It and its gradients begin inside the memory of other
/// tensors.
fn stepped<O: Optimizer>(optimizer: &O, at: &Range<usize>, device: &Device) -> Tensor<1> {
    let mut param = inside(1, at, device, FloatDType::F32);
    let mut state = None;
    for step in 0..2 {
        let gradient = inside(10 + step, at, device, FloatDType::F32);
        (param, state) = optimizer.step(1e-2, param, gradient, state);
    }
    param
}
