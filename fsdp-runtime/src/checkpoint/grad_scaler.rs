//! State of a loss scaler as numbers by name.

use super::scalar::{Scalar, Scalars};
use crate::error::ShardError;
use crate::optim::{GradScaler, GradScalerConfig};

impl GradScaler {
    /// Returns the configuration and the state, by the names used in checkpoints.
    pub(super) fn scalars(&self) -> Scalars {
        let (config, scale, growth_tracker) = self.parts();
        let float = |x: f32| Scalar::Float(f64::from(x));
        let count = |n: u32| Scalar::UInt(n.into());
        let named = [
            ("init_scale", float(config.init_scale)),
            ("growth_factor", float(config.growth_factor)),
            ("backoff_factor", float(config.backoff_factor)),
            ("growth_interval", count(config.growth_interval)),
            ("scale", float(scale)),
            ("growth_tracker", count(growth_tracker)),
        ];
        named.map(|(name, scalar)| (name.to_string(), scalar)).into()
    }

    /// Returns a scaler with the configuration and the state given by name.
    ///
    /// # Errors
    ///
    /// The first number that is missing, of another kind, or out of range.
    pub(super) fn from_scalars(scalars: &Scalars) -> Result<Self, String> {
        let number =
            |name: &str| scalars.get(name).copied().ok_or_else(|| format!("`{name}` is missing"));
        let float = |name| match number(name)? {
            Scalar::Float(x) => Ok(x as f32),
            other => Err(format!("`{name}` is {other}, not a float")),
        };
        let count = |name| match number(name)? {
            Scalar::UInt(n) => u32::try_from(n).map_err(|_| format!("`{name}` is {n}")),
            other => Err(format!("`{name}` is {other}, not a uint")),
        };
        let config = GradScalerConfig::new()
            .with_init_scale(float("init_scale")?)
            .with_growth_factor(float("growth_factor")?)
            .with_backoff_factor(float("backoff_factor")?)
            .with_growth_interval(count("growth_interval")?);
        let (scale, growth_tracker) = (float("scale")?, count("growth_tracker")?);
        Self::restored(config, scale, growth_tracker).map_err(|error: ShardError| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scaler_equals_the_one_restored_from_its_scalars() {
        let config = GradScalerConfig::new().with_init_scale(1e-38).with_growth_interval(3);
        let mut scaler = config.init().unwrap();
        for finite in [false, true, true] {
            scaler.update(finite);
        }
        assert_eq!(GradScaler::from_scalars(&scaler.scalars()), Ok(scaler));
    }
}
