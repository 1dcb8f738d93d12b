//! Optimizer steps on the device, on Flex and with Burn's own optimizers.

use burn::optim::Optimizer;
use burn::tensor::{Device, FloatDType, Tensor};
use fsdp_runtime::optim::{AdamConfig, AdamWConfig, SgdConfig};

use super::support::{assert_close, bits, device, devices, numbers, rounds_correctly, tensor};

/// Asserts that three steps on the device are those on Flex, from the same start and with the same
/// gradients.
fn assert_same_steps(device: &Device, optimizer: &impl Optimizer, what: &str) {
    for len in [1, 1031, 70_001] {
        let start = numbers(1, len, 1.0);
        let on = |device: &Device| {
            let mut param = tensor(&start, device, FloatDType::F32);
            let mut state = None;
            for step in 0..3 {
                let gradient = numbers(100 + step, len, 10.0);
                let gradient = tensor(&gradient, device, FloatDType::F32);
                (param, state) = optimizer.step(1e-2, param, gradient, state);
            }
            param
        };
        let (ours, twin) = (on(device), on(&Device::flex()));
        assert_ne!(bits(&ours), bits(&tensor(&start, device, FloatDType::F32)), "{what}: moved");
        if rounds_correctly(device) {
            assert_eq!(bits(&ours), bits(&twin), "{what}, {len} elements");
        } else {
            assert_close(&ours, &twin, 1e-5, what);
        }
    }
}

#[test]
fn adam_on_the_device_has_the_bits_of_adam_on_flex() {
    let Some(device) = device() else { return };
    let adamw = AdamWConfig::new().with_weight_decay(0.1);
    assert_same_steps(&device, &adamw.build(), "AdamW");
    let cautious = adamw.clone().with_cautious_weight_decay(true);
    assert_same_steps(&device, &cautious.build(), "cautious AdamW");
    let amsgrad = adamw.with_amsgrad(true);
    assert_same_steps(&device, &amsgrad.build(), "AMSGrad");
    let adam = AdamConfig::new().with_weight_decay(0.1);
    assert_same_steps(&device, &adam.build(), "Adam");
}

#[test]
fn sgd_on_the_device_has_the_bits_of_sgd_on_flex() {
    let Some(device) = device() else { return };
    let plain = SgdConfig::new().with_weight_decay(0.1);
    assert_same_steps(&device, &plain.build(), "SGD");
    let momentum = plain.with_momentum(0.9).with_dampening(0.3);
    assert_same_steps(&device, &momentum.build(), "momentum");
    assert_same_steps(&device, &momentum.with_nesterov(true).build(), "Nesterov");
}

/// Asserts that four steps are those of Burn's own optimizer, which has the same formulas and
/// rounds differently.
fn assert_gives_burns(ours: &impl Optimizer, theirs: &impl Optimizer, what: &str) {
    for device in devices() {
        let start = tensor(&numbers(1, 777, 1.0), &device, FloatDType::F32);
        let (mut a, mut b) = (start.clone(), start);
        let (mut state_a, mut state_b) = (None, None);
        for step in 0..4 {
            let gradient = tensor(&numbers(50 + step, 777, 1.0), &device, FloatDType::F32);
            (a, state_a) = ours.step(1e-3, a, gradient.clone(), state_a);
            (b, state_b) = theirs.step(1e-3, b, gradient, state_b);
            assert_close(&a, &b, 1e-4, &format!("{what} on {device:?}"));
        }
    }
}

#[test]
fn steps_give_burns_numbers() {
    use burn::optim::decay::WeightDecayConfig;
    use burn::optim::momentum::MomentumConfig;
    use burn::optim::{AdamConfig as BurnAdam, AdamWConfig as BurnAdamW, SgdConfig as BurnSgd};
    let decay = || Some(WeightDecayConfig::new(0.1));
    let ours = AdamWConfig::new().with_weight_decay(0.1);
    let theirs = BurnAdamW::new().with_weight_decay(0.1).with_epsilon(1e-8);
    assert_gives_burns(&ours.build(), &theirs.build(), "AdamW");
    let ours = AdamConfig::new().with_weight_decay(0.1);
    let theirs = BurnAdam::new().with_weight_decay(decay()).with_epsilon(1e-8);
    assert_gives_burns(&ours.build(), &theirs.build(), "Adam");
    let ours = SgdConfig::new().with_weight_decay(0.1);
    let theirs = BurnSgd::new().with_weight_decay(decay());
    assert_gives_burns(&ours.build(), &theirs.build(), "SGD");
    for nesterov in [false, true] {
        let momentum = MomentumConfig::new().with_momentum(0.9).with_dampening(0.3);
        let theirs = theirs.clone().with_momentum(Some(momentum.with_nesterov(nesterov)));
        let ours = ours.clone().with_momentum(0.9).with_dampening(0.3).with_nesterov(nesterov);
        assert_gives_burns(&ours.build(), &theirs.build(), "SGD with momentum");
    }
}

#[test]
fn a_shared_or_transposed_parameter_is_stepped_as_any_other() {
    for device in devices() {
        let flat = tensor(&numbers(3, 35 * 40, 1.0), &device, FloatDType::F32);
        let view = flat.reshape([35, 40]).transpose();
        let copy = Tensor::<2>::from_data(view.to_data(), &device);
        let kept = copy.clone();
        let before = kept.to_data();
        let adam = AdamWConfig::new().build();
        let gradient = view.clone() * 0.5;
        let [a, b] = [view, copy].map(|param| adam.step(1e-2, param, gradient.clone(), None).0);
        assert_eq!(a.to_data(), b.to_data(), "{device:?}");
        assert_eq!(kept.to_data(), before, "{device:?}: the clone keeps its values");
        assert_ne!(b.to_data(), before, "{device:?}");
    }
}
