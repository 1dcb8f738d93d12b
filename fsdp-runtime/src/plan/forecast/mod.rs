//! The memory that a rank will need for a model, before sharding or initialising it.

mod buffers;
mod gradients;
mod of_model;
