//! Runs that train one Llama on meshes of ranks, which split its matrices and its rows.

use std::ops::Range;
use std::path::Path;

use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor, TensorData};
use fsdp_runtime::Error;
use fsdp_runtime::checkpoint::{Checkpoint, Restore};
use fsdp_runtime::lora::LoraConfig;
use fsdp_runtime::nn::AttentionOptions;
use fsdp_runtime::optim::AdamWConfig;
use fsdp_runtime::prelude::*;

use self::net::IGNORED;
pub(crate) use self::net::{Block, HIDDEN, LENGTH, Net, ROWS, ids};
use crate::support::on_ranks;

mod net;

/// Which words a word sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sight {
    /// Those before it.
    Causal,
    /// All words.
    All,
    /// The five before it.
    Window,
    /// Those before it in its document. A row has two or three.
    Packed,
    /// All words but the last three of every second row.
    Padded,
}

impl Sight {
    /// Returns the options of attention for whole rows.
    fn options(self, rows: Range<usize>, device: &Device) -> AttentionOptions {
        let options = AttentionOptions::new();
        match self {
            Self::Causal => causal(),
            Self::All => options,
            Self::Window => causal().with_window(5),
            Self::Packed => {
                let segment = |row: usize, at: usize| (at + row) as i32 / (5 + row as i32 % 4);
                let numbers: Vec<i32> = rows
                    .clone()
                    .flat_map(|row| (0..LENGTH).map(move |at| segment(row, at)))
                    .collect();
                causal().with_segment_data(&TensorData::new(numbers, [rows.len(), LENGTH]))
            }
            Self::Padded => {
                let hidden = |row: usize, at: usize| row % 2 == 1 && at + 3 >= LENGTH;
                let mask: Vec<bool> = rows
                    .clone()
                    .flat_map(|row| (0..LENGTH).map(move |at| hidden(row, at)))
                    .collect();
                let mask = TensorData::new(mask, [rows.len(), LENGTH]);
                options.with_padding_mask(Tensor::from_data(mask, device))
            }
        }
    }
}

/// Returns options by which a word sees those before it.
pub(crate) fn causal() -> AttentionOptions {
    AttentionOptions::new().with_causal(true)
}

/// How a model is trained.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    /// Number of ranks that take different rows.
    pub(crate) data: usize,
    /// Number of ranks that have parts of the same rows.
    pub(crate) context: usize,
    /// Number of ranks that have parts of the same matrices.
    pub(crate) tensor: usize,
    pub(crate) options: FsdpOptions,
    pub(crate) sight: Sight,
    pub(crate) lora: Option<LoraConfig>,
    pub(crate) tied: bool,
    /// Probability with which all dropout layers drop elements.
    pub(crate) dropout: f64,
    pub(crate) micro_batches: usize,
    pub(crate) steps: usize,
}

impl Setup {
    pub(crate) fn new(data: usize, tensor: usize) -> Self {
        Self {
            data,
            context: 1,
            tensor,
            options: FsdpOptions::new().with_seed(3),
            sight: Sight::Causal,
            lora: None,
            tied: false,
            dropout: 0.0,
            micro_batches: 1,
            steps: 20,
        }
    }

    /// Returns the setup of a mesh: ranks that take different rows, that have parts of rows, and parts of
    /// matrices.
    pub(crate) fn mesh([data, context, tensor]: [usize; 3]) -> Self {
        Self { context, ..Self::new(data, tensor) }
    }
}

/// Returns options that change no loss: the other strategies, with shard groups of `shard_size` ranks, and recomputation.
pub(crate) fn variants(base: &FsdpOptions, shard_size: usize) -> [FsdpOptions; 4] {
    let layers = ActivationCheckpointing::Units(unit_types![Block]);
    let hybrid = base.clone().with_strategy(ShardingStrategy::HybridShard);
    [
        base.clone().with_strategy(ShardingStrategy::NoShard),
        base.clone().with_strategy(ShardingStrategy::ShardGradOp),
        hybrid.with_shard_size(shard_size),
        base.clone().with_activation_checkpointing(layers),
    ]
}

/// What a run gives: losses of the whole batch, gradient norms, and the whole parameters.
pub(crate) struct Trained {
    pub(crate) losses: Vec<f64>,
    pub(crate) norms: Vec<f64>,
    pub(crate) full: Vec<(String, Vec<f32>)>,
}

/// Trains a model. Checks that all ranks have equal norms and parameters.
pub(crate) fn train(setup: &Setup) -> Trained {
    let setup = setup.clone();
    let (world, steps) = (setup.data * setup.context * setup.tensor, setup.steps);
    let ranks = on_ranks(world, move |worker| train_rank(&setup, worker));
    for Rank { norms, full, .. } in &ranks {
        assert_eq!(norms, &ranks[0].norms, "every rank has the norm");
        assert!(full == &ranks[0].full, "every rank has the weights, to the bit");
    }
    let mean = |step: usize| {
        let of_data = ranks.iter().filter(|rank| rank.tensor == 0);
        let sums = of_data.map(|rank| rank.losses[step]);
        let [sum, counted] = sums.fold([0.0; 2], |[a, b], [x, y]| [a + x, b + y]);
        sum / counted
    };
    Trained {
        losses: (0..steps).map(mean).collect(),
        norms: ranks[0].norms.clone(),
        full: ranks[0].full.clone(),
    }
}

/// What one rank has.
struct Rank {
    /// Number among the tensor parallel ranks.
    tensor: usize,
    /// For each step, the sum of the losses of this rank's words, and the number of words that count.
    losses: Vec<[f64; 2]>,
    norms: Vec<f64>,
    full: Vec<(String, Vec<f32>)>,
}

fn train_rank(setup: &Setup, worker: &Worker) -> Result<Rank, Error> {
    let device = worker.device().clone();
    let net = Net::new(setup.tied, &device).with_dropout(setup.dropout);
    let net = match &setup.lora {
        Some(lora) => lora.apply(net)?,
        None => net,
    };
    let options = setup.options.clone().with_tensor_parallel(setup.tensor);
    let mut net = fully_shard(net, worker, options.with_context_parallel(setup.context))?;
    let mut optimizer = AdamWConfig::new().init();
    let mesh = net.stats().mesh();
    let part = mesh.context_part(LENGTH).expect("blocks of whole words");
    let each = ROWS / setup.data / setup.micro_batches;
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 0..setup.steps {
        let mut sums = [0.0; 2];
        let mut gradients = None;
        for micro_batch in 0..setup.micro_batches {
            let own = (micro_batch * setup.data + mesh.batch_rank().index()) * each;
            let rows = own..own + each;
            let ids = ids(step % 2, rows.clone(), &device);
            let targets = part.of(ids.clone().narrow(1, 1, LENGTH), 1).flatten(0, 1);
            let ids = part.of(ids.narrow(1, 0, LENGTH), 1);
            let counted = targets.clone().not_equal_elem(IGNORED).int().sum();
            let counted = f64::from(counted.into_scalar::<i32>());
            let sight = setup.sight.options(rows, &device);
            let loss = net.forward_loss(ids, targets, sight);
            sums[0] += f64::from(loss.clone().into_scalar::<f32>());
            sums[1] += counted;
            match micro_batch + 1 < setup.micro_batches {
                true => net.accumulate_sum(loss, counted)?,
                false => gradients = Some(net.backward_sum(loss, counted)?),
            }
        }
        losses.push(sums);
        let mut gradients = gradients.expect("there is a last micro-batch");
        norms.push(net.clip_grad_norm(&mut gradients, 0.5)?);
        net = optimizer.step(3e-3, net, gradients);
    }
    let full = net.state().full(Recipient::All)?;
    let full = full.iter().map(|(path, data)| (path.to_string(), data.iter::<f32>().collect()));
    Ok(Rank { tensor: mesh.tensor_rank().index(), losses, norms, full: full.collect() })
}

fn assert_close(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len());
    for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (found - expected).abs() / expected.abs().max(1.0);
        assert!(error < 1e-5, "{what}, step {step}: {found}, not {expected}");
    }
}

/// Checks that a setup has losses, norms and parameters of the run of one rank.
pub(crate) fn compare(alone: &Trained, setup: &Setup) {
    let Setup { data, context, tensor, sight, lora, .. } = setup;
    let what = format!("{data} x {context} x {tensor} {sight:?} {:?}", lora.is_some());
    let split = train(setup);
    assert_close(&split.losses, &alone.losses, &what);
    assert_close(&split.norms, &alone.norms, &what);
    // Before the steps of the runs can differ by rounding.
    let first = split.norms[0] / alone.norms[0] - 1.0;
    assert!(first.abs() < 1e-6, "{what}: a norm of {}, not {}", split.norms[0], alone.norms[0]);
    assert_eq!(split.full.len(), alone.full.len());
    for ((path, found), (_, expected)) in split.full.iter().zip(&alone.full) {
        assert_eq!(found.len(), expected.len(), "{path}");
        let differ = |(a, b): (&f32, &f32)| (a - b).abs() > 1e-3;
        assert!(!found.iter().zip(expected).any(differ), "{what}: {path}");
    }
}

/// Returns the loss of this rank's words of a batch of all rows, with the number of words that count, and the gradients
/// of the mean over all words.
pub(crate) fn gradients(
    net: &Fsdp<Net>,
    worker: &Worker,
    step: usize,
) -> Result<([f64; 2], GradientsParams), Error> {
    let (mesh, device) = (net.stats().mesh(), worker.device());
    let part = mesh.context_part(LENGTH).expect("blocks of whole words");
    let each = ROWS / mesh.batch_ranks().size();
    let own = mesh.batch_rank().index() * each;
    let ids = ids(step, own..own + each, device);
    let targets = part.of(ids.clone().narrow(1, 1, LENGTH), 1).flatten(0, 1);
    let counted = targets.clone().not_equal_elem(IGNORED).int().sum();
    let counted = f64::from(counted.into_scalar::<i32>());
    let loss = net.forward_loss(part.of(ids.narrow(1, 0, LENGTH), 1), targets, causal());
    let sum = f64::from(loss.clone().into_scalar::<f32>());
    Ok(([sum, counted], net.backward_sum(loss, counted)?))
}

/// Trains some steps on a mesh, resumed from one folder and saved in another, and returns the losses of all words.
pub(crate) fn resumed(
    [data, context, tensor]: [usize; 3],
    steps: Range<usize>,
    resume: Option<&Path>,
    save: Option<&Path>,
) -> Vec<f64> {
    let (resume, save) = (resume.map(Path::to_path_buf), save.map(Path::to_path_buf));
    let mut ranks = on_ranks(data * context * tensor, move |worker| {
        let options = FsdpOptions::new().with_seed(3).with_tensor_parallel(tensor);
        let options = options.with_context_parallel(context);
        let mut net = fully_shard(Net::new(true, worker.device()), worker, options)?;
        let mut optimizer = AdamWConfig::new().init();
        if let Some(folder) = &resume {
            let restore = Restore::new().with_model("net", &mut net);
            restore.with_optimizer("adam", &mut optimizer).load(worker, folder)?;
        }
        let mut losses = Vec::new();
        for step in steps.clone() {
            let (mut sums, gradients) = gradients(&net, worker, step)?;
            worker.all_reduce_sum(&mut sums)?;
            losses.push(sums[0] / sums[1]);
            net = optimizer.step(1e-3, net, gradients);
        }
        if let Some(folder) = &save {
            let checkpoint = Checkpoint::new(0).with_model("net", &net);
            checkpoint.with_optimizer("adam", &optimizer).save(worker, folder)?;
        }
        Ok(losses)
    });
    ranks.swap_remove(0)
}
