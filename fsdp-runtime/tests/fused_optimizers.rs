//! The fused optimizers have the numbers, the records and the options of Burn's own.
#![cfg(feature = "flex")]

#[path = "support/compare.rs"]
mod compare;

use burn::grad_clipping::GradientClippingConfig;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::{Module, ParamGroup};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{self as theirs, GradientsParams, ModuleOptimizer, Optimizer, OptimizerRecord};
use burn::tensor::activation::tanh;
use burn::tensor::{Device, Tensor, TensorData};
use compare::{Within, assert_close};
use fsdp_runtime::optim as ours;

const STEPS: usize = 100;
const LEARNING_RATE: f64 = 1e-3;

fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
    tensor.to_data().iter::<f32>().collect()
}

/// Rounding, relative to elements above 1.
const WITHIN: Within = Within::Scaled(1e-6);

/// Steps both on the same gradients, of every size. Some elements have a gradient of 0 in every
/// step.
fn assert_same_numbers(ours: impl Optimizer, theirs: impl Optimizer, what: &str) {
    const LEN: usize = 1003;
    let device = Device::flex();
    let tensor = |f: &dyn Fn(usize) -> f32| {
        let elements = (0..LEN).map(f).collect::<Vec<_>>();
        Tensor::<2>::from_data(TensorData::new(elements, [17, 59]), &device)
    };
    let start = tensor(&|i| (i as f32 * 0.7).sin());
    let (mut a, mut b) = (start.clone(), start.clone());
    let (mut state_a, mut state_b) = (None, None);
    for step in 0..STEPS {
        let grad = tensor(&|i| match i % 7 {
            0 => 0.0,
            size => ((i * 31 + step * 17) as f32).sin() * 10f32.powi(2 - size as i32),
        });
        (a, state_a) = ours.step(LEARNING_RATE, a, grad.clone(), state_a);
        (b, state_b) = theirs.step(LEARNING_RATE, b, grad, state_b);
        assert_close(&values(&a), &values(&b), WITHIN, format_args!("{what}, step {step}"));
    }
    assert_eq!(a.dims(), start.dims());
    let moved = values(&a).iter().zip(values(&start)).filter(|(a, b)| *a != b).count();
    assert!(moved > LEN / 2, "{what}: {moved} elements moved");
}

#[test]
fn adamw_has_burns_numbers() {
    let ours = ours::AdamWConfig::new().with_weight_decay(0.1);
    let theirs = theirs::AdamWConfig::new().with_weight_decay(0.1).with_epsilon(1e-8);
    assert_same_numbers(ours.build(), theirs.build(), "AdamW");
    assert_same_numbers(
        ours.clone().with_cautious_weight_decay(true).build(),
        theirs.clone().with_cautious_weight_decay(true).build(),
        "cautious AdamW",
    );
    assert_same_numbers(
        ours.clone().with_amsgrad(true).with_beta_1(0.8).with_beta_2(0.99).build(),
        theirs.with_amsgrad(true).with_beta_1(0.8).with_beta_2(0.99).build(),
        "AMSGrad with other betas",
    );
}

#[test]
fn adam_has_burns_numbers() {
    let ours = ours::AdamConfig::new();
    let theirs = theirs::AdamConfig::new().with_epsilon(1e-8);
    assert_same_numbers(ours.build(), theirs.build(), "Adam");
    assert_same_numbers(
        ours.with_weight_decay(0.1).with_amsgrad(true).build(),
        theirs.with_weight_decay(Some(WeightDecayConfig::new(0.1))).with_amsgrad(true).build(),
        "Adam with decay and AMSGrad",
    );
}

#[test]
fn sgd_has_burns_numbers() {
    let ours = ours::SgdConfig::new();
    let theirs = theirs::SgdConfig::new();
    assert_same_numbers(ours.build(), theirs.build(), "SGD");

    let ours = ours.with_weight_decay(0.1).with_momentum(0.9).with_dampening(0.2);
    let theirs = theirs.with_weight_decay(Some(WeightDecayConfig::new(0.1)));
    let momentum = MomentumConfig::new().with_momentum(0.9).with_dampening(0.2);
    for nesterov in [false, true] {
        let momentum = momentum.clone().with_nesterov(nesterov);
        assert_same_numbers(
            ours.clone().with_nesterov(nesterov).build(),
            theirs.clone().with_momentum(Some(momentum)).build(),
            "SGD with momentum",
        );
    }
}

#[derive(Module, Debug)]
struct Net {
    up: Linear,
    norm: LayerNorm,
    down: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        device.seed(5);
        Self {
            up: LinearConfig::new(9, 21).init(device),
            norm: LayerNormConfig::new(21).init(device),
            down: LinearConfig::new(21, 3).init(device),
        }
    }

    fn parameters(&self) -> Vec<f32> {
        let mut all = [&self.up, &self.down]
            .into_iter()
            .flat_map(|linear| {
                let bias = linear.bias.as_ref().expect("a bias");
                [values(&linear.weight.val()), values(&bias.val())].concat()
            })
            .collect::<Vec<_>>();
        all.extend(values(&self.norm.gamma.val()));
        all
    }

    fn gradients(&self, step: usize) -> GradientsParams {
        let device = self.up.weight.device();
        let input: Vec<f32> = (0..4 * 9).map(|i| ((i + step * 13) as f32 * 0.3).sin()).collect();
        let input = Tensor::<2>::from_data(TensorData::new(input, [4, 9]), &device);
        let output = self.down.forward(self.norm.forward(tanh(self.up.forward(input))));
        let loss = (output - 0.5).powf_scalar(2.0).mean();
        GradientsParams::from_grads(loss.backward(), self)
    }
}

/// Returns the parameters after each of `steps`.
fn train(
    net: &mut Net,
    optimizer: &mut ModuleOptimizer,
    rates: &mut ModuleLrScheduler,
    steps: std::ops::Range<usize>,
) -> Vec<Vec<f32>> {
    steps
        .map(|step| {
            let grads = net.gradients(step);
            let trained = optimizer.step(rates.step(), net.clone(), grads);
            *net = trained;
            net.parameters()
        })
        .collect()
}

/// Returns a name, our optimizer of that name, and Burn's with the same options.
fn pairs() -> [(&'static str, ModuleOptimizer, ModuleOptimizer); 3] {
    let momentum = MomentumConfig::new().with_momentum(0.9).with_dampening(0.0);
    [
        (
            "AdamW",
            ours::AdamWConfig::new().with_amsgrad(true).init(),
            theirs::AdamWConfig::new()
                .with_amsgrad(true)
                .with_epsilon(1e-8)
                .with_weight_decay(1e-2)
                .init(),
        ),
        (
            "Adam",
            ours::AdamConfig::new().init(),
            theirs::AdamConfig::new().with_epsilon(1e-8).init(),
        ),
        (
            "SGD",
            ours::SgdConfig::new().with_momentum(0.9).init(),
            theirs::SgdConfig::new().with_momentum(Some(momentum)).init(),
        ),
    ]
}

fn through_bytes(optimizer: &ModuleOptimizer) -> OptimizerRecord {
    OptimizerRecord::from_bytes(optimizer.into_bytes().expect("a record")).expect("its own bytes")
}

#[test]
fn training_resumes_from_a_record_bit_for_bit() {
    for (what, mut optimizer, _) in pairs() {
        let mut net = Net::new(&Device::flex().autodiff());
        let mut rates = ModuleLrScheduler::new(LEARNING_RATE);
        train(&mut net, &mut optimizer, &mut rates, 0..5);
        let record = through_bytes(&optimizer);
        assert!(!record.is_empty());
        let mut copy = net.clone();
        let expected = train(&mut net, &mut optimizer, &mut rates, 5..10);

        let (_, fresh, _) = pairs().into_iter().find(|(name, ..)| *name == what).expect("it");
        let resumed = train(&mut copy, &mut fresh.load_record(record), &mut rates, 5..10);
        assert_eq!(resumed, expected, "{what}");
    }
}

#[test]
fn records_are_interchangeable_with_burns() {
    for (what, mut ours, mut theirs) in pairs() {
        let start = Net::new(&Device::flex().autodiff());
        let mut rates = ModuleLrScheduler::new(LEARNING_RATE);
        let (mut a, mut b) = (start.clone(), start.clone());
        train(&mut a, &mut ours, &mut rates, 0..5);
        train(&mut b, &mut theirs, &mut rates, 0..5);
        assert_close(&a.parameters(), &b.parameters(), WITHIN, what);

        let (for_theirs, for_ours) = (through_bytes(&ours), through_bytes(&theirs));
        assert_eq!(for_theirs.len(), for_ours.len(), "{what}: tensors in a record");
        let (mut ours, mut theirs) = (ours.load_record(for_ours), theirs.load_record(for_theirs));
        let a = train(&mut a, &mut ours, &mut rates, 5..10);
        let b = train(&mut b, &mut theirs, &mut rates, 5..10);
        assert_close(&a.concat(), &b.concat(), WITHIN, what);
    }
}

/// Parameter groups of weight decay and of learning rate, a schedule, and clipping.
#[test]
fn groups_schedules_and_clipping_work_as_with_burns_optimizers() {
    let not_decayed = || ParamGroup::from_any_predicates(vec![".bias", ".gamma", ".beta"]);
    let clipping = GradientClippingConfig::Norm(0.05);
    let ours =
        ours::AdamWConfig::new().with_weight_decay(0.5).with_grad_clipping(Some(clipping.clone()));
    let theirs = theirs::AdamWConfig::new()
        .with_weight_decay(0.5)
        .with_epsilon(1e-8)
        .with_grad_clipping(Some(clipping));
    let mut plain = ours.init();
    let undecayed = ours.clone().with_weight_decay(0.0).build();
    let mut ours = ours.init().with_group(not_decayed(), undecayed, None);
    let undecayed = theirs.clone().with_weight_decay(0.0).build();
    let mut theirs = theirs.init().with_group(not_decayed(), undecayed, None);

    let rates = || {
        let falling = LinearLrSchedulerConfig::new(1e-2, 1e-4, 20).init().expect("a falling rate");
        falling.with_group(ParamGroup::from_predicate("down"), 3e-3)
    };
    let start = Net::new(&Device::flex().autodiff());
    let run = |optimizer: &mut ModuleOptimizer| {
        train(&mut start.clone(), optimizer, &mut rates(), 0..20).pop().expect("20 steps")
    };
    let (ours, plain) = (run(&mut ours), run(&mut plain));
    assert_close(&ours, &run(&mut theirs), WITHIN, "in groups");
    assert_eq!(ours.len(), plain.len());
    let largest = ours.iter().zip(&plain).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
    assert!(largest > 1e-3, "the groups change the result: {largest}");
}
