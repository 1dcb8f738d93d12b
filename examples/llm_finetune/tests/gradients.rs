//! Gradients of a tiny model of each type: of all parameters those of transformers, and of every adapter not zero.
//! `fixtures/make_models.py` made the models.

use std::collections::BTreeMap;
use std::path::Path;

use burn::optim::SgdConfig;
use burn::tensor::{Device, Tensor, TensorData};
use fsdp_runtime::lora::LoraConfig;
use fsdp_runtime::options::ActivationCheckpointing;
use fsdp_runtime::prelude::*;
use fsdp_runtime::pretrained::{LoadOptions, SaveDtype, SavePretrained, from_pretrained};
use serde::Deserialize;

use super::logits::{folder, read, whole_rows};
use crate::common::device::DeviceName;
use crate::config::ModelConfig;
use crate::model::{CausalLm, DecoderLayer, Labels};

/// Token ids, and the norm of the gradient of each parameter.
#[derive(Clone, Deserialize)]
struct Gradients {
    ids: Vec<Vec<i32>>,
    norms: BTreeMap<String, f32>,
}

/// Returns the mean loss of the tokens after the first of each row.
fn mean_loss(model: &Fsdp<CausalLm>, ids: &[Vec<i32>], device: &Device) -> Tensor<1> {
    let length = ids[0].len();
    let (at, next): (Vec<i32>, Vec<i32>) = (0..ids.len() * length)
        .filter(|at| at % length + 1 < length)
        .map(|at| (at as i32, ids[at / length][at % length + 1]))
        .unzip();
    let count = at.len();
    let list = |numbers| Tensor::from_data(TensorData::new(numbers, [count]), device);
    let labels = Labels { at: list(at), ids: list(next) };
    model.forward_loss(whole_rows(ids, device), labels) / count as f32
}

/// Elements of the tensors in a file of f32.
fn tensors(file: &Path) -> BTreeMap<String, Vec<f32>> {
    let bytes = std::fs::read(file).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap().tensors();
    let elements = |bytes: &[u8]| {
        let elements = bytes.as_chunks::<4>().0.iter();
        elements.map(|bytes| f32::from_le_bytes(*bytes)).collect()
    };
    tensors.into_iter().map(|(name, tensor)| (name, elements(tensor.data()))).collect()
}

#[test]
fn gradients_are_those_of_transformers() {
    for (name, world, parts) in
        [("llama", 2, 1), ("llama", 4, 2), ("mistral", 1, 1), ("qwen2", 2, 2), ("qwen3", 1, 1)]
    {
        let folder = folder(name);
        let options = FsdpOptions::new().with_tensor_parallel(parts);
        let Gradients { ids, norms } = read(&folder, "gradients.json");
        let config = ModelConfig::read(&folder).unwrap();
        assert_eq!(config.pad_token_id, Some(0));
        let saved = tempfile::tempdir().unwrap();
        let [before, after] = ["before", "after"].map(|name| saved.path().join(name));
        let device = DeviceName::Flex.resolve().unwrap();
        let files = [before.clone(), after.clone()];
        // Every rank has all rows: the mean over ranks is the gradient of one.
        launch(LaunchOptions::new(world).with_device(device), move |worker| {
            let device = worker.device().clone();
            let model = config.init(64, &device);
            let load = LoadOptions::new();
            let (model, _) = from_pretrained(model, &worker, options.clone(), &folder, &load)?;
            let save = SavePretrained::new().with_dtype(SaveDtype::F32);
            model.state().save_pretrained(&files[0], &save)?;
            let gradients = model.backward(mean_loss(&model, &ids, &device))?;
            let model = SgdConfig::new().init().step(1.0, model, gradients);
            model.state().save_pretrained(&files[1], &save)?;
            Ok::<_, anyhow::Error>(())
        })
        .unwrap();
        let [before, after] =
            [before, after].map(|folder| tensors(&folder.join("model.safetensors")));
        assert!(before.keys().eq(norms.keys()), "{name}: {:?}", before.keys());
        for (key, expected) in norms {
            let changes =
                before[&key].iter().zip(&after[&key]).map(|(before, after)| before - after);
            let norm = changes.map(|change| f64::from(change).powi(2)).sum::<f64>().sqrt();
            let expected = f64::from(expected);
            assert!((norm / expected - 1.0).abs() < 1e-4, "{name}, {key}: {norm} {expected}");
        }
    }
}

/// The second factor of an adapter is zero at first, so that the first one has no gradient in the first step.
#[test]
fn every_adapter_has_gradients() {
    for (name, recomputes) in
        [("llama", false), ("mistral", true), ("qwen2", false), ("qwen3", true)]
    {
        let folder = folder(name);
        let Gradients { ids, .. } = read(&folder, "gradients.json");
        let config = ModelConfig::read(&folder).unwrap();
        let device = DeviceName::Flex.resolve().unwrap();
        launch(LaunchOptions::new(2).with_device(device), move |worker| {
            let device = worker.device().clone();
            let lora = LoraConfig::new(4).with_target_modules(["all-linear"]);
            let model = lora.apply(config.init(64, &device))?;
            let load = LoadOptions::new().with_new_adapters();
            let options = match recomputes {
                true => FsdpOptions::new().with_activation_checkpointing(
                    ActivationCheckpointing::Units(unit_types![DecoderLayer]),
                ),
                false => FsdpOptions::new(),
            };
            let (mut model, _) = from_pretrained(model, &worker, options, &folder, &load)?;
            let mut before = model.state().full(Recipient::All)?;
            for step in 0..2 {
                let gradients = model.backward(mean_loss(&model, &ids, &device))?;
                model = SgdConfig::new().init().step(0.1, model, gradients);
                let after = model.state().full(Recipient::All)?;
                let mut factors = 0;
                for (path, old) in &before {
                    let changes = old.iter::<f32>().zip(after[path].iter::<f32>());
                    let changed = changes.filter(|(old, new)| old != new).count() > 0;
                    let is_factor = path.contains(".lora.");
                    factors += usize::from(is_factor);
                    let expected = path.ends_with(".lora.b") || is_factor && step > 0;
                    assert_eq!(changed, expected, "{name}, step {step}: {path}");
                }
                assert_eq!(factors, 2 * 7 * config.num_hidden_layers, "{name}");
                before = after;
            }
            Ok::<_, anyhow::Error>(())
        })
        .unwrap();
    }
}
