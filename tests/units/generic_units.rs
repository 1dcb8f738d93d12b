//! Generic units: modules with type and constant parameters, hooked in blocks of their own and in
//! those of traits.

use burn::module::{Module, ModuleDisplay};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use fsdp_runtime::prelude::*;

use crate::support::compare::{Within, assert_close};
use crate::support::on_ranks;

const WIDTH: usize = 8;

trait Layer {
    fn apply(&self, x: Tensor<2>) -> Tensor<2>;
}

impl Layer for Linear {
    fn apply(&self, x: Tensor<2>) -> Tensor<2> {
        self.forward(x)
    }
}

#[derive(Module, Debug)]
#[fsdp_unit]
struct Gate {
    left: Linear,
    right: Linear,
}

#[fsdp_unit]
impl Layer for Gate {
    #[fsdp(forward)]
    fn apply(&self, x: Tensor<2>) -> Tensor<2> {
        self.left.forward(x.clone()) * self.right.forward(x)
    }
}

/// A unit around any module.
#[derive(Module, Debug)]
#[fsdp_unit]
struct Residual<M: FsdpModule + ModuleDisplay + Layer> {
    inner: M,
    #[fsdp(key = "layer_norm")]
    norm: LayerNorm,
}

#[fsdp_unit]
impl<M: FsdpModule + ModuleDisplay + Layer> Residual<M> {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        x.clone() + self.inner.apply(self.norm.forward(x))
    }
}

impl<M: FsdpModule + ModuleDisplay + Layer> Layer for Residual<M> {
    fn apply(&self, x: Tensor<2>) -> Tensor<2> {
        self.forward(x)
    }
}

/// A module that is no unit, with a constant parameter, and bounds in a `where` clause.
#[derive(Module, FsdpModule, Debug)]
struct Stack<M, const N: usize>
where
    M: FsdpModule + ModuleDisplay,
{
    layers: [M; N],
}

/// A root whose only block is that of a trait, with a parameter of the trait.
trait Scored<T> {
    fn score(&self, x: Tensor<2>, times: T) -> Tensor<1>;
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Model<M: FsdpModule + ModuleDisplay + Layer> {
    stack: Stack<Residual<M>, 2>,
    last: Residual<Linear>,
}

#[fsdp_unit]
impl<M: FsdpModule + ModuleDisplay + Layer> Scored<f64> for Model<M> {
    #[fsdp(forward)]
    fn score(&self, x: Tensor<2>, times: f64) -> Tensor<1> {
        let x = self.stack.layers.iter().fold(x, |x, layer| layer.forward(x));
        self.last.forward(x).powf_scalar(2.0).mean() * times
    }
}

fn linear(device: &Device) -> Linear {
    LinearConfig::new(WIDTH, WIDTH).init(device)
}

fn residual<M: FsdpModule + ModuleDisplay + Layer>(device: &Device, inner: M) -> Residual<M> {
    Residual { inner, norm: LayerNormConfig::new(WIDTH).init(device) }
}

fn model<M: FsdpModule + ModuleDisplay + Layer>(
    device: &Device,
    inner: impl Fn(&Device) -> M,
) -> Model<M> {
    Model {
        stack: Stack { layers: [0, 1].map(|_| residual(device, inner(device))) },
        last: residual(device, linear(device)),
    }
}

/// Returns the loss and the norm of the gradients; and the names of the units.
fn step<M: FsdpModule + ModuleDisplay + Layer>(
    inner: fn(&Device) -> M,
    options: FsdpOptions,
    world: usize,
) -> ([f64; 2], Vec<(String, String)>) {
    on_ranks(world, move |worker| {
        let device = worker.device();
        let model = fully_shard(model(device, inner), worker, options.clone().with_seed(5))?;
        let loss = model.score(Tensor::ones([2, WIDTH], device), 3.0);
        let value = f64::from(loss.clone().into_scalar::<f32>());
        let mut gradients = model.backward(loss)?;
        let norm = model.clip_grad_norm(&mut gradients, 1e9)?;
        assert_eq!(model.stats().counts().single_gathers, 0);
        let wrapping = model.stats().wrapping();
        let units = wrapping.units.iter();
        let units = units.map(|unit| (unit.path.clone(), unit.ty.to_string())).collect();
        Ok(([value, norm], units))
    })
    .swap_remove(0)
}

fn assert_sharded_as_unsharded<M: FsdpModule + ModuleDisplay + Layer>(
    inner: fn(&Device) -> M,
    expected_units: &[(&str, &str)],
) {
    let none = FsdpOptions::new().with_strategy(ShardingStrategy::NoShard);
    let (expected, units) = step(inner, none, 1);
    let units: Vec<_> = units.iter().map(|(path, ty)| (path.as_str(), ty.as_str())).collect();
    assert_eq!(units, expected_units);
    for options in [
        FsdpOptions::new(),
        FsdpOptions::new().with_activation_checkpointing(ActivationCheckpointing::All),
    ] {
        for world in [1, 2] {
            let (found, _) = step(inner, options.clone(), world);
            assert_close(&found, &expected, Within::Relative(1e-5), format!("{world} ranks"));
        }
    }
}

#[test]
fn generic_units_train_as_unsharded_ones() {
    assert_sharded_as_unsharded(
        linear,
        &[
            ("", "Model"),
            ("stack.layers.0", "Residual"),
            ("stack.layers.1", "Residual"),
            ("last", "Residual"),
        ],
    );
}

#[test]
fn a_generic_unit_holds_other_units() {
    assert_sharded_as_unsharded(
        |device| residual(device, Gate { left: linear(device), right: linear(device) }),
        &[
            ("", "Model"),
            ("stack.layers.0", "Residual"),
            ("stack.layers.0.inner", "Residual"),
            ("stack.layers.0.inner.inner", "Gate"),
            ("stack.layers.1", "Residual"),
            ("stack.layers.1.inner", "Residual"),
            ("stack.layers.1.inner.inner", "Gate"),
            ("last", "Residual"),
        ],
    );
}

#[test]
fn a_type_of_a_generic_unit_is_selected_by_its_parameter() {
    let never = ReshardAfterForward::Never;
    let options = FsdpOptions::new()
        .with_reshard_after_forward_for(unit_types![Residual<Gate>], never)
        .with_wrap(WrapPolicy::TransformerBased(unit_types![Residual<Gate>]));
    let gate = |device: &Device| Gate { left: linear(device), right: linear(device) };
    let (_, units) = step(gate, options, 2);
    let paths: Vec<&str> = units.iter().map(|(path, _)| path.as_str()).collect();
    assert_eq!(paths, ["", "stack.layers.0", "stack.layers.1"], "not `last`, of another type");
}
