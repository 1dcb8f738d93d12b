//! Bigram model of the counted tokens, as a baseline for the perplexity of a language model.
//!
//! `p(w | v) = max(c(v, w) - d, 0) / c(v) + d n(v) / c(v) p(w)`, which is absolute discounting with
//! interpolation. Source: Chen and Goodman, *An Empirical Study of Smoothing Techniques for
//! Language Modeling* (1999).
//!
//! - `c(v, w)` is the count of a counted token `w` after `v`, and `c(v)` that of any after `v`.
//! - `n(v)` is the number of different counted tokens after `v`.
//! - `p(w)` is the share of `w` in the counted tokens, with one added to each token's count.
//! - `d` is 0.75.

use std::collections::{HashMap, HashSet};

use super::dataset::Dataset;

const DISCOUNT: f64 = 0.75;

#[derive(Debug, Default)]
struct Bigram {
    pairs: HashMap<(u32, u32), f64>,
    /// For each token, the count of pairs and the number of different pairs that begin with it.
    followed: HashMap<u32, (f64, f64)>,
    singles: HashMap<u32, f64>,
    total: f64,
    vocabulary: f64,
}

/// Returns the perplexity per counted token of `held_out`, of a model that is trained on the
/// counted tokens of `train`. The vocabulary are all tokens of both. Returns NaN without a counted
/// token.
pub fn bigram_perplexity(train: &Dataset, held_out: &Dataset) -> f64 {
    let all = train.iter().chain(held_out.iter());
    let vocabulary: HashSet<u32> = all.flat_map(|conversation| conversation.ids).copied().collect();
    let mut model = Bigram { vocabulary: vocabulary.len() as f64, ..Bigram::default() };
    for_each_pair(train, |first, second| model.count(first, second));
    let (mut sum, mut count) = (0.0, 0.0);
    for_each_pair(held_out, |first, second| {
        sum -= model.probability(first, second).ln();
        count += 1.0;
    });
    (sum / count).exp()
}

/// Calls a function with each counted token and the token before it.
fn for_each_pair(dataset: &Dataset, mut call: impl FnMut(u32, u32)) {
    for conversation in dataset.iter() {
        for (at, pair) in conversation.ids.windows(2).enumerate() {
            if conversation.is_counted(at + 1) {
                call(pair[0], pair[1]);
            }
        }
    }
}

impl Bigram {
    fn count(&mut self, first: u32, second: u32) {
        let pair = self.pairs.entry((first, second)).or_default();
        let followed = self.followed.entry(first).or_default();
        followed.0 += 1.0;
        followed.1 += f64::from(u8::from(*pair == 0.0));
        *pair += 1.0;
        *self.singles.entry(second).or_default() += 1.0;
        self.total += 1.0;
    }

    fn probability(&self, first: u32, second: u32) -> f64 {
        let single = self.singles.get(&second).copied().unwrap_or(0.0);
        let single = (single + 1.0) / (self.total + self.vocabulary);
        let Some((count, kinds)) = self.followed.get(&first) else { return single };
        let pair = self.pairs.get(&(first, second)).copied().unwrap_or(0.0);
        (pair - DISCOUNT).max(0.0) / count + DISCOUNT * kinds / count * single
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::fixture::counted;

    #[test]
    fn chances_add_up_to_one() {
        let mut model = Bigram { vocabulary: 6.0, ..Bigram::default() };
        for (first, second) in [(0, 1), (0, 1), (0, 2), (1, 0), (5, 5)] {
            model.count(first, second);
        }
        for first in 0..6 {
            let sum: f64 = (0..6).map(|second| model.probability(first, second)).sum();
            assert!((sum - 1.0).abs() < 1e-12, "after {first}: {sum}");
        }
        // 1.25 / 3 + 0.75 * 2 / 3 * 3 / 11
        assert!((model.probability(0, 1) - 0.553_030_303).abs() < 1e-9);
    }

    #[test]
    fn only_counted_tokens_are_predicted() {
        let ids: &[u32] = &[1, 2, 3, 4];
        let all = counted(&[(ids, [false, true, true, true].as_slice()); 50]);
        assert!(bigram_perplexity(&all, &all) < 1.1);
        // The token after 3 is not counted in training, so that it is known by its share only.
        let train = counted(&[(ids, [false, true, true, false].as_slice()); 50]);
        let held_out = counted(&[(ids, &[false, false, false, true])]);
        assert!((bigram_perplexity(&train, &held_out) - 104.0).abs() < 1e-9);
    }
}
