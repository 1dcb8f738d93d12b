//! Logits and gradients of a tiny model of each type are those of transformers. `fixtures/make_models.py` made the
//! models.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use burn::optim::SgdConfig;
use burn::tensor::{Device, Int, Tensor, TensorData};
use fsdp_runtime::nn::AttentionOptions;
use fsdp_runtime::prelude::*;
use fsdp_runtime::pretrained::{LoadOptions, SaveDtype, SavePretrained, from_pretrained};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::common::device::DeviceName;
use crate::config::ModelConfig;
use crate::model::{Cache, Labels, Rows};

#[derive(Clone, Deserialize)]
struct Expected {
    ids: Vec<Vec<i32>>,
    places: Vec<(usize, usize)>,
    logits: Vec<Vec<f32>>,
}

/// Token ids, and the norm of the gradient of each parameter.
#[derive(Clone, Deserialize)]
struct Gradients {
    ids: Vec<Vec<i32>>,
    norms: BTreeMap<String, f32>,
}

fn folder(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/llm_finetune/fixtures")).join(name)
}

fn read<T: DeserializeOwned>(folder: &Path, file: &str) -> T {
    serde_json::from_str(&std::fs::read_to_string(folder.join(file)).unwrap()).unwrap()
}

/// Returns the rows of a batch whose tokens all are of one conversation a row.
fn whole_rows(ids: &[Vec<i32>], device: &Device) -> Rows {
    let [count, length] = [ids.len(), ids[0].len()];
    let ints = |numbers: Vec<i32>| {
        Tensor::<2, Int>::from_data(TensorData::new(numbers, [count, length]), device)
    };
    Rows {
        ids: ints(ids.concat()),
        positions: ints((0..count).flat_map(|_| 0..length as i32).collect()),
        sight: AttentionOptions::new().with_causal(true),
    }
}

fn assert_close(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 1e-4, "{what}: {found} {expected}");
    }
}

#[test]
fn logits_are_those_of_transformers() {
    for (name, world) in [("llama", 1), ("mistral", 2), ("qwen2", 3), ("qwen3", 2)] {
        let folder = folder(name);
        let expected: Expected = read(&folder, "logits.json");
        let config = ModelConfig::read(&folder).unwrap();
        let device = DeviceName::Flex.resolve().unwrap();
        launch(LaunchOptions::new(world).with_device(device), move |worker| {
            let model = config.init(64, worker.device());
            let load = LoadOptions::new();
            let (model, _) = from_pretrained(model, &worker, FsdpOptions::new(), &folder, &load)?;
            let (model, device) = (model.valid(), worker.device().clone().inner());
            let Expected { ids, places, logits } = &expected;
            let length = ids[0].len();
            let rows = whole_rows(ids, &device);
            let found = model.forward(rows).try_into_data()?.try_into_vec_as::<f32>()?;
            let vocabulary = config.vocab_size;
            for ((row, at), expected) in places.iter().zip(logits) {
                let start = (row * length + at) * vocabulary;
                let what = format!("{name}, row {row}, position {at}");
                assert_close(&found[start..start + vocabulary], expected, &what);
            }
            // The same with a cache, at first of several tokens and then of one at a time.
            let _gathered = model.unshard()?;
            let mut cache = Cache::default();
            for (start, end) in std::iter::once((0, 5)).chain((5..length).map(|at| (at, at + 1))) {
                let new = TensorData::new(ids[1][start..end].to_vec(), [1, end - start]);
                let logits = model.next_logits(Tensor::from_data(new, &device), &mut cache);
                let logits = logits.try_into_data()?.try_into_vec_as::<f32>()?;
                let at = (length + end - 1) * vocabulary;
                assert_close(&logits, &found[at..at + vocabulary], &format!("{name}, cached"));
            }
            Ok::<_, anyhow::Error>(())
        })
        .unwrap();
    }
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
    for (name, world) in [("llama", 2), ("mistral", 1), ("qwen2", 2), ("qwen3", 1)] {
        let folder = folder(name);
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
            let (model, _) = from_pretrained(model, &worker, FsdpOptions::new(), &folder, &load)?;
            let save = SavePretrained::new().with_dtype(SaveDtype::F32);
            model.state().save_pretrained(&files[0], &save)?;
            let length = ids[0].len();
            let (at, next): (Vec<i32>, Vec<i32>) = (0..ids.len() * length)
                .filter(|at| at % length + 1 < length)
                .map(|at| (at as i32, ids[at / length][at % length + 1]))
                .unzip();
            let count = at.len();
            let list = |numbers| Tensor::from_data(TensorData::new(numbers, [count]), &device);
            let labels = Labels { at: list(at), ids: list(next) };
            let sum = model.forward_loss(whole_rows(&ids, &device), labels);
            let gradients = model.backward(sum / count as f32)?;
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
