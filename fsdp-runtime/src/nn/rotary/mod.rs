//! Rotary position encoding, with one kernel for forward and the same for backward.
//!
//! `scaling.rs` has the scalings of the frequencies, `config.rs` the configuration and the table of angles, and
//! this file the layer.

mod config;
mod scaling;
#[cfg(all(test, feature = "flex"))]
mod tests;

use burn::module::{Content, DisplaySettings, Module, ModuleDisplay};
use burn::tensor::{FloatDType, Int, Tensor};

pub use self::config::{RotaryEncodingConfig, RotaryPairs};
pub use self::scaling::{RotaryScaling, YarnScaling};
use crate::backend::ops::{RotaryRule, rotate_tracked, wide};
use crate::module::{FsdpModule, Kind, Node, ParamMapper, ParamVisitor, RunningForward};

/// Encodes positions by rotating pairs of elements of queries and keys: pair `(a, b)` of a row at position `p`
/// becomes `(a · cos(p·f) - b · sin(p·f), b · cos(p·f) + a · sin(p·f))`, with a frequency `f` for each pair. Source:
/// Su and others, [*RoFormer*](https://arxiv.org/abs/2104.09864), 2021.
///
/// The layer replaces `burn::nn::RotaryEncoding`, whose results it has but for rounding. It has no parameters. One
/// kernel computes it and its gradient, for tensors of f32, bf16 and f16; it computes in f32. It reads the input
/// through its strides: heads that were made by `swap_dims(1, 2)` need no copy. For backward it keeps nothing but
/// the positions. Other dtypes and devices have Burn's operations, with the same table of angles in f32.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct RotaryEncoding {
    /// Cosines, then sines, of each position, `[max_sequence_length, d_model]`, in f32.
    table: Tensor<2>,
    #[module(skip)]
    pairs: RotaryPairs,
}

impl RotaryEncoding {
    /// Rotates rows at the positions 0, 1, .. of each sequence. In the forward of a model with
    /// [context parallel](crate::FsdpOptions::with_context_parallel) ranks, these are the positions of this rank's
    /// part.
    ///
    /// # Shapes
    ///
    /// - input and output: `[.., length, d_model]`, such as `[batch, heads, length, d_model]`
    ///
    /// # Panics
    ///
    /// If the input has fewer than 2 dimensions, if its last dimension is not `d_model`, or if `length` exceeds
    /// `max_sequence_length`.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.apply(x, 0)
    }

    /// Rotates rows at the positions `start`, `start + 1`, .. of each sequence, as when a text is continued.
    ///
    /// # Shapes
    ///
    /// - input and output: `[.., length, d_model]`, such as `[batch, heads, length, d_model]`
    ///
    /// # Panics
    ///
    /// If the input has fewer than 2 dimensions, if its last dimension is not `d_model`, or if `start + length`
    /// exceeds `max_sequence_length`.
    pub fn apply<const D: usize>(&self, x: Tensor<D>, start: usize) -> Tensor<D> {
        let dims = x.dims();
        assert!(D >= 2, "the input must have a dimension for the length, and one for the width");
        let part = RunningForward::part(dims[D - 2]).map(|(part, _)| part);
        let length = part.map_or(dims[D - 2], |part| part.length());
        let [known, _] = self.table.dims();
        assert!(
            start + length <= known,
            "position {} is beyond this encoding, whose `max_sequence_length` is {known}",
            start + length - 1
        );
        let sequences: usize = dims[..D - 2].iter().product();
        let heads = match D {
            4 => retyped(x),
            _ => x.reshape([sequences, 1, dims[D - 2], dims[D - 1]]),
        };
        let positions = part.map(|part| {
            let positions = part.positions(&heads.device()).add_scalar(start as i64);
            positions.unsqueeze::<2>().repeat_dim(0, heads.dims()[0])
        });
        let rotated = self.rotate(heads, positions.as_ref(), start);
        if D == 4 { retyped(rotated) } else { rotated.reshape(dims) }
    }

    /// Rotates rows at given positions, as where several texts are packed in one row of a batch and positions
    /// begin at 0 in each.
    ///
    /// # Shapes
    ///
    /// - input and output: `[batch, heads, length, d_model]`
    /// - positions: `[batch, length]`, from 0 to `max_sequence_length - 1`
    ///
    /// # Panics
    ///
    /// If the last dimension of the input is not `d_model`, and if the positions have another shape. On Flex also if
    /// a position is out of range. On CubeCL devices, where such a check would wait for the device, the rows of
    /// such positions are NaN.
    pub fn forward_with_positions(&self, x: Tensor<4>, positions: Tensor<2, Int>) -> Tensor<4> {
        self.rotate(x, Some(&positions), 0)
    }

    /// Rotates query and key, which may differ in the number of heads, at given positions or, without any, at
    /// the positions 0, 1, ..
    ///
    /// # Shapes
    ///
    /// - query, key and outputs: `[batch, heads, length, d_model]`
    /// - positions: `[batch, length]`, from 0 to `max_sequence_length - 1`
    ///
    /// # Panics
    ///
    /// As [`forward`](Self::forward) and [`forward_with_positions`](Self::forward_with_positions).
    ///
    /// # Example
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use fsdp_runtime::nn::{RotaryEncodingConfig, RotaryPairs, RotaryScaling};
    ///
    /// # fn main() {
    /// # #[cfg(feature = "flex")] {
    /// let device = Device::flex();
    /// let scaling = RotaryScaling::Llama3 {
    ///     factor: 8.0,
    ///     low_freq_factor: 1.0,
    ///     high_freq_factor: 4.0,
    ///     original_max_position_embeddings: 8192,
    /// };
    /// let rotary = RotaryEncodingConfig::new(512, 64)
    ///     .with_theta(500_000.0)
    ///     .with_pairs(RotaryPairs::Halves)
    ///     .with_scaling(Some(scaling))
    ///     .init(&device);
    /// // A row of two texts, of 3 and of 2 words; 8 heads of queries, and 2 of keys.
    /// let positions = Tensor::from_ints([[0, 1, 2, 0, 1]], &device);
    /// let (query, key) = (Tensor::ones([1, 8, 5, 64], &device), Tensor::ones([1, 2, 5, 64], &device));
    /// let (query, key) = rotary.forward_query_key(query, key, Some(positions));
    /// assert_eq!((query.dims(), key.dims()), ([1, 8, 5, 64], [1, 2, 5, 64]));
    /// # }
    /// # }
    /// ```
    pub fn forward_query_key(
        &self,
        query: Tensor<4>,
        key: Tensor<4>,
        positions: Option<Tensor<2, Int>>,
    ) -> (Tensor<4>, Tensor<4>) {
        match &positions {
            None => (self.forward(query), self.forward(key)),
            Some(_) => {
                let rotate = |heads| self.rotate(heads, positions.as_ref(), 0);
                (rotate(query), rotate(key))
            }
        }
    }

    fn rotate(&self, x: Tensor<4>, positions: Option<&Tensor<2, Int>>, start: usize) -> Tensor<4> {
        let ([batch, _, length, width], [_, d_model]) = (x.dims(), self.table.dims());
        assert_eq!(width, d_model, "the last dimension of the input must be `d_model`");
        if let Some(positions) = positions {
            let expected = [batch, length];
            assert_eq!(positions.dims(), expected, "positions must be `[batch, length]`");
        }
        let interleaved = self.pairs == RotaryPairs::Interleaved;
        let rule = RotaryRule { interleaved, start, inverse: false };
        // f32 has all whole numbers up to 2^24, which is more than a table has rows.
        let numbers = positions.map(|positions| positions.clone().cast(FloatDType::F32));
        rotate_tracked(&x, &self.table, numbers.as_ref(), rule)
            .unwrap_or_else(|| self.composed(x, positions, start))
    }

    /// Rotates with Burn's operations, in f32 or, for f64, in f64.
    fn composed(
        &self,
        x: Tensor<4>,
        positions: Option<&Tensor<2, Int>>,
        start: usize,
    ) -> Tensor<4> {
        let dims @ [batch, heads, length, width] = x.dims();
        let (half, dtype) = (width / 2, x.dtype());
        let wide = wide(dtype);
        let angles: Tensor<4> = match positions {
            None => self.table.clone().narrow(0, start, length).reshape([1, 1, length, width]),
            Some(positions) => {
                let rows = positions.clone().reshape([batch * length]);
                self.table.clone().select(0, rows).reshape([batch, 1, length, width])
            }
        };
        let angles = angles.cast(wide);
        let (cos, sin) = (angles.clone().narrow(3, 0, half), angles.narrow(3, half, half));
        let x = x.cast(wide);
        let part = |at: usize| -> Tensor<4> {
            match self.pairs {
                RotaryPairs::Halves => x.clone().narrow(3, at * half, half),
                RotaryPairs::Interleaved => {
                    let pairs = x.clone().reshape([batch, heads, length, half, 2]);
                    pairs.narrow(4, at, 1).reshape([batch, heads, length, half])
                }
            }
        };
        let (a, b) = (part(0), part(1));
        let left = a.clone() * cos.clone() - b.clone() * sin.clone();
        let right = b * cos + a * sin;
        let rotated = match self.pairs {
            RotaryPairs::Halves => Tensor::cat(vec![left, right], 3),
            RotaryPairs::Interleaved => Tensor::stack::<5>(vec![left, right], 4).reshape(dims),
        };
        rotated.cast(dtype)
    }
}

/// Returns a tensor whose number of dimensions is `E` under the type that says so.
fn retyped<const D: usize, const E: usize>(tensor: Tensor<D>) -> Tensor<E> {
    debug_assert_eq!(D, E);
    Tensor::from_dispatch(tensor.into_dispatch())
}

impl ModuleDisplay for RotaryEncoding {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let [max_sequence_length, d_model] = self.table.dims();
        content.add("d_model", &d_model).add("max_sequence_length", &max_sequence_length).optional()
    }
}

/// The table is a constant, as the tensors of Burn's layer are.
impl FsdpModule for RotaryEncoding {
    const LAYOUT: Node = Node::plain("RotaryEncoding", Kind::Constant);

    fn visit_params<V: ParamVisitor>(&self, _: &mut V) {}

    fn map_params<P: ParamMapper>(self, mapper: &mut P) -> Self {
        mapper.unmanaged(self)
    }
}
