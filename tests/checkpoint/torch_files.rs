//! Weights that PyTorch wrote: files of `torch.save`, and folders of `torch.distributed.checkpoint`.
//!
//! `fsdp-runtime/tests/torch` has such files, and the script that wrote them.

use std::path::{Path, PathBuf};
use std::process::Command;

use burn::tensor::Device;
use fsdp_runtime::Error;
use fsdp_runtime::errors::LoadError;
use fsdp_runtime::prelude::*;
use fsdp_runtime::pretrained::{LoadOptions, from_pretrained, merge_safetensors};
use fsdp_runtime::state::FullState;

use crate::support::compare::assert_same_state;
use crate::support::small::Pair;
use crate::support::{of_rank_0, on_ranks};

fn pair(device: &Device) -> Pair {
    Pair::new([5, 7, 4], device)
}

/// Returns the folder of the files in this repository.
fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fsdp-runtime/tests/torch")
}

/// Loads weights into a sharded model. `prefix` is that of the names in the file.
fn load(world: usize, path: &Path, prefix: &str) -> Result<FullState, Error> {
    let (path, options) = (path.to_path_buf(), LoadOptions::new().with_base_prefix(prefix));
    of_rank_0(world, move |worker| {
        let mut model =
            fully_shard(pair(worker.device()), worker, FsdpOptions::new().with_seed(1))?;
        let before = model.state().full(Recipient::All)?;
        let loaded = model.state_mut().load_safetensors(&path, &options);
        let state = model.state().full(Recipient::All)?;
        if loaded.is_err() {
            assert_same_state(&state, &before, "a model whose load failed");
        }
        Ok(loaded.map(|report| {
            assert_eq!((report.loaded, report.missing.len()), (4, 0));
            state
        }))
    })
}

/// Asserts that a model has the values of `make.py`: eighths that count up from a start.
fn assert_values(state: &FullState) {
    assert_eq!(state.len(), 4);
    for (name, start, [outputs, inputs]) in [("first", 1.0, [7, 5]), ("second", 3.0, [4, 7])] {
        let weight: Vec<f32> = state[&*format!("{name}.weight")].iter().collect();
        assert_eq!(weight.len(), inputs * outputs);
        for (index, value) in weight.into_iter().enumerate() {
            let (input, output) = (index / outputs, index % outputs);
            assert_eq!(value, start + (output * inputs + input) as f32 / 8.0, "{name}: {index}");
        }
    }
    for (name, start, length) in [("first.bias", -2.0, 7), ("second.bias", 5.0, 4)] {
        let expected: Vec<f32> = (0..length).map(|index| start + index as f32 / 8.0).collect();
        assert_eq!(state[name].iter::<f32>().collect::<Vec<_>>(), expected, "{name}");
    }
}

/// Asserts that every file in a folder of `make.py` loads, and that the attack does not.
fn assert_loads(folder: &Path) {
    for world in [1, 2, 3] {
        assert_values(&load(world, &folder.join("pytorch_model.bin"), "").unwrap());
        assert_values(&load(world, &folder.join("training.pt"), "model").unwrap());
        assert_values(&load(world, &folder.join("dcp"), "model").unwrap());
    }
    // A folder with `pytorch_model.bin`, and no safetensors.
    assert_values(&load(2, folder, "").unwrap());
    let error = load(2, &folder.join("attack.bin"), "model").unwrap_err();
    let Error::Load(LoadError::UnsafePickle { file, global }) = &error else { panic!("{error}") };
    assert!(file.ends_with("attack.bin") && global == "posix.system", "{error}");
    assert!(error.to_string().contains("`posix.system`"), "{error}");
    assert!(!folder.join("owned").exists() && !Path::new("owned").exists());
}

#[test]
fn files_of_pytorch_load_at_every_world_size_and_an_attack_is_refused() {
    assert_loads(&fixtures());
}

#[test]
fn files_that_pytorch_writes_now_load() {
    let folder = tempfile::tempdir().unwrap();
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".into());
    let torch = Command::new(&python).args(["-c", "import torch"]).output();
    if !torch.is_ok_and(|output| output.status.success()) {
        return eprintln!("skipped: no Python with PyTorch (set PYTHON)");
    }
    let made = Command::new(&python).arg(fixtures().join("make.py")).arg(folder.path()).output();
    let made = made.unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    assert_loads(folder.path());
}

#[test]
fn a_model_is_built_from_files_of_pytorch() {
    for file in ["pytorch_model.bin", "dcp"] {
        let path = fixtures().join(file);
        let states = on_ranks(2, move |worker| {
            let options = FsdpOptions::new().with_strategy(ShardingStrategy::FullShard);
            let load = LoadOptions::new().with_base_prefix("model");
            let (model, report) =
                from_pretrained(pair(worker.device()), worker, options, &path, &load)?;
            assert_eq!(report.loaded, 4);
            model.state().full(Recipient::All)
        });
        states.iter().for_each(assert_values);
    }
}

#[test]
fn files_of_pytorch_are_merged_into_safetensors_in_their_dtypes() {
    let folder = tempfile::tempdir().unwrap();
    for file in ["pytorch_model.bin", "dcp"] {
        let out = folder.path().join(format!("{file}.safetensors"));
        merge_safetensors(fixtures().join(file), &out).unwrap();
        assert_values(&load(2, &out, "model").unwrap());
        let bytes = std::fs::read(&out).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let mut dtypes: Vec<_> =
            file.tensors().into_iter().map(|(name, view)| (name, view.dtype())).collect();
        dtypes.sort();
        let dtypes: Vec<_> = dtypes.into_iter().map(|(_, dtype)| dtype).collect();
        use safetensors::Dtype::{BF16, F16, F32, F64};
        assert_eq!(dtypes, [BF16, F32, F16, F64]);
    }
}

#[test]
fn damaged_files_of_pytorch_are_errors_and_change_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let whole = std::fs::read(fixtures().join("pytorch_model.bin")).unwrap();
    let path = folder.path().join("pytorch_model.bin");
    for length in [4, 100, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&path, &whole[..length]).unwrap();
        let error = load(2, &path, "").unwrap_err();
        assert!(matches!(&error, Error::Load(LoadError::Format { .. })), "{length}: {error}");
    }
    std::fs::write(&path, b"\x80\x02\x8a\x0al\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.rest").unwrap();
    let error = load(2, &path, "").unwrap_err();
    assert!(error.to_string().contains("before PyTorch 1.6"), "{error}");

    let dcp = folder.path().join("dcp");
    std::fs::create_dir(&dcp).unwrap();
    let copy =
        |name: &str| std::fs::copy(fixtures().join("dcp").join(name), dcp.join(name)).unwrap();
    copy(".metadata");
    copy("__0_0.distcp");
    let error = load(2, &dcp, "model").unwrap_err();
    assert!(matches!(&error, Error::Load(LoadError::Io { .. })), "{error}");
    assert!(error.to_string().contains("__1_0.distcp"), "{error}");
    // The parts of one rank in the place of the other's.
    std::fs::copy(dcp.join("__0_0.distcp"), dcp.join("__1_0.distcp")).unwrap();
    let error = load(2, &dcp, "model").unwrap_err();
    assert!(matches!(&error, Error::Load(LoadError::Format { .. })), "{error}");
}
