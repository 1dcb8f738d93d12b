//! Random numbers of a model's layers. A recomputed forward repeats the numbers of its first run.

mod part;
mod stream;
mod tape;

use std::sync::Arc;

use super::node::Split;

pub(crate) use self::part::{DrawnMask, Mask, Values};
pub use self::stream::RandomStream;
pub(crate) use self::stream::Source;
pub(crate) use self::tape::{Draw, Playback, Recording, capture_draws};

/// A layer that draws random numbers from the stream of its model.
pub trait RandomSource: Sized {
    /// Returns the layer with its own substream of `stream`, keyed by the layer's module path. `split` is that of
    /// the field that has the layer.
    #[doc(hidden)]
    fn with_stream(self, stream: &Arc<RandomStream>, path: &str, split: Option<Split>) -> Self;
}
