//! The command-line tool `fsdp`, run as a process. On Linux, where `/proc` shows the processes that
//! a run leaves.
#![cfg(target_os = "linux")]

mod faults;
mod files;
mod flags;
mod launch;
mod merge;
mod mpi;
mod plan;
mod questions;
mod restarts;
mod support;
mod training;
