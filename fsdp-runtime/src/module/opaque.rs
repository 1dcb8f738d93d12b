//! Modules whose type does not describe their structure, such as fields under `#[fsdp(leaf)]`.
//! Burn's own traversal visits and rebuilds them.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, Reparameterization};
use burn::tensor::Tensor;

use super::contract::{ParamMapper, ParamVisitor};
use super::node::{Child, LEAF};
use super::param::Sharded;
use super::path::ModulePath;

/// Visits a field under `#[fsdp(leaf)]`.
pub fn visit_leaf_field<M: Module, V: ParamVisitor>(
    module: &M,
    child: &'static Child,
    visitor: &mut V,
) {
    visitor.enter(child, None);
    visit_leaf(module, visitor);
    visitor.exit();
}

/// The content of a field under `#[fsdp(unit, leaf)]`. Each element of a `Vec` or an array is a
/// unit; any other module is one unit.
///
/// Generated code calls `visit_units`. For a list, method resolution finds the inherent method,
/// which takes precedence; for any other module it finds [`SingleUnit::visit_units`]. The type
/// decides, so an alias of `Vec` is a list too.
#[derive(Debug)]
pub struct LeafUnits<'a, M>(pub &'a M);

impl<M: Module> LeafUnits<'_, Vec<M>> {
    /// Visits each element as a unit.
    pub fn visit_units<V: ParamVisitor>(&self, child: &'static Child, visitor: &mut V) {
        visit_leaf_units(self.0, child, visitor);
    }
}

impl<M: Module, const N: usize> LeafUnits<'_, [M; N]> {
    /// Visits each element as a unit.
    pub fn visit_units<V: ParamVisitor>(&self, child: &'static Child, visitor: &mut V) {
        visit_leaf_units(self.0, child, visitor);
    }
}

/// [`LeafUnits`] of a module that is not a list.
pub trait SingleUnit {
    /// Visits the module as one unit.
    fn visit_units<V: ParamVisitor>(&self, child: &'static Child, visitor: &mut V);
}

impl<M: Module> SingleUnit for LeafUnits<'_, M> {
    fn visit_units<V: ParamVisitor>(&self, child: &'static Child, visitor: &mut V) {
        visitor.enter(child, None);
        leaf_unit(self.0, visitor);
        visitor.exit();
    }
}

fn visit_leaf_units<M: Module, V: ParamVisitor>(
    list: &[M],
    child: &'static Child,
    visitor: &mut V,
) {
    const ELEMENT: &Child = &Child {
        name: "",
        key: None,
        transposed: false,
        unit: true,
        group: None,
        split: None,
        node: &LEAF,
    };
    visitor.enter(child, None);
    for (index, module) in list.iter().enumerate() {
        visitor.enter(ELEMENT, Some(index));
        leaf_unit(module, visitor);
        visitor.exit();
    }
    visitor.exit();
}

fn leaf_unit<M: Module, V: ParamVisitor>(module: &M, visitor: &mut V) {
    if visitor.field_unit(module) {
        visit_leaf(module, visitor);
        visitor.unit_end();
    }
}

/// Rebuilds a field under `#[fsdp(leaf)]`.
pub fn map_leaf_field<M: Module, P: ParamMapper>(
    module: M,
    child: &'static Child,
    mapper: &mut P,
) -> M {
    mapper.enter(child, None);
    let module = map_leaf(module, mapper);
    mapper.exit();
    module
}

/// Visits a module of unknown structure.
pub(crate) fn visit_leaf<M: Module, V: ParamVisitor>(module: &M, visitor: &mut V) {
    let mut adapter =
        LeafVisitor { visitor, path: ModulePath::default(), pending: None, in_sharded: false };
    module.visit(&mut adapter);
    adapter.flush(None);
}

/// The visit of a parameter, delayed until it is known whether the parameter is sharded: Burn shows
/// the bare parameter to visitors before it shows the attached [`Sharded`].
type PendingVisit<V> = Box<dyn FnOnce(&mut V, Option<Sharded>)>;

/// Passes the parameters that Burn's traversal finds on to a [`ParamVisitor`].
struct LeafVisitor<'a, V> {
    visitor: &'a mut V,
    path: ModulePath,
    pending: Option<PendingVisit<V>>,
    /// Whether the traversal is inside a [`Sharded`], which is a module with fields of its own.
    in_sharded: bool,
}

impl<V: ParamVisitor> LeafVisitor<'_, V> {
    /// Runs the delayed visit, if there is one.
    fn flush(&mut self, sharded: Option<Sharded>) {
        if let Some(pending) = self.pending.take() {
            pending(self.visitor, sharded);
        }
    }
}

impl<V: ParamVisitor> ModuleVisitor for LeafVisitor<'_, V> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.flush(None);
        let (path, param) = (self.path.segments().to_vec(), param.clone());
        self.pending =
            Some(Box::new(move |visitor: &mut V, sharded: Option<Sharded>| match sharded {
                Some(sharded) => visitor.leaf_param(&path, &sharded.put_on(param)),
                None => visitor.leaf_param(&path, &param),
            }));
    }

    fn enter_module(&mut self, name: &str, container: &str) {
        let is_sharded = is_sharded(name, container);
        if container != "Reparameterization" && !self.in_sharded {
            self.flush(None);
        } else if container == "Reparameterization" && !is_sharded {
            self.visitor.leaf_reparameterized(self.path.segments(), name);
        }
        self.in_sharded |= is_sharded;
        self.path.push(name);
    }

    fn exit_module(&mut self, name: &str, container: &str) {
        self.path.exit();
        if is_sharded(name, container) {
            self.in_sharded = false;
            self.flush(Sharded::visited());
        } else if !self.in_sharded {
            self.flush(None);
        }
    }
}

fn is_sharded(name: &str, container: &str) -> bool {
    container == "Reparameterization" && name == <Sharded as Reparameterization>::NAME
}

/// Rebuilds a module of unknown structure.
pub(super) fn map_leaf<M: Module, P: ParamMapper>(module: M, mapper: &mut P) -> M {
    struct Adapter<'a, P>(&'a mut P);
    impl<P: ParamMapper> ModuleMapper for Adapter<'_, P> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            self.0.param(param)
        }
    }
    module.map(&mut Adapter(mapper))
}
