//! Parsers of command-line values. Each error says which values are valid.

/// Largest value of a [`bounded_count`]. A product of three such numbers fits into 64 bits.
const MAX_COUNT: usize = 1 << 20;

/// Parses a whole number from 1.
pub fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("expected a whole number from 1".into()),
        Ok(number) => Ok(number),
    }
}

/// Parses a whole number from 1 to 2^20.
pub fn bounded_count(text: &str) -> Result<usize, String> {
    let expected = || format!("expected a whole number from 1 to {MAX_COUNT}");
    positive(text).ok().filter(|count| *count <= MAX_COUNT).ok_or_else(expected)
}

/// Parses a number that `is_valid` accepts. `expected` describes the valid numbers.
pub fn number(text: &str, is_valid: impl Fn(f64) -> bool, expected: &str) -> Result<f64, String> {
    text.parse().ok().filter(|x| is_valid(*x)).ok_or_else(|| format!("expected {expected}"))
}

/// Parses a learning rate, in (0, 1].
pub fn learning_rate(text: &str) -> Result<f64, String> {
    number(text, |rate| rate > 0.0 && rate <= 1.0, "a number above 0 and at most 1, such as 5e-5")
}

/// Parses a dropout probability, in [0, 1).
pub fn probability(text: &str) -> Result<f64, String> {
    number(text, |probability| (0.0..1.0).contains(&probability), "a number from 0 to below 1")
}
