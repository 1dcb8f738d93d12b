//! Units that are kept gathered while a guard lives, and the plain module of a sharded model.

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use super::backward::catch_error;
use super::model::Fsdp;
use crate::error::{Error, ScheduleError};
use crate::layout::Rank;
use crate::module::{FsdpModule, ParamVisitor};
use crate::param_group::Unit;
use crate::runtime::hooks::Collect;

/// Keeps units gathered until it is dropped. [`Fsdp::unshard`] and [`UnitHandle::unshard`] return it.
#[derive(Debug)]
#[must_use = "the units are resharded when the guard is dropped"]
pub struct Unsharded<'a, M> {
    model: &'a Fsdp<M>,
    /// Indices of the units, in layout order.
    units: Vec<usize>,
}

impl<M> Drop for Unsharded<'_, M> {
    fn drop(&mut self) {
        self.model.schedule.end_guard(&self.units);
    }
}

/// A unit of a sharded model. [`Fsdp::unit`] returns it.
#[derive(Debug)]
pub struct UnitHandle<'a, M> {
    pub(super) model: &'a Fsdp<M>,
    pub(super) index: usize,
}

impl<'a, M: FsdpModule> UnitHandle<'a, M> {
    /// Gathers this unit, without the units inside it, and keeps it gathered until the returned
    /// guard is dropped. Every rank calls it. [`Fsdp::unshard`] describes the details and the errors.
    pub fn unshard(&self) -> Result<Unsharded<'a, M>, Error> {
        self.model.keep_unsharded(vec![self.index])
    }
}

impl<M: FsdpModule> Fsdp<M> {
    /// Gathers all units and keeps them gathered until the returned guard is dropped. Every rank
    /// calls it.
    ///
    /// Each unit is gathered once, into memory of its own, which
    /// [`stats().memory()`](crate::model::Stats::memory) counts as gathered: the full model in the dtypes in
    /// which it computes. Until the guard is dropped, forwards run without any collective, so ranks
    /// may run different numbers of them, as text generation does. Backward reduces gradients as
    /// usual. Numbers are the same with and without a guard. PyTorch's `FSDPModule.unshard`, without
    /// its values that grow old: the guard borrows the model, which therefore cannot be stepped.
    ///
    /// A guard that is dropped between a forward and its backward takes effect after the backward.
    /// Several guards may exist at once. Under `NO_SHARD` nothing is gathered.
    ///
    /// # Errors
    ///
    /// [`ScheduleError::UnshardDuringPass`] within a forward or a backward, and between the two, and
    /// [`CollectiveError`](crate::errors::CollectiveError) if another rank fails or does not take part within
    /// the time-out.
    ///
    /// While a guard lives, a change of the parameters through a clone of the model unwinds with
    /// [`ScheduleError::ChangedWhileUnsharded`].
    ///
    /// # Example
    ///
    /// ```no_run
    /// # use burn::module::Module;
    /// # use burn::nn::Linear;
    /// # use burn::tensor::Tensor;
    /// # use fsdp_runtime::prelude::*;
    /// # #[derive(Module, Debug)]
    /// # #[fsdp_unit(root)]
    /// # struct Net { head: Linear }
    /// # #[fsdp_unit]
    /// # impl Net {
    /// #     fn forward(&self, x: Tensor<2>) -> Tensor<2> { self.head.forward(x) }
    /// # }
    /// # fn evaluate(model: &Fsdp<Net>, batches: Vec<Tensor<2>>) -> Result<(), Error> {
    /// let model = model.valid();
    /// let _gathered = model.unshard()?;
    /// for batch in batches {
    ///     println!("{}", model.forward(batch)); // no collective
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn unshard(&self) -> Result<Unsharded<'_, M>, Error> {
        self.keep_unsharded((0..self.schedule.units().len()).collect())
    }

    /// Returns the unit at a module path, such as `blocks.0`; that of the outermost unit is empty.
    ///
    /// # Errors
    ///
    /// [`ScheduleError::UnknownUnit`] with the paths of all units.
    pub fn unit(&self, path: &str) -> Result<UnitHandle<'_, M>, Error> {
        let units = self.schedule.units();
        match units.iter().position(|unit| unit.path == path) {
            Some(index) => Ok(UnitHandle { model: self, index }),
            None => {
                let paths = |unit: &Unit| unit.path.clone();
                let units = units.iter().map(paths).collect();
                Err(ScheduleError::UnknownUnit { path: path.to_string(), units }.into())
            }
        }
    }

    /// Calls `f` with the plain Burn module, for code that knows nothing of sharding. Every rank
    /// calls it, and has the full parameters during the call.
    ///
    /// The module's parameters are f32 tensors of full shape, in the memory that
    /// [`unshard`](Self::unshard) takes; their gradients do not reach the sharded model. A unit that
    /// computes in another dtype is gathered in f32 as well, parameter by parameter, into memory that
    /// is not counted.
    ///
    /// # Errors
    ///
    /// Those of [`unshard`](Self::unshard), and what `f` raises as an [`Error`].
    pub fn gathered<T>(&self, f: impl FnOnce(&M) -> T) -> Result<T, Error> {
        let _unsharded = self.unshard()?;
        catch_error(|| f(&self.module.clone().materialize()))
    }

    /// Returns the plain Burn module with the full parameters, in f32, on each rank. Every rank calls
    /// it.
    ///
    /// # Errors
    ///
    /// [`CollectiveError`](crate::errors::CollectiveError) if another rank fails or does not take part within
    /// the time-out.
    pub fn into_plain(self) -> Result<M, Error> {
        self.schedule.check_whole("`Fsdp::into_plain`", WHOLE)?;
        catch_error(|| self.materialize().module)
    }

    /// Returns the plain Burn module with the full parameters, in f32, on one rank, and `None` on the
    /// others, which hold one full parameter at a time. Every rank calls it, with the same `rank`.
    ///
    /// # Errors
    ///
    /// Those of [`into_plain`](Self::into_plain).
    pub fn into_plain_on(self, rank: Rank) -> Result<Option<M>, Error> {
        self.schedule.check_whole("`Fsdp::into_plain_on`", WHOLE)?;
        if self.mesh().rank == rank {
            return self.into_plain().map(Some);
        }
        catch_error(|| {
            self.module.visit_params(&mut Collect(&*self.schedule));
            self.module.visit_params(&mut DropValues);
            self.schedule.forget();
            None
        })
    }

    fn keep_unsharded(&self, units: Vec<usize>) -> Result<Unsharded<'_, M>, Error> {
        self.module.visit_params(&mut Collect(&*self.schedule));
        self.schedule.begin_guard(&units)?;
        Ok(Unsharded { model: self, units })
    }
}

/// Advice to a program that wants a plain model from tensor parallel ranks.
const WHOLE: &str =
    "write the model with `save_pretrained`, and load it without tensor parallel ranks";

/// The visitor that gathers each parameter, in the order in which `Module::materialize` does, and
/// drops its value.
struct DropValues;

impl ParamVisitor for DropValues {
    fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        drop(param.val());
    }
}
