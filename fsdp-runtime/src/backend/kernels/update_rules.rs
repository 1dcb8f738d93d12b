//! The update rules over slices, whatever the tensors they belong to.
//!
//! The loops are plain, so that the compiler makes vector code of them, for the processor's widest
//! registers. Every operation is one IEEE rounding: Rust neither reassociates sums nor contracts a
//! product and a sum into one, and division and square root round alike in vectors and in scalars. So
//! the remainder of a vector loop computes what its body does.

use multiversion::multiversion;
use rayon::prelude::*;

/// Elements a task updates: 64 KiB of each array.
const TASK: usize = 1 << 14;

/// The numbers of one Adam step that are the same for all elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct AdamStep {
    pub(crate) beta_1: f32,
    pub(crate) rest_1: f32,
    pub(crate) beta_2: f32,
    pub(crate) rest_2: f32,
    pub(crate) epsilon: f32,
    /// `1 / √(1 - β₂ᵗ)`.
    pub(crate) root_scale: f32,
    /// `lr / (1 - β₁ᵗ)`.
    pub(crate) step_size: f32,
    /// What of the parameter is added to its gradient.
    pub(crate) penalty: f32,
    /// What the parameter is multiplied by: `1 - rate`, rounded.
    pub(crate) keep: f32,
    /// What of the parameter is taken from it under cautious decay.
    pub(crate) rate: f32,
    pub(crate) cautious: bool,
}

impl AdamStep {
    /// Takes the gradient into both moments.
    #[inline(always)]
    fn moments(&self, param: f32, grad: f32, moment_1: &mut f32, moment_2: &mut f32) {
        let grad = grad + param * self.penalty;
        *moment_1 = *moment_1 * self.beta_1 + grad * self.rest_1;
        *moment_2 = *moment_2 * self.beta_2 + grad * grad * self.rest_2;
    }

    /// The updated parameter.
    #[inline(always)]
    fn update(&self, param: f32, moment_1: f32, moment_2: f32) -> f32 {
        let kept = if !self.cautious {
            param * self.keep
        } else if (param >= 0.0) == (moment_1 >= 0.0) {
            param - param * self.rate
        } else {
            param
        };
        kept - self.step_size * moment_1 / (moment_2.sqrt() * self.root_scale + self.epsilon)
    }
}

/// One step of Adam or AdamW over slices of one length. `max` holds AMSGrad's largest second moments.
pub(crate) fn adam(
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
        // Not a number wins.
        *max = if *max >= *v { *max } else { *v };
        *p = step.update(*p, *m, *max);
    }
}

/// The numbers of one SGD step that are the same for all elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SgdStep {
    pub(crate) lr: f32,
    pub(crate) penalty: f32,
    pub(crate) momentum: f32,
    /// `1 - dampening`; 1 in the first step.
    pub(crate) rest: f32,
    pub(crate) nesterov: bool,
}

/// One step of SGD over slices of one length.
pub(crate) fn sgd(step: &SgdStep, param: &mut [f32], grad: &[f32], velocity: Option<&mut [f32]>) {
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
        *velocity = *velocity * step.momentum + grad * step.rest;
        let along = if step.nesterov { grad + *velocity * step.momentum } else { *velocity };
        *p -= along * step.lr;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::optim::{AdamConfig, AdamWConfig, SgdConfig};

    /// Longer than several tasks, with a remainder in every vector width.
    const LEN: usize = 5 * TASK + 13;

    /// A parameter's arrays: itself, its gradient, two moments and their largest.
    type Arrays = [Vec<f32>; 5];

    fn arrays() -> Arrays {
        let noise = |at: usize, scale: f32| {
            let bits = crate::layout::mix(at as u64) >> 40;
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
        // Rows of an embedding that no batch has seen, and the ends of the range.
        arrays[1..].iter_mut().for_each(|array: &mut Vec<f32>| array[40..75].fill(0.0));
        arrays[1][100..140].fill(1e-30);
        arrays[1][140..180].fill(3e18);
        arrays
    }

    type Rule = Box<dyn Fn([&mut [f32]; 5]) + Sync>;

    /// Every loop there is, with every option that changes what it does.
    fn rules() -> Vec<Rule> {
        let adam = AdamWConfig::new();
        let cautious = adam.clone().with_cautious_weight_decay(true);
        let amsgrad = adam.clone().with_amsgrad(true);
        let coupled = AdamConfig::new().with_weight_decay(0.1);
        let adams = [adam, cautious, amsgrad].map(|config| config.build().rule);
        let adams = adams.into_iter().chain([coupled.build().rule]).map(|rule| -> Rule {
            let step = rule.step(1e-3, 7);
            Box::new(move |[p, g, m, v, max]| {
                super::adam(&step, p, g, m, v, rule.amsgrad.then_some(max))
            })
        });
        let sgd = SgdConfig::new().with_weight_decay(0.1);
        let momentum = sgd.clone().with_momentum(0.9).with_dampening(0.3);
        let nesterov = momentum.clone().with_nesterov(true);
        let sgds = [sgd, momentum, nesterov].map(|config| -> Rule {
            let rule = config.build();
            let step = rule.numbers(1e-3, false);
            Box::new(move |[p, g, b, ..]| super::sgd(&step, p, g, rule.has_momentum().then_some(b)))
        });
        adams.chain(sgds).collect()
    }

    fn whole(rule: &Rule) -> Arrays {
        let mut whole = arrays();
        rule(whole.each_mut().map(Vec::as_mut_slice));
        whole
    }

    fn bits(arrays: &Arrays) -> Vec<Vec<u32>> {
        arrays.iter().map(|array| array.iter().map(|x| x.to_bits()).collect()).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]

        /// Pieces lie at other alignments than in the whole, each array at one of its own.
        #[test]
        fn an_element_does_not_depend_on_where_it_lies(
            mut cuts in proptest::collection::vec(0..=LEN, 0..40),
            shifts in proptest::array::uniform5(0..16usize),
        ) {
            cuts.extend([0, 1, 3, 20, LEN]);
            cuts.sort_unstable();
            let start = arrays();
            for rule in rules() {
                let expected = bits(&whole(&rule));
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
    fn the_number_of_threads_changes_no_bit() {
        for rule in rules() {
            let on = |threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                bits(&pool.install(|| whole(&rule)))
            };
            let one = on(1);
            assert!([2, 3, 7].into_iter().all(|threads| on(threads) == one));
            assert_ne!(one[0], bits(&arrays())[0], "and something was computed");
        }
    }

    /// One element, in f64, against the formulas as they are written in the documentation.
    #[test]
    fn the_formulas_are_those_of_the_documentation() {
        let [lr, beta_1, beta_2, epsilon, rate] = [1e-2, 0.9, 0.999, 1e-8, 0.1];
        let [mut p, mut m, mut v] = [0.7, 0.0, 0.0];
        let mut ours = [[p as f32], [0.0f32], [0.0]];
        let rule = AdamWConfig::new().with_weight_decay(rate as f32).build().rule;
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
    fn amsgrad_hands_on_what_is_not_a_number() {
        let rule = AdamWConfig::new().with_amsgrad(true).build().rule;
        let mut arrays: [[f32; 3]; 4] = [[1.0; 3], [0.0; 3], [0.0; 3], [0.0; 3]];
        let [p, m, v, max] = &mut arrays;
        super::adam(&rule.step(1e-3, 1), p, &[0.1, f32::NAN, 0.1], m, v, Some(max));
        assert!(p[0] < 1.0 && p[1].is_nan() && p[2] == p[0]);
        assert!(max[1].is_nan());
    }
}
