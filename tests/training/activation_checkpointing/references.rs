//! Arguments of a recomputed unit that are references are kept as clones.

use std::cell::Cell;

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use fsdp_runtime::Error;
use fsdp_runtime::errors::{LaunchError, ScheduleError};
use fsdp_runtime::prelude::*;

use super::{ALL, of_rank_0};
use crate::support::compare::assert_same_bits;
use crate::support::ranks::launch_options;

const WIDTH: usize = 6;

/// A module without parameters, which holds a table.
#[derive(Module, FsdpModule, Debug)]
struct Tables {
    offset: Tensor<1>,
}

/// A value that is neither a module nor a `UnitValue`.
#[derive(Clone, Debug)]
struct Settings {
    factor: Cell<f64>,
    /// Number of forwards that had this value.
    forwards: Cell<usize>,
}

#[derive(Module, Debug)]
#[fsdp_unit]
struct Block {
    linear: Linear,
}

#[fsdp_unit]
impl Block {
    fn forward(
        &self,
        x: Tensor<2>,
        scale: &Tensor<2>,
        tables: &Tables,
        settings: &Settings,
        name: &String,
    ) -> Tensor<2> {
        assert_eq!(name, "block");
        settings.forwards.set(settings.forwards.get() + 1);
        let x = self.linear.forward(x) * scale.clone() + tables.offset.clone().unsqueeze();
        x.mul_scalar(settings.factor.get()).tanh()
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Model {
    blocks: Vec<Block>,
    scale: Linear,
    tables: Tables,
}

#[fsdp_unit]
impl Model {
    fn new(device: &Device) -> Self {
        let linear = || LinearConfig::new(WIDTH, WIDTH).init(device);
        let blocks = (0..3).map(|_| Block { linear: linear() }).collect();
        let offset = Tensor::from_floats([0.1, 0.2, 0.3, -0.1, -0.2, -0.3], device);
        Self { blocks, scale: linear(), tables: Tables { offset } }
    }

    fn forward(&self, x: Tensor<2>, settings: &Settings) -> Tensor<1> {
        // A tracked tensor, which all blocks take by reference.
        let scale = self.scale.forward(x.clone());
        let name = "block".to_string();
        let mut x = x;
        for block in &self.blocks {
            x = block.forward(x, &scale, &self.tables, settings, &name);
        }
        x.powf_scalar(2.0).mean()
    }
}

/// Returns the loss, the gradients of rank 0 and the number of forwards that changed the caller's
/// settings.
fn step(world: usize, which: ActivationCheckpointing) -> (f32, Vec<f32>, usize) {
    of_rank_0(world, move |worker| {
        let device = worker.device();
        let options = FsdpOptions::new()
            .with_seed(5)
            .with_strategy(ShardingStrategy::NoShard)
            .with_activation_checkpointing(which);
        let model = fully_shard(Model::new(device), worker, options)?;
        let settings = Settings { factor: Cell::new(1.5), forwards: Cell::new(0) };
        let loss = model.forward(Tensor::ones([2, WIDTH], device), &settings);
        let value = loss.clone().into_scalar::<f32>();
        // A recomputed unit has the value of its forward.
        settings.factor.set(9.0);
        let gradients = model.backward(loss)?;
        let numbers = |gradients: &GradientsParams, weight: &Param<Tensor<2>>| -> Vec<f32> {
            let gradient = gradients.get::<2>(weight.id).expect("a gradient");
            gradient.into_data().iter().collect()
        };
        let weights = model.blocks.iter().map(|block| &block.linear.weight);
        let weights = weights.chain([&model.scale.weight]);
        let gradients = weights.flat_map(|weight| numbers(&gradients, weight)).collect();
        Ok((value, gradients, settings.forwards.get()))
    })
}

#[test]
fn references_are_kept_and_their_tensors_have_gradients() {
    for world in [1, 2] {
        let (loss, gradients, forwards) = step(world, ActivationCheckpointing::None);
        assert_eq!(forwards, 3, "the caller's value itself");
        let (recomputed, found, forwards) = step(world, ALL);
        assert_same_bits(&[recomputed], &[loss], "the loss");
        assert_same_bits(&found, &gradients, "gradients");
        assert_eq!(forwards, 0, "recomputed units have clones");
        let of_scale = &gradients[gradients.len() - WIDTH * WIDTH..];
        assert!(of_scale.iter().any(|gradient| *gradient != 0.0), "behind the reference");
    }
}

/// A module whose parameter FSDP does not see at compile time.
#[derive(Module, FsdpModule, Debug)]
struct Hidden {
    #[fsdp(leaf)]
    linear: Linear,
}

#[derive(Module, Debug)]
#[fsdp_unit]
struct Borrower {
    linear: Linear,
}

#[fsdp_unit]
impl Borrower {
    fn forward(&self, x: Tensor<2>, hidden: &Hidden) -> Tensor<2> {
        hidden.linear.forward(self.linear.forward(x))
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Lender {
    borrower: Borrower,
    hidden: Hidden,
}

#[fsdp_unit]
impl Lender {
    fn forward(&self, x: Tensor<2>) -> Tensor<1> {
        self.borrower.forward(x, &self.hidden).mean()
    }
}

fn lend(frozen: bool, which: ActivationCheckpointing) -> Result<(), LaunchError> {
    let ranks = launch(launch_options(2), move |worker| {
        let device = worker.device();
        let linear = || LinearConfig::new(WIDTH, WIDTH).init(device);
        let hidden = Hidden { linear: linear() };
        let hidden = if frozen { hidden.no_grad() } else { hidden };
        let model = Lender { borrower: Borrower { linear: linear() }, hidden };
        let options = FsdpOptions::new().with_activation_checkpointing(which);
        let model = fully_shard(model, &worker, options)?;
        model.backward(model.forward(Tensor::ones([2, WIDTH], device))).map(|_| ())
    });
    ranks.map(|_| ())
}

#[test]
fn a_trained_parameter_behind_a_reference_is_an_error_of_the_forward() {
    let error = lend(false, ALL).unwrap_err();
    let Some(Error::Schedule(ScheduleError::TrainedReference { unit, input })) =
        error.source.downcast_ref::<Error>()
    else {
        panic!("{error}")
    };
    assert_eq!(unit, "`borrower`");
    assert!(input.ends_with("::Hidden"), "{input}");
    lend(false, ActivationCheckpointing::None).expect("nothing is recomputed");
    lend(true, ALL).expect("a frozen parameter has no gradient");
}
