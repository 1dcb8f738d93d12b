//! Frequencies, attention factors and rotated rows beside those of Hugging Face transformers, which
//! `fixtures/make.py` wrote; and refused configurations.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::{Device, Int, Tensor, TensorData};
use serde::Deserialize;

use super::*;
use crate::error::panic_message;

#[derive(Deserialize)]
struct Fixtures {
    positions: Vec<i64>,
    heads: usize,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    width: usize,
    theta: f32,
    scaling: Option<RotaryScaling>,
    frequencies: Vec<f64>,
    attention_factor: f64,
    halves: Vec<f64>,
    interleaved: Vec<f64>,
}

impl Case {
    fn config(&self) -> RotaryEncodingConfig {
        RotaryEncodingConfig::new(1024, self.width)
            .with_theta(self.theta)
            .with_scaling(self.scaling.clone())
    }
}

fn fixtures() -> Fixtures {
    let text = include_str!("fixtures/transformers.json");
    let fixtures: Fixtures = serde_json::from_str(text).expect("the fixtures can be read");
    assert_eq!(fixtures.cases.len(), 7);
    fixtures
}

#[test]
fn frequencies_are_those_of_transformers() {
    for case in fixtures().cases {
        let (found, name) = (case.config().frequencies(), &case.name);
        assert_eq!((found.len(), case.frequencies.len()), (case.width / 2, case.width / 2));
        // transformers rounds each step to f32, with an error relative to the frequency before the scaling.
        let unscaled = case.config().with_scaling(None).frequencies();
        for ((found, expected), unscaled) in found.iter().zip(&case.frequencies).zip(unscaled) {
            assert!((found - expected).abs() < 1e-6 * unscaled, "{found} {expected}: {name}");
        }
        let factor = case.config().attention_factor();
        assert!((factor - case.attention_factor).abs() < 1e-6, "{factor}: {name}");
    }
}

#[test]
fn rotated_rows_are_those_of_transformers() {
    let (fixtures, device) = (fixtures(), Device::flex());
    let (length, heads) = (fixtures.positions.len(), fixtures.heads);
    let positions = TensorData::new(fixtures.positions.clone(), [1, length]);
    let positions = Tensor::<2, Int>::from_data(positions, &device);
    for case in fixtures.cases {
        let count = heads * length * case.width;
        let input: Vec<f32> = (0..count).map(|i| ((i * 37) % 129) as f32 / 64.0 - 1.0).collect();
        let input = TensorData::new(input, [1, heads, length, case.width]);
        let input = Tensor::<4>::from_data(input, &device);
        for (pairs, expected) in
            [(RotaryPairs::Halves, &case.halves), (RotaryPairs::Interleaved, &case.interleaved)]
        {
            let rotary = case.config().with_pairs(pairs).init(&device);
            let found = rotary.forward_with_positions(input.clone(), positions.clone());
            let found: Vec<f64> = found.into_data().iter::<f64>().collect();
            assert_eq!((found.len(), expected.len()), (count, count));
            for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
                let position = fixtures.positions[at / case.width % length];
                // transformers rounds frequencies and angles to f32, with an error of up to 1e-7 of the angle.
                let most = 1e-6 * (1.0 + position as f64 / 10.0) * case.attention_factor;
                let name = &case.name;
                assert!(
                    (found - expected).abs() < most,
                    "{found} {expected} at {position}: {name}, {pairs:?}"
                );
            }
        }
    }
}

#[test]
fn fields_of_hugging_face_are_read() {
    let read = |text: &str| serde_json::from_str::<RotaryScaling>(text).expect("a scaling");
    let yarn = r#"{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
        "rope_theta": 1e6, "attention_factor": null}"#;
    assert_eq!(read(yarn), RotaryScaling::Yarn(YarnScaling::new(4.0, 64)));
    let linear = r#"{"rope_type": "linear", "factor": 2}"#;
    assert_eq!(read(linear), RotaryScaling::Linear { factor: 2.0 });
    let unknown = serde_json::from_str::<RotaryScaling>(r#"{"rope_type": "longrope"}"#);
    let error = unknown.expect_err("no such scaling").to_string();
    assert!(error.contains("`linear`, `llama3`, `yarn`"), "{error}");

    let yarn = YarnScaling::new(4.0, 64).with_betas(24.0, 2.0).with_mscale(0.7, 1.0);
    let yarn = yarn.with_attention_factor(1.5).with_truncate(false);
    let config = RotaryEncodingConfig::new(8, 4).with_scaling(Some(RotaryScaling::Yarn(yarn)));
    let read: RotaryEncodingConfig =
        serde_json::from_str(&config.to_string()).expect("a configuration");
    assert_eq!((read.scaling, read.pairs), (config.scaling, RotaryPairs::Interleaved));
}

#[test]
fn wrong_configurations_say_what_would_be_right() {
    let llama = |factor, low, high, positions| RotaryScaling::Llama3 {
        factor,
        low_freq_factor: low,
        high_freq_factor: high,
        original_max_position_embeddings: positions,
    };
    let yarn = |factor| YarnScaling::new(factor, 64);
    let config = |width| RotaryEncodingConfig::new(8, width);
    let scaled = |scaling| config(4).with_scaling(Some(scaling));
    let cases = [
        (config(5), "`d_model` must be even"),
        (config(0), "`d_model` must be even and not 0"),
        (RotaryEncodingConfig::new(0, 4), "`max_sequence_length` must be at least 1"),
        (config(4).with_theta(-1.0), "`theta` must be a positive number"),
        (config(4).with_theta(f32::NAN), "`theta` must be a positive number"),
        (scaled(RotaryScaling::Linear { factor: 0.0 }), "`factor` of the rotary scaling"),
        (scaled(llama(-2.0, 1.0, 4.0, 8)), "`factor` of the rotary scaling"),
        (scaled(llama(2.0, 4.0, 4.0, 8)), "`low_freq_factor` must be below"),
        (scaled(llama(2.0, 0.0, 4.0, 8)), "`low_freq_factor` of the rotary scaling"),
        (scaled(llama(2.0, 1.0, 4.0, 0)), "`original_max_position_embeddings` of the rotary"),
        (scaled(RotaryScaling::Yarn(yarn(f64::INFINITY))), "must be a positive number, and is inf"),
        (scaled(RotaryScaling::Yarn(yarn(2.0).with_betas(1.0, 1.0))), "`beta_slow` must be below"),
        (
            scaled(RotaryScaling::Yarn(yarn(2.0).with_attention_factor(0.0))),
            "`attention_factor` of the rotary",
        ),
        (scaled(RotaryScaling::Yarn(yarn(2.0))).with_theta(1.0), "YaRN needs a `theta` above 1"),
    ];
    for (config, expected) in cases {
        let refused = catch_unwind(AssertUnwindSafe(|| config.init(&Device::flex())));
        let message = panic_message(&*refused.expect_err("the configuration is refused"));
        assert!(message.contains(expected), "{message}, not {expected}");
    }
}
