//! Update rules of Adam and SGD as loops over slices.
//!
//! The loops are plain, so that the compiler vectorises them for the widest registers of the
//! processor. Every operation rounds once, as IEEE 754 defines: Rust neither reassociates sums nor
//! fuses a product with a sum, and division and square root round equally in vector and scalar
//! instructions. So the scalar remainder of a vectorised loop computes the same bits as its body.

use multiversion::multiversion;
use rayon::prelude::*;

/// Number of elements that a task of the thread pool updates: 64 KiB of each array.
const TASK: usize = 1 << 14;

/// Coefficients of one step of Adam or AdamW, shared by all elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamStep {
    /// β₁, decay of the first moment.
    pub beta_1: f32,
    /// `1 - β₁`, computed in f64.
    pub one_minus_beta_1: f32,
    /// β₂, decay of the second moment.
    pub beta_2: f32,
    /// `1 - β₂`, computed in f64.
    pub one_minus_beta_2: f32,
    /// ε, added to the denominator.
    pub epsilon: f32,
    /// `1 / √(1 - β₂ᵗ)` at step `t`.
    pub root_scale: f32,
    /// `lr / (1 - β₁ᵗ)` at step `t`.
    pub step_size: f32,
    /// λ of Adam: `λ · parameter` is added to the gradient. 0 for AdamW.
    pub penalty: f32,
    /// Factor of the parameter under decoupled weight decay: `1 - rate`, computed in f64. 1 for
    /// Adam.
    pub keep: f32,
    /// `lr · λ` of AdamW: the share of the parameter that weight decay subtracts. 0 for Adam.
    pub rate: f32,
    /// Whether weight decay applies only to elements whose parameter and first moment have equal
    /// signs.
    pub cautious: bool,
}

impl AdamStep {
    /// Updates both moments with an element's gradient.
    #[inline(always)]
    fn moments(&self, param: f32, grad: f32, moment_1: &mut f32, moment_2: &mut f32) {
        let grad = grad + param * self.penalty;
        *moment_1 = *moment_1 * self.beta_1 + grad * self.one_minus_beta_1;
        *moment_2 = *moment_2 * self.beta_2 + grad * grad * self.one_minus_beta_2;
    }

    /// Returns the updated element of the parameter.
    #[inline(always)]
    fn update(&self, param: f32, moment_1: f32, moment_2: f32) -> f32 {
        let decayed = if !self.cautious {
            param * self.keep
        } else if (param >= 0.0) == (moment_1 >= 0.0) {
            param - param * self.rate
        } else {
            param
        };
        decayed - self.step_size * moment_1 / (moment_2.sqrt() * self.root_scale + self.epsilon)
    }
}

/// Runs one step of Adam or AdamW on slices of equal length. `max` holds the largest second moments
/// so far, under AMSGrad.
pub(super) fn adam(
    step: &AdamStep,
    param: &mut [f32],
    grad: &[f32],
    moment_1: &mut [f32],
    moment_2: &mut [f32],
    max: Option<&mut [f32]>,
) {
    let tasks = param.par_chunks_mut(TASK).zip(grad.par_chunks(TASK));
    let moments = moment_1.par_chunks_mut(TASK).zip(moment_2.par_chunks_mut(TASK));
    let tasks = tasks.zip(moments);
    match max {
        None => tasks.for_each(|((p, g), (m, v))| adam_slice(step, p, g, m, v)),
        Some(max) => tasks
            .zip(max.par_chunks_mut(TASK))
            .for_each(|(((p, g), (m, v)), max)| amsgrad_slice(step, p, g, m, v, max)),
    }
}

#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn adam_slice(step: &AdamStep, param: &mut [f32], grad: &[f32], m: &mut [f32], v: &mut [f32]) {
    let step = *step;
    for (((p, g), m), v) in param.iter_mut().zip(grad).zip(m).zip(v) {
        step.moments(*p, *g, m, v);
        *p = step.update(*p, *m, *v);
    }
}

#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn amsgrad_slice(
    step: &AdamStep,
    param: &mut [f32],
    grad: &[f32],
    m: &mut [f32],
    v: &mut [f32],
    max: &mut [f32],
) {
    let step = *step;
    for ((((p, g), m), v), max) in param.iter_mut().zip(grad).zip(m).zip(v).zip(max) {
        step.moments(*p, *g, m, v);
        // A NaN in `v` is kept, as the comparison is false; `f32::max` would drop it.
        *max = if *max >= *v { *max } else { *v };
        *p = step.update(*p, *m, *max);
    }
}

/// Coefficients of one step of SGD, shared by all elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdStep {
    /// Learning rate of the step.
    pub lr: f32,
    /// λ: `λ · parameter` is added to the gradient.
    pub penalty: f32,
    /// Factor of the previous velocity. Unused without a velocity.
    pub momentum: f32,
    /// Factor of the gradient in the velocity: `1 - dampening`, or 1 in the first step.
    pub grad_factor: f32,
    /// Whether the update is `gradient + momentum · velocity` instead of the velocity.
    pub nesterov: bool,
}

/// Runs one step of SGD on slices of equal length, with momentum if there is a velocity.
pub(super) fn sgd(step: &SgdStep, param: &mut [f32], grad: &[f32], velocity: Option<&mut [f32]>) {
    let tasks = param.par_chunks_mut(TASK).zip(grad.par_chunks(TASK));
    match velocity {
        None => tasks.for_each(|(p, g)| sgd_slice(step, p, g)),
        Some(velocity) => tasks
            .zip(velocity.par_chunks_mut(TASK))
            .for_each(|((p, g), velocity)| momentum_slice(step, p, g, velocity)),
    }
}

#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn sgd_slice(step: &SgdStep, param: &mut [f32], grad: &[f32]) {
    let step = *step;
    for (p, g) in param.iter_mut().zip(grad) {
        *p -= (g + *p * step.penalty) * step.lr;
    }
}

#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn momentum_slice(step: &SgdStep, param: &mut [f32], grad: &[f32], velocity: &mut [f32]) {
    let step = *step;
    for ((p, g), velocity) in param.iter_mut().zip(grad).zip(velocity) {
        let grad = g + *p * step.penalty;
        *velocity = *velocity * step.momentum + grad * step.grad_factor;
        let update = if step.nesterov { grad + *velocity * step.momentum } else { *velocity };
        *p -= update * step.lr;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{AdamRule, Decay};

    /// Number of elements: several tasks, and a remainder at every vector width.
    const LEN: usize = 5 * TASK + 13;

    /// Parameter, gradient, first moment, second moment and largest second moment.
    type Arrays = [Vec<f32>; 5];

    fn arrays() -> Arrays {
        let noise = |at: usize, scale: f32| {
            let bits = crate::mix(at as u64) >> 40;
            (bits as f32 / (1 << 23) as f32 - 1.0) * scale
        };
        let array = |from: usize, scale: f32| (0..LEN).map(move |at| noise(from + at, scale));
        let positive = |from, scale| array(from, scale).map(f32::abs).collect();
        let mut arrays = [
            array(0, 1.0).collect(),
            array(LEN, 1e-2).collect(),
            array(2 * LEN, 1e-3).collect(),
            positive(3 * LEN, 1e-5),
            positive(4 * LEN, 1e-5),
        ];
        // Rows of an embedding that no batch has used, and very small and very large gradients.
        arrays[1..].iter_mut().for_each(|array: &mut Vec<f32>| array[40..75].fill(0.0));
        arrays[1][100..140].fill(1e-30);
        arrays[1][140..180].fill(3e18);
        arrays
    }

    /// Returns AdamW with PyTorch's defaults and a weight decay.
    fn adam_w(rate: f32) -> AdamRule {
        let decay = Decay::Decoupled { rate, cautious: false };
        AdamRule { beta_1: 0.9, beta_2: 0.999, epsilon: 1e-8, amsgrad: false, decay }
    }

    type Rule = Box<dyn Fn([&mut [f32]; 5]) + Sync>;

    /// Returns a rule for each loop of this file, and for each option that changes its result.
    fn rules() -> Vec<Rule> {
        let adam = adam_w(1e-2);
        let cautious = AdamRule { decay: Decay::Decoupled { rate: 1e-2, cautious: true }, ..adam };
        let amsgrad = AdamRule { amsgrad: true, ..adam };
        let coupled = AdamRule { decay: Decay::Coupled { penalty: 0.1 }, ..adam };
        let adams = [adam, cautious, amsgrad, coupled].map(|rule| -> Rule {
            let step = rule.step(1e-3, 7);
            Box::new(move |[p, g, m, v, max]| {
                super::adam(&step, p, g, m, v, rule.amsgrad.then_some(max))
            })
        });
        let sgd =
            SgdStep { lr: 1e-3, penalty: 0.1, momentum: 0.0, grad_factor: 1.0, nesterov: false };
        let momentum = SgdStep { momentum: 0.9, grad_factor: 1.0 - 0.3, ..sgd };
        let nesterov = SgdStep { nesterov: true, ..momentum };
        let sgds = [sgd, momentum, nesterov].map(|step| -> Rule {
            let moves = step.momentum != 0.0;
            Box::new(move |[p, g, b, ..]| super::sgd(&step, p, g, moves.then_some(b)))
        });
        adams.into_iter().chain(sgds).collect()
    }

    fn updated(rule: &Rule) -> Arrays {
        let mut arrays = arrays();
        rule(arrays.each_mut().map(Vec::as_mut_slice));
        arrays
    }

    fn bits(arrays: &Arrays) -> Vec<Vec<u32>> {
        arrays.iter().map(|array| array.iter().map(|x| x.to_bits()).collect()).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]

        /// Updates pieces of the arrays, each array shifted to an alignment of its own, and
        /// compares the bits with those of an update in one piece.
        #[test]
        fn an_update_does_not_depend_on_alignment(
            mut cuts in proptest::collection::vec(0..=LEN, 0..40),
            shifts in proptest::array::uniform5(0..16usize),
        ) {
            cuts.extend([0, 1, 3, 20, LEN]);
            cuts.sort_unstable();
            let start = arrays();
            for rule in rules() {
                let expected = bits(&updated(&rule));
                for piece in cuts.windows(2).map(|cut| cut[0]..cut[1]) {
                    let mut shifted: Arrays = std::array::from_fn(|array| {
                        [&vec![0.0; shifts[array]], &start[array][piece.clone()]].concat()
                    });
                    let mut shift = shifts.iter();
                    rule(shifted.each_mut().map(|array| &mut array[*shift.next().unwrap()..]));
                    for ((array, expected), shift) in shifted.iter().zip(&expected).zip(shifts) {
                        let got = array[shift..].iter().map(|x| x.to_bits());
                        prop_assert!(got.eq(expected[piece.clone()].iter().copied()));
                    }
                }
            }
        }
    }

    #[test]
    fn an_update_does_not_depend_on_the_number_of_threads() {
        for rule in rules() {
            let on = |threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                bits(&pool.install(|| updated(&rule)))
            };
            let one = on(1);
            assert!([2, 3, 7].into_iter().all(|threads| on(threads) == one));
            assert_ne!(one[0], bits(&arrays())[0], "the rule must change the parameter");
        }
    }

    /// Compares twenty steps of one element with the documented formulas in f64.
    #[test]
    fn adam_w_follows_the_documented_formulas() {
        let [lr, beta_1, beta_2, epsilon, rate] = [1e-2, 0.9, 0.999, 1e-8, 0.1];
        let [mut p, mut m, mut v] = [0.7, 0.0, 0.0];
        let mut ours = [[p as f32], [0.0f32], [0.0]];
        let rule = adam_w(rate as f32);
        for t in 1..=20 {
            let g = (f64::from(t) * 0.9).cos();
            m = beta_1 * m + (1.0 - beta_1) * g;
            v = beta_2 * v + (1.0 - beta_2) * g * g;
            let step_size = lr / (1.0 - f64::powi(beta_1, t));
            let denominator = v.sqrt() / (1.0 - f64::powi(beta_2, t)).sqrt() + epsilon;
            p = (1.0 - lr * rate) * p - step_size * m / denominator;

            let step = rule.step(lr, t as usize);
            let [param, moment_1, moment_2] = &mut ours;
            super::adam(&step, param, &[g as f32], moment_1, moment_2, None);
            assert!((f64::from(param[0]) - p).abs() < 1e-6, "step {t}: {} {p}", param[0]);
        }
    }

    #[test]
    fn amsgrad_propagates_nan() {
        let rule = AdamRule { amsgrad: true, ..adam_w(1e-2) };
        let mut arrays: [[f32; 3]; 4] = [[1.0; 3], [0.0; 3], [0.0; 3], [0.0; 3]];
        let [p, m, v, max] = &mut arrays;
        super::adam(&rule.step(1e-3, 1), p, &[0.1, f32::NAN, 0.1], m, v, Some(max));
        assert!(p[0] < 1.0 && p[1].is_nan() && p[2] == p[0]);
        assert!(max[1].is_nan());
    }
}
