//! Running statistics, which are rank 0's at the start.

use std::collections::HashMap;

use burn::module::{ModuleMapper, Param, ParamId};
use burn::tensor::{Tensor, TensorData};

use crate::error::Error;
use crate::launch::Worker;
use crate::module::{FsdpModule, ParamVisitor};
use crate::param_group::plan::IgnoredParam;

/// The module with rank 0's running statistics on every rank, by their paths, which `known` has. Those
/// that rank 0 has not, or has of another shape, are each rank's own, and stay. Every rank calls it.
pub(super) fn share<M: FsdpModule>(
    worker: &Worker,
    known: &[IgnoredParam],
    module: M,
) -> Result<M, Error> {
    let mut read = Read { known, values: Vec::new() };
    let gives = worker.rank().index() == 0;
    if gives {
        module.visit_params(&mut read);
    }
    let all = worker.exchange("broadcast", "the running statistics", read.values)?;
    let own = |(path, data): &'_ (String, TensorData)| {
        let own = known.iter().find(|own| own.entry.path == *path)?;
        Some((own.id, data.clone()))
    };
    match gives || all[0].is_empty() {
        true => Ok(module),
        false => Ok(module.map(&mut Fill(all[0].iter().filter_map(own).collect()))),
    }
}

/// Reads them with their paths.
struct Read<'a> {
    known: &'a [IgnoredParam],
    values: Vec<(String, TensorData)>,
}

impl ParamVisitor for Read<'_> {
    fn param<const D: usize>(&mut self, _: &Param<Tensor<D>>) {}

    fn buffer<const D: usize>(&mut self, buffer: &Param<Tensor<D>>) {
        let known = self.known.iter().find(|known| known.id == buffer.id);
        let path = known.map(|known| (known.entry.path.clone(), buffer.val().into_data()));
        self.values.extend(path);
    }
}

struct Fill(HashMap<ParamId, TensorData>);

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let fits = |data: &TensorData| *data.shape() == param.lazy_shape();
        let Some(data) = self.0.remove(&param.id).filter(fits) else { return param };
        let (id, tensor, mapper) = param.consume();
        let tensor = Tensor::from_data(data, (&tensor.device(), tensor.dtype()));
        Param::from_mapped_value(id, tensor, mapper)
    }
}
