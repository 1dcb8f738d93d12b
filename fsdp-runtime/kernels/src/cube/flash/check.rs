//! The check of the kernels on a device: before the first attention of a kind, a small one is compared with loops
//! on the host.
//!
//! Matrix instructions take and leave their elements in registers, in an order that only the device knows. A
//! device or compiler with another order would give wrong numbers without an error.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, LazyLock, Mutex, OnceLock};

use burn::backend::TensorMetadata;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType, Shape, TensorData};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use burn_std::device::ServiceId;
use cubecl::dry_run::RealRun;

use super::attention::Attention;
use super::plan::Setting;
use super::{backward, forward};
use crate::attention::{
    AttentionRule, AttentionTensors, KeyRanges, MASK_ROWS, MaskRow, Segments, WeightPlaces,
};
use crate::cube::tensors::is_interleaved;
use crate::ignore_poison::IgnorePoison;
use crate::mask::MaskSource;

/// Number of rows of the batch.
const BATCH: usize = 2;
/// Number of queries and of keys: several tiles and a part of one, and more queries than share a dropout mask.
const LENGTH: usize = 150;
/// Number of heads of the queries, each two of which share a head of the keys.
const HEADS: usize = 4;
/// Number of heads of the keys.
const KEY_HEADS: usize = HEADS / 2;

/// What decides which kernels an attention takes, beside its lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Kind {
    dtype: DType,
    width: usize,
    is_causal: bool,
    has_window: bool,
    has_segments: bool,
    has_bias: bool,
    has_dropout: bool,
    /// Whether the heads of a row of keys lie beside each other.
    interleaved: bool,
}

impl Kind {
    fn of(Attention { tensors, rule, .. }: &Attention<'_>) -> Self {
        Self {
            dtype: tensors.query.dtype,
            width: tensors.query.shape()[3],
            is_causal: rule.causal,
            has_window: rule.window.is_some(),
            has_segments: rule.segments.is_some(),
            has_bias: tensors.bias.is_some(),
            has_dropout: rule.dropout.is_some(),
            interleaved: is_interleaved(&tensors.value),
        }
    }

    /// Returns the rule of the small attention. Its scores differ by several units.
    fn rule(&self) -> AttentionRule {
        let of_row = |row| (0..LENGTH).map(move |at| i64::from(at >= LENGTH / (3 - row)));
        let numbers: Vec<i64> = (0..BATCH).flat_map(of_row).collect();
        let segments = || Segments::new(&numbers, LENGTH).expect("two runs of positions");
        let dropout = MaskSource { key: [1, 2], counter: [3, 4], prob: 0.25 };
        AttentionRule {
            causal: self.is_causal,
            window: self.has_window.then_some(LENGTH / 4),
            segments: self.has_segments.then(segments),
            dropout: self.has_dropout.then_some(dropout),
            ..AttentionRule::new(1.5 / (self.width as f64).sqrt())
        }
    }
}

/// Returns multiples of 1/64 below 2, which are exact in half precision.
fn numbers(len: usize, seed: usize) -> Vec<f64> {
    let number = |at: usize| ((at * 7919 + seed * 104_729 + at / 97) % 257) as f64 / 64.0 - 2.0;
    (0..len).map(number).collect()
}

/// Names of the results, in their order.
const NAMES: [&str; 5] = [
    "output",
    "logarithms of the sums of exponentials",
    "gradient of the queries",
    "gradient of the keys",
    "gradient of the values",
];

/// Results in the order of [`NAMES`].
type Results = [Vec<f64>; 5];

/// Why the kernels are not used.
#[derive(Clone, Debug, PartialEq)]
enum Failure {
    /// An element differs from that of the loops.
    Element { name: &'static str, at: usize, found: f64, expected: f64 },
    /// The results could not be read.
    Unread(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Element { name, at, found, expected } => {
                write!(f, "element {at} of the {name} is {found}, and not {expected}")
            }
            Self::Unread(error) => write!(f, "the results cannot be read: {error}"),
        }
    }
}

/// Outcomes of the checks, by device and kind of attention.
type Checked = Mutex<HashMap<(ServiceId, Kind), Arc<OnceLock<bool>>>>;

/// Returns whether the kernels of an attention have passed their check on the device of its tensors. The first
/// call for a kind of attention makes the check. If it fails, it is reported once, as a warning.
pub(super) fn passes(attention: &Attention<'_>, setting: Setting) -> bool {
    static CHECKED: LazyLock<Checked> = LazyLock::new(Checked::default);
    let kind = Kind::of(attention);
    let device = &attention.tensors.query.device;
    let checked = {
        let mut checked = CHECKED.lock().ignore_poison();
        let of_device = (attention.client.service_id(), kind);
        Arc::clone(checked.entry(of_device).or_default())
    };
    *checked.get_or_init(|| match check(device, &kind, setting) {
        Ok(()) => true,
        Err(failure) => {
            let Kind { dtype, width, .. } = kind;
            tracing::warn!(
                "attention of {dtype:?} with heads of {width} elements runs on the slower kernels that store its \
                 scores: of the kernels that keep them on the chip, {failure}"
            );
            false
        }
    })
}

/// Runs the small attention on the device and on the host.
fn check(device: &CubeDevice, kind: &Kind, setting: Setting) -> Result<(), Failure> {
    // In a dry run of CubeCL, the kernels of the check run nevertheless.
    let _runs = RealRun::new();
    let small = Small::new(kind);
    compare(&small.found(device, setting)?, &small.expected(), kind.dtype)
}

/// A small attention in host memory, with the gradient of its output.
struct Small {
    dtype: DType,
    width: usize,
    interleaved: bool,
    rule: AttentionRule,
    tensors: AttentionTensors<Vec<f64>>,
    grad: Vec<f64>,
}

impl Small {
    fn new(kind: &Kind) -> Self {
        let width = kind.width;
        let of_queries = BATCH * HEADS * LENGTH * width;
        let of_keys = BATCH * KEY_HEADS * LENGTH * width;
        // Other keys in each row of the batch.
        let padding = |key| if key % 7 == 3 { f64::NEG_INFINITY } else { 0.0 };
        let tensors = AttentionTensors {
            query: numbers(of_queries, 1),
            key: numbers(of_keys, 2),
            value: numbers(of_keys, 3),
            bias: kind.has_bias.then(|| (0..BATCH * LENGTH).map(padding).collect()),
        };
        let grad = numbers(of_queries, 4);
        let Kind { dtype, interleaved, .. } = *kind;
        Self { dtype, width, interleaved, rule: kind.rule(), tensors, grad }
    }

    /// Returns the results of the kernels.
    fn found(&self, device: &CubeDevice, setting: Setting) -> Result<Results, Failure> {
        let tensor = |numbers: &Vec<f64>, dims: &[usize]| {
            let data = TensorData::new(numbers.clone(), Shape::from(dims.to_vec()));
            CubeBackend::float_from_data(data.convert_dtype(self.dtype), device)
        };
        let of_heads = |numbers: &Vec<f64>, heads| {
            if !self.interleaved {
                return tensor(numbers, &[BATCH, heads, LENGTH, self.width]);
            }
            let of_head = |row: usize, at| move |head| (row * heads + head) * LENGTH + at;
            let rows = (0..BATCH).flat_map(|row| (0..LENGTH).map(move |at| (row, at)));
            let rows = rows.flat_map(|(row, at)| (0..heads).map(of_head(row, at)));
            let of_row = |row: usize| numbers[row * self.width..][..self.width].iter().copied();
            let dims = [BATCH, LENGTH, heads, self.width];
            CubeBackend::float_swap_dims(tensor(&rows.flat_map(of_row).collect(), &dims), 1, 2)
        };
        let tensors = AttentionTensors {
            query: of_heads(&self.tensors.query, HEADS),
            key: of_heads(&self.tensors.key, KEY_HEADS),
            value: of_heads(&self.tensors.value, KEY_HEADS),
            bias: self.tensors.bias.as_ref().map(|bias| tensor(bias, &[BATCH, LENGTH])),
        };
        let attention = Attention::new(&tensors, &self.rule, setting)
            .expect("the kernels take attentions of this kind");
        let results = forward::forward(&attention);
        let grad = of_heads(&self.grad, HEADS);
        let grads = backward::backward(&attention, &results, &grad).expect("whole chunks");
        let mut found = Results::default();
        for (found, tensor) in found.iter_mut().zip(results.into_iter().chain(grads)) {
            *found = read(tensor)?;
        }
        Ok(found)
    }

    /// Returns the results of loops on the host, in f64.
    fn expected(&self) -> Results {
        let Self { tensors: AttentionTensors { query, key, value, bias }, .. } = self;
        let width = self.width;
        let scale = self.rule.scale;
        let ranges = KeyRanges::new(&self.rule, [LENGTH; 2]);
        let masks = self.rule.dropout.map(Masks::new);
        let mut expected: Results =
            [query.len(), BATCH * HEADS * LENGTH, query.len(), key.len(), value.len()]
                .map(|len| vec![0.0; len]);
        let [outputs, logs, query_grads, key_grads, value_grads] = &mut expected;
        // Heads are counted over all rows of the batch.
        for (head, at) in (0..BATCH * HEADS).flat_map(|head| (0..LENGTH).map(move |at| (head, at)))
        {
            let batch = head / HEADS;
            let number = head * LENGTH + at;
            let (query, grad) = (row(query, number, width), row(&self.grad, number, width));
            // Rows of the head of the keys that the query sees.
            let of_keys = head / (HEADS / KEY_HEADS) * LENGTH;
            let seen: Vec<usize> = ranges.of_query(batch, at).collect();
            let score = |&at: &usize| {
                dot(query, row(key, of_keys + at, width)) * scale
                    + bias.as_ref().map_or(0.0, |bias| bias[batch * LENGTH + at])
            };
            let exponentials: Vec<f64> = seen.iter().map(|at| score(at).exp()).collect();
            let sum: f64 = exponentials.iter().sum();
            logs[number] = sum.ln();
            let kept = |key| masks.as_ref().map_or(1.0, |masks| masks.factor(head, at, key));
            let weights: Vec<f64> = exponentials.iter().map(|x| x / sum).collect();
            let slopes: Vec<f64> = seen
                .iter()
                .map(|&at| dot(grad, row(value, of_keys + at, width)) * kept(at))
                .collect();
            let mean = dot(&weights, &slopes);
            for ((&at, weight), slope) in seen.iter().zip(weights).zip(slopes) {
                let slope = weight * (slope - mean) * scale;
                let dropped = weight * kept(at);
                let of_key = of_keys + at;
                add(&mut outputs[number * width..][..width], dropped, row(value, of_key, width));
                add(&mut query_grads[number * width..][..width], slope, row(key, of_key, width));
                add(&mut key_grads[of_key * width..][..width], slope, query);
                add(&mut value_grads[of_key * width..][..width], dropped, grad);
            }
        }
        expected
    }
}

/// The dropout masks of the small attention.
struct Masks {
    source: MaskSource,
    places: WeightPlaces,
    /// The mask of each block of queries.
    of_blocks: Vec<Vec<f32>>,
}

impl Masks {
    fn new(source: MaskSource) -> Self {
        let places = WeightPlaces::all(HEADS, [LENGTH; 2]);
        let of_block = |first| {
            let MaskRow { source, of_block, .. } = places.row(source, first);
            source.mask(BATCH * HEADS * of_block * places.padded_keys())
        };
        let of_blocks = (0..LENGTH).step_by(MASK_ROWS).map(of_block).collect();
        Self { source, places, of_blocks }
    }

    /// Returns the factor of a weight, given the head over all rows of the batch.
    fn factor(&self, head: usize, query: usize, key: usize) -> f64 {
        let MaskRow { row, of_block, .. } = self.places.row(self.source, query);
        let at = (head * of_block + row) * self.places.padded_keys() + key;
        self.of_blocks[query / MASK_ROWS][at].into()
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Adds `factor * row` to `sums`.
fn add(sums: &mut [f64], factor: f64, row: &[f64]) {
    sums.iter_mut().zip(row).for_each(|(sum, element)| *sum += factor * element);
}

/// Returns row `at` of rows of `width` elements.
fn row(of: &[f64], at: usize, width: usize) -> &[f64] {
    &of[at * width..][..width]
}

/// Returns the elements of a tensor.
fn read(tensor: CubeTensor) -> Result<Vec<f64>, Failure> {
    let data = burn::tensor::try_read_sync(CubeBackend::float_into_data(tensor));
    match data.expect("CubeCL reads synchronously") {
        Ok(data) => Ok(data.iter().collect()),
        Err(error) => Err(Failure::Unread(error.to_string())),
    }
}

/// Compares results with the expected ones, up to the rounding of factors and results in `dtype`.
fn compare(found: &Results, expected: &Results, dtype: DType) -> Result<(), Failure> {
    // Gradients of queries and keys are differences, and their means are sums over rounded outputs.
    let (plain, differences) = if dtype == DType::BF16 { (0.015, 0.05) } else { (0.002, 0.008) };
    let shares = [plain, 1e-4, differences, differences, plain];
    for (((found, expected), name), share) in found.iter().zip(expected).zip(NAMES).zip(shares) {
        assert_eq!(found.len(), expected.len(), "results have the shapes of the loops");
        let largest = expected.iter().fold(0.0, |largest: f64, x| largest.max(x.abs()));
        for (at, (&found, &expected)) in found.iter().zip(expected).enumerate() {
            // A comparison with NaN is false.
            let is_close = (found - expected).abs() <= share * largest;
            if !is_close {
                return Err(Failure::Element { name, at, found, expected });
            }
        }
    }
    Ok(())
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use super::*;

    fn kinds() -> Vec<Kind> {
        let plain = Kind {
            dtype: DType::F32,
            width: 32,
            is_causal: false,
            has_window: false,
            has_segments: false,
            has_bias: false,
            has_dropout: false,
            interleaved: false,
        };
        vec![
            Kind {
                is_causal: true,
                has_dropout: true,
                dtype: DType::BF16,
                interleaved: true,
                ..plain
            },
            Kind { is_causal: true, has_window: true, dtype: DType::F16, width: 16, ..plain },
            Kind { has_segments: true, has_bias: true, ..plain },
        ]
    }

    fn device() -> CubeDevice {
        CubeDevice::Cpu(cubecl::device::CpuDevice)
    }

    #[test]
    fn the_kernels_pass() {
        for kind in kinds() {
            assert_eq!(check(&device(), &kind, Setting::Scalar), Ok(()), "{kind:?}");
        }
    }

    /// Returns the results with the elements of one in another order: element `at` is that at `from(at)`.
    fn permuted(results: &Results, result: usize, from: impl Fn(usize) -> usize) -> Results {
        let mut permuted = results.clone();
        let elements = &results[result];
        permuted[result] = (0..elements.len())
            .map(|at| *elements.get(from(at)).unwrap_or(&elements[at]))
            .collect();
        permuted
    }

    #[test]
    fn a_wrong_order_of_elements_is_found_in_every_result() {
        for kind in kinds() {
            let expected = Small::new(&kind).expected();
            assert_eq!(compare(&expected, &expected, kind.dtype), Ok(()));
            for (result, name) in NAMES.into_iter().enumerate() {
                let width = if result == 1 { 1 } else { kind.width };
                let rows =
                    permuted(&expected, result, |at| ((at / width) ^ 8) * width + at % width);
                let mut missing = expected.clone();
                missing[result][17] = f64::NAN;
                let mut wrong = vec![rows, missing];
                if width > 1 {
                    wrong.push(permuted(&expected, result, |at| at ^ 1));
                    wrong.push(permuted(&expected, result, |at| at ^ 8));
                }
                for wrong in wrong {
                    let failure = compare(&wrong, &expected, kind.dtype).unwrap_err();
                    let is_named =
                        matches!(&failure, Failure::Element { name: found, .. } if *found == name);
                    assert!(is_named, "{failure} in {kind:?}");
                }
            }
        }
    }

    #[test]
    fn another_rule_is_found() {
        for kind in kinds() {
            let small = Small::new(&kind);
            let other = Small { rule: AttentionRule::new(small.rule.scale), ..Small::new(&kind) };
            let other = match kind.has_bias {
                true => {
                    Small { tensors: AttentionTensors { bias: None, ..other.tensors }, ..other }
                }
                false => other,
            };
            let compared = compare(&other.expected(), &small.expected(), kind.dtype);
            assert!(compared.is_err(), "{kind:?}");
        }
    }
}
