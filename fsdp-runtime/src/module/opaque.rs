//! Fields under `#[fsdp(leaf)]`, and other modules whose type tells nothing of their structure: read
//! and rebuilt through Burn's own traversal.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, Reparameterization};
use burn::tensor::Tensor;

use crate::module::Sharded;
use crate::module::{Child, LEAF, ParamMapper, ParamVisitor};

/// Reads a field under `#[fsdp(leaf)]`, through Burn's own traversal.
pub fn visit_leaf_field<M: Module, W: ParamVisitor>(
    module: &M,
    child: &'static Child,
    walk: &mut W,
) {
    walk.enter(child, None);
    visit_leaf(module, walk);
    walk.exit();
}

/// A field under `#[fsdp(unit, leaf)]`: of a `Vec` or an array, each element is a unit; any other
/// module is one unit.
///
/// Generated code calls `visit_units`. For a list, method resolution finds the inherent method, which takes
/// precedence; for any other module it finds [`SingleUnit::visit_units`]. So the type decides, whatever
/// name an alias gives it.
#[derive(Debug)]
pub struct LeafUnits<'a, M>(pub &'a M);

impl<M: Module> LeafUnits<'_, Vec<M>> {
    /// Reads each element as a unit.
    pub fn visit_units<W: ParamVisitor>(&self, child: &'static Child, walk: &mut W) {
        visit_leaf_units(self.0, child, walk);
    }
}

impl<M: Module, const N: usize> LeafUnits<'_, [M; N]> {
    /// Reads each element as a unit.
    pub fn visit_units<W: ParamVisitor>(&self, child: &'static Child, walk: &mut W) {
        visit_leaf_units(self.0, child, walk);
    }
}

/// [`LeafUnits`] of a module that is not a list.
pub trait SingleUnit {
    /// Reads the module as one unit.
    fn visit_units<W: ParamVisitor>(&self, child: &'static Child, walk: &mut W);
}

impl<M: Module> SingleUnit for LeafUnits<'_, M> {
    fn visit_units<W: ParamVisitor>(&self, child: &'static Child, walk: &mut W) {
        walk.enter(child, None);
        leaf_unit(self.0, walk);
        walk.exit();
    }
}

fn visit_leaf_units<M: Module, W: ParamVisitor>(list: &[M], child: &'static Child, walk: &mut W) {
    const ELEMENT: &Child =
        &Child { name: "", key: None, transposed: false, unit: true, node: &LEAF };
    walk.enter(child, None);
    for (index, module) in list.iter().enumerate() {
        walk.enter(ELEMENT, Some(index));
        leaf_unit(module, walk);
        walk.exit();
    }
    walk.exit();
}

fn leaf_unit<M: Module, W: ParamVisitor>(module: &M, walk: &mut W) {
    if walk.field_unit(module) {
        visit_leaf(module, walk);
        walk.unit_end();
    }
}

/// Rebuilds a field under `#[fsdp(leaf)]`, through Burn's own traversal.
pub fn map_leaf_field<M: Module, A: ParamMapper>(
    module: M,
    child: &'static Child,
    attach: &mut A,
) -> M {
    attach.enter(child, None);
    let module = map_leaf(module, attach);
    attach.exit();
    module
}

/// Reads a module whose type tells nothing of its structure.
pub(crate) fn visit_leaf<M: Module, W: ParamVisitor>(module: &M, walk: &mut W) {
    let mut visitor = LeafVisitor { walk, path: Vec::new(), pending: None, within: false };
    module.visit(&mut visitor);
    visitor.flush(None);
}

/// What is left to do with the parameter visited last, once it is known whether it is sharded: Burn
/// shows visitors the bare parameter first.
type Pending<W> = Box<dyn FnOnce(&mut W, Option<Sharded>)>;

struct LeafVisitor<'a, W> {
    walk: &'a mut W,
    path: Vec<String>,
    pending: Option<Pending<W>>,
    /// Whether what is visited is a [`Sharded`], which has parts of its own.
    within: bool,
}

impl<W: ParamVisitor> LeafVisitor<'_, W> {
    fn flush(&mut self, sharded: Option<Sharded>) {
        if let Some(pending) = self.pending.take() {
            pending(self.walk, sharded);
        }
    }
}

impl<W: ParamVisitor> ModuleVisitor for LeafVisitor<'_, W> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.flush(None);
        let (path, param) = (self.path.clone(), param.clone());
        self.pending =
            Some(Box::new(move |walk: &mut W, sharded: Option<Sharded>| match sharded {
                Some(sharded) => walk.leaf_param(&path, &sharded.put_on(param)),
                None => walk.leaf_param(&path, &param),
            }));
    }

    fn enter_module(&mut self, name: &str, container: &str) {
        let is_sharded = is_sharded(name, container);
        if container != "Reparameterization" && !self.within {
            self.flush(None);
        } else if container == "Reparameterization" && !is_sharded {
            self.walk.leaf_reparameterized(&self.path, name);
        }
        self.within |= is_sharded;
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, name: &str, container: &str) {
        self.path.pop();
        if is_sharded(name, container) {
            self.within = false;
            self.flush(Sharded::visited());
        } else if !self.within {
            self.flush(None);
        }
    }
}

fn is_sharded(name: &str, container: &str) -> bool {
    container == "Reparameterization" && name == <Sharded as Reparameterization>::NAME
}

/// Rebuilds a module whose type tells nothing of its structure.
pub(crate) fn map_leaf<M: Module, A: ParamMapper>(module: M, attach: &mut A) -> M {
    struct Mapper<'a, A>(&'a mut A);
    impl<A: ParamMapper> ModuleMapper for Mapper<'_, A> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            self.0.param(param)
        }
    }
    module.map(&mut Mapper(attach))
}
