//! Bigram model with interpolated Kneser-Ney smoothing, as a baseline for the GPT's perplexity.
//!
//! Source: Chen and Goodman, *An Empirical Study of Smoothing Techniques for Language Modeling*
//! (1999).
//!
//! `p(w | v) = max(c(v, w) - d, 0) / c(v) + d n(v) / c(v) p(w)`
//!
//! - `c(v, w)` is the count of the pair, and `c(v)` the count of all pairs that begin with `v`.
//! - `n(v)` is the number of different word pieces that follow `v`.
//! - `p(w)` is the number of different word pieces that `w` follows, divided by the number of
//!   different pairs, and interpolated in the same way with the uniform distribution.
//! - The discount `d` is `n1 / (n1 + 2 n2)`, where `n1` and `n2` are the numbers of different pairs
//!   that occur once and twice.

use std::collections::HashMap;

/// Bigram model.
#[derive(Clone, Debug)]
pub struct Bigram {
    /// Count of each pair of word pieces: `c(v, w)`.
    pairs: HashMap<(u32, u32), f64>,
    /// For each word piece, the count of pairs and the number of different pairs that begin with
    /// it: `c(v)` and `n(v)`.
    followed: Vec<(f64, f64)>,
    /// Probability of each word piece without a preceding one: `p(w)`.
    alone: Vec<f64>,
    discount: f64,
}

impl Bigram {
    /// Trains the model on word pieces with ids below `vocabulary`.
    pub fn train(pieces: &[u32], vocabulary: usize) -> Self {
        let mut pairs: HashMap<(u32, u32), f64> = HashMap::new();
        for pair in pieces.windows(2) {
            *pairs.entry((pair[0], pair[1])).or_default() += 1.0;
        }
        let seen = |times: f64| pairs.values().filter(|count| **count == times).count() as f64;
        let (once, twice) = (seen(1.0), seen(2.0));
        let discount = if once > 0.0 { once / (once + 2.0 * twice) } else { 0.5 };
        let mut followed = vec![(0.0, 0.0); vocabulary];
        let mut follows = vec![0f64; vocabulary];
        for ((first, second), count) in &pairs {
            followed[*first as usize].0 += count;
            followed[*first as usize].1 += 1.0;
            follows[*second as usize] += 1.0;
        }
        let kinds = (pairs.len() as f64).max(1.0);
        let known = follows.iter().filter(|count| **count > 0.0).count() as f64;
        let rest = if pairs.is_empty() { 1.0 } else { discount * known / kinds };
        let equal = rest / vocabulary as f64;
        let alone =
            follows.iter().map(|count| (count - discount).max(0.0) / kinds + equal).collect();
        Self { pairs, followed, alone, discount }
    }

    /// Returns the probability of `second` after `first`.
    fn probability(&self, first: u32, second: u32) -> f64 {
        let (count, kinds) = self.followed[first as usize];
        let alone = self.alone[second as usize];
        if count == 0.0 {
            return alone;
        }
        let pair = self.pairs.get(&(first, second)).copied().unwrap_or(0.0);
        (pair - self.discount).max(0.0) / count + self.discount * kinds / count * alone
    }

    /// Returns the perplexity per word piece, over all word pieces but the first.
    pub fn perplexity(&self, pieces: &[u32]) -> f64 {
        let logs = pieces.windows(2).map(|pair| self.probability(pair[0], pair[1]).ln());
        (-logs.sum::<f64>() / (pieces.len().max(2) - 1) as f64).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chances_add_up_to_one() {
        let text = [0, 1, 2, 0, 1, 3, 0, 1, 2, 2, 2, 5, 0];
        let model = Bigram::train(&text, 8);
        for first in 0..8 {
            let sum: f64 = (0..8).map(|second| model.probability(first, second)).sum();
            assert!((sum - 1.0).abs() < 1e-12, "after {first}: {sum}");
            assert!((0..8).all(|second| model.probability(first, second) > 0.0));
        }
        assert!(model.probability(0, 1) > 0.7 && model.probability(0, 7) < 0.1);
    }

    #[test]
    fn equal_chances_have_the_perplexity_of_the_vocabulary() {
        let model = Bigram::train(&[3], 16);
        assert!((model.perplexity(&[1, 2, 3, 4]) - 16.0).abs() < 1e-9);
    }

    #[test]
    fn pairs_help_on_text_that_was_not_counted() {
        let text = crate::text::Text::embedded().unwrap();
        let bpe = crate::bpe::Bpe::train(&text.train[..200_000], 600).unwrap();
        let train = bpe.encode(&text.train[..200_000]).unwrap();
        let held_out = bpe.encode(&text.held_out).unwrap();
        let model = Bigram::train(&train, bpe.vocabulary());
        let blind = Bigram { followed: vec![(0.0, 0.0); bpe.vocabulary()], ..model.clone() };
        let (with, without) = (model.perplexity(&held_out), blind.perplexity(&held_out));
        assert!(with > 20.0 && with < 0.6 * without, "{with} {without}");
    }
}
