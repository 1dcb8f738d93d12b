//! What the tests of this folder share: models, training runs, the start of ranks, comparisons.
#![allow(dead_code, unused_imports, reason = "each test binary uses its part")]

pub mod checkpoint;
#[path = "../../fsdp-runtime/tests/support/compare.rs"]
pub mod compare;
#[path = "../../fsdp-runtime/tests/support/mlp.rs"]
pub mod mlp;
pub mod parity;
pub mod ranks;
pub mod run;
pub mod small;
pub mod trace;
pub mod transformer;
pub mod whole_param;

/// Returns whether `strace` is installed, and may trace a process here.
pub fn has_strace() -> bool {
    let mut strace = std::process::Command::new("strace");
    let traced = strace.args(["-o", "/dev/null", "true"]).output();
    traced.is_ok_and(|output| output.status.success())
}

pub use ranks::{of_rank_0, on_ranks};
pub use run::{Outcome, Run};
pub use transformer::{Block, CLASSES, Embed, HIDDEN, LENGTH, Net, VOCABULARY, WIDTH, batch, loss};
