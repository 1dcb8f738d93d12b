//! Configuration of rotary positions, and the table of angles.

use burn::config::Config;
use burn::tensor::{DType, Device, Tensor, TensorData};
use serde::{Deserialize, Serialize};

use super::RotaryEncoding;
use super::scaling::RotaryScaling;

/// Which elements of a row are rotated together. A model must be run with the pairs that it was trained with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum RotaryPairs {
    /// Pair `i` consists of elements `2i` and `2i + 1`, as in the paper, in `burn::nn::RotaryEncoding`, in GPT-J
    /// and in Meta's own files of Llama.
    #[default]
    Interleaved,
    /// Pair `i` consists of elements `i` and `i + d_model / 2`. Hugging Face's Llama, Mistral and Qwen models have
    /// such pairs (`rotate_half`), as has GPT-NeoX.
    Halves,
}

/// Configuration of a [`RotaryEncoding`]. The fields of `burn::nn::RotaryEncodingConfig` have its defaults.
#[derive(Config, Debug)]
pub struct RotaryEncodingConfig {
    /// Number of positions, which are 0 to `max_sequence_length - 1`.
    pub max_sequence_length: usize,
    /// Width of a head, an even number.
    pub d_model: usize,
    /// Base of the frequencies: pair `i` turns by `theta^(-2i / d_model)` radians a position. Default: 10,000.
    #[config(default = "10000.0")]
    pub theta: f32,
    /// Which elements are pairs. Default: `Interleaved`, as Burn's layer has them. Models of Hugging Face need
    /// `Halves`.
    #[config(default = "RotaryPairs::Interleaved")]
    pub pairs: RotaryPairs,
    /// Scaling of the frequencies. Default: none.
    pub scaling: Option<RotaryScaling>,
}

impl RotaryEncodingConfig {
    /// Computes the cosines and sines of all positions, in f64, and stores them in f32: `4 · d_model` bytes for
    /// each position.
    ///
    /// # Panics
    ///
    /// If `max_sequence_length` is 0, if `d_model` is 0 or odd, if `theta` or a number of the scaling is not
    /// positive, if `low_freq_factor` is not below `high_freq_factor` or `beta_slow` not below `beta_fast`, and if
    /// `theta` is not above 1 under YaRN. The message names the number.
    pub fn init(&self, device: &Device) -> RotaryEncoding {
        assert!(self.max_sequence_length > 0, "`max_sequence_length` must be at least 1, and is 0");
        let (frequencies, factor) = self.scaled_frequencies();
        let mut table = Vec::with_capacity(self.max_sequence_length * self.d_model);
        for position in 0..self.max_sequence_length {
            let angles = || frequencies.iter().map(|frequency| position as f64 * frequency);
            table.extend(angles().map(|angle| (angle.cos() * factor) as f32));
            table.extend(angles().map(|angle| (angle.sin() * factor) as f32));
        }
        let table = TensorData::new(table, [self.max_sequence_length, self.d_model]);
        let table = Tensor::from_data(table, (device, DType::F32));
        RotaryEncoding { table, pairs: self.pairs }
    }

    /// Returns the angle of each pair from one position to the next, in radians: transformers' `inv_freq`.
    ///
    /// # Panics
    ///
    /// As [`init`](Self::init).
    pub fn frequencies(&self) -> Vec<f64> {
        self.scaled_frequencies().0
    }

    /// Returns the factor of all cosines and sines, which is 1 but under YaRN: transformers'
    /// `attention_scaling`.
    ///
    /// # Panics
    ///
    /// As [`init`](Self::init).
    pub fn attention_factor(&self) -> f64 {
        self.scaled_frequencies().1
    }

    fn scaled_frequencies(&self) -> (Vec<f64>, f64) {
        let (width, theta) = (self.d_model, f64::from(self.theta));
        assert!(
            width > 0 && width.is_multiple_of(2),
            "`d_model` must be even and not 0, as pairs of elements are rotated, and is {width}"
        );
        assert!(
            theta.is_finite() && theta > 0.0,
            "`theta` must be a positive number, such as 10000, and is {theta}"
        );
        let frequency = |pair| theta.powf(-2.0 * pair as f64 / width as f64);
        let mut frequencies: Vec<f64> = (0..width / 2).map(frequency).collect();
        let factor = self.scaling.as_ref().map_or(1.0, |scaling| {
            scaling.check(theta);
            scaling.apply(&mut frequencies, theta)
        });
        (frequencies, factor)
    }
}
