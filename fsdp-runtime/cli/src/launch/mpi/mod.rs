//! Ranks under Open MPI: one `mpirun` starts the ranks of all machines, and the launcher learns
//! from its output which rank printed a line and how each rank ended.
//!
//! `mpirun` itself tags the pieces of a line that it happens to read, and its messages about a
//! failed rank differ between versions and are missing at times. So `mpirun` starts
//! `fsdp rank PROGRAM` for each rank. That process runs the program and sends messages about the
//! program through `mpirun`.
//!
//! Order of the files, each of which uses only those before it: `message.rs` (the format of the
//! messages), `watch.rs` (the end of an `mpirun` that does not end by itself), `rank.rs`
//! (`fsdp rank`, which sends messages), `job_output.rs` (the launcher, which reads the messages).

mod job_output;
mod message;
mod rank;
mod watch;

pub(super) use self::job_output::JobOutput;
pub(super) use self::rank::run as run_rank;
pub(super) use self::watch::run as run_watch;
