//! Adapters that a save adds to their matrices, one matrix at a time.

use std::collections::{HashMap, HashSet};

use burn::module::{Param, ParamId};
use burn::tensor::{Shape, Tensor, TensorData};
use rayon::prelude::*;

use super::load_values::ParamTarget;
use crate::error::SaveError;
use crate::fully_shard::Fsdp;
use crate::module::{FsdpModule, ParamVisitor, Sharded};
use crate::param_group::Placement;

/// The factors of an adapter, and the factor of their product.
#[derive(Clone, Copy, Debug)]
pub(super) struct MergedAdapter {
    pub(super) a: ParamTarget,
    pub(super) b: ParamTarget,
    scale: f64,
}

impl MergedAdapter {
    /// Returns `matrix + scale · a · b`. All have f32 elements in row-major order: `matrix` of shape
    /// `[inputs, outputs]`, `a` of `[inputs, rank]` and `b` of `[rank, outputs]`.
    ///
    /// # Errors
    ///
    /// A description of elements of another type.
    pub(super) fn add(
        &self,
        matrix: TensorData,
        [a, b]: [&TensorData; 2],
    ) -> Result<TensorData, String> {
        let shape = Shape::from(matrix.shape().to_vec());
        let wrong = |error| format!("the elements of an adapter are not f32: {error:?}");
        let (a, b) = (a.as_slice::<f32>().map_err(wrong)?, b.as_slice::<f32>().map_err(wrong)?);
        let mut sums = matrix.try_into_vec::<f32>().map_err(|error| format!("{error:?}"))?;
        let outputs = shape[1].max(1);
        let rank = b.len() / outputs;
        let scale = self.scale as f32;
        let add_row = |(row, sums): (usize, &mut [f32])| {
            let mut products = vec![0.0; sums.len()];
            for (a, b) in a[row * rank..][..rank].iter().zip(b.chunks(outputs)) {
                products.iter_mut().zip(b).for_each(|(product, b)| *product += a * b);
            }
            sums.iter_mut().zip(products).for_each(|(sum, product)| *sum += scale * product);
        };
        sums.par_chunks_mut(outputs).enumerate().for_each(add_row);
        Ok(TensorData::new(sums, shape))
    }
}

/// The adapters of a model by the matrices that they are added to.
#[derive(Debug, Default)]
pub(super) struct MergedAdapters {
    adapters: HashMap<ParamTarget, MergedAdapter>,
    /// The factors of the adapters.
    factors: HashSet<ParamTarget>,
}

impl MergedAdapters {
    /// Returns the adapters of `model`.
    ///
    /// # Errors
    ///
    /// [`SaveError::TiedAdapter`] for an adapter of a matrix that is written under another's name.
    pub(super) fn of<M: FsdpModule>(model: &Fsdp<M>) -> Result<Self, SaveError> {
        let mut found = Found { model, adapters: Self::default(), tied: None };
        model.module.visit_params(&mut found);
        match found.tied {
            Some(path) => Err(SaveError::TiedAdapter { path }),
            None => Ok(found.adapters),
        }
    }

    /// Returns the adapter of a parameter, if it has one.
    pub(super) fn get(&self, param: ParamTarget) -> Option<&MergedAdapter> {
        self.adapters.get(&param)
    }

    /// Returns whether a parameter is a factor of an adapter.
    pub(super) fn has_factor(&self, param: ParamTarget) -> bool {
        self.factors.contains(&param)
    }
}

/// The visitor that finds adapters.
struct Found<'a, M> {
    model: &'a Fsdp<M>,
    adapters: MergedAdapters,
    /// Path of a tied matrix with an adapter.
    tied: Option<String>,
}

impl<M> ParamVisitor for Found<'_, M> {
    fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(lora) = Sharded::lora_of(param) else { return };
        let target = target(param);
        if let ParamTarget::Sharded(index) = target {
            let spec = &self.model.schedule.units()[index.unit].params[index.param];
            if matches!(spec.placement, Placement::TiedTo(_)) {
                self.tied.get_or_insert_with(|| spec.path.clone());
            }
        }
        let (a, b, scale) = (self::target(&lora.a), self::target(&lora.b), lora.scale);
        self.adapters.factors.extend([a, b]);
        self.adapters.adapters.insert(target, MergedAdapter { a, b, scale });
    }
}

/// Returns the place of a parameter's values.
fn target<const D: usize>(param: &Param<Tensor<D>>) -> ParamTarget {
    let id: ParamId = param.id;
    Sharded::of(param)
        .map_or(ParamTarget::PerRank(id), |sharded| ParamTarget::Sharded(sharded.index))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_product_is_added_row_by_row() {
        let data = |numbers: &[f32], shape: [usize; 2]| TensorData::new(numbers.to_vec(), shape);
        let factor = ParamTarget::PerRank(ParamId::from(0));
        let adapter = MergedAdapter { a: factor, b: factor, scale: 0.5 };
        let matrix = data(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [3, 2]);
        let (a, b) = (data(&[2.0, 4.0, 6.0], [3, 1]), data(&[1.0, -1.0], [1, 2]));
        let sums = adapter.add(matrix, [&a, &b]).unwrap();
        assert_eq!(sums, data(&[2.0, 1.0, 5.0, 2.0, 8.0, 3.0], [3, 2]));
        let none = adapter.add(data(&[], [3, 0]), [&a, &data(&[], [1, 0])]).unwrap();
        assert_eq!(none, data(&[], [3, 0]));
    }
}
