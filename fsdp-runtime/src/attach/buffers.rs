//! Running statistics, which are rank 0's at the start.

use std::collections::HashMap;

use burn::module::{ModuleMapper, Param, ParamId};
use burn::tensor::{Tensor, TensorData};
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::launch::Worker;
use crate::unit::{Child, FsdpModule, Walk};

/// The module with rank 0's running statistics on every rank, by their paths. Those that rank 0 has not,
/// or has of another shape, are each rank's own, and stay. Every rank calls it.
pub(super) fn share<M: FsdpModule>(worker: &Worker, module: M) -> Result<M, Error> {
    let gives = worker.rank().index() == 0;
    let mut read = Read { gives, path: Vec::new(), ids: HashMap::new(), values: Vec::new() };
    module.walk(&mut read);
    let Read { mut ids, values, .. } = read;
    let all = worker.exchange("broadcast", "the running statistics", values)?;
    if gives || ids.is_empty() {
        return Ok(module);
    }
    let own = all[0].iter().filter_map(|value| Some((ids.remove(&value.path)?, value)));
    let mut fill = Fill(own.collect());
    Ok(module.map(&mut fill))
}

/// A running statistic.
#[derive(Serialize, Deserialize)]
struct Statistic {
    path: String,
    shape: Vec<usize>,
    elements: Vec<f32>,
}

struct Read {
    /// Whether this rank's values are those of all.
    gives: bool,
    path: Vec<String>,
    ids: HashMap<String, ParamId>,
    values: Vec<Statistic>,
}

impl Walk for Read {
    fn enter(&mut self, child: &'static Child, index: Option<usize>) {
        self.path.push(index.map_or_else(|| child.name.to_string(), |index| index.to_string()));
    }

    fn exit(&mut self) {
        self.path.pop();
    }

    fn param<const D: usize>(&mut self, _: &Param<Tensor<D>>) {}

    fn buffer<const D: usize>(&mut self, buffer: &Param<Tensor<D>>) {
        let path = self.path.join(".");
        self.ids.insert(path.clone(), buffer.id);
        if self.gives {
            let data = buffer.val().into_data();
            let (shape, elements) =
                (data.shape().as_slice().to_vec(), data.iter::<f32>().collect());
            self.values.push(Statistic { path, shape, elements });
        }
    }
}

struct Fill<'a>(HashMap<ParamId, &'a Statistic>);

impl ModuleMapper for Fill<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(Statistic { shape, elements, .. }) = self.0.get(&param.id) else { return param };
        if *shape != param.lazy_shape().as_slice() {
            return param;
        }
        let (id, tensor, mapper) = param.consume();
        let data = TensorData::new(elements.clone(), shape.clone());
        let tensor = Tensor::from_data(data, (&tensor.device(), tensor.dtype()));
        Param::from_mapped_value(id, tensor, mapper)
    }
}
