//! The collectives on host values that programs use: exchange, gather, broadcast, reduction, and the
//! rows of a tensor for metrics.

use std::any::type_name;
use std::sync::Arc;

use burn::tensor::kind::Basic;
use burn::tensor::{Tensor, TensorData};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::worker::Worker;
use crate::error::{CollectiveError, Error};
use crate::layout::Rank;

/// How [`Worker::reduce`] combines the values of all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReduceOp {
    /// The sum, added in rank order.
    Sum,
    /// The sum, divided by the number of ranks.
    Mean,
    /// The smallest value. NaN if that of a rank is NaN.
    Min,
    /// The largest value. NaN if that of a rank is NaN.
    Max,
}

impl ReduceOp {
    /// Combines the values of ranks, of which there is at least one.
    fn combine(self, values: impl ExactSizeIterator<Item = f64>) -> f64 {
        let ranks = values.len() as f64;
        let pick = |first: f64, second: f64, takes_first: bool| match first.is_nan() {
            true => first,
            false if second.is_nan() || !takes_first => second,
            false => first,
        };
        let combined = values.reduce(|first, second| match self {
            Self::Sum | Self::Mean => first + second,
            Self::Min => pick(first, second, first <= second),
            Self::Max => pick(first, second, first >= second),
        });
        let combined = combined.unwrap_or(f64::NAN);
        if self == Self::Mean { combined / ranks } else { combined }
    }
}

/// Returns the description of values of a type, which ranks compare.
fn values_of<T>() -> String {
    format!("the program's values of type `{}`", type_name::<T>())
}

impl Worker {
    /// Returns every rank's value, in rank order, on every rank. Every rank calls it, with a value of
    /// the same type.
    ///
    /// Threads share the values; between processes they are serialised in the format of `postcard`,
    /// which needs types that describe themselves as Rust structs do (no `serde_json::Value`).
    ///
    /// # Errors
    ///
    /// [`CollectiveError`] when a rank does not call it within the time-out, or passes a value of
    /// another type.
    ///
    /// # Example
    ///
    /// ```
    /// use fsdp_runtime::prelude::*;
    ///
    /// # fn main() -> Result<(), fsdp_runtime::errors::LaunchError> {
    /// launch(LaunchOptions::new(2), |worker| {
    ///     let names = worker.exchange(format!("rank {}", worker.rank()))?;
    ///     assert_eq!(*names[1], "rank 1");
    ///     Ok::<_, Error>(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn exchange<T>(&self, value: T) -> Result<Vec<Arc<T>>, Error>
    where
        T: Serialize + DeserializeOwned + Send + Sync + 'static,
    {
        self.exchange_as("all_gather", &values_of::<T>(), value)
    }

    /// Returns every rank's value, in rank order, on the rank `to`, and `None` on the others, which
    /// receive no value. Every rank calls it, with the same `to`. Otherwise it works as
    /// [`exchange`](Self::exchange) does.
    ///
    /// # Errors
    ///
    /// Those of [`exchange`](Self::exchange).
    pub fn gather<T>(&self, to: Rank, value: T) -> Result<Option<Vec<Arc<T>>>, Error>
    where
        T: Serialize + DeserializeOwned + Send + Sync + 'static,
    {
        self.gather_as(&format!("{} to rank {to}", values_of::<T>()), to, value)
    }

    /// Calls `value` on the rank `from`, and returns the result on every rank. Every rank calls it,
    /// with the same `from`.
    ///
    /// # Errors
    ///
    /// Those of [`exchange`](Self::exchange).
    pub fn broadcast<T>(&self, from: Rank, value: impl FnOnce() -> T) -> Result<T, Error>
    where
        T: Serialize + DeserializeOwned + Clone + Send + Sync + 'static,
    {
        let own = (self.rank() == from).then(value);
        let what = format!("{} from rank {from}", values_of::<T>());
        let mut all = self.exchange_as("broadcast", &what, own)?;
        let value = Arc::unwrap_or_clone(all.swap_remove(from.index()));
        Ok(value.expect("all ranks have given the same `from`, which made a value"))
    }

    /// Replaces each value by its sum over all ranks, added in rank order. Every rank calls it.
    ///
    /// # Errors
    ///
    /// [`CollectiveError`] when a rank does not call it within the time-out, or passes another
    /// number of values.
    pub fn all_reduce_sum(&self, values: &mut [f64]) -> Result<(), Error> {
        self.reduce(values, ReduceOp::Sum)
    }

    /// Replaces each value by its combination over all ranks. Every rank calls it.
    ///
    /// # Errors
    ///
    /// [`CollectiveError`] when a rank does not call it within the time-out, or passes another
    /// number of values.
    pub fn reduce(&self, values: &mut [f64], with: ReduceOp) -> Result<(), Error> {
        let what = match with {
            ReduceOp::Sum => "the worker's values".to_string(),
            other => format!("the worker's values ({other:?})"),
        };
        let all = self.exchange_as("all_reduce", &what, values.to_vec())?;
        let lens = all.iter().map(|values| values.len());
        self.check_equal(lens, |len| format!("all_reduce of {len} values"))?;
        for (index, value) in values.iter_mut().enumerate() {
            *value = with.combine(all.iter().map(|rank| rank[index]));
        }
        Ok(())
    }

    /// Returns the rows of all ranks' tensors, in rank order, on every rank: of each rank the first
    /// `rows` rows. Returns `None` if no rank has any. Every rank calls it.
    ///
    /// A rank that only takes part in a forward, because its data has ended, passes 0 rows. The
    /// tensors may differ in their number of rows, and in nothing else. They are exchanged through
    /// host memory. Accelerate's `gather_for_metrics`.
    ///
    /// # Errors
    ///
    /// [`CollectiveError`] when a rank does not call it within the time-out, or passes a tensor whose
    /// rows have another shape or dtype.
    ///
    /// # Panics
    ///
    /// Panics if the tensor has fewer than `rows` rows.
    pub fn gather_for_metrics<const D: usize, K: Basic>(
        &self,
        tensor: Tensor<D, K>,
        rows: usize,
    ) -> Result<Option<Tensor<D, K>>, Error> {
        let device = tensor.device();
        let data = tensor.into_data();
        let (dtype, mut shape) = (data.dtype(), data.shape().to_vec());
        assert!(rows <= shape[0], "a tensor of {} rows has no {rows} rows", shape[0]);
        let row_bytes = data.as_bytes().len() / shape[0].max(1);
        let own = (
            shape[1..].to_vec(),
            format!("{dtype:?}"),
            data.as_bytes()[..rows * row_bytes].to_vec(),
        );
        let all = self.exchange_as("all_gather", "rows for metrics", own)?;
        let forms = all.iter().map(|rank| (&rank.0, &rank.1));
        let describe = |(shape, dtype): (&Vec<usize>, &String)| {
            format!("all_gather of rows of shape {shape:?} and type {dtype}")
        };
        self.check_equal(forms, describe)?;
        let bytes: Vec<u8> = all.iter().flat_map(|rank| rank.2.iter().copied()).collect();
        if bytes.is_empty() {
            return Ok(None);
        }
        shape[0] = bytes.len() / row_bytes;
        let data = TensorData::from_bytes_vec(bytes, shape, dtype);
        Ok(Some(Tensor::from_data(data, (&device, dtype))))
    }

    /// Checks that all ranks have given an equal value.
    fn check_equal<T: PartialEq + Copy>(
        &self,
        mut values: impl Iterator<Item = T>,
        describe: impl Fn(T) -> String,
    ) -> Result<(), Error> {
        let Some(first) = values.next() else { return Ok(()) };
        match self.world().ranks().skip(1).zip(values).find(|(_, value)| *value != first) {
            Some((rank, value)) => {
                let (found, expected) = (describe(value), describe(first));
                Err(CollectiveError::Mismatch { rank, found, peer: Rank::ZERO, expected }.into())
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_combine_values_and_keep_nan() {
        let combine = |op: ReduceOp, values: [f64; 3]| op.combine(values.into_iter());
        assert_eq!(combine(ReduceOp::Sum, [1.0, -2.0, 4.0]), 3.0);
        assert_eq!(combine(ReduceOp::Mean, [1.0, -2.0, 4.0]), 1.0);
        assert_eq!(combine(ReduceOp::Min, [1.0, -2.0, 4.0]), -2.0);
        assert_eq!(combine(ReduceOp::Max, [1.0, -2.0, 4.0]), 4.0);
        for at in 0..3 {
            let mut values = [1.0, 2.0, 3.0];
            values[at] = f64::NAN;
            for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min, ReduceOp::Max] {
                assert!(combine(op, values).is_nan(), "{op:?} {at}");
            }
        }
    }
}
