//! Saving the weights of a sharded model as safetensors with another framework's names, and loading
//! them.

use std::collections::BTreeMap;
use std::path::Path;

use burn::module::{Module, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, LinearConfig};
use burn::tensor::{Device, Int, Tensor, TensorData};
use fsdp_runtime::Error;
use fsdp_runtime::errors::{CollectiveError, LoadError, SaveError};
use fsdp_runtime::prelude::*;
use fsdp_runtime::pretrained::{
    LoadOptions, SaveDtype, SavePretrained, from_pretrained, merge_safetensors,
};
use fsdp_runtime::state::FullState;
use safetensors::{Dtype, SafeTensors};

use super::initialisation::Counted;
use crate::support::compare::assert_same_state;
use crate::support::{self, Net, of_rank_0, on_ranks};

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// Returns the sharded model of one seed.
pub(super) fn sharded(worker: &Worker) -> Result<Fsdp<Net>, Error> {
    fully_shard(Net::new(2, 0.0, worker.device()), worker, FsdpOptions::new().with_seed(3))
}

/// Saves the model of one seed. Returns its full state.
pub(super) fn save(world: usize, folder: &Path, options: &SavePretrained) -> FullState {
    let (folder, options) = (folder.to_path_buf(), options.clone());
    of_rank_0(world, move |worker| {
        let net = sharded(worker)?;
        net.state().save_pretrained(&folder, &options)?;
        net.state().full(Recipient::All)
    })
}

/// Loads files into a model of another seed. Returns its full state, or the error, of rank 0.
pub(super) fn load(world: usize, path: &Path) -> Result<FullState, Error> {
    let path = path.to_path_buf();
    of_rank_0(world, move |worker| {
        let net = Net::new(2, 0.0, worker.device());
        let mut net = fully_shard(net, worker, FsdpOptions::new().with_seed(99))?;
        let loaded = net.state_mut().load_safetensors(&path, &LoadOptions::new());
        let state = net.state().full(Recipient::All)?;
        Ok(loaded.map(|_| state))
    })
}

/// Returns the tensors of a file: dtype, shape and bytes.
pub(super) fn read(path: &Path) -> Tensors {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.tensors()
        .into_iter()
        .map(|(name, view)| (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec())))
        .collect()
}

/// Returns the names of the files in a folder, sorted.
pub(super) fn files(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_saved_file_has_pytorchs_names_and_layouts() {
    let folder = tempfile::tempdir().unwrap();
    let state = save(2, folder.path(), &SavePretrained::new());
    let tensors = read(&folder.path().join("model.safetensors"));
    assert_eq!(tensors.len(), state.len());
    assert_eq!(files(folder.path()), ["model.safetensors"]);

    // Burn's `gamma` is PyTorch's `weight`, and PyTorch's `Linear` is `[out, in]`.
    let (dtype, shape, bytes) = &tensors["embed.norm.weight"];
    assert_eq!((*dtype, &shape[..]), (Dtype::F32, &[support::WIDTH][..]));
    assert_eq!(bytes, state["embed.norm.gamma"].as_bytes());
    let (_, shape, bytes) = &tensors["blocks.1.up.weight"];
    let hidden = support::HIDDEN;
    assert_eq!(shape[..], [hidden, support::WIDTH]);
    let ours: Vec<f32> = state["blocks.1.up.weight"].iter().collect();
    for out in 0..hidden {
        for input in 0..support::WIDTH {
            let at = (out * support::WIDTH + input) * 4;
            let theirs = f32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
            assert_eq!(theirs, ours[input * hidden + out]);
        }
    }
    let text = std::fs::read(folder.path().join("model.safetensors")).unwrap();
    let (_, metadata) = SafeTensors::read_metadata(&text).unwrap();
    assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
}

#[test]
fn every_world_size_and_strategy_saves_the_same_bytes_and_loads_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let file = |world: usize| folder.path().join(format!("{world}/model.safetensors"));
    let state = save(1, file(1).parent().unwrap(), &SavePretrained::new());
    let bytes = std::fs::read(file(1)).unwrap();
    for world in [2, 3] {
        save(world, file(world).parent().unwrap(), &SavePretrained::new());
        assert!(std::fs::read(file(world)).unwrap() == bytes, "{world}");
        assert_same_state(&load(world, file(1).parent().unwrap()).unwrap(), &state, "loaded");
    }
    for (world, strategy) in [
        (2, ShardingStrategy::NoShard),
        (2, ShardingStrategy::ShardGradOp),
        (4, ShardingStrategy::HybridShard),
    ] {
        let folder = folder.path().join(strategy.to_string());
        let path = folder.clone();
        let states = on_ranks(world, move |worker| {
            let build = |seed| {
                let options =
                    FsdpOptions::new().with_seed(seed).with_strategy(strategy).with_shard_size(2);
                fully_shard(Net::new(2, 0.0, worker.device()), worker, options)
            };
            build(3)?.state().save_pretrained(&path, &SavePretrained::new())?;
            let mut net = build(99)?;
            net.state_mut().load_safetensors(&path, &LoadOptions::new())?;
            net.state().full(Recipient::All)
        });
        assert!(std::fs::read(folder.join("model.safetensors")).unwrap() == bytes, "{strategy}");
        states.iter().for_each(|loaded| assert_same_state(loaded, &state, "loaded"));
    }
}

#[test]
fn half_precision_is_rounded_to_nearest() {
    let folder = tempfile::tempdir().unwrap();
    for (dtype, expected) in [(SaveDtype::Bf16, Dtype::BF16), (SaveDtype::F16, Dtype::F16)] {
        let state = save(2, folder.path(), &SavePretrained::new().with_dtype(dtype));
        let tensors = read(&folder.path().join("model.safetensors"));
        let (dtype, shape, bytes) = &tensors["head.weight"];
        assert_eq!((*dtype, &shape[..]), (expected, &[support::CLASSES, support::WIDTH][..]));
        let ours: Vec<f32> = state["head.weight"].iter().collect();
        assert_eq!((ours.len(), bytes.len()), (shape[0] * shape[1], 2 * shape[0] * shape[1]));
        for (index, theirs) in bytes.chunks(2).enumerate() {
            let (row, column) = (index / support::WIDTH, index % support::WIDTH);
            let ours = ours[column * support::CLASSES + row];
            let bits = u16::from_le_bytes([theirs[0], theirs[1]]);
            let nearest = match expected {
                Dtype::BF16 => half::bf16::from_f32(ours).to_bits(),
                _ => half::f16::from_f32(ours).to_bits(),
            };
            assert_eq!(bits, nearest);
        }
        assert!(load(3, folder.path()).is_ok());
    }
}

#[test]
fn above_a_size_there_are_several_files_and_an_index() {
    let folder = tempfile::tempdir().unwrap();
    let state = save(2, folder.path(), &SavePretrained::new().with_max_shard_size(8_000));
    let names = files(folder.path());
    let shards: Vec<_> = names.iter().filter(|name| name.ends_with(".safetensors")).collect();
    assert!(shards.len() > 2 && names.contains(&"model.safetensors.index.json".to_string()));
    assert_eq!(*shards[0], format!("model-00001-of-{:05}.safetensors", shards.len()));
    for name in &shards {
        let tensors = read(&folder.path().join(name));
        let bytes: usize = tensors.values().map(|(_, _, bytes)| bytes.len()).sum();
        assert!(bytes <= 8_000 || tensors.len() == 1, "{name}: {bytes}");
    }
    let index = std::fs::read(folder.path().join("model.safetensors.index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_slice(&index).unwrap();
    let total: usize = state.values().map(|data| data.as_bytes().len()).sum();
    assert_eq!(index["metadata"]["total_size"], total);
    assert_eq!(index["weight_map"].as_object().unwrap().len(), state.len());
    assert_same_state(&load(3, folder.path()).unwrap(), &state, "loaded");
    let by_index = folder.path().join("model.safetensors.index.json");
    assert_same_state(&load(1, &by_index).unwrap(), &state, "loaded");

    // One file again, without the model.
    let merged = folder.path().join("one/model.safetensors");
    std::fs::create_dir(merged.parent().unwrap()).unwrap();
    merge_safetensors(folder.path(), &merged).unwrap();
    assert_eq!(files(merged.parent().unwrap()), ["model.safetensors"]);
    assert_same_state(&load(2, &merged).unwrap(), &state, "loaded");
}

#[test]
fn a_save_replaces_the_weight_files_of_the_previous_save_and_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let options = SavePretrained::new().with_config("{}").with_file("vocab.txt", "[PAD]\n");
    let state = save(1, folder.path(), &options.clone().with_max_shard_size(8_000));
    let many = files(folder.path());
    assert!(many.len() > 5, "{many:?}");
    std::fs::write(folder.path().join("notes.md"), "mine").unwrap();
    // Several files replace the same files, one file replaces several, and several replace one.
    for max in [8_000, 20_000, u64::MAX, 8_000] {
        save(2, folder.path(), &options.clone().with_max_shard_size(max));
        let names = files(folder.path());
        for kept in ["config.json", "vocab.txt", "notes.md"] {
            assert!(names.contains(&kept.to_string()), "{names:?}");
        }
        let single = names.contains(&"model.safetensors".to_string());
        let index = names.contains(&"model.safetensors.index.json".to_string());
        assert_eq!((single, index), (max == u64::MAX, max != u64::MAX), "{names:?}");
        assert!(!names.iter().any(|name| name.ends_with(".tmp")), "{names:?}");
        assert_same_state(&load(2, folder.path()).unwrap(), &state, "loaded");
    }
    let mut last = files(folder.path());
    last.retain(|name| name != "notes.md");
    assert_eq!(last, many);
}

/// Returns the error of each of two ranks where rank 0 cannot write.
fn refused(folder: &Path, options: SavePretrained) -> Vec<Error> {
    let folder = folder.to_path_buf();
    on_ranks(2, move |worker| {
        let net = sharded(worker)?;
        let error = net.state().save_pretrained(&folder, &options).unwrap_err();
        // The process group is still whole: the model can be used, and saved elsewhere.
        net.state().full(Recipient::All)?;
        Ok(error)
    })
}

#[test]
fn a_failed_save_is_an_error_on_every_rank_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let state = save(1, folder.path(), &SavePretrained::new());
    let untouched = || {
        assert_eq!(files(folder.path()), ["model.safetensors"]);
        assert_same_state(&load(1, folder.path()).unwrap(), &state, "loaded");
    };
    let ranks = |errors: Vec<Error>, text: &str| {
        assert!(matches!(&errors[0], Error::Save(_)) && errors[0].to_string().contains(text));
        let Error::Collective(CollectiveError::PeerFailed { rank, reason }) = &errors[1] else {
            panic!("{}", errors[1])
        };
        assert!(rank.index() == 0 && reason.contains(text), "{reason}");
    };

    // A file where the folder should be, which is noticed before the first gather.
    let file = folder.path().join("model.safetensors");
    ranks(refused(&file, SavePretrained::new()), "model.safetensors");
    untouched();

    // A folder where the file should be, which is noticed after all is written.
    let other = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(other.path().join("model.safetensors/full")).unwrap();
    ranks(refused(other.path(), SavePretrained::new()), "model.safetensors");
    assert_eq!(files(other.path()), ["model.safetensors"]);

    for name in ["../config.json", "a/b", "", "..", "x.safetensors", "model.safetensors.index.json"]
    {
        let errors = refused(folder.path(), SavePretrained::new().with_file(name, "x"));
        for error in errors {
            assert!(matches!(&error, Error::Save(SaveError::FileName { .. })), "{error}");
        }
        untouched();
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root, tie("embed" = "out.weight"))]
pub(super) struct Tied {
    #[fsdp(key = "wte")]
    embed: Embedding,
    out: Projection,
    pub(super) norm: BatchNorm,
}

#[derive(Module, FsdpModule, Debug)]
struct Projection {
    weight: Param<Tensor<2>>,
}

#[fsdp_unit]
impl Tied {
    pub(super) fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let hidden = self.norm.forward(self.embed.forward(tokens).swap_dims(1, 2)).swap_dims(1, 2);
        hidden.matmul(self.out.weight.val().transpose().unsqueeze())
    }
}

impl Tied {
    pub(super) fn embedding(&self) -> TensorData {
        self.embed.weight.val().into_data()
    }
}

pub(super) fn tied(device: &Device) -> Tied {
    let embed = EmbeddingConfig::new(13, 8).init(device);
    let out = Projection { weight: embed.weight.clone() };
    Tied { embed, out, norm: BatchNormConfig::new(8).init(device) }
}

pub(super) fn tokens(device: &Device) -> Tensor<2, Int> {
    Tensor::from_data([[1, 5, 9, 12], [3, 3, 0, 7]], device)
}

#[test]
fn a_tied_weight_is_saved_once_under_the_key_of_its_owner() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_path_buf();
    let ranks = on_ranks(3, move |worker| {
        let options = FsdpOptions::new().with_seed(1);
        let model = fully_shard(tied(worker.device()), worker, options.clone())?;
        model.state().save_pretrained(&path, &SavePretrained::new())?;
        let mut other = fully_shard(tied(worker.device()), worker, options.with_seed(2))?;
        let logits = |model: &Fsdp<Tied>| {
            let device = worker.device().clone().inner();
            model.valid().forward(tokens(&device)).into_data()
        };
        let before = logits(&other);
        // A load does not need the key of the other place.
        let report = other.state_mut().load_safetensors(&path, &LoadOptions::new())?;
        Ok((logits(&model), before, logits(&other), report))
    });
    let names: Vec<_> = read(&folder.path().join("model.safetensors")).into_keys().collect();
    let statistics = ["norm.running_mean", "norm.running_var"];
    assert_eq!(names, [&["norm.bias"], &statistics[..], &["norm.weight", "wte.weight"]].concat());
    for (saved, before, loaded, report) in ranks {
        assert_ne!(saved, before);
        assert_eq!(saved, loaded);
        assert_eq!(report.missing, ["out.weight"]);
    }
}

/// A tie whose first place is declared after the second. Both hold clones of one weight.
#[derive(Module, Debug)]
#[fsdp_unit(root, tie("out.weight" = "embed"))]
struct Reversed {
    embed: Embedding,
    out: Projection,
}

#[fsdp_unit]
impl Reversed {
    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let hidden = self.embed.forward(tokens);
        hidden.matmul(self.out.weight.val().transpose().unsqueeze())
    }
}

#[test]
fn a_tie_of_clones_named_backwards_trains_and_loads() {
    let trained = |strategy| {
        on_ranks(2, move |worker| {
            let device = worker.device();
            let embed = EmbeddingConfig::new(13, 8).init(device);
            let out = Projection { weight: embed.weight.clone() };
            let options = FsdpOptions::new().with_seed(1).with_strategy(strategy);
            let mut model = fully_shard(Reversed { embed, out }, worker, options)?;
            let start = model.state().full(Recipient::All)?;
            assert_eq!(start.keys().collect::<Vec<_>>(), ["embed.weight"]);
            let mut sgd = burn::optim::SgdConfig::new().init();
            for _ in 0..2 {
                let gradients = model.backward(model.forward(tokens(device)).square().mean())?;
                model = sgd.step(1.0, model, gradients);
            }
            let end = model.state().full(Recipient::All)?;
            assert_ne!(start, end);
            let after = model.forward(tokens(device)).into_data();
            model.state_mut().load_full(&start, Recipient::All)?;
            assert_eq!(model.state().full(Recipient::All)?, start);
            model.state_mut().load_full(&end, Recipient::All)?;
            assert_eq!(model.forward(tokens(device)).into_data(), after);
            Ok(end)
        })
    };
    assert_eq!(trained(ShardingStrategy::FullShard), trained(ShardingStrategy::NoShard));
}

#[test]
fn renamed_suffixes_load_files_with_old_names() {
    let folder = tempfile::tempdir().unwrap();
    let state = save(1, folder.path(), &SavePretrained::new());
    let path = folder.path().join("model.safetensors");
    let tensors = read(&path);
    let renamed = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        let name = match name.as_str() {
            "embed.norm.weight" => "embed.norm.gamma",
            "embed.norm.bias" => "embed.norm.beta",
            name => name,
        };
        let view = safetensors::tensor::TensorView::new(*dtype, shape.clone(), bytes).unwrap();
        (name.to_string(), view)
    });
    let renamed: Vec<_> = renamed.collect();
    safetensors::serialize_to_file(renamed, None, &path).unwrap();
    let Error::Load(LoadError::Mismatch { missing, unexpected, .. }) =
        load(1, folder.path()).unwrap_err()
    else {
        panic!()
    };
    assert_eq!(missing, ["embed.norm.bias", "embed.norm.weight"]);
    assert_eq!(unexpected, ["embed.norm.beta", "embed.norm.gamma"]);

    let loaded = on_ranks(2, move |worker| {
        let mut net = sharded(worker)?;
        let options = LoadOptions::new()
            .with_renamed_suffix("norm.gamma", "norm.weight")
            .with_renamed_suffix("norm.beta", "norm.bias");
        net.state_mut().load_safetensors(&path, &options)?;
        net.state().full(Recipient::All)
    });
    assert_same_state(&loaded[0], &state, "loaded");
}

#[test]
fn ignored_parameters_are_saved_with_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_path_buf();
    let ranks = on_ranks(2, move |worker| {
        let build = || {
            let linear = || LinearConfig::new(16, 24).init(worker.device());
            let model = Counted { body: linear(), head: linear() };
            let ignored = [model.head.weight.id, model.head.bias.as_ref().unwrap().id];
            (model, FsdpOptions::new().with_ignored_params(ignored))
        };
        let (model, options) = build();
        let saved = fully_shard(model, worker, options)?;
        saved.state().save_pretrained(&path, &SavePretrained::new())?;
        saved.state().save_burnpack(path.join("model"))?;
        let head = |model: &Fsdp<Counted>| model.head.weight.val().into_data();

        let (model, options) = build();
        let (by_key, _) = from_pretrained(model, worker, options, &path, &LoadOptions::new())?;
        let (model, options) = build();
        let mut by_path = fully_shard(model, worker, options)?;
        by_path.state_mut().load_burnpack(path.join("model"), &LoadOptions::new())?;
        for loaded in [&by_key, &by_path] {
            let all = Recipient::All;
            assert_same_state(&loaded.state().full(all)?, &saved.state().full(all)?, "loaded");
        }
        Ok([head(&saved), head(&by_key), head(&by_path)])
    });
    let names: Vec<_> = read(&folder.path().join("model.safetensors")).into_keys().collect();
    assert_eq!(names, ["body.bias", "body.weight", "head.bias", "head.weight"]);
    // Ranks have different values, of which rank 0's are saved.
    assert_ne!(ranks[0][0], ranks[1][0]);
    for [_, by_key, by_path] in &ranks {
        assert_eq!((by_key, by_path), (&ranks[0][0], &ranks[0][0]));
    }
}
