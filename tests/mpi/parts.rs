//! Ranks that are processes and split matrices and rows.

use std::time::Instant;

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use fsdp_runtime::nn;
use fsdp_runtime::prelude::*;

use super::{Ended, TIMEOUT, fingerprint, mpirun};

/// A table, and a block whose matrices and rows are split over ranks.
#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Parts {
    #[fsdp(vocab)]
    words: nn::Embedding,
    #[fsdp(column)]
    query: nn::Linear,
    #[fsdp(row)]
    mixed: nn::Linear,
    #[fsdp(column)]
    up: nn::Linear,
    #[fsdp(row)]
    down: nn::Linear,
    #[fsdp(vocab)]
    head: nn::LmHead,
}

#[fsdp_unit]
impl Parts {
    fn new(device: &Device) -> Self {
        let linear = |from, to| nn::LinearConfig::new(from, to).init(device);
        Self {
            words: nn::EmbeddingConfig::new(24, 8).init(device),
            query: linear(8, 16),
            mixed: linear(16, 8),
            up: linear(8, 12),
            down: linear(12, 8),
            head: nn::LmHeadConfig::new(8, 24).init(device),
        }
    }

    fn forward_loss(&self, ids: Tensor<2, Int>) -> Tensor<1> {
        let x = self.words.forward(ids.clone());
        let query = self.query.forward(x.clone());
        let [rows, length, width] = query.dims();
        let heads = query.reshape([rows, length, width / 4, 4]).swap_dims(1, 2);
        let causal = nn::AttentionOptions::new().with_causal(true);
        let mixed = nn::attention(heads.clone(), heads.clone(), heads, causal);
        let mixed = mixed.swap_dims(1, 2).reshape([rows, length, width]);
        let x = x + self.mixed.forward(mixed);
        let x = self.down.forward(self.up.forward_activated(x, nn::LinearActivation::Gelu));
        let options = nn::LinearCrossEntropyOptions::new();
        let hidden = self.head.gather_sequence(x).flatten(0, 1);
        self.head.cross_entropy(hidden, ids.flatten(0, 1), options)
    }
}

/// Trains a model of split matrices on 2 x 2 ranks, which then also split rows. Returns the bits of losses, norms
/// and parameters.
pub fn train(worker: &Worker) -> Result<String, Error> {
    let options = FsdpOptions::new().with_seed(2).with_tensor_parallel(2);
    let rows = options.clone().with_context_parallel(2).with_sequence_parallel(true);
    let half = MixedPrecisionPolicy::new().with_param_dtype(burn::tensor::FloatDType::BF16);
    let in_half = rows.clone().with_mixed_precision(half);
    let ring = in_half.clone().with_context_exchange(ContextExchange::Ring);
    let runs = [options, rows, in_half, ring].map(|options| train_with(worker, options));
    Ok(runs.into_iter().collect::<Result<Vec<_>, _>>()?.join(" "))
}

fn train_with(worker: &Worker, options: FsdpOptions) -> Result<String, Error> {
    let device = worker.device();
    let mut model = fully_shard(Parts::new(device), worker, options)?;
    let mut optimizer = fsdp_runtime::optim::AdamWConfig::new().init();
    let mesh = model.stats().mesh();
    let own = mesh.batch_rank().index() as i32;
    let ids = Tensor::<2, Int>::from_ints([[own, 5, 11, 23], [12 + own, 3, 7, 1]], device);
    let ids = mesh.context_part(4).expect("blocks of one word").of(ids, 1);
    let mut bits = Vec::new();
    for _ in 0..5 {
        let loss = model.forward_loss(ids.clone());
        bits.push(f64::from(loss.clone().into_scalar::<f32>()).to_bits());
        let mut gradients = model.backward(loss)?;
        bits.push(model.clip_grad_norm(&mut gradients, 0.5)?.to_bits());
        model = optimizer.step(1e-2, model, gradients);
    }
    let full = model.state().full(Recipient::All)?;
    let full = full.iter().map(|(path, data)| (path.to_string(), data.clone())).collect();
    Ok(format!("parts {bits:x?} {:x}", fingerprint(&full)))
}

#[test]
fn tensor_parallel_processes_train_with_the_bits_of_threads() {
    let Some(command) = mpirun(4, "rank_of_split_matrices") else { return };
    let ended = Ended::of(command);
    assert!(ended.success, "{}", ended.text);
    let options = LaunchOptions::new(4).with_device(Device::flex()).with_timeout(4 * TIMEOUT);
    let threads = launch(options, |worker| train(&worker)).unwrap();
    for expected in threads {
        assert!(ended.text.contains(&expected), "{expected}\n{}", ended.text);
    }
}

/// A rank of one group of tensor parallel ranks that stops is named.
#[test]
fn a_stopped_tensor_parallel_rank_is_named() {
    let options = LaunchOptions::new(4).with_device(Device::flex()).with_timeout(TIMEOUT / 3);
    let begin = Instant::now();
    let error = launch(options, |worker: Worker| {
        let device = worker.device();
        let options = FsdpOptions::new().with_tensor_parallel(2);
        let model = fully_shard(Parts::new(device), &worker, options)?;
        if worker.rank() == 3 {
            std::thread::sleep(TIMEOUT);
        }
        let ids = Tensor::from_ints([[0, 5, 11, 23]], device);
        model.backward(model.forward_loss(ids)).map(|_| ())
    });
    let text = error.unwrap_err().to_string();
    assert!(text.contains("rank 3 did not join within"), "{text}");
    assert!(begin.elapsed() < 3 * TIMEOUT, "{:?}", begin.elapsed());
}
