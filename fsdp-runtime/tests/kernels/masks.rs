//! Masks of dropout.

use burn::tensor::{Device, Distribution, FloatDType, Tensor};
use fsdp_runtime::kernels::{self, MaskSource};
use fsdp_runtime::nn::DropoutConfig;

use super::support::{LENGTHS, bits, device, devices, dtypes};

/// Returns the output of dropout for an input of ones.
fn mask(device: &Device, source: &MaskSource, len: usize, dtype: FloatDType) -> Tensor<1> {
    kernels::dropout(Tensor::<1>::ones([len], device).cast(dtype), source).unwrap()
}

fn sources() -> impl Iterator<Item = MaskSource> {
    let keys = [[1, 2], [0xFFFF_FFFF, 0x8000_0001]];
    let counters = [[0, 0], [77, 0xFFFF_FFF0]];
    keys.into_iter().zip(counters).zip([0.1, 0.731]).map(|((key, counter), prob)| MaskSource {
        key,
        counter,
        prob,
    })
}

#[test]
fn a_mask_has_the_same_bits_on_the_device_as_on_flex() {
    let Some(device) = device() else { return };
    for source in sources() {
        for dtype in dtypes(&device) {
            for len in LENGTHS {
                let mask = |device| mask(device, &source, len, dtype);
                let (ours, twin) = (mask(&device), mask(&Device::flex()));
                assert_eq!((ours.dims(), ours.dtype()), ([len], dtype.into()));
                assert_eq!(bits(&ours), bits(&twin), "{source:?}, {len} {dtype:?}");
            }
        }
    }
}

#[test]
fn a_mask_holds_two_values_in_the_shares_of_its_probability() {
    for source in sources() {
        for dtype in super::support::DTYPES {
            let mask = mask(&Device::flex(), &source, 100_000, dtype);
            let keep = Tensor::<1>::full([1], 1.0 / (1.0 - source.prob), &Device::flex());
            let keep = bits(&keep.cast(dtype))[0];
            let bits = bits(&mask);
            assert_eq!(bits.len(), 100_000);
            assert!(bits.iter().all(|&bits| bits == 0 || bits == keep));
            let zeros = bits.iter().filter(|&&bits| bits == 0).count() as f64 / 1e5;
            assert!((zeros - source.prob).abs() < 0.005, "{zeros} {}", source.prob);
        }
    }
}

#[test]
fn dropout_multiplies_by_the_mask() {
    for device in devices() {
        for (source, dtype) in sources().flat_map(|s| dtypes(&device).map(move |d| (s, d))) {
            let whole = Tensor::<1>::random([5000], Distribution::Normal(0.0, 1.0), &device);
            let whole = whole.cast(dtype);
            // A whole tensor, and one that begins inside another's memory.
            for input in [whole.clone(), whole.slice(37..4321)] {
                let mask = mask(&device, &source, input.dims()[0], dtype);
                let dropped = kernels::dropout(input.clone(), &source).unwrap();
                let zero = mask.clone().equal_elem(0.0);
                let expected = (input * mask).mask_fill(zero, 0.0);
                assert_eq!(bits(&dropped), bits(&expected), "{source:?} {dtype:?}");
            }
        }
    }
}

#[test]
fn a_dropped_element_is_zero_even_if_it_was_not_finite() {
    for device in devices() {
        let source = MaskSource { key: [5, 6], counter: [7, 8], prob: 0.5 };
        let kept = bits(&mask(&device, &source, 999, FloatDType::F32));
        for value in [-1.0, f32::INFINITY, f32::NAN] {
            let input = Tensor::<1>::full([999], value, &device);
            let dropped = bits(&kernels::dropout(input, &source).unwrap());
            let expected = kept.iter().map(|&kept| match kept {
                0 => 0,
                _ => (2.0 * value).to_bits(),
            });
            assert!(dropped.into_iter().eq(expected), "{value} on {device:?}");
        }
    }
}

#[test]
fn dropout_on_an_autodiff_device_scales_gradients_by_its_mask() {
    for device in devices() {
        let dropout = DropoutConfig::new(0.5).init();
        let input = Tensor::<2>::ones([9, 11], &device.autodiff()).require_grad();
        let output = dropout.forward(input.clone());
        let gradients = output.clone().sum().backward();
        let gradient = input.grad(&gradients).unwrap().flatten::<1>(0, 1);
        let output = bits(&output.inner().flatten(0, 1));
        assert_eq!(bits(&gradient), output);
        assert!(output.contains(&0) && output.contains(&2f32.to_bits()));
    }
}
