//! Sums for norms, and gradients that are unscaled while they are measured.

use burn::tensor::{Device, FloatDType, Tensor};
use fsdp_runtime::{Norm, kernels};

use super::support::{LENGTHS, assert_as_many, bits, device, devices, dtypes, numbers, tensor};

const NORMS: [Norm; 4] = [Norm::One, Norm::Two, Norm::Inf, Norm::P(3.0)];

/// Returns the sum (or maximum) of a norm in f64, from the definition.
fn exact(values: &[f64], norm: Norm) -> f64 {
    let magnitudes = values.iter().map(|x| x.abs());
    match norm {
        Norm::One => magnitudes.sum(),
        Norm::Two => magnitudes.map(|x| x * x).sum(),
        Norm::Inf => magnitudes.fold(0.0, f64::max),
        Norm::P(p) => magnitudes.map(|x| x.powf(p)).sum(),
    }
}

fn assert_sums(device: &Device) {
    for dtype in dtypes(device) {
        let tensors: Vec<_> = LENGTHS
            .map(|len| tensor(&numbers(len as u64 + 3, len, 2.0), device, dtype))
            .into_iter()
            .collect();
        for norm in NORMS {
            let sums = kernels::norm_sums(&tensors, norm).unwrap();
            assert_eq!(sums.len(), tensors.len());
            for (tensor, sums) in tensors.iter().zip(sums) {
                let values: Vec<f64> = tensor.to_data().iter::<f64>().collect();
                let expected = exact(&values, norm);
                let what = format!("{norm:?} of {} {dtype:?} on {device:?}", values.len());
                assert!(
                    (sums.term(norm) - expected).abs() <= 1e-5 * expected,
                    "{what}: {} {expected}",
                    sums.term(norm)
                );
                let largest = exact(&values, Norm::Inf);
                // Only subnormal numbers may be flushed to 0.
                assert!((f64::from(sums.largest) - largest).abs() <= 1e-38, "{what}");
                assert!(sums.is_finite(), "{what}");
            }
        }
    }
}

#[test]
fn sums_on_flex_are_those_of_f64() {
    assert_sums(&Device::flex());
}

#[test]
fn sums_on_the_device_are_those_of_f64() {
    if let Some(device) = device() {
        assert_sums(&device);
    }
}

#[test]
fn a_sum_does_not_depend_on_the_offset_in_memory() {
    for device in devices() {
        let values = numbers(9, 9001, 1.0);
        let whole = tensor(&values, &device, FloatDType::F32);
        let own = tensor(&values[5..8008], &device, FloatDType::F32);
        let part = whole.slice(5..8008);
        for norm in NORMS {
            let sums = kernels::norm_sums(&[own.clone(), part.clone()], norm).unwrap();
            assert_eq!(sums[0], sums[1], "{norm:?} on {device:?}");
        }
    }
}

/// More tensors than one launch takes, whose last elements fill no vector.
#[test]
fn tensors_that_are_measured_together_have_the_sums_they_have_alone() {
    for device in devices() {
        let tensors: Vec<_> = (0..3)
            .flat_map(|round| LENGTHS.map(|len| (round, len + round)))
            .map(|(round, len)| tensor(&numbers(round as u64, len, 1.0), &device, FloatDType::F32))
            .collect();
        let together = kernels::norm_sums(&tensors, Norm::Two).unwrap();
        let (_, unscaled) = kernels::unscale(tensors.clone(), 1.0, Norm::Two).unwrap();
        assert_eq!(unscaled, together, "{device:?}");
        assert_as_many(&together, &tensors);
        for (tensor, sums) in tensors.into_iter().zip(together) {
            let alone = kernels::norm_sums(std::slice::from_ref(&tensor), Norm::Two).unwrap();
            assert_eq!(alone, [sums], "{} elements on {device:?}", tensor.dims()[0]);
        }
    }
}

#[test]
fn every_element_counts_for_being_finite() {
    for device in devices() {
        for dtype in dtypes(&device) {
            for at in [0, 1, 1023, 1024, 69_999, 70_000] {
                for value in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
                    let mut values = vec![2e3; 70_001];
                    values[at] = value;
                    let tensor = tensor(&values, &device, dtype);
                    let sums = kernels::norm_sums(&[tensor], Norm::Inf).unwrap();
                    assert!(!sums[0].is_finite(), "{value} at {at}, {dtype:?} on {device:?}");
                    assert_eq!(sums[0].largest.is_nan(), value.is_nan());
                }
            }
        }
    }
}

/// The squares of the elements overflow, the elements themselves do not.
#[test]
fn large_elements_are_finite_though_their_norm_is_not() {
    for device in devices() {
        let tensor = tensor(&[1e38; 100], &device, FloatDType::F32);
        let sums = kernels::norm_sums(&[tensor], Norm::Two).unwrap();
        assert!(sums[0].is_finite() && !(sums[0].sum as f32).is_finite(), "{device:?}");
    }
}

#[test]
fn unscaling_multiplies_in_place_and_measures_what_it_leaves() {
    let factor = 1.0 / 3.0;
    for device in devices() {
        for dtype in dtypes(&device) {
            for len in LENGTHS {
                let values = numbers(len as u64 + 11, len, 100.0);
                let scaled = tensor(&values, &device, dtype);
                let kept = scaled.clone();
                let before = bits(&kept);
                let wide = tensor(&values, &Device::flex(), dtype).cast(FloatDType::F32);
                let expected = (wide * factor).cast(dtype);
                let (shared, _) = kernels::unscale(vec![scaled], factor, Norm::Two).unwrap();
                let what = format!("{len} {dtype:?} on {device:?}");
                assert_eq!(bits(&kept), before, "{what}: a shared tensor is copied");
                let own = vec![tensor(&values, &device, dtype)];
                let (own, sums) = kernels::unscale(own, factor, Norm::Two).unwrap();
                assert_eq!(bits(&own[0]), bits(&expected), "{what}");
                assert_eq!(bits(&own[0]), bits(&shared[0]), "{what}");
                assert_eq!(sums, kernels::norm_sums(&own, Norm::Two).unwrap(), "{what}");
            }
        }
    }
}

#[test]
fn no_tensors_have_no_sums() {
    assert!(kernels::norm_sums(&[], Norm::Two).unwrap().is_empty());
    let (tensors, sums): (Vec<Tensor<1>>, _) =
        kernels::unscale(Vec::new(), 2.0, Norm::Two).unwrap();
    assert!(tensors.is_empty() && sums.is_empty());
}
