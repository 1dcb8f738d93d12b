//! Outputs of steps, from all ranks to the metrics of rank 0.

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn::train::{
    ClassificationOutput, ItemLazy, MultiLabelClassificationOutput, RegressionOutput,
    SequenceOutput,
};

/// The output of a step, which every rank sends to rank 0 for the metrics.
///
/// Burn's four output types and `()` implement it. Their outputs of all ranks become one: rows are
/// concatenated in rank order, and the loss is the mean of the ranks' losses, weighted by their
/// numbers of rows. Outputs whose shapes do not fit together, such as sequences of different
/// lengths, are passed to the metrics one after the other.
///
/// Implement it for an output type of your own to use metrics with
/// [`FsdpStrategy`](super::FsdpStrategy) on several ranks.
pub trait RankOutput: ItemLazy + 'static {
    /// Returns the tensors of the output, copied to the host.
    fn into_host(self) -> Vec<TensorData>;

    /// Returns the outputs for the metrics, made from the tensors of each rank in rank order. All
    /// ranks have equally many tensors.
    fn from_ranks(ranks: Vec<Vec<TensorData>>, device: &Device) -> Vec<Self>;
}

impl RankOutput for () {
    fn into_host(self) -> Vec<TensorData> {
        Vec::new()
    }

    fn from_ranks(_: Vec<Vec<TensorData>>, _: &Device) -> Vec<Self> {
        vec![()]
    }
}

/// Implements [`RankOutput`] for a struct of a loss and of tensors whose first dimension is the
/// batch.
macro_rules! outputs {
    ($($ty:ident { $($field:ident: $tensor:ty),+ })+) => {$(
        impl RankOutput for $ty {
            fn into_host(self) -> Vec<TensorData> {
                vec![self.loss.into_data(), $(self.$field.into_data()),+]
            }

            fn from_ranks(ranks: Vec<Vec<TensorData>>, device: &Device) -> Vec<Self> {
                let one = |tensors: Vec<TensorData>| {
                    let [loss, $($field),+] = <[_; _]>::try_from(tensors)
                        .expect("as many tensors as `into_host` returns");
                    Self {
                        loss: Tensor::from_data(loss, device),
                        $($field: <$tensor>::from_data($field, device)),+
                    }
                };
                joined(ranks).into_iter().map(one).collect()
            }
        }
    )+};
}
outputs! {
    ClassificationOutput { output: Tensor<2>, targets: Tensor<1, Int> }
    MultiLabelClassificationOutput { output: Tensor<2>, targets: Tensor<2, Int> }
    RegressionOutput { output: Tensor<2>, targets: Tensor<2> }
}

impl RankOutput for SequenceOutput {
    fn into_host(self) -> Vec<TensorData> {
        let predictions = self.predictions.map(Tensor::into_data);
        let tensors = [self.loss.into_data(), self.logits.into_data(), self.targets.into_data()];
        tensors.into_iter().chain(predictions).collect()
    }

    fn from_ranks(ranks: Vec<Vec<TensorData>>, device: &Device) -> Vec<Self> {
        let one = |tensors: Vec<TensorData>| {
            let mut tensors = tensors.into_iter();
            let mut next = || tensors.next().expect("as many tensors as `into_host` returns");
            Self {
                loss: Tensor::from_data(next(), device),
                logits: Tensor::from_data(next(), device),
                targets: Tensor::from_data(next(), device),
                predictions: tensors.next().map(|data| Tensor::from_data(data, device)),
            }
        };
        joined(ranks).into_iter().map(one).collect()
    }
}

/// Joins the tensors of all ranks: the first one, the loss, and the rows of the others. Returns the
/// ranks' tensors as they are if their shapes do not fit together.
fn joined(ranks: Vec<Vec<TensorData>>) -> Vec<Vec<TensorData>> {
    let fits = |data: &TensorData, other: &TensorData| {
        data.dtype() == other.dtype() && data.shape()[1..] == other.shape()[1..]
    };
    let first = &ranks[0];
    if !ranks.iter().all(|rank| rank.iter().skip(1).zip(&first[1..]).all(|(a, b)| fits(a, b))) {
        return ranks;
    }
    let rows: Vec<usize> = ranks.iter().map(|rank| rank[1].shape()[0]).collect();
    let mut columns: Vec<Vec<TensorData>> = first.iter().map(|_| Vec::new()).collect();
    for rank in ranks {
        columns.iter_mut().zip(rank).for_each(|(column, data)| column.push(data));
    }
    let mut columns = columns.into_iter();
    let losses = columns.next().expect("the loss is the first tensor");
    let loss = mean_loss(losses, &rows);
    vec![std::iter::once(loss).chain(columns.map(concatenate)).collect()]
}

/// Returns the mean of the ranks' losses of one element, weighted by the ranks' numbers of rows.
/// Losses of several elements, one for each row, are concatenated.
fn mean_loss(losses: Vec<TensorData>, rows: &[usize]) -> TensorData {
    if losses.iter().any(|loss| loss.num_elements() != 1) {
        return concatenate(losses);
    }
    let dtype = losses[0].dtype();
    let values = losses.iter().flat_map(|loss| loss.iter::<f64>());
    let sum: f64 = values.zip(rows).map(|(loss, rows)| loss * *rows as f64).sum();
    let mean = sum / rows.iter().sum::<usize>() as f64;
    TensorData::from([mean]).convert_dtype(dtype)
}

/// Concatenates tensors along their first dimension.
fn concatenate(parts: Vec<TensorData>) -> TensorData {
    let dtype = parts[0].dtype();
    let mut shape = parts[0].shape().clone();
    shape[0] = parts.iter().map(|part| part.shape()[0]).sum();
    let bytes = parts.iter().flat_map(|part| part.as_bytes()).copied().collect();
    TensorData::from_bytes_vec(bytes, shape, dtype)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(loss: f32, rows: &[[f32; 2]], targets: &[i64]) -> Vec<TensorData> {
        let output = TensorData::new(rows.concat(), [rows.len(), 2]);
        vec![TensorData::from([loss]), output, TensorData::new(targets.to_vec(), [targets.len()])]
    }

    #[test]
    fn the_outputs_of_ranks_are_one_output_of_all_rows() {
        let ranks = vec![
            rank(1.0, &[[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]], &[0, 1, 0]),
            rank(5.0, &[[6.0, 7.0]], &[1]),
        ];
        let [output] = <[_; 1]>::try_from(joined(ranks)).unwrap();
        assert_eq!(output[0], TensorData::from([2.0f32]), "(3 · 1 + 1 · 5) / 4");
        let rows: Vec<f32> = (0..8).map(|i| i as f32).collect();
        assert_eq!(output[1], TensorData::new(rows, [4, 2]));
        assert_eq!(output[2], TensorData::from([0i64, 1, 0, 1]));
    }

    #[test]
    fn outputs_of_other_shapes_stay_apart() {
        let mut other = rank(5.0, &[[6.0, 7.0]], &[1]);
        other[1] = TensorData::from([[1.0f32, 2.0, 3.0]]);
        let ranks = vec![rank(1.0, &[[0.0, 1.0]], &[0]), other];
        assert_eq!(joined(ranks.clone()), ranks);
    }

    #[test]
    fn losses_of_rows_are_concatenated() {
        let losses = vec![TensorData::from([1.0f32, 2.0]), TensorData::from([3.0f32])];
        assert_eq!(mean_loss(losses, &[2, 1]), TensorData::from([1.0f32, 2.0, 3.0]));
    }
}
