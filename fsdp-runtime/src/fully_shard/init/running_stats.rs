//! The broadcast of rank 0's running statistics.

use std::collections::HashMap;

use burn::module::{ModuleMapper, Param, ParamId};
use burn::tensor::{Tensor, TensorData};

use crate::backend::owned_data;
use crate::error::Error;
use crate::launch::Worker;
use crate::module::{FsdpModule, ParamVisitor};
use crate::param_group::plan::IgnoredParam;

/// Returns the module with rank 0's running statistics. Every rank calls it.
///
/// `known` has the paths of the running statistics. A rank keeps its own values where rank 0 has no
/// statistic under that path, or one of another shape.
pub(super) fn broadcast<M: FsdpModule>(
    worker: &Worker,
    known: &[IgnoredParam],
    module: M,
) -> Result<M, Error> {
    let mut read = ReadStats { known, values: Vec::new() };
    let sends = worker.is_rank_zero();
    if sends {
        module.visit_params(&mut read);
    }
    let all = worker.exchange_as("broadcast", "the running statistics", read.values)?;
    if sends || all[0].is_empty() {
        return Ok(module);
    }
    let own = |(path, data): &'_ (String, TensorData)| {
        let own = known.iter().find(|own| own.spec.path == *path)?;
        Some((own.id, data.clone()))
    };
    Ok(module.map(&mut ReplaceStats(all[0].iter().filter_map(own).collect())))
}

/// Reads the running statistics with their paths.
struct ReadStats<'a> {
    known: &'a [IgnoredParam],
    values: Vec<(String, TensorData)>,
}

impl ParamVisitor for ReadStats<'_> {
    fn param<const D: usize>(&mut self, _: &Param<Tensor<D>>) {}

    fn buffer<const D: usize>(&mut self, buffer: &Param<Tensor<D>>) {
        let known = self.known.iter().find(|known| known.id == buffer.id);
        let path =
            known.map(|known| (known.spec.path.clone(), owned_data(buffer.val().into_data())));
        self.values.extend(path);
    }
}

/// Replaces running statistics that have the shape of the new values.
struct ReplaceStats(HashMap<ParamId, TensorData>);

impl ModuleMapper for ReplaceStats {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let fits = |data: &TensorData| *data.shape() == param.lazy_shape();
        let Some(data) = self.0.remove(&param.id).filter(fits) else { return param };
        let (id, tensor, mapper) = param.consume();
        let tensor = Tensor::from_data(data, (&tensor.device(), tensor.dtype()));
        Param::from_mapped_value(id, tensor, mapper)
    }
}
