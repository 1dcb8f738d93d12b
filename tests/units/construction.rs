//! Models that cannot be sharded give a typed error that names the parameter. Broadcasts at
//! construction.

use burn::module::{Module, ModuleMapper, Param, ParamId, Reparameterization, Reparameterizer};
use burn::nn::{Linear, LinearConfig, LinearLayout};
use burn::tensor::{Device, Int, Tensor, TensorData};
use fsdp_runtime::Error;
use fsdp_runtime::errors::ShardError;
use fsdp_runtime::model::HookedForward;
use fsdp_runtime::prelude::*;
use fsdp_runtime::state::FullState;

use crate::support::compare::assert_same_state;
use crate::support::ranks::launch_options;
use crate::support::small::Pair;
use crate::support::trace::{only, record};
use crate::support::{Net, on_ranks};

fn pair(device: &Device) -> Pair {
    Pair::new([6; 3], device)
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct WithInteger {
    weight: Linear,
    counts: Param<Tensor<1, Int>>,
}

#[fsdp_unit]
impl WithInteger {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.weight.forward(x)
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Empty {
    layers: Vec<Pair2>,
}

#[derive(Module, FsdpModule, Debug)]
struct Pair2 {
    first: Linear,
}

#[fsdp_unit]
impl Empty {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.layers.iter().fold(x, |x, layer| layer.first.forward(x))
    }
}

/// Returns the error of the first rank to fail, where each of two ranks shards the model that
/// `build` returns for it.
fn refused<M: HookedForward + 'static>(
    options: FsdpOptions,
    build: impl Fn(usize, &Device) -> M + Send + Sync + 'static,
) -> ShardError {
    let error = launch(launch_options(2), move |worker| {
        let model = build(worker.rank().index(), worker.device());
        fully_shard(model, &worker, options.clone()).map(|_| ())
    })
    .unwrap_err();
    match error.source.downcast_ref::<Error>() {
        Some(Error::Shard(error)) => error.clone(),
        _ => panic!("{error}"),
    }
}

#[test]
fn an_undeclared_clone_is_named_at_both_places() {
    let error = refused(FsdpOptions::new(), |_, device| {
        let model = pair(device);
        Pair { second: Linear { weight: model.first.weight.clone(), ..model.second }, ..model }
    });
    let (first, second) = ("first.weight".to_string(), "second.weight".to_string());
    assert_eq!(error, ShardError::SharedParameter { first, second });
    assert!(error.to_string().contains(r#"tie("first.weight" = "second.weight")"#), "{error}");
}

#[test]
fn a_model_is_sharded_once() {
    let errors = on_ranks(2, |worker| {
        let sharded = fully_shard(pair(worker.device()), worker, FsdpOptions::new())?;
        let again = fully_shard((*sharded).clone(), worker, FsdpOptions::new());
        Ok(again.map(|_| ()).unwrap_err())
    });
    for error in errors {
        assert_eq!(error, ShardError::AlreadySharded { path: "first.weight".into() }.into());
    }
}

#[derive(Module, Debug)]
struct Half {
    scale: f64,
}

impl Reparameterization for Half {
    const NAME: &'static str = "half";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        base * self.scale
    }
}

struct Halving;

impl Reparameterizer for Halving {
    type Reparam = Half;

    fn reparameterize<const D: usize>(
        &mut self,
        _: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Half>) {
        (param, Some(Half { scale: 0.5 }))
    }
}

#[test]
fn a_reparameterization_of_another_crate_is_refused_by_name() {
    let error =
        refused(FsdpOptions::new(), |_, device| pair(device).apply_reparameterization(Halving));
    let (path, name) = ("first.weight".to_string(), "half".to_string());
    assert_eq!(error, ShardError::Reparameterized { path, name });
}

#[test]
fn integer_parameters_are_refused() {
    let error = refused(FsdpOptions::new(), |_, device| WithInteger {
        weight: LinearConfig::new(4, 4).init(device),
        counts: Param::initialized(Default::default(), Tensor::zeros([4], device)),
    });
    assert_eq!(error, ShardError::NotFloat { path: "counts".into() });
}

#[test]
fn f64_and_quantised_weights_are_refused() {
    use burn::module::Quantizer;
    use burn::tensor::DType;
    use burn::tensor::quantization::{Calibration, QuantValue};
    let error = refused(FsdpOptions::new(), |_, device| {
        let model = pair(device);
        let weight = model.second.weight.clone().map(|weight| weight.cast(DType::F64));
        Pair { second: Linear { weight, ..model.second }, ..model }
    });
    assert_eq!(
        error,
        ShardError::UnsupportedDtype { path: "second.weight".into(), dtype: DType::F64 }
    );

    let error = refused(FsdpOptions::new(), |_, device| {
        let scheme = device.settings().quantization.scheme.with_value(QuantValue::Q8S);
        pair(&device.clone().inner())
            .quantize_weights(&mut Quantizer::new(Calibration::MinMax, scheme))
    });
    let ShardError::UnsupportedDtype { path, dtype: DType::QFloat(_) } = error else {
        panic!("{error}")
    };
    assert_eq!(path, "first.weight");
}

#[test]
fn a_weight_initialised_to_another_shape_than_it_declares_is_refused() {
    let error = refused(FsdpOptions::new(), |_, device| Pair {
        first: LinearConfig::new(6, 4).with_layout(LinearLayout::Col).init(device),
        second: LinearConfig::new(4, 6).init(device),
    });
    let path = "first.weight".to_string();
    assert_eq!(
        error,
        ShardError::InitShape { path, declared: vec![4, 6], found: vec![6, 4] },
        "rank 0 finds the error, and no rank waits for its values"
    );
}

#[test]
fn an_empty_model_is_refused() {
    let error = refused(FsdpOptions::new(), |_, _| Empty { layers: Vec::new() });
    assert_eq!(error, ShardError::EmptyModel { model: "Empty" });
}

#[test]
fn an_error_says_where_the_models_of_ranks_differ() {
    let error = refused(FsdpOptions::new(), |rank, device| Net::new(2 + rank, 0.0, device));
    let ShardError::ModelMismatch { ranks, expected, found } = &error else { panic!("{error}") };
    assert_eq!(ranks.iter().map(|rank| rank.index()).collect::<Vec<_>>(), [1]);
    assert!(found.contains("blocks.2") || expected.contains("nothing"), "{error}");

    let error = refused(FsdpOptions::new(), |rank, device| {
        let mut model = pair(device);
        model.second = LinearConfig::new(6, 6 + rank).init(device);
        model
    });
    assert!(error.to_string().contains("second.weight [6, 7]"), "{error}");
}

#[test]
fn without_sync_every_rank_must_have_the_same_weights() {
    let unsynced = FsdpOptions::new().with_sync_module_states(false);
    let error = refused(unsynced.clone(), |rank, device| {
        let model = pair(device);
        let weight = model.first.weight.clone().map(|weight| weight.add_scalar(rank as f32));
        Pair { first: Linear { weight, ..model.first }, ..model }
    });
    let ShardError::ValueMismatch { rank, path } = &error else { panic!("{error}") };
    assert_eq!((rank.index(), path.as_str()), (1, "first.weight"));

    // One seed gives the same values on all ranks.
    on_ranks(3, move |worker| {
        fully_shard(pair(worker.device()), worker, unsynced.clone().with_seed(5)).map(|_| ())
    });
}

#[test]
fn options_are_checked() {
    let error = refused(FsdpOptions::new().with_gather_buffers(0), |_, device| pair(device));
    assert!(matches!(error, ShardError::InvalidOption { option: "gather_buffers", .. }), "{error}");
}

#[test]
fn the_weights_of_rank_0_are_broadcast() {
    let states = on_ranks(2, |worker| {
        let model = pair(worker.device());
        // No rank has zeros, which a buffer that nothing was written to may hold.
        let value = 0.25 + worker.rank().index() as f32;
        let of = |linear: Linear| {
            let weight = linear.weight.map(|weight| weight.full_like(value));
            Linear { weight, ..linear }
        };
        let model = Pair { first: of(model.first), second: of(model.second) };
        fully_shard(model, worker, FsdpOptions::new())?.state().full(Recipient::All)
    });
    for state in states {
        // Rank 0 has the shard of the first weight, and rank 1 that of the second one.
        for path in ["first.weight", "second.weight"] {
            assert_eq!(state[path].iter::<f32>().collect::<Vec<_>>(), [0.25; 6 * 6], "{path}");
        }
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root, tie("first" = "second"))]
struct Tied {
    first: Linear,
    second: Linear,
}

#[fsdp_unit]
impl Tied {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.second.forward(self.first.forward(x))
    }
}

/// Replaces the initial values of each parameter by numbers that do not depend on Burn's random
/// generator.
struct Numbered(usize);

impl ModuleMapper for Numbered {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.0 += 1;
        let first = self.0 * 7919;
        let (device, shape) = (param.lazy_device(), param.lazy_shape());
        let declared = shape.clone();
        let value = move |device: &Device, tracked| {
            let number = |at: usize| ((first + at * 31) % 10_007) as f32 * 0.37 - 1e3;
            let numbers: Vec<f32> = (0..declared.num_elements()).map(number).collect();
            let data = TensorData::new(numbers, declared);
            Tensor::from_data(data, device).set_require_grad(tracked)
        };
        Param::uninitialized(ParamId::new(), value, device, true, shape)
    }
}

fn tied(device: &Device) -> Tied {
    let Pair { first, second } = pair(device).map(&mut Numbered(0));
    let weight = first.weight.clone();
    Tied { first, second: Linear { weight, ..second } }
}

/// Shards a model over two ranks. Returns the lines of its broadcasts, and the full state on each
/// rank.
fn broadcasts<M: FsdpModule + HookedForward + 'static>(
    options: FsdpOptions,
    build: fn(&Device) -> M,
) -> (Vec<String>, Vec<FullState>) {
    let ranks = on_ranks(2, move |worker| {
        let model = build(worker.device());
        let (model, lines) = record(|| fully_shard(model, worker, options.clone()));
        Ok((only(&lines, &["broadcast"]), model?.state().full(Recipient::All)?))
    });
    let (lines, states): (Vec<_>, Vec<_>) = ranks.into_iter().unzip();
    assert_eq!(lines[0], lines[1], "every rank has the same broadcasts");
    (lines.into_iter().next().unwrap(), states)
}

/// Asserts that every rank has the same bits with and without broadcasts. Returns the lines of the
/// broadcasts.
fn assert_values<M: FsdpModule + HookedForward + 'static>(
    options: FsdpOptions,
    build: fn(&Device) -> M,
) -> Vec<String> {
    let (lines, states) = broadcasts(options.clone(), build);
    let (none, own) = broadcasts(options.with_sync_module_states(false), build);
    assert_eq!(none, [""; 0]);
    for state in states {
        assert_same_state(&state, &own[0], "broadcast");
    }
    lines
}

fn net(device: &Device) -> Net {
    Net::new(2, 0.0, device).map(&mut Numbered(0))
}

#[test]
fn small_replicated_parameters_of_a_unit_are_broadcast_together() {
    let expected = [
        "broadcast embed.word.weight",
        "broadcast embed.position",
        "broadcast the small parameters of embed",
        "broadcast blocks.0.up.weight",
        "broadcast blocks.0.down.weight",
        "broadcast the small parameters of blocks.0",
        "broadcast blocks.1.up.weight",
        "broadcast blocks.1.down.weight",
        "broadcast the small parameters of blocks.1",
        "broadcast head.weight",
        "broadcast the small parameters of (root)",
    ];
    assert_eq!(assert_values(FsdpOptions::new(), net), expected);

    // Replicated matrices are broadcast with them.
    let whole = FsdpOptions::new().with_strategy(ShardingStrategy::NoShard);
    assert_eq!(assert_values(whole.clone(), net).len(), 4, "one broadcast a unit");
    assert_eq!(assert_values(whole, tied).len(), 1, "a tied weight is broadcast once");
    let policy = OffloadPolicy::Params { pin_memory: false };
    assert_eq!(assert_values(FsdpOptions::new().with_offload(policy), net).len(), expected.len());
    assert_eq!(assert_values(FsdpOptions::new().with_persist_below(200), tied).len(), 1);
}

#[test]
fn large_replicated_parameters_are_broadcast_alone() {
    fn build(device: &Device) -> Pair {
        let first = LinearConfig::new(256, 256).init(device);
        let second = LinearConfig::new(256, 255).init(device);
        Pair { first, second }.map(&mut Numbered(0))
    }
    let whole = FsdpOptions::new().with_strategy(ShardingStrategy::NoShard);
    let lines = ["broadcast first.weight", "broadcast the small parameters of (root)"];
    assert_eq!(assert_values(whole, build), lines);
}

#[test]
fn a_frozen_bias_is_frozen_on_the_ranks_that_receive_it() {
    let options = launch_options(2).with_device(Device::flex().autodiff());
    let tracked = launch(options, |worker| {
        let mut model = pair(worker.device());
        model.second.bias = model.second.bias.map(|bias| bias.set_require_grad(false));
        let model = fully_shard(model, &worker, FsdpOptions::new())?;
        let tracked = |linear: &Linear| linear.bias.as_ref().unwrap().base().is_require_grad();
        Ok::<_, Error>((tracked(&model.first), tracked(&model.second)))
    })
    .unwrap();
    assert_eq!(tracked, [(true, false); 2]);
}
