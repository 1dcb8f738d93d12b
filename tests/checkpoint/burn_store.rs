//! `burn-store` on a sharded model: its snapshot is refused, and it reads what `save_burnpack`
//! wrote.

use burn_store::{BurnpackStore, ModuleSnapshot};
use fsdp_runtime::Error;
use fsdp_runtime::errors::SaveError;
use fsdp_runtime::prelude::*;

use crate::support::ranks::launch_options;
use crate::support::{Net, on_ranks};

fn sharded(worker: &Worker, strategy: ShardingStrategy) -> Result<Fsdp<Net>, Error> {
    let options = FsdpOptions::new().with_strategy(strategy).with_seed(3);
    fully_shard(Net::new(1, 0.0, worker.device()), worker, options)
}

#[test]
fn a_snapshot_of_a_sharded_model_is_an_error_that_names_save_burnpack() {
    for world in [1, 2] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.bpk");
        let file = path.clone();
        let saved = launch(launch_options(world), move |worker| {
            let net = sharded(&worker, ShardingStrategy::FullShard)?;
            net.save_into(&mut BurnpackStore::from_file(&file)).expect("unwinds before");
            Ok::<_, Error>(())
        });
        let error = saved.expect_err("shards are not a model");
        let found = error.source.downcast_ref::<Error>();
        assert_eq!(found, Some(&Error::Save(SaveError::Snapshot)), "{error}");
        assert!(error.to_string().contains("`model.state().save_burnpack(path)`"), "{error}");
        assert!(!path.exists());

        let collected = launch(launch_options(world), |worker| {
            sharded(&worker, ShardingStrategy::FullShard)?.collect(None, None, false);
            Ok::<_, Error>(())
        });
        assert!(collected.is_err());
    }
}

#[test]
fn replicated_parameters_are_a_model() {
    let names = on_ranks(2, |worker| {
        let net = sharded(worker, ShardingStrategy::NoShard)?;
        let tensors = net.collect(None, None, false);
        Ok(tensors.iter().any(|tensor| tensor.name == "blocks.0.up.weight"))
    });
    assert_eq!(names, [true, true]);
}

#[test]
fn burn_store_reads_what_save_burnpack_wrote() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.bpk");
    on_ranks(2, move |worker| {
        let net = sharded(worker, ShardingStrategy::FullShard)?;
        net.state().save_burnpack(&path)?;
        let mut plain = Net::new(1, 0.0, worker.device());
        let loaded = plain.load_from(&mut BurnpackStore::from_file(&path)).expect("a model");
        assert!(loaded.errors.is_empty() && loaded.missing.is_empty(), "{loaded}");
        let full = net.head.weight.val().into_data();
        assert_eq!(plain.head.weight.val().into_data(), full);
        Ok(())
    });
}
