//! `fsdp merge`.

use std::path::Path;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use fsdp_runtime::prelude::*;

use crate::support::{Fsdp as Tool, Run};

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Net {
    #[fsdp(key = "encoder.dense")]
    body: Linear,
    head: Linear,
}

#[fsdp_unit]
impl Net {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.head.forward(self.body.forward(x))
    }
}

/// Saves the state of a model on two ranks.
fn save(folder: &Path) {
    let folder = folder.to_path_buf();
    launch(LaunchOptions::new(2).with_device(Device::flex()), move |worker| {
        let linear = |from, to| LinearConfig::new(from, to).init(worker.device());
        let net = Net { body: linear(6, 10), head: linear(10, 3) };
        let net = fully_shard(net, &worker, FsdpOptions::new().with_seed(1))?;
        assert_eq!(net.forward(Tensor::ones([1, 6], worker.device())).dims(), [1, 3]);
        net.state().save(&folder)
    })
    .unwrap();
}

fn merge(args: &[&str]) -> Run {
    Tool::new(&[&["merge"], args].concat()).run()
}

#[test]
fn a_checkpoint_becomes_one_file_or_several_with_an_index() {
    let home = tempfile::tempdir().unwrap();
    let [from, one, several] =
        ["step-00000004", "one", "several"].map(|name| home.path().join(name));
    save(&from);
    // A folder of checkpoints stands for the newest one in it.
    let text = |path: &Path| path.to_str().unwrap().to_string();
    let run = merge(&[&text(home.path()), &text(&one)]);
    assert_eq!(run.code, Some(0), "{run:#?}");
    let file = one.join("model.safetensors");
    assert!(run.stdout.starts_with(&text(&file)), "{run:#?}");
    assert!(run.stdout.contains("4 tensors, 0.0 MB, of `model` in "), "{run:#?}");
    let bytes = std::fs::read(file).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut names = tensors.names();
    names.sort_unstable();
    let expected = ["encoder.dense.bias", "encoder.dense.weight", "head.bias", "head.weight"];
    assert_eq!(names, expected);
    assert_eq!(tensors.tensor("encoder.dense.weight").unwrap().shape(), [10, 6]);

    let run = merge(&[&text(&from), &text(&several), "--max-shard-size", "200B", "--module-paths"]);
    assert_eq!(run.code, Some(0), "{run:#?}");
    assert!(several.join("model-00001-of-00002.safetensors").is_file(), "{run:#?}");
    let index = std::fs::read_to_string(several.join("model.safetensors.index.json")).unwrap();
    assert!(index.contains("body.weight") && !several.join("model.safetensors").exists());

    let run = merge(&[&text(&from), &text(&one), "--dtype", "bf16"]);
    assert_eq!(run.code, Some(0), "{run:#?}");
    let half = std::fs::read(one.join("model.safetensors")).unwrap();
    let half = safetensors::SafeTensors::deserialize(&half).unwrap();
    let weight = half.tensor("encoder.dense.weight").unwrap();
    assert_eq!((weight.dtype(), weight.shape()), (safetensors::Dtype::BF16, &[10, 6][..]));
}

#[test]
fn a_merge_that_fails_has_a_message_and_an_exit_code() {
    let home = tempfile::tempdir().unwrap();
    let from = home.path().join("checkpoint");
    let (path, output) = (from.to_str().unwrap(), home.path().join("merged"));
    let output = output.to_str().unwrap();
    let run = merge(&[path, output]);
    assert_eq!(run.code, Some(1), "{run:#?}");
    assert!(run.stderr.starts_with("fsdp: cannot read ") && run.stderr.contains(path), "{run:#?}");

    save(&from);
    let run = merge(&[path, output, "--model", "bert"]);
    assert_eq!(run.code, Some(1), "{run:#?}");
    assert!(run.stderr.contains("holds no model `bert`; it holds `model`"), "{run:#?}");
    let run = merge(&[path, output, "--max-shard-size", "5 apples"]);
    assert_eq!(run.code, Some(2), "{run:#?}");
    assert!(run.stderr.contains("5GB"), "{run:#?}");
    std::fs::remove_file(from.join("rank-00001.safetensors")).unwrap();
    let run = merge(&[path, output]);
    assert_eq!(run.code, Some(1), "{run:#?}");
    assert!(run.stderr.contains("rank-00001.safetensors is missing"), "{run:#?}");
    assert_eq!(std::fs::read_dir(output).unwrap().count(), 0);
}
