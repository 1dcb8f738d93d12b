//! An attention, and what it should be.

use burn::tensor::{Bool, DType, Device, FloatDType, Int, Tensor, TensorData};
use fsdp_runtime::nn::{AttentionOptions, attention};

use crate::kernels::support::tensor;

/// An attention of random numbers.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub batch: usize,
    pub heads: usize,
    /// Heads of the query that share a head of the key.
    pub group: usize,
    pub queries: usize,
    pub keys: usize,
    pub width: usize,
    pub value_width: usize,
    pub causal: bool,
    pub window: Option<usize>,
    /// Whether rows are packed: the first has documents of 5, 12, 19 and so on positions, and a later one
    /// begins with a longer document.
    pub packed: bool,
    /// Whether the last keys of a row are padding.
    pub masked: bool,
    pub scale: Option<f64>,
}

pub const PLAIN: Case = Case {
    batch: 2,
    heads: 3,
    group: 1,
    queries: 150,
    keys: 150,
    width: 16,
    value_width: 16,
    causal: false,
    window: None,
    packed: false,
    masked: false,
    scale: None,
};

/// Query, key, value, and the weights of the output in the loss.
type Elements = [Vec<f32>; 4];

impl Case {
    fn shapes(&self) -> [[usize; 4]; 4] {
        let Self { batch, heads, group, queries, keys, width, value_width, .. } = *self;
        let of = |heads, length, width| [batch, heads, length, width];
        [
            of(heads, queries, width),
            of(heads / group, keys, width),
            of(heads / group, keys, value_width),
            of(heads, queries, value_width),
        ]
    }

    /// Returns elements that are exact in every dtype.
    pub fn elements(&self) -> Elements {
        let element = |seed: usize, at: usize| {
            ((at * 7919 + seed * 104_729 + at / 97 * 31) % 257) as f32 / 64.0 - 2.0
        };
        let mut seed = 0;
        self.shapes().map(|shape| {
            seed += 1;
            (0..shape.iter().product()).map(|at| element(seed, at)).collect()
        })
    }

    /// Returns whether a key is padding: the last ones, more in later rows of the batch, all in the
    /// row 2.
    fn is_padding(&self, batch: usize, key: usize) -> bool {
        let hidden = [self.keys / 3, self.keys / 2 + 1, self.keys][batch % 3];
        self.masked && key + hidden >= self.keys
    }

    /// Returns the number of the document to which a position belongs.
    pub fn document(&self, row: usize, position: usize) -> usize {
        let ends = (0..).scan(4 * row, |end, number| {
            *end += 5 + 7 * number;
            Some(*end)
        });
        ends.take_while(|end| *end <= position).count()
    }

    /// Returns whether a query sees a key.
    fn sees(&self, row: usize, query: usize, key: usize) -> bool {
        let after = (key + self.queries) as i64 - (query + self.keys) as i64;
        !self.is_padding(row, key)
            && (!self.causal || after <= 0)
            && self.window.is_none_or(|window| after.unsigned_abs() < window as u64)
            && (!self.packed || self.document(row, query) == self.document(row, key))
    }

    pub fn options(&self, device: &Device) -> AttentionOptions {
        let mut options = AttentionOptions::new().with_causal(self.causal);
        if let Some(window) = self.window {
            options = options.with_window(window);
        }
        if self.packed {
            let positions = (0..self.batch).flat_map(|row| (0..self.keys).map(move |at| (row, at)));
            let numbers: Vec<i64> =
                positions.map(|(row, at)| 7 - self.document(row, at) as i64).collect();
            let numbers = TensorData::new(numbers, [self.batch, self.keys]);
            options = options.with_segments(Tensor::<2, Int>::from_data(numbers, device));
        }
        if let Some(scale) = self.scale {
            options = options.with_scale(scale);
        }
        if !self.masked {
            return options;
        }
        let keys = (0..self.batch).flat_map(|row| (0..self.keys).map(move |key| (row, key)));
        let mask: Vec<bool> = keys.map(|(row, key)| self.is_padding(row, key)).collect();
        let mask = TensorData::new(mask, [self.batch, self.keys]);
        options.with_padding_mask(Tensor::<2, Bool>::from_data(mask, device))
    }

    /// Returns the output, and the gradients of query, key and value.
    pub fn run(&self, device: &Device, dtype: FloatDType) -> [Vec<f64>; 4] {
        let elements = self.elements();
        let device = device.clone().autodiff();
        let mut shapes = self.shapes().into_iter();
        let [query, key, value, weights] = elements.map(|elements| {
            let shape = shapes.next().expect("four shapes");
            tensor(&elements, &device, dtype).reshape(shape).require_grad()
        });
        let output = attention(query.clone(), key.clone(), value.clone(), self.options(&device));
        assert_eq!((output.dims(), output.dtype()), (weights.dims(), DType::from(dtype)));
        let loss = (output.clone() * weights.detach()).sum();
        let gradients = loss.backward();
        let [query, key, value] =
            [query, key, value].map(|tensor| numbers(&tensor.grad(&gradients).expect("one")));
        [numbers(&output.inner()), query, key, value]
    }

    /// Computes what [`run`](Self::run) should find.
    fn expected(&self) -> [Vec<f64>; 4] {
        let Self { batch, heads, group, queries, keys, width, value_width, .. } = *self;
        let elements = self
            .elements()
            .map(|elements| -> Vec<f64> { elements.into_iter().map(f64::from).collect() });
        let [query, key, value, weights] = &elements;
        let scale = self.scale.unwrap_or_else(|| 1.0 / (width as f64).sqrt());
        let mut results = [weights, query, key, value].map(|like| vec![0.0; like.len()]);
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        for head in 0..batch * heads {
            for row in head * queries..(head + 1) * queries {
                let sees = |at: &usize| self.sees(head / heads, row - head * queries, *at);
                let seen: Vec<usize> = (0..keys).filter(sees).collect();
                let of_width = |at: usize, width: usize| {
                    let first = (head / group * keys + at) * width;
                    first..first + width
                };
                let of_key = |at: usize| of_width(at, width);
                let of_value = |at: usize| of_width(at, value_width);
                let of_query = row * width..(row + 1) * width;
                let of_output = row * value_width..(row + 1) * value_width;
                let scores: Vec<f64> = (seen.iter())
                    .map(|&at| scale * dot(&query[of_query.clone()], &key[of_key(at)]))
                    .collect();
                let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let powers: Vec<f64> = scores.iter().map(|score| (score - top).exp()).collect();
                let sum: f64 = powers.iter().sum();
                let slopes: Vec<f64> = (seen.iter())
                    .map(|&at| dot(&weights[of_output.clone()], &value[of_value(at)]))
                    .collect();
                let mean = dot(&powers, &slopes) / sum;
                for ((&at, power), slope) in seen.iter().zip(&powers).zip(&slopes) {
                    let share = power / sum;
                    for index in 0..value_width {
                        let of_output = row * value_width + index;
                        results[0][of_output] += share * value[of_value(at).start + index];
                        results[3][of_value(at).start + index] += share * weights[of_output];
                    }
                    let slope = share * (slope - mean) * scale;
                    for index in 0..width {
                        results[1][row * width + index] += slope * key[of_key(at).start + index];
                        results[2][of_key(at).start + index] += slope * query[row * width + index];
                    }
                }
            }
        }
        results
    }

    /// Asserts that output and gradients are those of the definition, relative to the largest, or to
    /// `least` where all are smaller.
    #[track_caller]
    pub fn assert_exact(&self, device: &Device, dtype: FloatDType, [share, least]: [f64; 2]) {
        let names = ["output", "query's gradient", "key's gradient", "value's gradient"];
        let found = self.run(device, dtype).into_iter().zip(self.expected());
        for ((found, expected), name) in found.zip(names) {
            assert_eq!(found.len(), expected.len());
            assert!(!found.is_empty());
            let largest = expected.iter().fold(least, |largest: f64, x| largest.max(x.abs()));
            for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let close = (found - expected).abs() <= share * largest;
                assert!(
                    close,
                    "element {at} of the {name} is {found}, not {expected}, of at most {largest}: \
                     {self:?} in {dtype:?} on {device:?}"
                );
            }
        }
    }
}

pub fn numbers(tensor: &Tensor<4>) -> Vec<f64> {
    tensor.to_data().iter::<f64>().collect()
}

/// Returns the share of the largest element by which an element may differ, and the least such element.
///
/// Flex computes bf16 and f16 in f32 and rounds the results, of which backward uses the output: a gradient is a
/// difference of its products. On other devices products, scores and weights are rounded as well.
pub fn bounds(dtype: FloatDType, device: &Device) -> [f64; 2] {
    let is_flex = *device == Device::flex();
    match dtype {
        FloatDType::F64 => [1e-10, 1e-2],
        FloatDType::F32 => [1e-5, 1e-2],
        FloatDType::F16 if is_flex => [2e-3, 1.0],
        FloatDType::F16 => [1e-2, 1.0],
        _ if is_flex => [1.6e-2, 1.0],
        _ => [6e-2, 1.0],
    }
}
