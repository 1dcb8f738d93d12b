//! Casts, and parts that are packed into one buffer and unpacked.

use burn::tensor::{Device, FloatDType, Tensor};
use fsdp_runtime::kernels;

use super::support::{
    DTYPES, LENGTHS, assert_as_many, bits, device, devices, dtypes, numbers, tensor,
};

/// Numbers, with infinities, NaN and the ends of the range among them.
fn with_ends(seed: u64, len: usize) -> Vec<f32> {
    let mut values = numbers(seed, len, 7e4);
    let ends = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, f32::MIN_POSITIVE, -0.0];
    for (value, end) in values.iter_mut().step_by(97).skip(1).zip(ends) {
        *value = end;
    }
    values
}

#[test]
fn a_cast_on_flex_is_burns() {
    let flex = burn::tensor::Device::flex();
    for len in LENGTHS {
        let values = with_ends(len as u64, len);
        for (from, to) in DTYPES.into_iter().flat_map(|from| DTYPES.map(|to| (from, to))) {
            let source = tensor(&values, &flex, from);
            let ours = kernels::cast(source.clone(), to, None).unwrap();
            assert_eq!(ours.dtype(), to.into());
            assert_eq!(bits(&ours), bits(&source.clone().cast(to)), "{from:?} to {to:?}, {len}");
            let ours = kernels::cast(source.clone(), to, Some(3.0)).unwrap();
            let theirs = source.cast(FloatDType::F32).div_scalar(3.0).cast(to);
            assert_eq!(bits(&ours), bits(&theirs), "{from:?} to {to:?}, divided, {len}");
        }
    }
}

#[test]
fn a_cast_on_the_device_has_the_bits_of_flex() {
    let Some(device) = device() else { return };
    let flex = burn::tensor::Device::flex();
    for (from, to) in dtypes(&device)
        .flat_map(|from| dtypes(&device).map(move |to| (from, to)))
        .collect::<Vec<_>>()
    {
        for len in LENGTHS {
            let values = with_ends(len as u64, len);
            for divisor in [None, Some(3.0)] {
                let cast =
                    |device| kernels::cast(tensor(&values, device, from), to, divisor).unwrap();
                let what = format!("{from:?} to {to:?}, {len} elements, divided by {divisor:?}");
                assert_eq!(bits(&cast(&device)), bits(&cast(&flex)), "{what}");
            }
        }
    }
}

/// Places and lengths of parts: at vector boundaries and not, small and large, one empty, with
/// gaps.
const PARTS: [(usize, usize); 9] = [
    (0, 64),
    (64, 128),
    (195, 1),
    (196, 0),
    (197, 31),
    (256, 1000),
    (1300, 70_000),
    (71_303, 66_001),
    (137_400, 48),
];
const BUFFER: usize = 137_500;

fn parts(device: &burn::tensor::Device, dtype: FloatDType) -> Vec<(Tensor<1>, usize)> {
    let part =
        |(at, len): (usize, usize)| (tensor(&numbers(at as u64, len, 10.0), device, dtype), at);
    PARTS.map(part).into()
}

/// Packs with Burn's tensor operations: slices are assigned one after the other.
fn packed_by_burn(parts: &[(Tensor<1>, usize)], buffer: Tensor<1>) -> Tensor<1> {
    let dtype = buffer.dtype();
    parts.iter().filter(|(part, _)| part.dims()[0] > 0).fold(buffer, |buffer, (part, at)| {
        let range = *at..at + part.dims()[0];
        buffer.slice_assign([range], part.clone().cast(dtype))
    })
}

fn assert_packs(device: &burn::tensor::Device) {
    for from in dtypes(device) {
        for to in dtypes(device) {
            let what = format!("{from:?} to {to:?}");
            let parts = parts(device, from);
            let buffer = tensor(&numbers(5, BUFFER, 1.0), device, to);
            let kept = bits(&buffer);
            let ours = kernels::pack(parts.clone(), buffer.clone()).unwrap();
            let theirs = packed_by_burn(&parts, buffer.clone());
            assert_eq!(bits(&ours), bits(&theirs), "{what}");
            assert_eq!(bits(&buffer), kept, "{what}: a buffer that is shared is copied");

            let ranges = PARTS.map(|(at, len)| at..at + len);
            for divisor in [None, Some(3.0)] {
                let unpacked = kernels::unpack(ours.clone(), &ranges, from, divisor).unwrap();
                assert_as_many(&unpacked, &parts);
                for (unpacked, (part, at)) in unpacked.iter().zip(&parts) {
                    let expected = kernels::cast(part.clone().cast(to), from, divisor).unwrap();
                    assert_eq!(unpacked.dtype(), from.into());
                    let what = format!("{what}: the part at {at}, divided by {divisor:?}");
                    assert_eq!(bits(unpacked), bits(&expected), "{what}");
                }
            }
        }
    }
}

#[test]
fn parts_are_packed_and_unpacked_on_flex() {
    assert_packs(&burn::tensor::Device::flex());
}

#[test]
fn parts_are_packed_and_unpacked_on_the_device() {
    if let Some(device) = device() {
        assert_packs(&device);
    }
}

#[test]
fn many_small_parts_are_packed_into_one_buffer_and_unpacked() {
    for device in devices() {
        let lens = (0..50).map(|i| [384, 1536, 1, 30][i % 4]);
        let mut at = 0;
        let parts: Vec<_> = lens
            .map(|len| {
                let part =
                    (tensor(&numbers(at as u64 + 1, len, 1.0), &device, FloatDType::F32), at);
                at += len;
                part
            })
            .collect();
        let buffer = Tensor::zeros([at], &device);
        let buffer = kernels::pack(parts.clone(), buffer).unwrap();
        let ranges: Vec<_> = parts.iter().map(|(part, at)| *at..at + part.dims()[0]).collect();
        let unpacked = kernels::unpack(buffer, &ranges, FloatDType::F32, None).unwrap();
        assert_as_many(&unpacked, &parts);
        for (unpacked, (part, at)) in unpacked.iter().zip(&parts) {
            assert_eq!(bits(unpacked), bits(part), "at {at} on {device:?}");
        }
    }
}

/// Numbers halfway between two of bf16, beside it, NaN, infinite, and so large that they round to
/// infinity. Where the processor cannot round to bf16, the kernel does so with integers.
#[test]
fn every_kind_of_number_is_rounded_to_bf16_as_on_flex() {
    let Some(device) = device() else { return };
    if !device.supports_dtype(FloatDType::BF16) {
        return eprintln!("skipped: {device:?} has no bf16");
    }
    let upper = [0x0000u32, 0x0080, 0x3F7F, 0x3F80, 0x3F81, 0x477F, 0x7F7E, 0x7F7F, 0x7F80, 0x7FC1];
    let lower = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF];
    let magnitudes = upper.iter().flat_map(|upper| lower.map(|lower| upper << 16 | lower));
    let values: Vec<f32> =
        magnitudes.flat_map(|bits| [bits, bits | 1 << 31]).map(f32::from_bits).collect();
    for divisor in [None, Some(1.0), Some(2.0)] {
        let on = |device: &Device| {
            let values = tensor(&values, device, FloatDType::F32);
            bits(&kernels::cast(values, FloatDType::BF16, divisor).unwrap())
        };
        assert_eq!(on(&device), on(&Device::flex()), "{divisor:?}");
    }
}
