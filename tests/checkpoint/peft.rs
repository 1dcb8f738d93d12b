//! LoRA adapters alone, in PEFT's files.

use std::path::Path;

use burn::module::{Module, ModuleMapper};
use burn::optim::AdamWConfig;
use burn::tensor::Tensor;
use fsdp_runtime::Error;
use fsdp_runtime::checkpoint::{Checkpoint, CheckpointManager, Restore};
use fsdp_runtime::errors::{LoadError, SaveError};
use fsdp_runtime::lora::LoraConfig;
use fsdp_runtime::nn::{Linear, LinearConfig};
use fsdp_runtime::prelude::*;
use fsdp_runtime::pretrained::{
    LoadOptions, SaveAdapters, SaveDtype, SavePretrained, from_pretrained,
};
use fsdp_runtime::state::{FullState, ParamFilter};
use safetensors::SafeTensors;

use crate::support::compare::{Within, assert_close, assert_same_state};
use crate::support::transformer::Numbered;
use crate::support::{CLASSES, HIDDEN, Net, WIDTH, batch, loss, of_rank_0, on_ranks};

const RANK: usize = 2;

fn config() -> LoraConfig {
    LoraConfig::new(RANK).with_alpha(6.0).with_target_modules(["up"]).with_modules_to_save(["head"])
}

/// Returns adapters of several ranks and alphas.
fn several() -> LoraConfig {
    config()
        .with_target_modules(["up", "down"])
        .with_rslora(true)
        .with_rank_pattern([("1.down", 5), ("down", 3)])
        .with_alpha_pattern([(r"blocks\.0\..*", 2.5)])
}

/// Returns a model with adapters, on a base whose values depend on nothing.
fn adapted(config: &LoraConfig, worker: &Worker, options: FsdpOptions) -> Result<Fsdp<Net>, Error> {
    let net = Net::new(2, 0.0, worker.device()).map(&mut Numbered(0));
    fully_shard(config.apply(net)?, worker, options)
}

fn nf4() -> FsdpOptions {
    FsdpOptions::new().with_storage(StoragePolicy::new().with_frozen(StorageType::NF4))
}

fn logits(net: &Fsdp<Net>, worker: &Worker) -> Vec<u32> {
    let device = worker.device().clone().inner();
    let logits = net.valid().forward(batch(0, 0..4, &device).0).into_data();
    logits.iter::<f32>().map(f32::to_bits).collect()
}

/// Trains adapters on `world` ranks and saves them. Returns the full state and logits.
fn saved(
    folder: &Path,
    world: usize,
    options: FsdpOptions,
    save: SaveAdapters,
) -> (FullState, Vec<u32>) {
    let folder = folder.to_path_buf();
    of_rank_0(world, move |worker| {
        let net = trained(&config(), worker, options.clone())?;
        net.state().save_adapters(&folder, &save)?;
        Ok((net.state().full(Recipient::All)?, logits(&net, worker)))
    })
}

/// Returns a model whose adapters have been trained.
fn trained(config: &LoraConfig, worker: &Worker, options: FsdpOptions) -> Result<Fsdp<Net>, Error> {
    let mut net = adapted(config, worker, options.with_seed(3))?;
    let mut optimizer = AdamWConfig::new().init();
    for step in 0..3 {
        let (tokens, labels) = batch(step, 0..4, worker.device());
        let gradients = net.backward(loss(net.forward(tokens), labels))?;
        net = optimizer.step(1e-1, net, gradients);
    }
    Ok(net)
}

/// Returns the names in a folder, in order.
fn files(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn json(folder: &Path) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(folder.join("adapter_config.json")).unwrap()).unwrap()
}

#[test]
fn adapters_saved_at_world_2_load_at_world_3() {
    for options in [FsdpOptions::new(), nf4()] {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join("adapters");
        let (state, expected) = saved(&folder, 2, options.clone(), SaveAdapters::new());
        assert_eq!(files(&folder), ["adapter_config.json", "adapter_model.safetensors"]);
        let loaded = folder.clone();
        let ranks = on_ranks(3, move |worker| {
            let config = LoraConfig::from_peft(&loaded)?;
            assert_eq!(config, self::config());
            let mut net = adapted(&config, worker, options.clone().with_seed(8))?;
            let before = logits(&net, worker);
            let report = net.state_mut().load_adapters(&loaded)?;
            assert_eq!(report.loaded, 2 * 2 + 2);
            Ok((before, logits(&net, worker), net.state().full(Recipient::All)?))
        });
        for (before, logits, loaded) in ranks {
            assert_ne!(before, expected);
            assert_eq!(logits, expected);
            for path in [
                "blocks.0.up.weight.lora.a",
                "blocks.0.up.weight.lora.b",
                "blocks.1.up.weight.lora.a",
                "blocks.1.up.weight.lora.b",
                "head.weight",
                "head.bias",
            ] {
                assert_eq!(loaded[path].as_bytes(), state[path].as_bytes(), "{path}");
            }
        }
    }
}

/// Ranks and alphas by patterns, in the base and in NF4.
#[test]
fn adapters_of_several_ranks_load_to_the_bit() {
    for options in [FsdpOptions::new(), nf4()] {
        let home = tempfile::tempdir().unwrap();
        let (folder, with) = (home.path().to_path_buf(), options.clone());
        let (state, expected) = of_rank_0(2, move |worker| {
            let net = trained(&several(), worker, with.clone())?;
            net.state().save_adapters(&folder, &SaveAdapters::new())?;
            Ok((net.state().full(Recipient::All)?, logits(&net, worker)))
        });
        let json = json(home.path());
        for (key, expected) in [
            ("r", serde_json::json!(2)),
            ("lora_alpha", serde_json::json!(2.5)),
            ("use_rslora", true.into()),
            ("lora_dropout", serde_json::json!(0.0)),
            ("rank_pattern", serde_json::json!({ "0.down": 3, "1.down": 5 })),
            ("alpha_pattern", serde_json::json!({ "1.down": 6, "1.up": 6 })),
            ("target_modules", serde_json::json!(["down", "up"])),
        ] {
            assert_eq!(json[key], expected, "{key}");
        }
        let folder = home.path().to_path_buf();
        let ranks = on_ranks(3, move |worker| {
            let config = LoraConfig::from_peft(&folder)?;
            let mut net = adapted(&config, worker, options.clone().with_seed(8))?;
            net.state_mut().load_adapters(&folder)?;
            // The configuration that trained them fits too.
            adapted(&several(), worker, options.clone())?.state_mut().load_adapters(&folder)?;
            Ok((logits(&net, worker), net.state().full(Recipient::All)?))
        });
        for (logits, loaded) in ranks {
            assert_eq!(logits, expected);
            for path in ["0.up", "1.up", "0.down", "1.down"] {
                for factor in ["a", "b"] {
                    let path = format!("blocks.{path}.weight.lora.{factor}");
                    assert_eq!(loaded[&path].as_bytes(), state[&path].as_bytes(), "{path}");
                }
            }
        }
    }
}

/// A model of this crate's layers.
#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Pair {
    query: Linear,
    classifier: Linear,
}

#[fsdp_unit]
impl Pair {
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.classifier.forward(self.query.forward(x))
    }
}

/// Trains with dropout from the newest checkpoint in `folder`, if any, to step `until`, and saves it.
fn train_with_dropout(folder: &Path, until: usize) -> FullState {
    let folder = folder.to_path_buf();
    of_rank_0(2, move |worker| {
        let linear = || LinearConfig::new(8, 8).init(worker.device());
        let net = Pair { query: linear(), classifier: linear() };
        let lora = LoraConfig::new(2).with_dropout(0.5).with_rslora(true);
        let mut net = fully_shard(lora.apply(net)?, worker, FsdpOptions::new().with_seed(5))?;
        let mut optimizer = AdamWConfig::new().init();
        let mut checkpoints = CheckpointManager::new(&folder, worker);
        let mut at = 0;
        if let Some(newest) = checkpoints.latest()? {
            let restore = Restore::new().with_model("net", &mut net);
            let restored = restore.with_optimizer("adamw", &mut optimizer).load(worker, newest)?;
            at = restored.progress.step as usize;
        }
        for _ in at..until {
            // A clone, mapped, has the settings of the adapters.
            net = net.clone().map(&mut Unchanged);
            let output = net.forward(Tensor::ones([3, 8], worker.device()));
            let gradients = net.backward(output.powi_scalar(2).sum())?;
            net = optimizer.step(1e-1, net, gradients);
        }
        let checkpoint = Checkpoint::new(until as u64);
        let checkpoint = checkpoint.with_model("net", &net).with_optimizer("adamw", &optimizer);
        checkpoints.save(&checkpoint)?;
        net.state().full(Recipient::All)
    })
}

/// Maps nothing.
struct Unchanged;

impl ModuleMapper for Unchanged {}

#[test]
fn dropout_resumes_bit_for_bit() {
    let [whole, parts, other] = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let expected = train_with_dropout(whole.path(), 6);
    train_with_dropout(parts.path(), 3);
    assert_same_state(&train_with_dropout(parts.path(), 6), &expected, "resumed");
    let earlier = train_with_dropout(other.path(), 3);
    let path = "query.weight.lora.a";
    assert_ne!(earlier[path].as_bytes(), expected[path].as_bytes());
}

#[test]
fn dropout_is_in_the_configuration() {
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().to_path_buf();
    on_ranks(2, move |worker| {
        let pair = || {
            let linear = || LinearConfig::new(8, 8).init(worker.device());
            Pair { query: linear(), classifier: linear() }
        };
        let lora = LoraConfig::new(2).with_dropout(0.25).with_target_modules(["query"]);
        let net = fully_shard(lora.apply(pair())?, worker, FsdpOptions::new())?;
        net.state().save_adapters(&folder, &SaveAdapters::new())?;
        let read = LoraConfig::from_peft(&folder)?;
        assert_eq!(read, lora);
        let mut net = fully_shard(read.apply(pair())?, worker, FsdpOptions::new())?;
        net.state_mut().load_adapters(&folder)
    });
    assert_eq!(json(home.path())["lora_dropout"], 0.25);
}

/// A plain model that reads the merged weights has the logits of the adapted one, from every storage type.
#[test]
fn merged_weights_have_the_logits_of_the_adapters() {
    let stored =
        |storage| FsdpOptions::new().with_storage(StoragePolicy::new().with_frozen(storage));
    let storages = [StorageType::F32, StorageType::Bf16, StorageType::INT8, StorageType::NF4];
    for options in storages.map(stored) {
        let home = tempfile::tempdir().unwrap();
        let (folder, with) = (home.path().to_path_buf(), options.clone());
        let (expected, unmerged) = of_rank_0(2, move |worker| {
            let net = trained(&several(), worker, with.clone())?;
            let save = SavePretrained::new().with_merged_adapters(true);
            net.state().save_pretrained(&folder, &save)?;
            // A matrix with an adapter counts as trained.
            let trainable = ParamFilter::new().with_trainable_only();
            let part = folder.join("part");
            net.state().save_pretrained(&part, &save.with_filter(trainable))?;
            let base = adapted(&several(), worker, with.clone())?;
            Ok((logits(&net, worker), logits(&base, worker)))
        });
        let names = |folder: &Path| -> Vec<String> {
            let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
            let tensors = SafeTensors::deserialize(&bytes).unwrap();
            let mut names: Vec<_> = tensors.names().into_iter().map(str::to_string).collect();
            names.sort();
            names
        };
        assert!(names(home.path()).iter().all(|name| !name.contains("lora")));
        let matrices = ["0.down", "0.up", "1.down", "1.up"];
        let matrices = matrices.map(|name| format!("blocks.{name}.weight"));
        let head = ["head.bias", "head.weight"].map(str::to_string);
        assert_eq!(names(&home.path().join("part")), [&matrices[..], &head].concat());
        let folder = home.path().to_path_buf();
        let ranks = on_ranks(3, move |worker| {
            let net = Net::new(2, 0.0, worker.device());
            let load = LoadOptions::new();
            let (net, _) = from_pretrained(net, worker, FsdpOptions::new(), &folder, &load)?;
            Ok(logits(&net, worker))
        });
        let numbers = |bits: &[u32]| bits.iter().copied().map(f32::from_bits).collect::<Vec<_>>();
        let (expected, unmerged) = (numbers(&expected), numbers(&unmerged));
        let moved = expected.iter().zip(&unmerged).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(moved > 0.1, "the adapters have an effect: {moved}");
        for logits in ranks {
            let what = format!("{options:?}");
            assert_close(&numbers(&logits), &expected, Within::Absolute(1e-5), what);
        }
    }
}

/// PEFT's names and PyTorch's orientation: `lora_A` is `[rank, inputs]`, `lora_B`
/// `[outputs, rank]`.
#[test]
fn the_files_are_those_of_peft() {
    let home = tempfile::tempdir().unwrap();
    let options = SaveAdapters::new()
        .with_base_model("some/base")
        .with_task_type("SEQ_CLS")
        .with_file("tokenizer.json", "{}");
    let (state, _) = saved(home.path(), 2, FsdpOptions::new(), options);
    let bytes = std::fs::read(home.path().join("adapter_model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut found: Vec<_> =
        tensors.iter().map(|(name, view)| (name.to_string(), view.shape().to_vec())).collect();
    found.sort();
    let expected = [
        ("base_model.model.blocks.0.up.lora_A.weight", vec![RANK, WIDTH]),
        ("base_model.model.blocks.0.up.lora_B.weight", vec![HIDDEN, RANK]),
        ("base_model.model.blocks.1.up.lora_A.weight", vec![RANK, WIDTH]),
        ("base_model.model.blocks.1.up.lora_B.weight", vec![HIDDEN, RANK]),
        ("base_model.model.head.bias", vec![CLASSES]),
        ("base_model.model.head.weight", vec![CLASSES, WIDTH]),
    ];
    assert_eq!(found, expected.map(|(name, shape)| (name.to_string(), shape)));
    let factor = tensors.tensor("base_model.model.blocks.1.up.lora_A.weight").unwrap();
    let factor: Vec<f32> =
        factor.data().chunks(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect();
    let ours = state["blocks.1.up.weight.lora.a"].as_slice::<f32>().unwrap();
    for (row, column) in [(0, 0), (1, 5), (0, WIDTH - 1)] {
        assert_eq!(factor[row * WIDTH + column], ours[column * RANK + row]);
    }
    let json = json(home.path());
    for (key, expected) in [
        ("peft_type", serde_json::json!("LORA")),
        ("task_type", "SEQ_CLS".into()),
        ("base_model_name_or_path", "some/base".into()),
        ("r", RANK.into()),
        ("lora_alpha", 6.into()),
        ("target_modules", serde_json::json!(["up"])),
        ("modules_to_save", serde_json::json!(["head"])),
        ("bias", "none".into()),
        ("fan_in_fan_out", false.into()),
    ] {
        assert_eq!(json[key], expected, "{key}");
    }
    assert_eq!(std::fs::read(home.path().join("tokenizer.json")).unwrap(), b"{}");
}

/// A save of adapters leaves the weights of a base model in the same folder as they are.
#[test]
fn adapters_in_bf16_are_half_as_large_and_load() {
    let home = tempfile::tempdir().unwrap();
    std::fs::write(home.path().join("model.safetensors"), "the base").unwrap();
    let options = SaveAdapters::new().with_dtype(SaveDtype::Bf16);
    saved(home.path(), 2, FsdpOptions::new(), options);
    assert!(home.path().join("model.safetensors").exists());
    let bytes = std::fs::read(home.path().join("adapter_model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    assert!(tensors.iter().all(|(_, view)| view.dtype() == safetensors::Dtype::BF16));
    let folder = home.path().to_path_buf();
    on_ranks(2, move |worker| {
        let mut net = adapted(&config(), worker, FsdpOptions::new())?;
        net.state_mut().load_adapters(&folder)
    });
}

#[test]
fn adapters_that_do_not_fit_are_refused() {
    let home = tempfile::tempdir().unwrap();
    saved(home.path(), 2, FsdpOptions::new(), SaveAdapters::new());
    let load = |config: LoraConfig| {
        let folder = home.path().to_path_buf();
        let mut ranks = on_ranks(2, move |worker| {
            let mut net = adapted(&config, worker, FsdpOptions::new())?;
            Ok(net.state_mut().load_adapters(&folder).map(|_| ()))
        });
        ranks.swap_remove(0)
    };
    assert_eq!(load(config()), Ok(()));
    let error = load(config().with_alpha(4.0)).unwrap_err();
    assert!(matches!(error, Error::Load(LoadError::Adapters { .. })), "{error}");
    let text = error.to_string();
    assert!(text.contains("alpha 6 in the file") && text.contains("alpha 4 in"), "{text}");
    let error = load(config().with_target_modules(["up", "down"])).unwrap_err();
    let Error::Load(LoadError::Mismatch { missing, .. }) = error else { panic!("{error}") };
    assert_eq!(missing[0], "base_model.model.blocks.0.down.lora_A.weight");

    let path = home.path().join("adapter_config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let change = |key: &str, value: serde_json::Value| {
        let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
        json[key] = value;
        std::fs::write(&path, json.to_string()).unwrap();
        LoraConfig::from_peft(home.path())
    };
    for (key, value) in [
        ("peft_type", serde_json::json!("IA3")),
        ("use_dora", true.into()),
        ("bias", "all".into()),
        ("init_lora_weights", "pissa".into()),
        ("target_parameters", serde_json::json!(["experts.down"])),
        ("a_setting_of_next_year", 3.into()),
    ] {
        let error = change(key, value.clone()).unwrap_err();
        let expected = format!("sets `{key}` to {value}, which is not supported: ");
        assert!(error.to_string().contains(&expected), "{error}");
        let LoadError::Setting { setting, .. } = error else { panic!("{error}") };
        assert_eq!(setting, key);
    }
    for (key, value) in [
        ("r", serde_json::json!(0)),
        ("r", (-1).into()),
        ("lora_dropout", serde_json::json!(1.5)),
        ("use_rslora", "yes".into()),
        ("rank_pattern", serde_json::json!({ "(?<=q)up": 3 })),
        ("rank_pattern", serde_json::json!({ "up": 2.5 })),
        ("alpha_pattern", serde_json::json!([3])),
        ("target_modules", "up(".into()),
        ("target_modules", 3.into()),
        ("exclude_modules", "(?<!q)up".into()),
        ("exclude_modules", 3.into()),
        ("layers_to_transform", serde_json::json!([0, -1])),
        ("layers_to_transform", "0".into()),
        ("layers_pattern", 3.into()),
    ] {
        let error = change(key, value.clone()).unwrap_err();
        assert!(matches!(error, LoadError::Format { .. }), "{key} {value}: {error}");
        let named = error.to_string().contains(key) || error.to_string().contains("rank is 0");
        assert!(named, "{key} {value}: {error}");
    }
    // Settings as people write them.
    let config = change("target_modules", "all-linear".into()).unwrap();
    assert_eq!(config.target_modules(), ["all-linear"]);
    let config = change("exclude_modules", serde_json::json!(["head"])).unwrap();
    assert_eq!(config.excluded_modules(), ["head"]);
    let config = change("exclude_modules", ".*up".into()).unwrap();
    assert_eq!((config.excluded_pattern(), config.excluded_modules()), (Some(".*up"), &[][..]));
    let config = change("target_modules", r".*\.(up|down)".into()).unwrap();
    assert_eq!(
        (config.target_pattern(), config.target_modules()),
        (Some(r".*\.(up|down)"), &[][..])
    );
    for numbers in [serde_json::json!([1]), 1.into()] {
        let config = change("layers_to_transform", numbers).unwrap();
        assert_eq!(config.layers_to_transform(), [1]);
    }
    let config = change("layers_pattern", "blocks".into()).unwrap();
    assert_eq!(config.layers_pattern(), ["blocks"]);
    let ranks = serde_json::json!({ "up": 4 });
    assert_eq!(change("rank_pattern", ranks).unwrap().rank_pattern(), [("up".to_string(), 4)]);
}

#[test]
fn a_model_that_peft_cannot_hold_is_not_saved() {
    let save = |lora: Option<LoraConfig>, train_bias: bool| {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().to_path_buf();
        let ranks = on_ranks(2, move |worker| {
            let net = Net::new(1, 0.0, worker.device());
            let mut net = match &lora {
                Some(lora) => lora.apply(net)?,
                None => net,
            };
            if train_bias {
                let bias = net.blocks[0].up.bias.take().expect("a bias");
                net.blocks[0].up.bias = Some(bias.set_require_grad(true));
            }
            let net = fully_shard(net, worker, FsdpOptions::new())?;
            Ok(net.state().save_adapters(&folder, &SaveAdapters::new()).unwrap_err())
        });
        assert!(matches!(ranks[0], Error::Save(SaveError::Adapters { .. })), "{}", ranks[0]);
        assert!(files(home.path()).is_empty());
        ranks[0].to_string()
    };
    assert!(save(None, false).contains("LoraConfig::apply"));
    assert!(save(Some(config()), true).contains("`blocks.0.up`"));
}
