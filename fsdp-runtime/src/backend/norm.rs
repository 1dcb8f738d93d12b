//! Vector norms.

use crate::error::ShardError;

/// A vector norm, as `torch.nn.utils.clip_grad_norm_` takes it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Norm {
    /// The sum of absolute values.
    One,
    /// The square root of the sum of squares.
    #[default]
    Two,
    /// The largest absolute value.
    Inf,
    /// The `p`-th root of the sum of `p`-th powers of absolute values, for any `p` above 0.
    P(f64),
}

impl Norm {
    /// The norm for an exponent, of infinity too.
    ///
    /// # Errors
    ///
    /// [`ShardError::InvalidOption`] for an exponent that is not above 0.
    pub fn new(p: f64) -> Result<Self, ShardError> {
        match p {
            1.0 => Ok(Self::One),
            2.0 => Ok(Self::Two),
            f64::INFINITY => Ok(Self::Inf),
            p if p > 0.0 => Ok(Self::P(p)),
            p => Err(ShardError::InvalidOption {
                option: "norm",
                value: p.to_string(),
                expected: "use an exponent above 0".into(),
            }),
        }
    }

    /// Joins the sums of two parts.
    pub(crate) fn add(self, a: f64, b: f64) -> f64 {
        match self {
            // NaN must not be lost, as `f64::max` would.
            Self::Inf if a.is_nan() || b.is_nan() => f64::NAN,
            Self::Inf => a.max(b),
            _ => a + b,
        }
    }

    /// What an element adds to the sum.
    pub(crate) fn term(self, x: f64) -> f64 {
        match self {
            Self::One | Self::Inf => x.abs(),
            Self::Two => x * x,
            Self::P(p) => x.abs().powf(p),
        }
    }

    /// The norm whose sum is `sum`.
    pub(crate) fn root(self, sum: f64) -> f64 {
        match self {
            Self::One | Self::Inf => sum,
            Self::Two => sum.sqrt(),
            Self::P(p) => sum.powf(p.recip()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn norms_are_those_of_their_definitions() {
        let of = |p: f64| {
            let norm = Norm::new(p).unwrap();
            norm.root(
                [3.0, -4.0].map(|x| norm.term(x)).into_iter().fold(0.0, |a, b| norm.add(a, b)),
            )
        };
        assert_eq!((of(1.0), of(2.0), of(f64::INFINITY)), (7.0, 5.0, 4.0));
        assert!((of(3.0) - 91f64.cbrt()).abs() < 1e-12);
        assert!(Norm::Inf.add(f64::NAN, 1.0).is_nan() && Norm::Inf.add(1.0, f64::NAN).is_nan());
        for wrong in [0.0, -1.0, f64::NAN] {
            assert!(Norm::new(wrong).is_err());
        }
    }
}
