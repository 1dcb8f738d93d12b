//! Parameters that are stored in bf16 and in codes, in checkpoints, state dicts and files.

use std::collections::BTreeMap;
use std::path::Path;

use burn::module::Module;
use burn::optim::AdamWConfig;
use burn::tensor::DType;
use fsdp_runtime::Error;
use fsdp_runtime::checkpoint::{Checkpoint, Dtype, Manifest, MergeOptions, Restore, merge};
use fsdp_runtime::errors::CheckpointError;
use fsdp_runtime::prelude::*;
use fsdp_runtime::pretrained::{LoadOptions, SaveDtype, SavePretrained};
use fsdp_runtime::state::FullState;

use crate::support::compare::{assert_same_state, assert_state_differs};
use crate::support::transformer::Numbered;
use crate::support::{self, Net, batch, loss, of_rank_0, on_ranks};

const TYPES: [StorageType; 4] = [
    StorageType::Bf16,
    StorageType::INT8,
    StorageType::NF4,
    StorageType::Nf4 { block: 64, double_quant: false },
];
const FROZEN: &str = "blocks.1.up.weight";

fn options(storage: StorageType) -> FsdpOptions {
    FsdpOptions::new().with_storage(StoragePolicy::new().with_frozen(storage)).with_seed(1)
}

/// Returns a model whose embeddings, and one matrix of each block, are frozen.
fn net(start: u64, worker: &Worker) -> Net {
    let mut net = Net::new(2, 0.0, worker.device()).map(&mut Numbered(start));
    for block in &mut net.blocks {
        block.up.weight = block.up.weight.clone().set_require_grad(false);
    }
    Net { embed: net.embed.clone().freeze(), ..net }
}

fn sharded(start: u64, worker: &Worker, options: FsdpOptions) -> Result<Fsdp<Net>, Error> {
    fully_shard(net(start, worker), worker, options)
}

/// Trains a step on two ranks, saves, and returns the full state.
fn saved(folder: &Path, world: usize, options: FsdpOptions) -> FullState {
    let folder = folder.to_path_buf();
    of_rank_0(world, move |worker| {
        let mut net = sharded(0, worker, options.clone())?;
        let mut optimizer = AdamWConfig::new().init();
        let (tokens, labels) = batch(0, 0..2, worker.device());
        let grads = net.backward(loss(net.forward(tokens), labels))?;
        net = optimizer.step(1e-2, net, grads);
        let checkpoint =
            Checkpoint::new(1).with_model("net", &net).with_optimizer("adamw", &optimizer);
        checkpoint.save(worker, &folder)?;
        net.state().full(Recipient::All)
    })
}

#[test]
fn checkpoints_of_codes_load_at_other_worlds_and_strategies() {
    let home = tempfile::tempdir().unwrap();
    for storage in TYPES {
        let hybrid =
            || options(storage).with_strategy(ShardingStrategy::HybridShard).with_shard_size(2);
        let none = || options(storage).with_strategy(ShardingStrategy::NoShard);
        let offload = || options(storage).with_offload(OffloadPolicy::Params { pin_memory: false });
        for (world, from) in [(2, options(storage)), (4, hybrid()), (2, none())] {
            let folder = home.path().join(format!("{storage}-{world}-{:?}", from == none()));
            let state = saved(&folder, world, from);
            for (world, to) in [
                (1, options(storage)),
                (3, options(storage)),
                (4, hybrid()),
                (2, none()),
                (2, offload()),
            ] {
                let folder = folder.clone();
                let loaded = of_rank_0(world, move |worker| {
                    let mut net = sharded(5, worker, to.clone())?;
                    let mut optimizer = AdamWConfig::new().init();
                    Restore::new()
                        .with_model("net", &mut net)
                        .with_optimizer("adamw", &mut optimizer)
                        .load(worker, &folder)?;
                    net.state().full(Recipient::All)
                });
                assert_same_state(&loaded, &state, format_args!("{storage} on {world}"));
            }
        }
    }
}

#[test]
fn a_checkpoint_holds_codes_and_scales() {
    let home = tempfile::tempdir().unwrap();
    for storage in TYPES {
        let folder = home.path().join(storage.to_string());
        saved(&folder, 2, options(storage));
        let text = std::fs::read(folder.join("manifest.json")).unwrap();
        let manifest = Manifest::parse(&text, "manifest.json").unwrap();
        let entry = &manifest.models["net"].tensors[FROZEN];
        let elements: usize = entry.shape.iter().product();
        let (dtype, codes, stored) = match storage {
            StorageType::Bf16 => (Dtype::BF16, None, elements),
            // 1,848 elements: 29 blocks, or two records of 16 blocks.
            StorageType::NF4 => (Dtype::U32, Some(storage), 2 * 134),
            StorageType::INT8 => (Dtype::U32, Some(storage), 29 * 17),
            _ => (Dtype::U32, Some(storage), 29 * 9),
        };
        assert_eq!(elements, 1848);
        assert_eq!((entry.dtype, entry.codes), (dtype, codes), "{storage}");
        assert_eq!(entry.pieces.iter().map(|piece| piece.range().len()).sum::<usize>(), stored);
        assert_eq!(manifest.models["net"].tensors["blocks.1.down.weight"].codes, None);

        let other = match storage {
            StorageType::NF4 => StorageType::INT8,
            _ => StorageType::NF4,
        };
        for to in [other, StorageType::F32] {
            let folder = folder.clone();
            on_ranks(2, move |worker| {
                let mut net = sharded(5, worker, options(to))?;
                let before = net.state().full(Recipient::All)?;
                let restore = Restore::new().with_model("net", &mut net);
                let error = restore.load(worker, &folder).unwrap_err();
                let Error::Checkpoint(CheckpointError::Mismatch { differences, .. }) = error else {
                    panic!("{error}")
                };
                assert!(differences.iter().any(|it| it.contains(FROZEN)), "{differences:?}");
                assert_same_state(&net.state().full(Recipient::All)?, &before, "unchanged");
                Ok(())
            });
        }
    }
}

/// Returns the tensors of a safetensors file in f32, by name.
fn tensors(file: &Path) -> BTreeMap<String, (safetensors::Dtype, Vec<f32>)> {
    let bytes = std::fs::read(file).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let elements = |tensor: safetensors::tensor::TensorView<'_>| {
        let bytes = tensor.data();
        let elements = match tensor.dtype() {
            safetensors::Dtype::F32 => {
                let words = bytes.as_chunks::<4>().0.iter();
                words.map(|word| f32::from_le_bytes(*word)).collect()
            }
            safetensors::Dtype::BF16 => {
                let words = bytes.as_chunks::<2>().0.iter();
                words.map(|word| half::bf16::from_le_bytes(*word).to_f32()).collect()
            }
            other => panic!("{other:?}"),
        };
        (tensor.dtype(), elements)
    };
    file.tensors().into_iter().map(|(name, tensor)| (name, elements(tensor))).collect()
}

#[test]
fn a_checkpoint_of_codes_merges_to_floats() {
    let home = tempfile::tempdir().unwrap();
    for storage in TYPES {
        let folder = home.path().join(storage.to_string());
        let state = saved(&folder, 3, options(storage));
        for dtype in [None, Some(SaveDtype::F32), Some(SaveDtype::Bf16)] {
            let options = MergeOptions::new().with_module_paths(true);
            let options = match dtype {
                Some(dtype) => options.with_dtype(dtype),
                None => options,
            };
            let merged = merge(&folder, home.path().join("merged"), &options).unwrap();
            let found = tensors(&merged.files[0]);
            assert_eq!(found.len(), state.len());
            for (name, (found_dtype, found)) in found {
                let is_stored_half = storage == StorageType::Bf16
                    && (name.starts_with("embed") || name.ends_with("up.weight"));
                let expected_dtype = match dtype {
                    Some(SaveDtype::Bf16) => safetensors::Dtype::BF16,
                    None if is_stored_half => safetensors::Dtype::BF16,
                    _ => safetensors::Dtype::F32,
                };
                assert_eq!(found_dtype, expected_dtype, "{storage}: {name}");
                let expected: Vec<f32> = state[&name].iter().collect();
                let expected: Vec<f32> = match expected_dtype {
                    safetensors::Dtype::BF16 => {
                        expected.iter().map(|it| half::bf16::from_f32(*it).to_f32()).collect()
                    }
                    _ => expected,
                };
                assert_eq!(found, expected, "{storage}: {name}");
            }
        }
    }
}

/// Weights that are loaded from a file are stored as those that are sharded.
#[test]
fn files_of_weights_load_into_codes() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("weights");
    let written = file.clone();
    on_ranks(2, move |worker| {
        let net = sharded(0, worker, FsdpOptions::new())?;
        net.state().save_burnpack(written.with_file_name("net"))?;
        net.state().save_pretrained(&written, &SavePretrained::new())
    });
    for storage in TYPES {
        for world in [1, 2, 3] {
            let file = file.clone();
            on_ranks(world, move |worker| {
                let expected =
                    sharded(0, worker, options(storage))?.state().full(Recipient::All)?;
                let mut net = sharded(5, worker, options(storage))?;
                let other = net.state().full(Recipient::All)?;
                assert_state_differs(&other, &expected, "other weights");
                net.state_mut().load_safetensors(&file, &LoadOptions::new())?;
                assert_same_state(&net.state().full(Recipient::All)?, &expected, "safetensors");
                let mut net = sharded(5, worker, options(storage))?;
                net.state_mut().load_burnpack(file.with_file_name("net"), &LoadOptions::new())?;
                assert_same_state(&net.state().full(Recipient::All)?, &expected, "a record");
                let plain = support::Net::new(2, 0.0, worker.device());
                let mut plain = Net { embed: plain.embed.clone().freeze(), ..plain };
                for block in &mut plain.blocks {
                    block.up.weight = block.up.weight.clone().set_require_grad(false);
                }
                let (net, _) = fsdp_runtime::pretrained::from_pretrained(
                    plain,
                    worker,
                    options(storage),
                    &file,
                    &LoadOptions::new(),
                )?;
                assert_same_state(&net.state().full(Recipient::All)?, &expected, "pretrained");
                Ok(())
            });
        }
    }
}

#[test]
fn state_dicts_of_codes_are_taken_and_loaded() {
    for storage in TYPES {
        for world in [1, 3] {
            on_ranks(world, move |worker| {
                let (net, mut other) =
                    (sharded(0, worker, options(storage))?, sharded(5, worker, options(storage))?);
                let (full, own) =
                    (net.state().full(Recipient::All)?, other.state().full(Recipient::All)?);
                assert!(full.values().all(|data| data.dtype() == DType::F32), "{storage}");
                for (path, part) in net.state().sharded().iter() {
                    let elements: Vec<f32> = full[path].iter().collect();
                    let found: Vec<f32> = part.data.iter().collect();
                    assert_eq!(found, elements[part.range.clone()], "{storage}: {path}");
                }
                other.state_mut().load_local(&net.state().local())?;
                assert_same_state(&other.state().full(Recipient::All)?, &full, "local");
                // Exact values of codes have the same codes, but for the rounding of 8-bit scales.
                let exact = matches!(
                    storage,
                    StorageType::Bf16 | StorageType::Nf4 { double_quant: false, .. }
                );
                other.state_mut().load_full(&own, Recipient::All)?;
                if exact {
                    assert_same_state(&other.state().full(Recipient::All)?, &own, "full");
                }
                let loaded = other.state_mut().load_sharded(&net.state().sharded());
                match (storage, loaded) {
                    (StorageType::Nf4 { double_quant: true, .. }, Err(error)) => {
                        let CheckpointError::StateMismatch { differences } = &error else {
                            panic!("{error}")
                        };
                        assert!(differences[0].contains("load a full"), "{error}");
                    }
                    (_, loaded) => loaded.map(|()| assert!(storage != StorageType::NF4))?,
                }
                if exact {
                    assert_same_state(&other.state().full(Recipient::All)?, &full, "sharded");
                }
                let mut plain = sharded(5, worker, FsdpOptions::new())?;
                let refused = plain.state_mut().load_local(&net.state().local()).unwrap_err();
                assert!(matches!(refused, CheckpointError::StateMismatch { .. }), "{refused}");
                Ok(())
            });
        }
    }
}
