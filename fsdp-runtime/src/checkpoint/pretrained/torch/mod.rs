//! Files of PyTorch, read without running any code of theirs: `torch.save`'s archives, and folders
//! of `torch.distributed.checkpoint`.
//!
//! Imports: globals ← pickle ← machine ← archive ← weights ← dcp.

mod archive;
mod dcp;
mod globals;
mod machine;
mod pickle;
mod weights;

#[cfg(test)]
mod tests;

pub(super) use self::dcp::{distributed_checkpoint, read_checkpoint};
pub(super) use self::weights::{is_archive, saved_file};
