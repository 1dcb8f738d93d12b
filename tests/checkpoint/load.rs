//! Loading weights from a safetensors file with another framework's names and layouts.

use std::collections::BTreeMap;
use std::path::Path;

use fsdp_runtime::Error;
use fsdp_runtime::errors::LoadError;
use fsdp_runtime::prelude::*;
use fsdp_runtime::pretrained::LoadOptions;
use fsdp_runtime::state::{FullState, LoadReport};
use safetensors::tensor::{Dtype, TensorView};

use crate::support::compare::assert_same_state;
use crate::support::{self, Net, of_rank_0};

/// Returns a file of [`Net`]'s weights with PyTorch's names and layouts. Each element is a function
/// of its place in that layout.
fn checkpoint(prefix: &str) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let (v, l, w, h, c) =
        (support::VOCABULARY, support::LENGTH, support::WIDTH, support::HIDDEN, support::CLASSES);
    let mut shapes = vec![
        ("embed.word.weight".to_string(), vec![v, w]),
        ("embed.position".into(), vec![l, w]),
        ("embed.norm.weight".into(), vec![w]),
        ("embed.norm.bias".into(), vec![w]),
        ("head.weight".into(), vec![c, w]),
        ("head.bias".into(), vec![c]),
    ];
    for block in 0..2 {
        shapes.extend([
            (format!("blocks.{block}.norm.weight"), vec![w]),
            (format!("blocks.{block}.up.weight"), vec![h, w]),
            (format!("blocks.{block}.up.bias"), vec![h]),
            (format!("blocks.{block}.down.weight"), vec![w, h]),
            (format!("blocks.{block}.down.bias"), vec![w]),
        ]);
    }
    let fill = |(index, (name, shape)): (usize, (String, Vec<usize>))| {
        let numel: usize = shape.iter().product();
        let elements = (0..numel).map(|i| (index * 100_000 + i) as f32).collect();
        (format!("{prefix}{name}"), (shape, elements))
    };
    shapes.into_iter().enumerate().map(fill).collect()
}

fn write(path: &Path, tensors: &BTreeMap<String, (Vec<usize>, Vec<f32>)>) {
    let bytes: BTreeMap<_, Vec<u8>> = tensors
        .iter()
        .map(|(name, (_, elements))| {
            (name, elements.iter().flat_map(|x| x.to_le_bytes()).collect())
        })
        .collect();
    let views = tensors.iter().map(|(name, (shape, _))| {
        (name, TensorView::new(Dtype::F32, shape.clone(), &bytes[name]).expect("shapes fit"))
    });
    safetensors::serialize_to_file(views, None, path).expect("a writable folder");
}

/// Loads a file into a model on `world` ranks. Returns the state and the report, or the error, of
/// rank 0. A load that fails must change nothing.
fn load(world: usize, path: &Path, options: LoadOptions) -> Result<(FullState, LoadReport), Error> {
    let path = path.to_path_buf();
    of_rank_0(world, move |worker| {
        let net = Net::new(2, 0.0, worker.device());
        let mut net = fully_shard(net, worker, FsdpOptions::new().with_seed(1))?;
        let before = net.state().full(Recipient::All)?;
        let loaded = net.state_mut().load_safetensors(&path, &options);
        let after = net.state().full(Recipient::All)?;
        Ok(match loaded {
            Ok(report) => Ok((after, report)),
            Err(error) => {
                assert_same_state(&after, &before, "after a load that failed");
                Err(error)
            }
        })
    })
}

/// Returns what an error of a load lists: missing, unexpected and misshapen tensors.
fn difference(path: &Path, options: LoadOptions) -> (Vec<String>, Vec<String>, Vec<String>) {
    match load(2, path, options).unwrap_err() {
        Error::Load(LoadError::Mismatch { missing, unexpected, misshapen, .. }) => {
            (missing, unexpected, misshapen)
        }
        error => panic!("{error}"),
    }
}

#[test]
fn every_world_size_loads_the_same_weights() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let checkpoint = checkpoint("");
    write(&file, &checkpoint);
    for world in [1, 2, 3, 5] {
        // A path may be that of the folder or of the file.
        let path = if world == 2 { folder.path() } else { &file };
        let (state, report) = load(world, path, LoadOptions::new()).unwrap();
        assert_eq!(report.loaded, checkpoint.len());
        assert_eq!(
            state["embed.word.weight"].iter::<f32>().collect::<Vec<_>>(),
            checkpoint["embed.word.weight"].1
        );
        assert_eq!(
            state["embed.norm.gamma"].iter::<f32>().collect::<Vec<_>>(),
            checkpoint["embed.norm.weight"].1
        );
        // Burn holds `[in, out]`, PyTorch `[out, in]`.
        let (shape, theirs) = &checkpoint["blocks.1.up.weight"];
        let ours: Vec<f32> = state["blocks.1.up.weight"].iter().collect();
        let (rows, columns) = (shape[1], shape[0]);
        for row in 0..rows {
            for column in 0..columns {
                assert_eq!(ours[row * columns + column], theirs[column * rows + row]);
            }
        }
    }
}

#[test]
fn half_precision_is_widened() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("half.safetensors");
    let checkpoint = checkpoint("");
    let half = |x: &f32| half::bf16::from_f32(x / 1e5);
    let bytes: BTreeMap<_, Vec<u8>> = checkpoint
        .iter()
        .map(|(name, (_, elements))| {
            (name, elements.iter().flat_map(|x| half(x).to_le_bytes()).collect())
        })
        .collect();
    let views = checkpoint.iter().map(|(name, (shape, _))| {
        (name, TensorView::new(Dtype::BF16, shape.clone(), &bytes[name]).unwrap())
    });
    safetensors::serialize_to_file(views, None, &file).unwrap();
    let (state, _) = load(2, &file, LoadOptions::new()).unwrap();
    let expected: Vec<f32> =
        checkpoint["embed.position"].1.iter().map(|x| half(x).to_f32()).collect();
    assert_eq!(state["embed.position"].iter::<f32>().collect::<Vec<_>>(), expected);
}

#[test]
fn all_differences_are_listed_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let mut tensors = checkpoint("");
    tensors.remove("head.weight");
    tensors.remove("blocks.0.norm.weight");
    tensors.insert("pooler.weight".into(), (vec![2], vec![0.0; 2]));
    tensors.insert("head.bias".into(), (vec![9], vec![0.0; 9]));
    write(&file, &tensors);
    let (missing, unexpected, misshapen) = difference(&file, LoadOptions::new());
    assert_eq!(missing, ["blocks.0.norm.weight", "head.weight"]);
    assert_eq!(unexpected, ["pooler.weight"]);
    assert_eq!(misshapen, ["head.bias: [9] in the file, [3] in the model"]);

    let lenient = LoadOptions::new()
        .with_allowed_missing("head.")
        .with_allowed_missing("blocks.0.")
        .with_allowed_unexpected("pooler.");
    let (missing, unexpected, misshapen) = difference(&file, lenient.clone());
    assert!(missing.is_empty() && unexpected.is_empty());
    assert_eq!(misshapen.len(), 1, "a wrong shape is never accepted");

    tensors.remove("head.bias");
    write(&file, &tensors);
    let (_, report) = load(2, &file, lenient).unwrap();
    assert_eq!(report.missing, ["blocks.0.norm.weight", "head.bias", "head.weight"]);
    assert_eq!(report.unexpected, ["pooler.weight"]);
}

#[test]
fn a_base_prefix_may_be_in_the_file_alone_or_in_the_model_alone() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    write(&file, &checkpoint("net."));
    let (missing, unexpected, _) = difference(&file, LoadOptions::new());
    assert_eq!((missing.len(), unexpected.len()), (16, 16));
    assert!(load(2, &file, LoadOptions::new().with_base_prefix("net")).is_ok());

    write(
        &file,
        &checkpoint("")
            .into_iter()
            .map(|(name, tensor)| {
                (name.strip_prefix("embed.").map(String::from).unwrap_or(name), tensor)
            })
            .collect(),
    );
    assert!(load(2, &file, LoadOptions::new().with_base_prefix("embed")).is_ok());
}

#[test]
fn a_file_that_is_not_there_or_torn_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let error = load(1, &folder.path().join("none.safetensors"), LoadOptions::new()).unwrap_err();
    assert!(
        matches!(&error, Error::Load(LoadError::Io { file, .. }) if file.contains("none.safetensors")),
        "{error}"
    );

    let file = folder.path().join("model.safetensors");
    write(&file, &checkpoint(""));
    let whole = std::fs::read(&file).unwrap();
    for keep in [0, 5, 100, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&file, &whole[..keep]).unwrap();
        let error = load(1, &file, LoadOptions::new()).unwrap_err();
        assert!(
            matches!(&error, Error::Load(LoadError::Format { .. } | LoadError::Io { .. })),
            "{keep}: {error}"
        );
        assert!(error.to_string().contains("model.safetensors"), "{error}");
    }
}
