//! The comparisons of the tests fail on every difference, also where one side has no elements to
//! compare.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::TensorData;
use fsdp_runtime::state::FullState;

use crate::support::compare::{
    Parameters, Within, assert_close, assert_parameters_close, assert_same_bits, assert_same_state,
    assert_state_differs,
};

fn fails(comparison: impl FnOnce()) -> bool {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| ()));
    let fails = catch_unwind(AssertUnwindSafe(comparison)).is_err();
    std::panic::set_hook(hook);
    fails
}

const NUMBERS: [f32; 3] = [1.0, 0.0, -2.0];

#[test]
fn numbers_that_are_missing_or_differ_fail() {
    let none: [f32; 0] = [];
    let wrong: [(&str, &[f32]); 6] = [
        ("none", &none),
        ("one too few", &NUMBERS[..2]),
        ("one too many", &[1.0, 0.0, -2.0, 0.0]),
        ("another value", &[1.0, 0.0, -2.1]),
        ("NaN", &[1.0, f32::NAN, -2.0]),
        ("an infinite one", &[f32::INFINITY, 0.0, -2.0]),
    ];
    for (what, found) in wrong {
        for within in [Within::Absolute(0.01), Within::Relative(0.01), Within::Scaled(0.01)] {
            assert!(fails(|| assert_close(found, &NUMBERS, within, what)), "{what}, {within:?}");
            assert!(fails(|| assert_close(&NUMBERS, found, within, what)), "{what}, {within:?}");
        }
        assert!(fails(|| assert_same_bits(found, &NUMBERS, what)), "{what}");
    }
    assert!(fails(|| assert_close(&none, &none, Within::Absolute(1.0), "nothing")));
    assert!(fails(|| assert_same_bits(&none, &none, "nothing")));
    assert!(fails(|| assert_same_bits(&[-0.0_f32], &[0.0], "signs of zero")));
    assert_close(&NUMBERS, &NUMBERS, Within::Relative(0.0), "the same");
    assert_same_bits(&NUMBERS, &NUMBERS, "the same");
}

fn state(tensors: &[(&str, &[f32])]) -> FullState {
    let data = |elements: &[f32]| TensorData::new(elements.to_vec(), [elements.len()]);
    tensors.iter().map(|(path, elements)| ((*path).to_string(), data(elements))).collect()
}

#[test]
fn states_that_lack_a_tensor_or_differ_fail() {
    let expected = state(&[("a", &[1.0, 2.0]), ("b", &[3.0])]);
    let wrong = [
        ("none", state(&[])),
        ("one tensor missing", state(&[("a", &[1.0, 2.0])])),
        ("another path", state(&[("a", &[1.0, 2.0]), ("c", &[3.0])])),
        ("another shape", state(&[("a", &[1.0]), ("b", &[3.0])])),
        ("another element", state(&[("a", &[1.0, 2.5]), ("b", &[3.0])])),
    ];
    for (what, found) in &wrong {
        assert!(fails(|| assert_same_state(found, &expected, what)), "{what}");
        assert!(fails(|| assert_same_state(&expected, found, what)), "{what}");
        let elements = |state: &FullState| -> Parameters {
            let tensor =
                |(path, data): (&String, &TensorData)| (path.clone(), data.iter().collect());
            state.iter().map(tensor).collect()
        };
        let (found, expected) = (elements(found), elements(&expected));
        let within = Within::Absolute(0.1);
        assert!(fails(|| assert_parameters_close(&found, &expected, within, what)), "{what}");
        assert!(fails(|| assert_parameters_close(&expected, &found, within, what)), "{what}");
    }
    assert!(fails(|| assert_same_state(&state(&[]), &state(&[]), "nothing")));
    assert!(fails(|| assert_state_differs(&expected, &expected, "the same")));
    assert!(fails(|| assert_state_differs(&expected, &wrong[1].1, "one tensor missing")));
    assert_same_state(&expected, &expected, "the same");
    assert_state_differs(&expected, &wrong[4].1, "another element");
}
