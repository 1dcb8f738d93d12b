//! Tests of the whole program: logits of transformers, worlds, packing, resuming, and plans.

mod logits;
mod plan;
mod runs;
mod transformers;
