//! Models that cannot be sharded: a typed error on every rank, naming the parameter.

mod support;

use std::time::Duration;

use burn::module::{Module, Param, Reparameterization, Reparameterizer};
use burn::nn::{Linear, LinearConfig, LinearLayout};
use burn::tensor::{Device, Int, Tensor};
use fsdp_runtime::prelude::*;
use fsdp_runtime::{Error, HookedForward, ShardError};
use support::Net;

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Pair {
    first: Linear,
    second: Linear,
}

#[fsdp_unit]
impl Pair {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.second.forward(self.first.forward(x))
    }
}

fn pair(device: &Device) -> Pair {
    let linear = || LinearConfig::new(6, 6).init(device);
    Pair { first: linear(), second: linear() }
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

/// The error of the first rank to fail, when every rank shards what `build` makes of its number.
fn refused<M: HookedForward + 'static>(
    options: FsdpOptions,
    build: impl Fn(usize, &Device) -> M + Send + Sync + 'static,
) -> ShardError {
    let launched = LaunchOptions::new(2).device(Device::flex()).timeout(Duration::from_secs(20));
    let error = launch(launched, move |worker| {
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
    let launched = LaunchOptions::new(2).device(Device::flex());
    let errors = launch(launched, |worker| {
        let sharded = fully_shard(pair(worker.device()), &worker, FsdpOptions::new())?;
        let again = fully_shard((*sharded).clone(), &worker, FsdpOptions::new());
        Ok::<_, Error>(again.map(|_| ()).unwrap_err())
    })
    .unwrap();
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
fn another_reparameterization_is_named() {
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
fn other_floats_and_quantised_weights_are_refused() {
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
        "rank 0 finds it, and no rank waits for its values"
    );
}

#[test]
fn an_empty_model_is_refused() {
    let error = refused(FsdpOptions::new(), |_, _| Empty { layers: Vec::new() });
    assert_eq!(error, ShardError::EmptyModel { model: "Empty" });
}

#[test]
fn ranks_that_built_different_models_are_told_what_differs() {
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
    let unsynced = FsdpOptions::new().sync_module_states(false);
    let error = refused(unsynced.clone(), |rank, device| {
        let model = pair(device);
        let weight = model.first.weight.clone().map(|weight| weight.add_scalar(rank as f32));
        Pair { first: Linear { weight, ..model.first }, ..model }
    });
    let ShardError::ValueMismatch { rank, path } = &error else { panic!("{error}") };
    assert_eq!((rank.index(), path.as_str()), (1, "first.weight"));

    // One seed draws the same on all ranks.
    launch(LaunchOptions::new(3).device(Device::flex()), move |worker| {
        fully_shard(pair(worker.device()), &worker, unsynced.clone().seed(5)).map(|_| ())
    })
    .expect("equal seeds agree");
}

#[test]
fn options_are_checked() {
    let error = refused(FsdpOptions::new().slots(0), |_, device| pair(device));
    assert!(matches!(error, ShardError::InvalidOption { option: "slots", .. }), "{error}");
}

#[test]
fn rank_0s_weights_are_broadcast() {
    let states = launch(LaunchOptions::new(2).device(Device::flex()), |worker| {
        let model = pair(worker.device());
        let offset = worker.rank().index() as f32;
        let weight =
            model.first.weight.clone().map(|weight| weight.zeros_like().add_scalar(offset));
        let model = Pair { first: Linear { weight, ..model.first }, ..model };
        fully_shard(model, &worker, FsdpOptions::new())?.unsharded_state(Recipient::All)
    })
    .unwrap();
    for state in states {
        assert_eq!(state["first.weight"].iter::<f32>().sum::<f32>(), 0.0);
    }
}
