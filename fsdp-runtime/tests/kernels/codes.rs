//! Codes of elements, and the elements of codes.

use burn::tensor::FloatDType;
use fsdp_runtime::kernels::{self, KernelError};
use fsdp_runtime::options::StorageType;

use super::support::{LENGTHS, devices, dtypes, elements_of, numbers, tensor};

const TYPES: [StorageType; 5] = [
    StorageType::INT8,
    StorageType::NF4,
    StorageType::Nf4 { block: 64, double_quant: false },
    StorageType::Int8 { block: 1024 },
    StorageType::Nf4 { block: 256, double_quant: true },
];

/// Half of the largest distance between neighbouring values, for a scale of 1.
fn resolution(storage: StorageType) -> f64 {
    // The first two of the 16 values of NF4 are the furthest apart: -1 and -0.696.
    if matches!(storage, StorageType::Int8 { .. }) { 0.5 / 127.0 } else { 0.152 }
}

#[test]
fn elements_are_those_that_were_encoded_up_to_the_resolution() {
    for (device, storage) in devices().flat_map(|it| TYPES.map(|storage| (it.clone(), storage))) {
        for len in LENGTHS {
            let values = numbers(5, len, 1.0);
            let codes = kernels::encode(tensor(&values, &device, FloatDType::F32), storage);
            let decoded = kernels::decode(codes.unwrap(), storage, len, FloatDType::F32);
            let found = elements_of(&decoded.unwrap());
            assert_eq!(found.len(), len);
            for (at, (found, value)) in found.iter().zip(&values).enumerate() {
                // Double quantisation rounds the scale too.
                let most = resolution(storage) * 1.1 + 1e-6;
                let distance = (found - f64::from(*value)).abs();
                assert!(distance <= most, "{storage}, element {at} of {len}: {found} {value}");
            }
        }
    }
}

/// Codes and elements have the same bits on all devices, in all dtypes.
#[test]
fn codes_and_elements_are_those_of_flex_on_the_device() {
    for storage in TYPES {
        for len in LENGTHS {
            let mut values = numbers(9, len, 3.0);
            if len > 1000 {
                (values[70], values[200], values[330]) = (f32::NAN, f32::INFINITY, -0.0);
                values[500..700].fill(1e-39);
            }
            let mut results = Vec::new();
            for device in devices() {
                for dtype in dtypes(&device) {
                    let codes = kernels::encode(tensor(&values, &device, dtype), storage).unwrap();
                    let decoded = kernels::decode(codes.clone(), storage, len, dtype).unwrap();
                    let bits =
                        |it: f32| if it.is_nan() { f32::NAN.to_bits() } else { it.to_bits() };
                    let elements = elements_of(&decoded).into_iter().map(|it| bits(it as f32));
                    let words = codes.into_data();
                    let words = words.as_slice::<f32>().unwrap().iter().map(|it| it.to_bits());
                    let words: Vec<u32> = words.collect();
                    results.push((dtype, words, elements.collect::<Vec<_>>()));
                }
            }
            for (dtype, words, elements) in &results {
                let (_, of_flex, expected) = results.iter().find(|it| it.0 == *dtype).unwrap();
                assert_eq!(words, of_flex, "{storage}, {len} elements in {dtype:?}");
                assert_eq!(elements, expected, "{storage}, {len} elements in {dtype:?}");
            }
        }
    }
}

#[test]
fn other_storage_types_and_too_few_codes_are_refused() {
    for device in devices() {
        let ones = || tensor(&[1.0; 200], &device, FloatDType::F32);
        let error = kernels::encode(ones(), StorageType::Bf16).unwrap_err();
        let expected = "use `Int8` or `Nf4`";
        assert_eq!(error, KernelError::Codes { storage: StorageType::Bf16, expected });
        let error = kernels::encode(ones(), StorageType::Int8 { block: 96 }).unwrap_err();
        assert!(error.to_string().contains("4096 elements"), "{error}");
        let codes = kernels::encode(ones(), StorageType::INT8).unwrap();
        let error = kernels::decode(codes, StorageType::INT8, 300, FloatDType::F32).unwrap_err();
        // Five blocks of 17 words, where there are four.
        assert_eq!(error, KernelError::Range { range: 0..85, len: 68 });
    }
}
