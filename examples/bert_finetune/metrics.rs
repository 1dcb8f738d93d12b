//! Accuracy and F1 score of a classifier, computed from counts that ranks add up.

/// Counts of right and wrong predictions, as numbers that [`all_reduce_sum`] can add over ranks.
///
/// [`all_reduce_sum`]: fsdp_runtime::prelude::Worker::all_reduce_sum
#[derive(Clone, Debug, PartialEq)]
pub struct Counts {
    /// Three counts per class: true positives, false positives and false negatives.
    per_class: Vec<f64>,
}

/// Scores of a model on a split.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scores {
    /// Fraction of the examples that are classified correctly.
    pub accuracy: f64,
    /// F1 score of class 1 if there are two classes, or the mean of the F1 scores of all classes.
    pub f1: f64,
}

impl Counts {
    /// Returns counts of 0 for each class.
    pub fn new(classes: usize) -> Self {
        Self { per_class: vec![0.0; 3 * classes] }
    }

    /// Counts the predicted class `guess` of one example with the class `label`.
    pub fn add(&mut self, guess: usize, label: usize) {
        if guess == label {
            self.per_class[3 * label] += 1.0;
        } else {
            self.per_class[3 * guess + 1] += 1.0;
            self.per_class[3 * label + 2] += 1.0;
        }
    }

    /// Returns the numbers to add over ranks.
    pub fn as_mut_slice(&mut self) -> &mut [f64] {
        &mut self.per_class
    }

    /// Returns the accuracy and the F1 score, or 0 if nothing was counted.
    pub fn scores(&self) -> Scores {
        let classes = || self.per_class.chunks_exact(3);
        let right: f64 = classes().map(|class| class[0]).sum();
        let missed: f64 = classes().map(|class| class[2]).sum();
        let f1: Vec<f64> = classes()
            .map(|class| ratio(2.0 * class[0], 2.0 * class[0] + class[1] + class[2]))
            .collect();
        let f1 = if let [_, positive] = f1[..] {
            positive
        } else {
            ratio(f1.iter().sum(), f1.len() as f64)
        };
        Scores { accuracy: ratio(right, right + missed), f1 }
    }
}

/// Returns `part / whole`, or 0 if `whole` is 0.
fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

/// Returns the index of the largest logit; the first one of equal logits.
pub fn argmax(logits: &[f32]) -> usize {
    let first_larger = |best: usize, at: usize| if logits[at] > logits[best] { at } else { best };
    (0..logits.len()).fold(0, first_larger)
}

/// Returns the mean, or 0 for no values.
pub fn mean(values: &[f64]) -> f64 {
    ratio(values.iter().sum(), values.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(classes: usize, pairs: &[(usize, usize)]) -> Counts {
        let mut counts = Counts::new(classes);
        pairs.iter().for_each(|(guess, label)| counts.add(*guess, *label));
        counts
    }

    #[test]
    fn two_classes_score_class_one() {
        let scores = count(2, &[(1, 1), (1, 1), (1, 0), (0, 1), (0, 0)]).scores();
        assert_eq!(scores, Scores { accuracy: 0.6, f1: 4.0 / 6.0 });
    }

    #[test]
    fn more_classes_score_the_mean() {
        let scores = count(3, &[(0, 0), (1, 1), (1, 2), (2, 2)]).scores();
        assert_eq!(scores.accuracy, 0.75);
        assert!((scores.f1 - (1.0 + 2.0 / 3.0 + 2.0 / 3.0) / 3.0).abs() < 1e-12);
    }

    #[test]
    fn the_sum_of_ranks_scores_as_one_rank_would() {
        let all = [(1, 1), (0, 1), (0, 0), (1, 0), (1, 1)];
        let (mut one, mut two) = (count(2, &all[..2]), count(2, &all[2..]));
        for (sum, part) in one.as_mut_slice().iter_mut().zip(two.as_mut_slice()) {
            *sum += *part;
        }
        assert_eq!(one, count(2, &all));
    }

    #[test]
    fn nothing_counted_scores_zero() {
        assert_eq!(Counts::new(2).scores(), Scores { accuracy: 0.0, f1: 0.0 });
        assert_eq!(mean(&[]), 0.0);
    }

    #[test]
    fn argmax_is_the_first_of_the_largest() {
        assert_eq!((argmax(&[0.1, 0.9, 0.9]), argmax(&[-1.0, -2.0])), (1, 0));
    }
}
