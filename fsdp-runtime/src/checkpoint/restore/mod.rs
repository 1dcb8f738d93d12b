//! Loading checkpoints, at any world size and under any strategy.
//!
//! A rank reads the manifest, lists everything that differs from the models and optimizers to load
//! into, and verifies the checksums of the ranges that it needs. Only when all ranks have found no
//! error does any rank change anything; then each rank reads its parameters one after another.
//!
//! Imports: builder, target ← compare, optimizer ← prepare ← load.

mod builder;
mod compare;
mod load;
mod optimizer;
mod prepare;
mod target;

pub use self::builder::{Restore, Restored};
