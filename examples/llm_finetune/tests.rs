//! Tests of the whole program: logits of transformers, worlds, packing, and resuming.

mod logits;
mod runs;
mod transformers;
