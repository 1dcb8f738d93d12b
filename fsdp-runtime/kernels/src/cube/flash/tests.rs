//! The kernels on CubeCL's CPU device, without matrix instructions, against Burn's operations on Flex.

use burn::backend::{Flex, TensorMetadata};
use burn::tensor::{DType, Shape, TensorData};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};

use super::attention::Attention;
use super::plan::Setting;
use crate::attention::{AttentionRule, AttentionTensors, Segments, composed};
use crate::contract::dropout_kernels;
use crate::tensor::Float;
use crate::{Kernels, MaskSource, cast, to_data};

/// An attention of random numbers.
#[derive(Clone, Debug)]
struct Case {
    batch: usize,
    heads: usize,
    key_heads: usize,
    queries: usize,
    keys: usize,
    width: usize,
    /// Whether rows of the tensors have all heads, which the kernels read through strides.
    interleaved: bool,
    /// Whether every third key of the first row is padding, and all of the last row if there are three.
    masked: bool,
    rule: AttentionRule,
}

impl Case {
    fn tensor<B: Kernels>(
        &self,
        device: &B::Device,
        [heads, rows]: [usize; 2],
        seed: usize,
        dtype: DType,
    ) -> Float<B> {
        let dims = match self.interleaved {
            true => [self.batch, rows, heads, self.width],
            false => [self.batch, heads, rows, self.width],
        };
        // Multiples of 1/64 up to 2, which are exact in f16.
        let number = |at: usize| ((at * 7919 + seed * 104_729 + at / 97) % 257) as f32 / 64.0 - 2.0;
        let numbers: Vec<f32> = (0..dims.iter().product()).map(number).collect();
        let data = TensorData::new(numbers, Shape::from(dims));
        let tensor = cast::<B>(B::float_from_data(data, device), dtype);
        if self.interleaved { B::float_swap_dims(tensor, 1, 2) } else { tensor }
    }

    fn tensors<B: Kernels>(&self, device: &B::Device, dtype: DType) -> AttentionTensors<Float<B>> {
        let (batch, keys) = (self.batch, self.keys);
        let bias = (0..batch * keys).map(|at| {
            let is_padding = at < keys && at % 3 == 1 || at >= 2 * keys;
            if is_padding { f32::NEG_INFINITY } else { 0.0 }
        });
        let bias = TensorData::new(bias.collect::<Vec<_>>(), [batch, keys]);
        AttentionTensors {
            query: self.tensor::<B>(device, [self.heads, self.queries], 1, dtype),
            key: self.tensor::<B>(device, [self.key_heads, keys], 2, dtype),
            value: self.tensor::<B>(device, [self.key_heads, keys], 3, dtype),
            bias: self.masked.then(|| cast::<B>(B::float_from_data(bias, device), dtype)),
        }
    }

    fn grad<B: Kernels>(&self, device: &B::Device, dtype: DType) -> Float<B> {
        self.tensor::<B>(device, [self.heads, self.queries], 4, dtype)
    }

    /// Asserts that the results are those of Burn's operations in f32, up to a share of the largest element.
    fn assert_close(&self, dtype: DType, share: f32) {
        let device = CubeDevice::Cpu(cubecl::device::CpuDevice);
        let tensors = self.tensors::<CubeBackend>(&device, dtype);
        let attention =
            Attention::new(&tensors, &self.rule, Setting::Scalar).expect("a width of the kernels");
        let results = super::forward::forward(&attention);
        let grad = self.grad::<CubeBackend>(&device, dtype);
        let grads = super::backward::backward(&attention, &results, &grad).expect("whole chunks");

        let flex = Default::default();
        let tensors = self.tensors::<Flex>(&flex, DType::F32);
        let grad = self.grad::<Flex>(&flex, DType::F32);
        let expected = composed::forward::<Flex>(&tensors, &self.rule, dropout_kernels());
        let expected_grads =
            composed::backward::<Flex>(&tensors, &expected, &grad, &self.rule, dropout_kernels());
        let names = ["output", "statistics", "query", "key", "value"];
        let found = results.into_iter().chain(grads);
        let expected = expected.into_iter().chain(expected_grads);
        for ((found, expected), name) in found.zip(expected).zip(names) {
            let expected_dtype = if name == "statistics" { DType::F32 } else { dtype };
            assert_eq!((found.shape(), found.dtype()), (expected.shape(), expected_dtype));
            let found = numbers(found);
            let expected: Vec<f32> = to_data::<Flex>(expected).iter().collect();
            // Statistics of queries without keys are large.
            let small = expected.iter().map(|x| x.abs()).filter(|x| *x < 1e30);
            let largest = small.fold(1.0f32, f32::max);
            for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let close = (found - expected).abs() <= share * largest.max(expected.abs() * 1e-3);
                assert!(close, "{at} of {name}: {found}, not {expected}: {self:?} in {dtype:?}");
            }
        }
    }
}

fn numbers(tensor: CubeTensor) -> Vec<f32> {
    to_data::<CubeBackend>(cast::<CubeBackend>(tensor, DType::F32)).iter().collect()
}

const PLAIN: [usize; 2] = [75, 101];

fn case(rule: AttentionRule) -> Case {
    let [queries, keys] = PLAIN;
    Case {
        batch: 2,
        heads: 2,
        key_heads: 2,
        queries,
        keys,
        width: 32,
        interleaved: false,
        masked: false,
        rule,
    }
}

/// Segments of 5, 12, 19 and so on positions, in the second row after one of 40.
fn segments(length: usize) -> Option<Segments> {
    let number = |row: usize, at: usize| {
        let ends = (0..).scan(40 * row, |end, number| {
            *end += 5 + 7 * number;
            Some(*end)
        });
        ends.take_while(|end| *end <= at).count() as i64
    };
    let numbers: Vec<i64> =
        (0..2).flat_map(|row| (0..length).map(move |at| number(row, at))).collect();
    Segments::new(&numbers, length).ok()
}

/// Returns attentions under every kind of rule.
fn cases() -> Vec<Case> {
    let plain = AttentionRule::new(0.3);
    let causal = AttentionRule { causal: true, ..plain.clone() };
    let window = AttentionRule { window: Some(11), ..plain.clone() };
    let both = AttentionRule { window: Some(30), ..causal.clone() };
    let packed = AttentionRule { segments: segments(131), ..plain.clone() };
    let packed_causal = AttentionRule { causal: true, ..packed.clone() };
    let dropout = Some(MaskSource { key: [1, 2], counter: [3, 4], prob: 0.2 });
    let dropped = AttentionRule { dropout, ..causal.clone() };
    let square = Case { queries: 131, keys: 131, ..case(packed) };
    vec![
        Case { masked: true, batch: 3, ..case(plain.clone()) },
        case(plain),
        Case { interleaved: true, ..case(causal.clone()) },
        // The first queries come before the first key.
        Case { queries: 101, keys: 37, ..case(causal.clone()) },
        Case { queries: 3, ..case(causal.clone()) },
        Case { queries: 1, keys: 1, width: 16, ..case(causal.clone()) },
        Case { heads: 6, key_heads: 2, interleaved: true, ..case(causal) },
        case(window),
        // Two blocks of queries with masks of their own, and keys of two batches of the random generator.
        Case { queries: 133, keys: 301, heads: 4, masked: true, ..case(dropped) },
        Case { queries: 150, keys: 150, ..case(both) },
        Case { rule: packed_causal, masked: true, heads: 4, ..square.clone() },
        square,
        Case { width: 80, ..case(AttentionRule::new(0.1)) },
    ]
}

#[test]
fn results_are_those_of_burns_operations() {
    for case in cases() {
        case.assert_close(DType::F32, 1e-5);
    }
}

#[test]
fn results_in_half_precision_are_near() {
    let [first, second] = [2, 9].map(|at| cases().swap_remove(at));
    first.assert_close(DType::F16, 2e-3);
    second.assert_close(DType::BF16, 1.6e-2);
}
