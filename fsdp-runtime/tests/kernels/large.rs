//! Tensors of millions of elements: several rows of sums for each tile, more tiles than one launch
//! has, and elements at the end that fill no vector.

use burn::optim::Optimizer;
use burn::tensor::{Device, FloatDType, Tensor};
use fsdp_runtime::Norm;
use fsdp_runtime::kernels::{self, MaskSource, Sums};
use fsdp_runtime::optim::AdamWConfig;

use super::support::{
    assert_as_many, assert_close, bits, device, numbers, rounds_correctly, tensor,
};

/// More than 32 elements for each of 2^17 sums.
const LEN: usize = (1 << 22) + 100_003;
/// The offset of a part: no multiple of a vector's length.
const AT: usize = 5;

#[test]
fn sums_of_millions_of_elements_are_those_of_flex_at_any_offset() {
    let Some(device) = device() else { return };
    let values = numbers(11, AT + LEN, 2.0);
    let whole = tensor(&values, &device, FloatDType::F32);
    let own = tensor(&values[AT..], &device, FloatDType::F32);
    let twin = tensor(&values[AT..], &Device::flex(), FloatDType::F32);
    for norm in [Norm::One, Norm::Two, Norm::Inf] {
        let sums = |tensor: &Tensor<1>| -> Sums {
            kernels::norm_sums(std::slice::from_ref(tensor), norm).unwrap()[0]
        };
        let (ours, twin) = (sums(&own), sums(&twin));
        assert_eq!(ours, sums(&whole.clone().slice(AT..)), "{norm:?}");
        let (ours, twin) = (ours.term(norm), twin.term(norm));
        assert!((ours / twin - 1.0).abs() < 1e-5, "{norm:?}: {ours} {twin}");
    }
    // The last element, which is in no whole vector, is infinite.
    let mut values = values;
    values[AT + LEN - 1] = f32::INFINITY;
    let sums = kernels::norm_sums(&[tensor(&values, &device, FloatDType::F32)], Norm::Two).unwrap();
    assert!(!sums[0].is_finite());
}

#[test]
fn millions_of_elements_have_the_bits_of_flex() {
    let Some(device) = device() else { return };
    let values = numbers(12, LEN, 3.0);
    let on = |device: &Device| {
        let all = tensor(&values, device, FloatDType::F32);
        let source = MaskSource { key: [3, 4], counter: [5, 6], prob: 0.3 };
        let parts = [all.clone(), all.clone().flip([0])];
        let buffer = Tensor::zeros([LEN + 2 * AT], device);
        vec![
            kernels::cast(all.clone(), FloatDType::F16, None).unwrap(),
            kernels::mean(&parts, AT..LEN, 2).unwrap(),
            kernels::pack(vec![(all.clone(), AT)], buffer).unwrap(),
            kernels::dropout(all.clone(), &source).unwrap(),
            kernels::unscale(vec![all], 0.5, Norm::Inf).unwrap().0.remove(0),
        ]
    };
    let (ours, twins) = (on(&device), on(&Device::flex()));
    assert_as_many(&ours, &twins);
    let same = ours.iter().zip(&twins).map(|(a, b)| bits(a) == bits(b));
    // A mean that divides by a power of two has the same bits on any device.
    assert_eq!(same.collect::<Vec<_>>(), [true; 5]);
}

#[test]
fn a_step_on_millions_of_elements_is_that_of_flex() {
    let Some(device) = device() else { return };
    let on = |device: &Device| {
        let param = tensor(&numbers(13, LEN, 1.0), device, FloatDType::F32);
        let gradient = tensor(&numbers(14, LEN, 1.0), device, FloatDType::F32);
        AdamWConfig::new().build().step(1e-2, param, gradient, None).0
    };
    let (ours, twin) = (on(&device), on(&Device::flex()));
    match rounds_correctly(&device) {
        true => assert!(bits(&ours) == bits(&twin)),
        false => assert_close(&ours, &twin, 1e-5, "AdamW"),
    }
}
