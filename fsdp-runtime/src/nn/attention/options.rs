//! Options of attention.

use burn::tensor::{Bool, Int, Tensor, TensorData};

use crate::backend::ops::Segments;
use crate::nn::dropout::Dropout;

/// Options of [`attention`](super::attention).
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct AttentionOptions {
    pub(super) causal: bool,
    pub(super) window: Option<usize>,
    pub(super) segments: Option<Segments>,
    pub(super) padding: Option<Tensor<2, Bool>>,
    pub(super) dropout: Option<Dropout>,
    pub(super) scale: Option<f64>,
}

impl AttentionOptions {
    /// Returns the default options: every query sees every key, without dropout.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets whether a query sees only the keys up to its own position. Default: false.
    ///
    /// The last query has the position of the last key, as in `burn::tensor::module::attention`. PyTorch's
    /// `is_causal` gives the first query the position of the first key, which differs if there are more
    /// keys than queries, or fewer.
    pub fn with_causal(mut self, causal: bool) -> Self {
        self.causal = causal;
        self
    }

    /// Sets the number of keys that a causal query sees at most: its own position and the `keys - 1` before it,
    /// as Mistral's `sliding_window`. Default: no bound.
    ///
    /// Without [`with_causal`](Self::with_causal) a query also sees the `keys - 1` after its position, as in the
    /// bidirectional layers of transformers' Gemma 3. Positions are those of
    /// [`with_causal`](Self::with_causal).
    ///
    /// # Panics
    ///
    /// If `keys` is 0.
    pub fn with_window(mut self, keys: usize) -> Self {
        assert!(keys > 0, "a window must have at least one key, that of the query's own position");
        self.window = Some(keys);
        self
    }

    /// Lets a query see only the keys of its own segment, for rows that hold several documents one after another.
    /// Default: a row is one segment.
    ///
    /// `numbers` has shape `[batch, length]`: any number for each position, equal for the positions of one
    /// segment, which are neighbours. Queries and keys have that length. The work for a row is that for its
    /// documents, each alone.
    ///
    /// The numbers are copied to host memory here. On a GPU this waits until it has computed them: build the
    /// options once for a batch, and clone them for each layer, or take
    /// [`with_segment_data`](Self::with_segment_data).
    ///
    /// # Panics
    ///
    /// If a number returns in a row after another number, or if the numbers cannot be read from the device.
    pub fn with_segments(self, numbers: Tensor<2, Int>) -> Self {
        let numbers = numbers
            .try_into_data()
            .unwrap_or_else(|error| panic!("the segments cannot be read from the device: {error}"));
        self.with_segment_data(&numbers)
    }

    /// Lets a query see only the keys of its own segment, as [`with_segments`](Self::with_segments) does. The
    /// numbers lie in host memory, and nothing waits for a device.
    ///
    /// # Panics
    ///
    /// If `numbers` does not have shape `[batch, length]`, or if a number returns in a row after another number.
    pub fn with_segment_data(mut self, numbers: &TensorData) -> Self {
        let &[_, length] = &numbers.shape()[..] else {
            panic!("segments have the shape [batch, length], not {:?}", numbers.shape().as_slice())
        };
        let numbers: Vec<i64> = numbers.iter().collect();
        let segments = Segments::new(&numbers, length);
        self.segments = Some(segments.unwrap_or_else(|error| panic!("{error}")));
        self
    }

    /// Hides the keys whose element of `mask` is true, which has shape `[batch, key_length]`, as `mask_pad`
    /// of `burn::nn::attention::MultiHeadAttention` does.
    pub fn with_padding_mask(mut self, mask: Tensor<2, Bool>) -> Self {
        self.padding = Some(mask);
        self
    }

    /// Drops attention weights at random with the probability and the random stream of a layer. As in
    /// [`Dropout::forward`], nothing is dropped on devices without autodiff.
    pub fn with_dropout(mut self, dropout: &Dropout) -> Self {
        self.dropout = Some(dropout.clone());
        self
    }

    /// Sets the factor of the products of queries and keys. Default: `1 / √width`.
    pub fn with_scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }
}
