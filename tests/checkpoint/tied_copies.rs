//! A tie under a condition, and files that hold a copy of a tied parameter.

use std::path::{Path, PathBuf};

use burn::module::{Module, Param};
use burn::nn::{Embedding, EmbeddingConfig};
use burn::tensor::{Device, Int, Tensor};
use fsdp_runtime::Error;
use fsdp_runtime::errors::LoadError;
use fsdp_runtime::prelude::*;
use fsdp_runtime::pretrained::{LoadOptions, SavePretrained};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors, serialize_to_file};

use crate::support::{of_rank_0, on_ranks};

const WORDS: usize = 40;
const WIDTH: usize = 8;

/// A language model that a configuration ties or not.
#[derive(Module, Debug)]
#[fsdp_unit(root, tie("words" = "head", if_shared))]
struct Bigram {
    words: Embedding,
    #[fsdp(key = "head.weight")]
    head: Param<Tensor<2>>,
}

#[fsdp_unit]
impl Bigram {
    fn new(tied: bool, device: &Device) -> Self {
        let embedding = || -> Embedding { EmbeddingConfig::new(WORDS, WIDTH).init(device) };
        let words = embedding();
        let head = if tied { words.weight.clone() } else { embedding().weight };
        Self { words, head }
    }

    fn forward(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        self.words.forward(ids).matmul(self.head.val().transpose().unsqueeze())
    }
}

fn sharded(worker: &Worker, tied: bool) -> Result<Fsdp<Bigram>, Error> {
    fully_shard(Bigram::new(tied, worker.device()), worker, FsdpOptions::new().with_seed(5))
}

/// Returns the number of parameters, and whether the head equals the embedding after a step.
fn trained(world: usize, tied: bool) -> (usize, bool) {
    of_rank_0(world, move |worker| {
        let mut model = sharded(worker, tied)?;
        let mut optimizer = burn::optim::AdamWConfig::new().init();
        let ids = Tensor::<2, Int>::from_ints([[1, 2, 3]], worker.device());
        let gradients = model.backward(model.forward(ids).powf_scalar(2.0).mean())?;
        model = optimizer.step(0.1, model, gradients);
        let equal = model.gathered(|model| {
            model.words.weight.val().into_data() == model.head.val().into_data()
        })?;
        Ok((model.num_params(), equal))
    })
}

#[test]
fn a_tie_under_a_condition_holds_for_one_parameter_only() {
    for world in [1, 2, 3] {
        assert_eq!(trained(world, true), (WORDS * WIDTH, true));
        assert_eq!(trained(world, false), (2 * WORDS * WIDTH, false));
    }
}

/// Saves a model that is not tied, and returns its folder. With `equal`, the head is a copy of the
/// embedding but for the elements in `changed`.
fn file(folder: &Path, changed: Option<usize>) -> PathBuf {
    let saved = folder.join("saved");
    let path = saved.clone();
    on_ranks(1, move |worker| {
        sharded(worker, false)?.state().save_pretrained(&path, &SavePretrained::new())
    });
    let bytes = std::fs::read(saved.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let words = tensors.tensor("words.weight").unwrap().data().to_vec();
    let mut head = words.clone();
    if let Some(element) = changed {
        head[4 * element] ^= 1;
    }
    let view = |data| TensorView::new(Dtype::F32, vec![WORDS, WIDTH], data).unwrap();
    let copies = [("words.weight", view(&words)), ("head.weight", view(&head))];
    let path = folder.join("copies.safetensors");
    serialize_to_file(copies, None, &path).unwrap();
    path
}

fn load(world: usize, tied: bool, path: &Path) -> Vec<Result<usize, Error>> {
    let path = path.to_path_buf();
    on_ranks(world, move |worker| {
        let mut model = sharded(worker, tied)?;
        let loaded = model.state_mut().load_safetensors(&path, &LoadOptions::new());
        Ok(loaded.map(|report| report.loaded))
    })
}

#[test]
fn copies_of_a_tied_parameter_must_be_equal() {
    let folder = tempfile::tempdir().unwrap();
    let equal = file(folder.path(), None);
    assert_eq!(load(2, true, &equal), [Ok(1), Ok(1)]);
    assert_eq!(load(2, false, &equal), [Ok(2), Ok(2)]);

    // The element of the last rank.
    let element = WORDS * WIDTH - 1;
    let different = file(folder.path(), Some(element));
    assert_eq!(load(2, false, &different), [Ok(2), Ok(2)]);
    for world in [1, 3] {
        let results = load(world, true, &different);
        assert!(results.iter().all(Result::is_err), "{results:?}");
        let expected = Error::from(LoadError::TiedCopies {
            file: different.display().to_string(),
            first: "words.weight".into(),
            second: "head.weight".into(),
            element,
        });
        assert_eq!(results.last(), Some(&Err(expected)));
    }
}
