//! Units with several inputs and outputs, options, tuples, early returns and `?` compute as
//! unsharded ones.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Bool, Device, Tensor, TensorData};
use fsdp_runtime::prelude::*;
use fsdp_runtime::state::FullState;

use crate::support::compare::{Within, assert_close};
use crate::support::on_ranks;

#[derive(Debug, PartialEq)]
struct TooLong(usize);

#[derive(UnitValue)]
struct Scored {
    hidden: Tensor<2>,
    score: Option<Tensor<2>>,
    passes: usize,
}

#[derive(Module, Debug)]
#[fsdp_unit]
struct Gate {
    left: Linear,
    right: Linear,
}

#[fsdp_unit]
impl Gate {
    fn forward(
        &self,
        (x, scale): (Tensor<2>, f64),
        mask: Option<Tensor<2, Bool>>,
        names: &[&str],
    ) -> Result<(Tensor<2>, Option<Tensor<2>>), TooLong> {
        if names.len() > 2 {
            return Err(TooLong(names.len()));
        }
        let left = self.left.forward(x.clone()).mul_scalar(scale);
        let Some(mask) = mask else { return Ok((left, None)) };
        let left = checked(left, names)?;
        Ok((left.mask_fill(mask, 0.0), Some(self.right.forward(x))))
    }
}

fn checked(x: Tensor<2>, names: &[&str]) -> Result<Tensor<2>, TooLong> {
    if names.is_empty() { Err(TooLong(0)) } else { Ok(x) }
}

#[derive(Module, Debug)]
#[fsdp_unit]
struct Table {
    rows: Param<Tensor<2>>,
}

#[fsdp_unit]
impl Table {
    /// Returns a view of the parameter.
    fn forward(&self, rows: std::ops::Range<usize>) -> Tensor<2> {
        self.rows.val().slice([rows])
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root, tie("input" = "output"))]
struct Model {
    input: Param<Tensor<2>>,
    gates: (Gate, Gate),
    table: Table,
    output: Param<Tensor<2>>,
}

#[fsdp_unit]
impl Model {
    fn forward(&self, x: Tensor<2>) -> Scored {
        let rows = x.dims()[0];
        let x = x.matmul(self.input.val()) + self.table.forward(1..1 + rows);
        let mask = x.clone().lower_elem(0.0);
        let (a, b) =
            self.gates.0.forward((x.clone(), 0.5), Some(mask), &["a"]).unwrap_or((x.clone(), None));
        let b = b.unwrap_or(x);
        let (c, none) = self.gates.1.forward((b, 2.0), None, &[]).expect("two names at most");
        assert!(none.is_none());
        assert_eq!(
            self.gates.1.forward((c.clone(), 1.0), None, &["", "", ""]).err(),
            Some(TooLong(3))
        );
        // The input weight transposed: a tied weight at its other place.
        let score = (a + c.clone()).matmul(self.output.val().transpose());
        Scored { hidden: c, score: Some(score), passes: 3 }
    }
}

const WIDTH: usize = 12;

fn model(device: &Device) -> Model {
    let linear = || LinearConfig::new(WIDTH, WIDTH).init(device);
    let gate = || Gate { left: linear(), right: linear() };
    let matrix = |rows: usize, by: f32| {
        let data = (0..rows * WIDTH).map(|i| ((i * 37) % 19) as f32 * by).collect::<Vec<_>>();
        Param::from_data(TensorData::new(data, [rows, WIDTH]), device)
    };
    let input = matrix(WIDTH, 0.03);
    let output = input.clone();
    Model { input, gates: (gate(), gate()), table: Table { rows: matrix(6, 0.01) }, output }
}

fn input(device: &Device) -> Tensor<2> {
    let data = (0..3 * WIDTH).map(|i| ((i * 11) % 7) as f32 * 0.3 - 0.8).collect::<Vec<_>>();
    Tensor::from_data(TensorData::new(data, [3, WIDTH]), device)
}

fn scalar(output: Scored) -> Tensor<1> {
    assert_eq!(output.passes, 3);
    output.score.expect("always scored").powf_scalar(2.0).mean() + output.hidden.mean()
}

/// Returns the loss and gradients of plain Burn. A tied weight has one gradient, from both places.
fn expected(model: &Model, device: &Device) -> (f32, Vec<Vec<f32>>) {
    let loss = scalar(model.forward(input(device)));
    let value = loss.clone().into_scalar::<f32>();
    let grads = GradientsParams::from_grads(loss.backward(), model);
    let get = |param: &Param<Tensor<2>>| {
        grads
            .get::<2>(param.id)
            .expect("every weight has a gradient")
            .into_data()
            .iter::<f32>()
            .collect()
    };
    (value, vec![get(&model.input), get(&model.gates.0.left.weight), get(&model.table.rows)])
}

/// Returns the shards of gradients on this rank. A rank may have none of a matrix.
fn shards(model: &Fsdp<Model>, grads: &GradientsParams) -> Vec<Vec<f32>> {
    let get = |param: &Param<Tensor<2>>| {
        grads
            .get::<2>(param.id)
            .map(|grad| grad.into_data().iter::<f32>().collect())
            .unwrap_or_default()
    };
    vec![get(&model.input), get(&model.gates.0.left.weight), get(&model.table.rows)]
}

#[test]
fn values_and_gradients_are_those_of_plain_burn() {
    for strategy in [ShardingStrategy::FullShard, ShardingStrategy::NoShard] {
        for world in [1, 2, 3] {
            let ranks = on_ranks(world, move |worker| {
                let device = worker.device();
                let plain = model(device);
                // One seed gives the same values on every rank.
                let options = FsdpOptions::new().with_strategy(strategy).with_seed(3);
                let sharded = fully_shard(plain, worker, options)?;
                let state = sharded.state().full(Recipient::All)?;
                let plain = restore(&state, device);
                let want = expected(&plain, device);
                let loss = scalar(sharded.forward(input(device)));
                let value = loss.clone().into_scalar::<f32>();
                let grads = sharded.backward(loss)?;
                // A second step must not be disturbed by the first.
                sharded.backward(scalar(sharded.forward(input(device))))?;
                Ok((want, value, shards(&sharded, &grads)))
            });
            let (expected_loss, expected_gradients) = &ranks[0].0;
            let losses: Vec<f32> = ranks.iter().map(|(_, loss, _)| *loss).collect();
            let within = Within::Relative(1e-5);
            assert_close(&losses, &vec![*expected_loss; world], within, "losses");
            assert_eq!(expected_gradients.len(), 3);
            for (weight, expected) in expected_gradients.iter().enumerate() {
                assert!(expected.iter().any(|&element| element.abs() > 1e-3), "weight {weight}");
                let mut parts = ranks.iter().map(|rank| rank.2[weight].clone());
                let found: Vec<f32> = match strategy {
                    ShardingStrategy::FullShard => parts.flatten().collect(),
                    _ => parts.next_back().unwrap_or_default(),
                };
                let what = format_args!("weight {weight}, {strategy} on {world} ranks");
                assert_close(&found, expected, Within::Absolute(1e-5), what);
            }
        }
    }
}

/// Returns the unsharded model of a full state.
fn restore(state: &FullState, device: &Device) -> Model {
    let matrix = |path: &str| Param::from_data(state[path].clone(), device);
    let linear = |gate: &str, side: &str| Linear {
        weight: matrix(&format!("gates.{gate}.{side}.weight")),
        bias: Some(Param::from_data(state[&format!("gates.{gate}.{side}.bias")].clone(), device)),
    };
    let gate = |index: &str| Gate { left: linear(index, "left"), right: linear(index, "right") };
    assert!(!state.contains_key("output"), "a tied weight appears once");
    let input = matrix("input");
    let output = input.clone();
    Model {
        input,
        output,
        gates: (gate("0"), gate("1")),
        table: Table { rows: matrix("table.rows") },
    }
}

#[test]
fn a_parameter_read_outside_a_forward_is_gathered_alone_and_has_a_gradient() {
    let ranks = on_ranks(2, |worker| {
        let device = worker.device();
        let sharded = fully_shard(model(device), worker, FsdpOptions::new().with_seed(3))?;
        let table = sharded.table.rows.val();
        assert_eq!(table.dims(), [6, WIDTH]);
        let data = table.clone().into_data();
        let grads = sharded.backward(table.powf_scalar(2.0).sum())?;
        let mine = shards(&sharded, &grads)[2].clone();
        let doubled = data.iter::<f32>().map(|value| 2.0 * value).collect::<Vec<_>>();
        Ok((doubled, mine, sharded.stats().counts().single_gathers))
    });
    let found: Vec<f32> = ranks.iter().flat_map(|rank| rank.1.clone()).collect();
    assert_eq!(found.len(), 6 * WIDTH);
    assert_close(&found, &ranks[0].0, Within::Absolute(1e-6), "the gradient of a sum of squares");
    assert_eq!(ranks[0].2, 1);
}

#[test]
fn evaluation_has_the_outputs_of_the_trained_model() {
    on_ranks(2, |worker| {
        let device = worker.device();
        let sharded = fully_shard(model(device), worker, FsdpOptions::new().with_seed(3))?;
        let train = sharded.forward(input(device)).hidden.into_data();
        let valid = sharded.valid();
        let plain = device.clone().inner();
        let eval = valid.forward(input(&plain)).hidden;
        assert!(!eval.is_autodiff());
        assert_eq!(eval.into_data().as_bytes(), train.as_bytes());
        drop(valid);
        // Training continues.
        sharded.backward(scalar(sharded.forward(input(device))))?;
        Ok(())
    });
}

#[test]
fn the_annotated_model_trains_unsharded_with_the_same_code() {
    let device = Device::flex().autodiff();
    let model = model(&device);
    let (value, grads) = expected(&model, &device);
    assert!(value.is_finite() && grads.len() == 3);
    assert!(grads.iter().all(|grad| grad.iter().any(|&element| element != 0.0)));
}
