//! Tests of the whole program: logits and gradients of transformers, worlds, packing, resuming, and plans.

mod gradients;
mod logits;
mod plan;
mod rows;
mod runs;
mod transformers;
