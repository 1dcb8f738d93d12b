//! Drawing the next token from logits.

use clap::Args;
use rand::Rng;
use rand::rngs::StdRng;

use super::parse::{number, positive};

/// Arguments of sampling.
#[derive(Args, Clone, Copy, Debug)]
pub struct SamplingArgs {
    /// Number of tokens to add to a text, at most
    #[arg(long, value_name = "N", default_value = "100", value_parser = positive)]
    pub max_new_tokens: usize,

    /// Divisor of the logits before a token is drawn; 0 for the most probable one in any case
    #[arg(long, value_name = "T", default_value = "1", value_parser = temperature)]
    pub temperature: f64,

    /// Number of the most probable tokens that one is drawn of [default: all]
    #[arg(long, value_name = "K", value_parser = positive)]
    pub top_k: Option<usize>,

    /// Probability that the most probable tokens, of which one is drawn, have together at least [default: 1]
    #[arg(long, value_name = "P", value_parser = share)]
    pub top_p: Option<f64>,
}

fn temperature(text: &str) -> Result<f64, String> {
    number(text, |number| number >= 0.0 && number.is_finite(), "a number from 0")
}

fn share(text: &str) -> Result<f64, String> {
    number(text, |number| number > 0.0 && number <= 1.0, "a number above 0 and at most 1")
}

impl SamplingArgs {
    /// Draws a token with the probabilities of the logits.
    pub fn draw(&self, logits: &[f32], rng: &mut StdRng) -> u32 {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        // Of equal logits, the first is the larger.
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
        if self.temperature == 0.0 {
            return order[0] as u32;
        }
        order.truncate(self.top_k.unwrap_or(usize::MAX));
        let top = f64::from(logits[order[0]]);
        let weight = |id: &usize| ((f64::from(logits[*id]) - top) / self.temperature).exp();
        let mut weights: Vec<f64> = order.iter().map(weight).collect();
        if let Some(share) = self.top_p {
            let wanted = share * weights.iter().sum::<f64>();
            let mut sum = 0.0;
            let enough = weights.iter().position(|weight| {
                sum += weight;
                sum >= wanted
            });
            weights.truncate(enough.map_or(weights.len(), |last| last + 1));
        }
        let mut left = rng.random::<f64>() * weights.iter().sum::<f64>();
        for (id, weight) in order.iter().zip(&weights) {
            left -= weight;
            if left < 0.0 {
                return *id as u32;
            }
        }
        order[0] as u32
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    fn drawn(args: SamplingArgs) -> Vec<usize> {
        let logits = [0.0, 3.0, 2.0, -1.0].map(|x: f32| x);
        let mut rng = StdRng::seed_from_u64(5);
        let mut counts = vec![0; logits.len()];
        (0..4000).for_each(|_| counts[args.draw(&logits, &mut rng) as usize] += 1);
        counts
    }

    #[test]
    fn tokens_are_drawn_with_their_probabilities() {
        let all = SamplingArgs { max_new_tokens: 1, temperature: 1.0, top_k: None, top_p: None };
        // e^3 : e^2 : 1 : e^-1 of 28.84 together.
        let expected = [138.7, 2785.8, 1024.9, 51.0];
        for (count, expected) in drawn(all).into_iter().zip(expected) {
            assert!(
                (count as f64 - expected).abs() < 5.0 * f64::sqrt(expected),
                "{count} {expected}"
            );
        }
        let counts =
            |args: SamplingArgs| drawn(args).iter().map(|count| *count > 0).collect::<Vec<_>>();
        assert_eq!(drawn(SamplingArgs { temperature: 0.0, ..all }), [0, 4000, 0, 0]);
        assert_eq!(counts(SamplingArgs { top_k: Some(2), ..all }), [false, true, true, false]);
        assert_eq!(counts(SamplingArgs { top_p: Some(0.97), ..all }), [true, true, true, false]);
        assert_eq!(counts(SamplingArgs { top_p: Some(0.5), ..all }), [false, true, false, false]);
    }
}
