//! `test_fully_shard_state`: a model is sharded once, with the same options on all ranks.
//!
//! Containers and types that cannot be units do not compile: see `tests/ui`.

use fsdp_runtime::Error;
use fsdp_runtime::errors::ShardError;
use fsdp_runtime::prelude::*;

use super::mlp::{on_ranks, sharded};

#[test]
fn fully_shard_applied_twice() {
    let errors = on_ranks(2, |worker| {
        let model = sharded(1, worker, FsdpOptions::new())?;
        Ok(fully_shard((*model).clone(), worker, FsdpOptions::new()).map(|_| ()).unwrap_err())
    });
    for error in errors {
        let Error::Shard(ShardError::AlreadySharded { path }) = error else { panic!("{error}") };
        assert_eq!(path, "blocks.0.up.weight");
    }
}

#[test]
fn ranks_with_different_options_are_an_error_on_all() {
    let errors = on_ranks(2, |worker| {
        let gather_buffers = 2 + worker.rank().index();
        Ok(sharded(1, worker, FsdpOptions::new().with_gather_buffers(gather_buffers))
            .map(|_| ())
            .unwrap_err())
    });
    assert!(
        errors.iter().all(|error| error.to_string().contains("gather_buffers: 3")),
        "{errors:?}"
    );
}
