//! Logits of a tiny model of each type are those of transformers. `fixtures/make_models.py` made the models.

use std::path::{Path, PathBuf};

use burn::tensor::{Device, Int, Tensor, TensorData};
use fsdp_runtime::nn::AttentionOptions;
use fsdp_runtime::prelude::*;
use fsdp_runtime::pretrained::{LoadOptions, from_pretrained};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::common::device::DeviceName;
use crate::config::ModelConfig;
use crate::model::{Cache, Rows};

#[derive(Clone, Deserialize)]
struct Expected {
    ids: Vec<Vec<i32>>,
    places: Vec<(usize, usize)>,
    logits: Vec<Vec<f32>>,
}

/// Returns the folder of a tiny model.
pub fn folder(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/llm_finetune/fixtures")).join(name)
}

/// Reads a JSON file of a folder.
pub fn read<T: DeserializeOwned>(folder: &Path, file: &str) -> T {
    serde_json::from_str(&std::fs::read_to_string(folder.join(file)).unwrap()).unwrap()
}

/// Returns the rows of a batch whose tokens all are of one conversation a row.
pub fn whole_rows(ids: &[Vec<i32>], device: &Device) -> Rows {
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
