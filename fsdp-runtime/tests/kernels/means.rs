//! Means of gradients over ranks.

use burn::tensor::{Device, FloatDType, Tensor};
use fsdp_runtime::kernels;

use super::support::{LENGTHS, bits, device, dtypes, numbers, tensor};

fn parts(ranks: usize, len: usize, device: &Device, dtype: FloatDType) -> Vec<Tensor<1>> {
    let part = |rank| tensor(&numbers((rank * 1000 + len) as u64, len, 100.0), device, dtype);
    (0..ranks).map(part).collect()
}

/// Returns the sum in rank order in f32, divided, with Burn's tensor operations.
fn mean_by_burn(parts: &[Tensor<1>], range: std::ops::Range<usize>, divisor: usize) -> Tensor<1> {
    let wide = parts.iter().map(|part| part.clone().cast(FloatDType::F32).slice([range.clone()]));
    let sum = wide.reduce(|sum, part| sum + part).unwrap();
    if divisor == 1 { sum } else { sum / divisor as f32 }
}

fn assert_means(device: &Device, flex: &Device) {
    for dtype in dtypes(device) {
        for (ranks, divisor) in [(1, 1), (2, 1), (3, 3), (8, 8), (11, 4)] {
            for len in LENGTHS {
                // A shard begins at any offset.
                let range = len / 3..len;
                let mean = |device| {
                    let parts = parts(ranks, len, device, dtype);
                    kernels::mean(&parts, range.clone(), divisor).unwrap()
                };
                let ours = mean(device);
                assert_eq!(ours.dtype(), burn::tensor::DType::F32);
                let what = format!("{ranks} ranks, {range:?}, {dtype:?}");
                assert_eq!(bits(&ours), bits(&mean(flex)), "{what}");
                if !range.is_empty() {
                    let parts = parts(ranks, len, flex, dtype);
                    assert_eq!(bits(&ours), bits(&mean_by_burn(&parts, range, divisor)), "{what}");
                }
            }
        }
    }
}

#[test]
fn a_mean_on_flex_is_the_sum_in_rank_order_divided() {
    assert_means(&Device::flex(), &Device::flex());
}

#[test]
fn a_mean_on_the_device_has_the_bits_of_flex() {
    if let Some(device) = device() {
        assert_means(&device, &Device::flex());
    }
}
