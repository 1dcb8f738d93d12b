//! Running statistics, which are rank 0's at the start.

use std::collections::HashMap;

use burn::module::{ModuleMapper, Param, ParamId};
use burn::tensor::{Tensor, TensorData};

use crate::error::Error;
use crate::launch::Worker;
use crate::unit::{FsdpModule, Walk};

/// A shape and its elements.
type Values = (Vec<usize>, Vec<f32>);

/// The module with rank 0's running statistics on every rank, by their order. Those of another shape
/// are each rank's own, and stay. Every rank calls it.
pub(super) fn share<M: FsdpModule>(worker: &Worker, module: M) -> Result<M, Error> {
    let mut read = Read { ids: Vec::new(), values: Vec::new() };
    module.walk(&mut read);
    let Read { ids, values } = read;
    let first = worker.rank().index() == 0;
    let own = if first { values } else { Vec::new() };
    let all = worker.exchange("broadcast", "the running statistics", own)?;
    if first || ids.is_empty() {
        return Ok(module);
    }
    Ok(module.map(&mut Fill(ids.into_iter().zip(all[0].iter()).collect())))
}

struct Read {
    ids: Vec<ParamId>,
    values: Vec<Values>,
}

impl Walk for Read {
    fn param<const D: usize>(&mut self, _: &Param<Tensor<D>>) {}

    fn buffer<const D: usize>(&mut self, buffer: &Param<Tensor<D>>) {
        let data = buffer.val().into_data();
        self.ids.push(buffer.id);
        self.values.push((data.shape().as_slice().to_vec(), data.iter::<f32>().collect()));
    }
}

struct Fill<'a>(HashMap<ParamId, &'a Values>);

impl ModuleMapper for Fill<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some((shape, values)) = self.0.get(&param.id) else { return param };
        if *shape != param.lazy_shape().as_slice() {
            return param;
        }
        let (id, tensor, mapper) = param.consume();
        let data = TensorData::new(values.clone(), shape.clone());
        let tensor = Tensor::from_data(data, (&tensor.device(), tensor.dtype()));
        Param::from_mapped_value(id, tensor, mapper)
    }
}
