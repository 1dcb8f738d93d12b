//! Casts of *tables*: float tensors of a module that are neither parameters nor running statistics.
//!
//! [Note: tables are cast in a copy of the module] A forward has its module as `&self`, and outside of a
//! forward tables keep their dtype, as parameters do. So the outermost forward runs on a clone of the
//! module whose tables are cast. The clone shares the handles of all parameters, and all forwards inside
//! of it, recomputed ones too, are those of the clone's fields. It is dropped when the forward ends.

use burn::module::Param;
use burn::tensor::{DType, Tensor};

use super::hooks::{Call, OpenCall, pre_forward};
use super::values::Inputs;
use crate::module::{
    Child, FsdpModule, FsdpUnit, ModulePath, ParamMapper, ParamVisitor, Runtime, Sharded,
};
use crate::param_group::is_cast;

/// Gathers the module's unit as [`pre_forward`] does. Returns the call, and a copy of the module with
/// cast tables if the forward must run on one.
///
/// # Panics
///
/// Unwinds with the typed error if a collective fails.
pub fn pre_forward_with_tables<M: FsdpUnit>(
    module: &M,
    inputs: impl FnOnce(&mut Inputs),
) -> (Call, Option<M>) {
    let call = pre_forward(module, inputs);
    let copy = cast_module(&call, module);
    (call, copy)
}

/// Returns a copy of the module with cast tables, for the outermost forward of a model with tables that
/// the options cast. Returns `None` for any other forward, which runs on the module itself.
fn cast_module<M: FsdpModule>(call: &Call, module: &M) -> Option<M> {
    let Some(OpenCall { runtime, outermost: true, .. }) = &call.0 else { return None };
    if !runtime.casts_tables() {
        return None;
    }
    let above = path_of(&**runtime, module);
    let mut cast = CastModule { runtime: &**runtime, above, path: ModulePath::default() };
    Some(module.clone().map_params(&mut cast))
}

/// Returns a copy of an argument with its tables in the dtype that the called unit's tables have.
/// Returns `None` if no table has another dtype.
pub(super) fn cast_argument<M: FsdpModule>(call: &Call, module: &M) -> Option<M> {
    let Some(OpenCall { runtime, unit, .. }) = &call.0 else { return None };
    if !runtime.casts_arguments(*unit) {
        return None;
    }
    let types = vec![M::LAYOUT.ty];
    let mut search = CastArgument { runtime: &**runtime, unit: *unit, types, casts: false };
    module.visit_params(&mut search);
    search.casts.then(|| module.clone().map_params(&mut search))
}

/// Returns a table in another dtype, if one is given.
fn cast<const D: usize>(table: Tensor<D>, dtype: Option<DType>) -> Tensor<D> {
    match dtype {
        Some(dtype) => table.cast(dtype),
        None => table,
    }
}

/// Returns the module path of a module in a sharded model, found through the first parameter in it.
fn path_of<M: FsdpModule>(runtime: &dyn Runtime, module: &M) -> Vec<String> {
    let mut search = FirstParam { runtime, path: ModulePath::default(), above: None };
    module.visit_params(&mut search);
    search.above.unwrap_or_default()
}

/// A search for the module path of the visited module.
struct FirstParam<'a> {
    runtime: &'a dyn Runtime,
    /// Path of the position, below the visited module.
    path: ModulePath,
    above: Option<Vec<String>>,
}

impl FirstParam<'_> {
    fn param_at<const D: usize>(&mut self, below: &[String], param: &Param<Tensor<D>>) {
        if self.above.is_some() {
            return;
        }
        let Some(sharded) = Sharded::of(param) else { return };
        let path = self.runtime.param_path(sharded.index);
        let inside = self.path.join(below);
        let above = path.strip_suffix(&inside).unwrap_or_default().trim_end_matches('.');
        let segments = above.split('.').filter(|segment| !segment.is_empty());
        self.above = Some(segments.map(str::to_string).collect());
    }
}

impl ParamVisitor for FirstParam<'_> {
    fn enter(&mut self, child: &'static Child, index: Option<usize>) {
        self.path.enter(child, index);
    }

    fn exit(&mut self) {
        self.path.exit();
    }

    fn unit<M: FsdpModule>(&mut self, _: &M) -> bool {
        self.above.is_none()
    }

    fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.param_at(&[], param);
    }

    fn leaf_param<const D: usize>(&mut self, path: &[String], param: &Param<Tensor<D>>) {
        self.param_at(path, param);
    }
}

/// Casts the tables of a module in a sharded model, by their module paths.
struct CastModule<'a> {
    runtime: &'a dyn Runtime,
    /// Path of the module.
    above: Vec<String>,
    /// Path of the position, below the module.
    path: ModulePath,
}

impl ParamMapper for CastModule<'_> {
    fn enter(&mut self, child: &'static Child, index: Option<usize>) {
        self.path.enter(child, index);
    }

    fn exit(&mut self) {
        self.path.exit();
    }

    fn param<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param
    }

    fn table<const D: usize>(&mut self, table: Tensor<D>, _: bool) -> Tensor<D> {
        let path = [&*self.above, self.path.segments()].concat().join(".");
        let dtype = self.runtime.table_dtype(&path);
        cast(table, dtype)
    }
}

/// Casts the tables of an argument, by the types of the modules that hold them.
struct CastArgument<'a> {
    runtime: &'a dyn Runtime,
    /// The called unit.
    unit: usize,
    /// Names of the types at the position, outermost first.
    types: Vec<&'static str>,
    /// Whether a table has another dtype than the one it is cast to.
    casts: bool,
}

impl CastArgument<'_> {
    /// Returns the dtype to which a table at the position is cast, if it is.
    fn dtype<const D: usize>(&self, table: &Tensor<D>, in_device_dtype: bool) -> Option<DType> {
        let dtype = Some(table.dtype()).filter(|dtype| is_cast(*dtype))?;
        self.runtime.argument_dtype(self.unit, &self.types, (dtype, in_device_dtype))
    }
}

impl ParamVisitor for CastArgument<'_> {
    fn enter(&mut self, child: &'static Child, _: Option<usize>) {
        self.types.push(child.node.type_name());
    }

    fn exit(&mut self) {
        self.types.pop();
    }

    fn param<const D: usize>(&mut self, _: &Param<Tensor<D>>) {}

    fn table<const D: usize>(&mut self, table: &Tensor<D>, in_device_dtype: bool) {
        self.casts |= self.dtype(table, in_device_dtype).is_some();
    }
}

impl ParamMapper for CastArgument<'_> {
    fn enter(&mut self, child: &'static Child, _: Option<usize>) {
        self.types.push(child.node.type_name());
    }

    fn exit(&mut self) {
        self.types.pop();
    }

    fn param<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param
    }

    fn table<const D: usize>(&mut self, table: Tensor<D>, in_device_dtype: bool) -> Tensor<D> {
        let dtype = self.dtype(&table, in_device_dtype);
        cast(table, dtype)
    }
}
