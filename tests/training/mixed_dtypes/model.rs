//! A model whose nested and tied units hold matrices of several dtypes, and the runs that are
//! compared.

use std::path::PathBuf;

use burn::module::{Module, Param};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::activation::tanh;
use burn::tensor::{DType, Device, Tensor, TensorData};
use fsdp_runtime::Error;
use fsdp_runtime::checkpoint::{Checkpoint, Restore};
use fsdp_runtime::model::Counts;
use fsdp_runtime::optim::WholeParam;
use fsdp_runtime::prelude::*;
use fsdp_runtime::state::FullState;

use crate::support::of_rank_0;
pub use crate::support::on_ranks;

pub const FULL: DType = DType::F32;
pub const HALF: DType = DType::BF16;
pub const OTHER: DType = DType::F16;

pub const WIDTH: usize = 20;
pub const HIDDEN: usize = 27;
pub const BLOCKS: usize = 3;
/// Rows of a global batch. Every world size of the tests divides it.
pub const ROWS: usize = 12;

/// `x * weight`, computed in the weight's dtype, and the result in f32.
fn apply(x: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
    x.cast(weight.dtype()).matmul(weight).cast(FULL)
}

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Inner {
    pub gate: Param<Tensor<2>>,
    pub mix: Param<Tensor<2>>,
}

#[fsdp_unit]
impl Inner {
    /// Returns a parameter too: a view of the gather buffer of the second dtype.
    pub fn forward(&self, x: Tensor<2>) -> (Tensor<2>, Tensor<2>) {
        let (gate, mix) = (self.gate.val(), self.mix.val());
        let one = gate.dtype() == mix.dtype();
        let expected = if one { gate.dtype() } else { HALF };
        assert_eq!(x.dtype(), expected, "an input is cast only where the unit has one dtype");
        (apply(tanh(apply(x.clone(), gate)), mix.clone()) + x.cast(FULL), mix)
    }
}

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Block {
    pub up: Param<Tensor<2>>,
    pub gain: Param<Tensor<1>>,
    pub inner: Inner,
    pub middle: Param<Tensor<2>>,
    pub shift: Param<Tensor<1>>,
    pub down: Param<Tensor<2>>,
    pub last: Param<Tensor<2>>,
}

#[fsdp_unit]
impl Block {
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let (up, middle, down) = (self.up.val(), self.middle.val(), self.down.val());
        let one = up.dtype() == middle.dtype() && middle.dtype() == down.dtype();
        let expected = if one { up.dtype() } else { FULL };
        assert_eq!(x.dtype(), expected);
        let hidden = tanh(apply(x.clone(), up)) * self.gain.val().cast(FULL).unsqueeze();
        let (hidden, mix) = self.inner.forward(hidden.cast(HALF));
        let hidden = hidden + mix.cast(FULL).mean_dim(0);
        let shift = self.shift.val().cast(FULL).unsqueeze();
        let hidden = tanh(apply(hidden, middle) + shift);
        x.cast(FULL) + apply(tanh(apply(hidden, down)), self.last.val())
    }
}

/// A unit of one dtype among the others.
#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Plain {
    pub weight: Param<Tensor<2>>,
}

#[fsdp_unit]
impl Plain {
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        apply(x, self.weight.val())
    }
}

/// The tied weight has another dtype than the root's other matrix.
#[derive(Module, Debug)]
#[fsdp_unit(root, tie("tokens" = "output"))]
pub struct Net {
    pub tokens: Param<Tensor<2>>,
    pub scale: Param<Tensor<2>>,
    pub blocks: Vec<Block>,
    pub plain: Plain,
    pub output: Param<Tensor<2>>,
}

#[fsdp_unit]
impl Net {
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = apply(apply(x, self.tokens.val()), self.scale.val());
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
        apply(self.plain.forward(x), self.output.val().transpose())
    }
}

/// Returns the dtype of a parameter. Vectors have another dtype than the matrices of their module.
pub fn dtype(path: &str) -> DType {
    match path.rsplit('.').next().expect("a path has a last part") {
        "tokens" | "gate" | "middle" | "shift" => HALF,
        "down" => OTHER,
        _ => FULL,
    }
}

impl Net {
    /// Builds every parameter from `value`, which is called with its path and its number of
    /// elements.
    pub fn from(device: &Device, value: impl Fn(&str, &[usize]) -> TensorData) -> Self {
        let tensor = |path: &str, shape: &[usize]| {
            let tensor = Tensor::<1>::from_data(value(path, &[shape.iter().product()]), device);
            tensor.cast(dtype(path))
        };
        let matrix =
            |path: &str, shape: [usize; 2]| Param::from_tensor(tensor(path, &shape).reshape(shape));
        let vector = |path: &str, len: usize| Param::from_tensor(tensor(path, &[len]));
        let block = |index: usize| {
            let at = |name: &str| format!("blocks.{index}.{name}");
            Block {
                up: matrix(&at("up"), [WIDTH, HIDDEN]),
                gain: vector(&at("gain"), HIDDEN),
                inner: Inner {
                    gate: matrix(&at("inner.gate"), [HIDDEN, 9]),
                    mix: matrix(&at("inner.mix"), [9, HIDDEN]),
                },
                middle: matrix(&at("middle"), [HIDDEN, HIDDEN]),
                shift: vector(&at("shift"), HIDDEN),
                down: matrix(&at("down"), [HIDDEN, 7]),
                last: matrix(&at("last"), [7, WIDTH]),
            }
        };
        let tokens = matrix("tokens", [5, WIDTH]);
        Self {
            output: tokens.clone(),
            tokens,
            scale: matrix("scale", [WIDTH, WIDTH]),
            blocks: (0..BLOCKS).map(block).collect(),
            plain: Plain { weight: matrix("plain.weight", [WIDTH, WIDTH]) },
        }
    }

    /// Returns a model with the same values on every rank.
    pub fn new(device: &Device) -> Self {
        Self::from(device, |path, shape| {
            let seed: usize = path.bytes().map(usize::from).sum();
            let at = |i: usize| (((i + seed) * 7919 % 1009) as f32 / 504.5 - 1.0) * 0.4;
            TensorData::new((0..shape[0]).map(at).collect::<Vec<_>>(), shape.to_vec())
        })
    }

    /// Returns the unsharded model with the parameters of a full state, in the dtypes that units
    /// compute with.
    pub fn of_state(state: &FullState, device: &Device) -> Self {
        Self::from(device, |path, shape| {
            TensorData::new(state[path].iter::<f32>().collect::<Vec<_>>(), shape.to_vec())
        })
    }
}

pub fn rows(step: usize, rows: std::ops::Range<usize>, device: &Device) -> Tensor<2> {
    let at = |i: usize| ((i * 37 + step * 7919) % 101) as f32 / 50.0 - 1.0;
    let data: Vec<f32> = (5 * rows.start..5 * rows.end).map(at).collect();
    Tensor::from_data(TensorData::new(data, [rows.len(), 5]), device)
}

/// Returns a sum over rows, so that a row's gradient does not depend on the number of rows.
pub fn loss(output: Tensor<2>) -> Tensor<1> {
    output.powf_scalar(2.0).sum() * 0.5
}

/// One training run of `steps` steps, of `batches` micro-batches each.
#[derive(Clone, Debug)]
pub struct Run {
    pub world: usize,
    pub options: FsdpOptions,
    pub batches: usize,
    pub steps: usize,
    pub from: Option<PathBuf>,
    pub save: Option<PathBuf>,
    /// An optimizer that needs whole matrices, in place of AdamW.
    pub whole: Option<fn() -> ModuleOptimizer>,
}

/// What rank 0 has at the end of a run.
#[derive(Debug)]
pub struct Outcome {
    pub losses: Vec<u32>,
    pub norms: Vec<u64>,
    pub state: FullState,
    pub counts: Counts,
    pub gather_buffer_bytes: usize,
    pub peak_unsharded_bytes: usize,
}

impl Run {
    pub fn new(world: usize, options: FsdpOptions) -> Self {
        Self { world, options, batches: 1, steps: 3, from: None, save: None, whole: None }
    }

    pub fn launch(&self) -> Outcome {
        let run = self.clone();
        of_rank_0(self.world, move |worker| run.rank(worker))
    }

    fn rank(&self, worker: &Worker) -> Result<Outcome, Error> {
        let device = worker.device();
        let mut net = fully_shard(Net::new(device), worker, self.options.clone().with_seed(3))?;
        let mut optimizer = AdamWConfig::new().init();
        let mut whole = self.whole.map(|whole| WholeParam::new(whole()));
        if let Some(folder) = &self.from {
            Restore::new()
                .with_model("net", &mut net)
                .with_optimizer("own", &mut optimizer)
                .load(worker, folder)?;
        }
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for step in 0..self.steps {
            let mut grads = gradients(&net, worker, step, self.batches, |loss| {
                losses.push(loss.to_bits());
            })?;
            norms.push(net.clip_grad_norm(&mut grads, 0.5)?.to_bits());
            net = match &mut whole {
                Some(whole) => whole.step(1e-2, net, grads)?,
                None => optimizer.step(1e-2, net, grads),
            };
        }
        if let Some(folder) = &self.save {
            let saved = Checkpoint::new(self.steps as u64);
            saved.with_model("net", &net).with_optimizer("own", &optimizer).save(worker, folder)?;
        }
        Ok(Outcome {
            losses,
            norms,
            state: net.state().full(Recipient::All)?,
            counts: net.stats().counts(),
            gather_buffer_bytes: net.stats().gather_buffer_bytes(),
            peak_unsharded_bytes: net.stats().peak_unsharded_bytes(),
        })
    }
}

/// Returns the gradients of this rank's rows, in micro-batches, whose losses are reported.
pub fn gradients(
    net: &Fsdp<Net>,
    worker: &Worker,
    step: usize,
    batches: usize,
    mut report: impl FnMut(f32),
) -> Result<GradientsParams, Error> {
    let (rank, len) = (worker.rank().index(), ROWS / worker.world().size());
    for batch in 0..batches {
        let at = batch * ROWS + rank * len;
        let loss = loss(net.forward(rows(step, at..at + len, worker.device())));
        report(loss.clone().into_scalar::<f32>());
        if batch + 1 == batches {
            return net.backward(loss);
        }
        net.accumulate(loss)?;
    }
    unreachable!("a step has a batch")
}
