//! Vector norms over sharded gradients, from partial sums of their elements.

/// Exponent of a norm that is NaN, 0 or negative.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("norm {exponent}: use an exponent above 0")]
#[non_exhaustive]
pub struct InvalidNorm {
    /// The exponent.
    pub exponent: f64,
}

/// Vector norm, one of those `torch.nn.utils.clip_grad_norm_` accepts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Norm {
    /// The 1-norm: sum of the absolute values.
    One,
    /// The 2-norm: square root of the sum of squares.
    #[default]
    Two,
    /// The infinity norm: largest absolute value.
    Inf,
    /// The p-norm: `p`-th root of the sum of the `p`-th powers of the absolute values, for `p`
    /// above 0.
    P(f64),
}

impl Norm {
    /// Returns the norm with exponent `p`; `f64::INFINITY` gives [`Norm::Inf`].
    ///
    /// # Errors
    ///
    /// [`InvalidNorm`] if `p` is NaN, 0 or negative.
    pub fn new(p: f64) -> Result<Self, InvalidNorm> {
        match p {
            1.0 => Ok(Self::One),
            2.0 => Ok(Self::Two),
            f64::INFINITY => Ok(Self::Inf),
            p if p > 0.0 => Ok(Self::P(p)),
            exponent => Err(InvalidNorm { exponent }),
        }
    }

    /// Combines the partial sums of two parts: their sum, or their maximum for [`Norm::Inf`].
    pub fn add(self, a: f64, b: f64) -> f64 {
        match self {
            // `f64::max` ignores a NaN, but the norm of a tensor with a NaN must be NaN.
            Self::Inf if a.is_nan() || b.is_nan() => f64::NAN,
            Self::Inf => a.max(b),
            _ => a + b,
        }
    }

    /// Returns the term that an element contributes to a partial sum.
    pub(crate) fn term(self, x: f64) -> f64 {
        match self {
            Self::One | Self::Inf => x.abs(),
            Self::Two => x * x,
            Self::P(p) => x.abs().powf(p),
        }
    }

    /// Returns the norm of a tensor whose terms add up to `sum`.
    pub fn root(self, sum: f64) -> f64 {
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
    fn norms_match_their_definitions() {
        let norm_of_3_and_minus_4 = |p: f64| {
            let norm = Norm::new(p).unwrap();
            let terms = [3.0, -4.0].map(|x| norm.term(x));
            norm.root(terms.into_iter().fold(0.0, |a, b| norm.add(a, b)))
        };
        let [one, two, inf] = [1.0, 2.0, f64::INFINITY].map(norm_of_3_and_minus_4);
        assert_eq!((one, two, inf), (7.0, 5.0, 4.0));
        assert!((norm_of_3_and_minus_4(3.0) - 91f64.cbrt()).abs() < 1e-12);
        assert!(Norm::Inf.add(f64::NAN, 1.0).is_nan() && Norm::Inf.add(1.0, f64::NAN).is_nan());
        for wrong in [0.0, -1.0, f64::NAN] {
            assert!(Norm::new(wrong).is_err());
        }
    }
}
