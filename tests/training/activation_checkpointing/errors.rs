//! A unit that cannot be recomputed is an error at construction, or a typed error of the backward.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use burn::module::Module;
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Distribution, Tensor};
use fsdp_runtime::Error;
use fsdp_runtime::errors::{LaunchError, NotRecomputable, RankPanic, ScheduleError, ShardError};
use fsdp_runtime::nn::{Dropout, DropoutConfig};
use fsdp_runtime::prelude::*;

use super::{ALL, of_rank_0};

const WIDTH: usize = 8;

/// A unit that takes its scale by exclusive reference.
#[derive(Module, Debug)]
#[fsdp_unit]
struct Borrowing {
    linear: Linear,
}

#[fsdp_unit]
impl Borrowing {
    fn forward(&self, x: Tensor<2>, scale: &mut f64) -> Tensor<2> {
        self.linear.forward(x).mul_scalar(*scale)
    }
}

/// An argument of a type that is not a `UnitValue`.
#[derive(Clone, Debug)]
struct Mode;

#[derive(Module, Debug)]
#[fsdp_unit]
struct Moded {
    linear: Linear,
}

#[fsdp_unit]
impl Moded {
    fn forward(&self, x: Tensor<2>, _mode: Mode) -> Tensor<2> {
        self.linear.forward(x)
    }
}

#[derive(Module, Debug)]
#[fsdp_unit]
struct Attending {
    attention: MultiHeadAttention,
}

#[fsdp_unit]
impl Attending {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.attention.forward(MhaInput::self_attn(x.unsqueeze())).context.squeeze_dim(0)
    }
}

#[derive(Module, Debug)]
#[fsdp_unit]
struct Normed {
    norm: BatchNorm,
}

#[fsdp_unit]
impl Normed {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.norm.forward(x)
    }
}

thread_local! {
    /// Forwards of [`Fickle`] on this rank so far, and what the next ones do.
    static FICKLE: Cell<(usize, &'static str)> = const { Cell::new((0, "")) };
}

thread_local! {
    /// A tensor that [`Fickle`] uses and has from neither its inputs nor its parameters.
    static ELSEWHERE: RefCell<Option<Tensor<2>>> = const { RefCell::new(None) };
}

/// A unit whose second forward differs from the first.
#[derive(Module, Debug)]
#[fsdp_unit(checkpoint)]
struct Fickle {
    linear: Linear,
    dropout: Dropout,
}

#[fsdp_unit]
impl Fickle {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let (forwards, what) = FICKLE.get();
        FICKLE.set((forwards + 1, what));
        let x = self.dropout.forward(self.linear.forward(x));
        match (forwards, what) {
            (1, "rows") => x.narrow(0, 0, 1),
            (1, "draws") => self.dropout.forward(x),
            (1, "panics") => panic!("the second time is one too many"),
            (_, "random") => {
                let noise = Tensor::random(x.shape(), Distribution::Normal(0.0, 1.0), &x.device());
                x + noise
            }
            (_, "elsewhere") => x * ELSEWHERE.with_borrow(|it| it.clone().expect("set before")),
            _ => x,
        }
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Model {
    borrowing: Option<Borrowing>,
    moded: Option<Moded>,
    attending: Option<Attending>,
    normed: Option<Normed>,
    fickle: Option<Fickle>,
    head: Linear,
}

#[fsdp_unit]
impl Model {
    fn forward(&self, x: Tensor<2>) -> Tensor<1> {
        let x = match &self.borrowing {
            Some(borrowing) => borrowing.forward(x, &mut 2.0),
            None => x,
        };
        let x = self.moded.iter().fold(x, |x, moded| moded.forward(x, Mode));
        let x = self.attending.iter().fold(x, |x, attending| attending.forward(x));
        let x = self.normed.iter().fold(x, |x, normed| normed.forward(x));
        let x = self.fickle.iter().fold(x, |x, fickle| fickle.forward(x));
        self.head.forward(x).powf_scalar(2.0).mean()
    }
}

fn linear(device: &Device) -> Linear {
    LinearConfig::new(WIDTH, WIDTH).init(device)
}

fn model(device: &Device) -> Model {
    Model {
        borrowing: None,
        moded: None,
        attending: None,
        normed: None,
        fickle: None,
        head: linear(device),
    }
}

fn fickle(device: &Device) -> Option<Fickle> {
    Some(Fickle { linear: linear(device), dropout: DropoutConfig::new(0.1).init() })
}

/// Returns the error of sharding what `build` returns, on one rank.
fn refused(
    which: ActivationCheckpointing,
    build: impl Fn(&Device) -> Model + Send + Sync + 'static,
) -> ShardError {
    of_rank_0(1, move |worker| {
        let options = FsdpOptions::new().with_activation_checkpointing(which);
        let model = build(worker.device());
        match fully_shard(model, worker, options) {
            Err(Error::Shard(error)) => Ok(error),
            other => panic!("{:?}", other.map(|_| ())),
        }
    })
}

#[test]
fn a_forward_whose_inputs_cannot_be_kept_is_an_error_at_construction() {
    let borrowing = |device: &Device| Model {
        borrowing: Some(Borrowing { linear: linear(device) }),
        ..model(device)
    };
    let error = refused(ALL, borrowing);
    let expected = ShardError::NotRecomputable {
        unit: "`borrowing`".into(),
        ty: "Borrowing",
        forward: "forward",
        input: "scale",
        reason: NotRecomputable::Borrowed,
    };
    assert_eq!(error, expected);
    assert!(error.to_string().contains("take it by value"), "{error}");

    let moded =
        |device: &Device| Model { moded: Some(Moded { linear: linear(device) }), ..model(device) };
    let error = refused(ActivationCheckpointing::Units(unit_types![Moded]), moded).to_string();
    assert!(error.contains("`_mode` of `Moded::forward` cannot be kept"), "{error}");
    assert!(error.contains("#[derive(Clone, UnitValue)]"), "{error}");

    // Units that are not chosen train as they did.
    of_rank_0(1, move |worker| {
        let model =
            Model { borrowing: borrowing(worker.device()).borrowing, ..moded(worker.device()) };
        let model = fully_shard(model, worker, FsdpOptions::new())?;
        model.backward(model.forward(Tensor::ones([2, WIDTH], worker.device())))
    });
}

#[test]
fn a_module_that_differs_from_call_to_call_is_an_error_at_construction() {
    let attending = |dropout: f64| {
        move |device: &Device| {
            let attention = MultiHeadAttentionConfig::new(WIDTH, 2).with_dropout(dropout);
            let attending = Some(Attending { attention: attention.init(device) });
            Model { attending, ..model(device) }
        }
    };
    let error = refused(ALL, attending(0.1)).to_string();
    let refused_part = "`attending` is under activation checkpointing, but `attending.attention`";
    assert!(error.contains(refused_part), "{error}");
    assert!(error.contains("fsdp_runtime::nn::Dropout"), "{error}");
    of_rank_0(1, move |worker| {
        let model = attending(0.0)(worker.device());
        let model =
            fully_shard(model, worker, FsdpOptions::new().with_activation_checkpointing(ALL))?;
        model.backward(model.forward(Tensor::ones([2, WIDTH], worker.device())))
    });

    let error = refused(ALL, |device| Model {
        normed: Some(Normed { norm: BatchNormConfig::new(WIDTH).init(device) }),
        ..model(device)
    });
    assert!(
        matches!(&error, ShardError::ModuleNotRecomputable { path, .. } if path == "normed.norm.running_mean")
    );
    assert!(error.to_string().contains("GroupNorm"), "{error}");
}

#[test]
fn a_unit_type_that_the_model_lacks_is_an_error_at_construction() {
    let error = refused(ActivationCheckpointing::Units(unit_types![Fickle, Moded]), |device| {
        Model { fickle: fickle(device), ..model(device) }
    });
    let text = error.to_string();
    assert!(text.contains("`activation_checkpointing` is a list with `Moded`"), "{text}");
    assert!(text.contains("the units of this model are `Model`, "), "{text}");
}

#[test]
fn an_ignored_parameter_that_trains_is_an_error_at_construction() {
    let error = of_rank_0(1, |worker| {
        let shard = |frozen: bool, options: FsdpOptions| {
            let fickle = fickle(worker.device());
            let fickle = fickle.map(|it| if frozen { it.freeze() } else { it });
            let id = fickle.as_ref().map(|fickle| fickle.linear.weight.id);
            let model = Model { fickle, ..model(worker.device()) };
            fully_shard(model, worker, options.with_ignored_params(id)).map(|_| ())
        };
        let none = ActivationCheckpointing::None;
        shard(true, FsdpOptions::new())?;
        shard(false, FsdpOptions::new().with_activation_checkpointing(none))?;
        Ok(shard(false, FsdpOptions::new()).unwrap_err())
    });
    let expected = ShardError::IgnoredInRecomputedUnit {
        unit: "`fickle`".into(),
        path: "fickle.linear.weight".into(),
    };
    assert_eq!(error, expected.into());
}

/// Trains a step that fails and then one that does not. Returns the error, and whether the second
/// step succeeded, on each rank.
fn fail(what: &'static str) -> Result<[(Error, bool); 2], LaunchError> {
    let options =
        LaunchOptions::new(2).with_device(Device::flex()).with_timeout(Duration::from_secs(30));
    let ranks = launch(options, move |worker| {
        let device = worker.device();
        let model = Model { fickle: fickle(device), ..model(device) };
        let model = fully_shard(model, &worker, FsdpOptions::new().with_seed(1))?;
        let step = || model.backward(model.forward(Tensor::ones([2, WIDTH], device)));
        FICKLE.set((0, what));
        let error = step().map(|_| ()).unwrap_err();
        FICKLE.set((0, ""));
        model.collect_gradients()?;
        Ok::<_, Error>((error, step().is_ok()))
    });
    Ok(ranks?.try_into().expect("a launch of two ranks returns two values"))
}

#[test]
fn a_forward_that_differs_when_recomputed_is_an_error_of_the_backward() {
    for (error, recovered) in fail("rows").unwrap() {
        let expected = ScheduleError::RecomputedShapesMismatch {
            unit: "`fickle`".into(),
            expected: vec![vec![2, WIDTH]],
            found: vec![vec![1, WIDTH]],
        };
        assert_eq!(error, expected.into());
        assert!(recovered, "a step that failed does not disturb the next");
    }
    for (error, recovered) in fail("draws").unwrap() {
        assert_eq!(error, ScheduleError::RandomDrawsMismatch.into());
        assert!(recovered);
    }
    for (error, recovered) in fail("random").unwrap() {
        assert_eq!(
            error,
            ScheduleError::RecomputedValuesMismatch { unit: "`fickle`".into() }.into()
        );
        assert!(recovered);
    }
    let error = fail("panics").unwrap_err();
    let panic = error.source.downcast_ref::<RankPanic>().expect("a panic");
    assert!(panic.message.contains("one too many"), "{panic}");
}

#[test]
fn a_tracked_tensor_that_is_no_input_is_an_error_of_the_forward() {
    let error = launch(LaunchOptions::new(1).with_device(Device::flex()), |worker| {
        let device = worker.device();
        let model = Model { fickle: fickle(device), ..model(device) };
        let model = fully_shard(model, &worker, FsdpOptions::new().with_seed(1))?;
        FICKLE.set((0, "elsewhere"));
        let scale = Tensor::<2>::ones([1, WIDTH], &device.clone().autodiff());
        let forward = || model.forward(Tensor::ones([2, WIDTH], device));
        // An untracked tensor is a constant.
        ELSEWHERE.set(Some(scale.clone()));
        model.backward(forward())?;
        ELSEWHERE.set(Some(scale.require_grad()));
        model.backward(forward()).map(|_| ())
    });
    let error = error.unwrap_err();
    let expected = ScheduleError::TrackedFromElsewhere { unit: "`fickle`".into() };
    assert_eq!(error.source.downcast_ref::<Error>(), Some(&expected.into()), "{error}");
}

/// A unit with methods in a further block, whose inputs cannot be kept.
#[derive(Module, Debug)]
#[fsdp_unit]
struct Extended {
    linear: Linear,
}

#[fsdp_unit]
impl Extended {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.linear.forward(x)
    }
}

#[fsdp_unit(more)]
impl Extended {
    #[fsdp(forward)]
    fn scaled(&self, x: &[Tensor<2>]) -> Tensor<2> {
        self.linear.forward(x[0].clone())
    }

    #[fsdp(forward)]
    fn moded(&self, x: Tensor<2>, _mode: Mode) -> Tensor<2> {
        self.linear.forward(x)
    }

    #[fsdp(forward)]
    fn plain(&self, x: Tensor<2>) -> Tensor<2> {
        self.linear.forward(x)
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Extending {
    extended: Extended,
    head: Linear,
}

#[fsdp_unit]
impl Extending {
    #[fsdp(forward)]
    fn run(&self, x: Tensor<2>, which: &str) -> Tensor<1> {
        let x = match which {
            "scaled" => self.extended.scaled(&[x]),
            "moded" => self.extended.moded(x, Mode),
            "plain" => self.extended.plain(x),
            _ => self.extended.forward(x),
        };
        self.head.forward(x).powf_scalar(2.0).mean()
    }
}

/// Runs a step through a method of a further block.
fn step_through(
    which: &'static str,
    recompute: ActivationCheckpointing,
) -> Result<(), LaunchError> {
    let ranks = launch(LaunchOptions::new(2).with_device(Device::flex()), move |worker| {
        let device = worker.device();
        let model =
            Extending { extended: Extended { linear: linear(device) }, head: linear(device) };
        let options = FsdpOptions::new().with_activation_checkpointing(recompute);
        let model = fully_shard(model, &worker, options)?;
        // Evaluation recomputes nothing.
        model.valid().run(Tensor::ones([2, WIDTH], &device.clone().inner()), which);
        model.backward(model.run(Tensor::ones([2, WIDTH], device), which)).map(|_| ())
    });
    ranks.map(|_| ())
}

#[test]
fn a_method_of_a_further_block_that_cannot_be_recomputed_is_an_error_when_it_runs() {
    let expected =
        [("scaled", "x", NotRecomputable::Borrowed), ("moded", "_mode", NotRecomputable::Unknown)];
    for (forward, input, reason) in expected {
        let error = step_through(forward, ALL).unwrap_err();
        let unit = "`extended`".to_string();
        let expected = ShardError::NotRecomputable { unit, ty: "Extended", forward, input, reason };
        assert_eq!(error.source.downcast_ref::<Error>(), Some(&expected.into()), "{error}");
        step_through(forward, ActivationCheckpointing::None).expect("nothing is recomputed");
    }
    for which in ["plain", "forward"] {
        step_through(which, ALL).expect("the inputs can be kept");
    }
}
