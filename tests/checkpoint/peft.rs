//! LoRA adapters alone, in PEFT's files.

use std::path::Path;

use burn::module::Module;
use burn::optim::AdamWConfig;
use fsdp_runtime::Error;
use fsdp_runtime::errors::{LoadError, SaveError};
use fsdp_runtime::lora::LoraConfig;
use fsdp_runtime::prelude::*;
use fsdp_runtime::pretrained::{SaveAdapters, SaveDtype};
use fsdp_runtime::state::FullState;
use safetensors::SafeTensors;

use crate::support::transformer::Numbered;
use crate::support::{CLASSES, HIDDEN, Net, WIDTH, batch, loss, of_rank_0, on_ranks};

const RANK: usize = 2;

fn config() -> LoraConfig {
    LoraConfig::new(RANK).with_alpha(6.0).with_target_modules(["up"]).with_modules_to_save(["head"])
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
        let mut net = adapted(&config(), worker, options.clone().with_seed(3))?;
        let mut optimizer = AdamWConfig::new().init();
        for step in 0..3 {
            let (tokens, labels) = batch(step, 0..4, worker.device());
            let gradients = net.backward(loss(net.forward(tokens), labels))?;
            net = optimizer.step(1e-1, net, gradients);
        }
        net.state().save_adapters(&folder, &save)?;
        Ok((net.state().full(Recipient::All)?, logits(&net, worker)))
    })
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
    for (from, to, expected) in [
        ("\"LORA\"", "\"IA3\"", "peft_type"),
        ("\"use_dora\": false", "\"use_dora\": true", "use_dora"),
        ("\"none\"", "\"all\"", "bias"),
    ] {
        std::fs::write(&path, text.replace(from, to)).unwrap();
        let error = LoraConfig::from_peft(home.path()).unwrap_err();
        assert!(matches!(error, LoadError::Format { .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    }
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
