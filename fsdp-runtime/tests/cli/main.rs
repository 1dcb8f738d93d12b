//! The command-line tool as a user runs it, on Linux, where `/proc` tells what is left behind.
#![cfg(target_os = "linux")]

mod faults;
mod files;
mod launch;
mod merge;
mod mpi;
mod questions;
mod support;
