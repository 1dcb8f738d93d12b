//! The contract between the macros and the runtime: the static layout tree and the walks over it.
//!
//! `#[fsdp_unit]` and `#[derive(FsdpModule)]` implement [`FsdpModule`] for a user's struct; the
//! runtime implements it for [`Param`], for containers and (in `modules.rs`) for `burn::nn`. Rules
//! over the tree are in `check.rs`; what a unit *does* is in `group.rs`.

use burn::module::{LoraAdapter, Module, Param};
use burn::tensor::{Bool, Int, Tensor};

use super::param::Sharded;
use super::random::RandomSource;
use crate::error::NotRecomputable;

/// A hooked method, and whether it can be run again from what it was called with.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Forward {
    /// The method's name.
    pub name: &'static str,
    /// Its inputs by name, and for some of them, why they cannot be kept.
    pub inputs: &'static [(&'static str, Option<NotRecomputable>)],
}

/// What a [`Node`] of the layout tree is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A struct under `#[fsdp_unit]`: one all-gather, one reduce-scatter.
    Unit {
        /// Whether it was annotated as `#[fsdp_unit(root)]`.
        root: bool,
    },
    /// A module whose parameters belong to the unit around it.
    Module,
    /// A float `Param`; the runtime shards it.
    Param {
        /// Number of dimensions.
        rank: usize,
    },
    /// An integer or Boolean `Param`, never sharded.
    Fixed,
    /// `Option`, transparent in paths: its one child has the option's own path.
    Optional,
    /// `Vec` or array: its one child stands for every element, whose segment is the index.
    List,
    /// A tuple, whose children are named `0`, `1`, ...
    Tuple,
    /// A value without parameters, such as `usize` or `burn::nn::Gelu`.
    Constant,
    /// A field under `#[fsdp(leaf)]`: its parameters are found when the model is sharded.
    Leaf,
}

/// One type in the static layout tree of a model.
#[derive(Clone, Copy, Debug)]
pub struct Node {
    /// The type's name, without its path.
    pub ty: &'static str,
    /// What the type is.
    pub kind: Kind,
    /// Its fields, in declaration order; those under `#[module(skip)]` are left out.
    pub children: &'static [Child],
    /// Weights declared as one with `tie("a.b" = "c.d")`.
    pub ties: &'static [Tie],
}

/// A field, or the element of a container.
#[derive(Clone, Copy, Debug)]
pub struct Child {
    /// The field's name: a segment of the module path. Empty for `Optional` and `List`.
    pub name: &'static str,
    /// Its name in a checkpoint from elsewhere, where that differs: one segment or several
    /// (`"output.LayerNorm"`).
    pub key: Option<&'static str>,
    /// The checkpoint holds this matrix transposed, as PyTorch's `nn.Linear` does.
    pub transposed: bool,
    /// The field is under `#[fsdp(unit)]`: the module in it, or each one in its containers, is a
    /// unit.
    pub unit: bool,
    /// What the field holds.
    pub node: &'static Node,
}

impl Child {
    /// The segment this field adds to a checkpoint key.
    pub const fn key_or_name(&self) -> &'static str {
        match self.key {
            Some(key) => key,
            None => self.name,
        }
    }
}

/// Two places that hold one weight. A path names a `Param` or a module with exactly one matrix.
#[derive(Clone, Copy, Debug)]
pub struct Tie {
    /// The place that owns the weight, as a dotted path of field names from the declaring type.
    pub first: &'static str,
    /// The place that aliases it.
    pub second: &'static str,
}

impl Node {
    /// A node without children.
    pub const fn plain(ty: &'static str, kind: Kind) -> Self {
        Self { ty, kind, children: &[], ties: &[] }
    }

    /// Whether this node is a unit.
    pub const fn is_unit(&self) -> bool {
        matches!(self.kind, Kind::Unit { .. })
    }

    /// The names of the units in it, each once, in its order.
    pub(crate) fn unit_names(&self) -> Vec<&'static str> {
        fn visit(node: &Node, names: &mut Vec<&'static str>) {
            if node.is_unit() && !names.contains(&node.ty) {
                names.push(node.ty);
            }
            node.children.iter().for_each(|child| visit(child.node, names));
        }
        let mut names = Vec::new();
        visit(self, &mut names);
        names
    }
}

/// The node of a field under `#[fsdp(leaf)]`.
pub const LEAF: Node = Node::plain("leaf", Kind::Leaf);

/// A Burn module whose structure is known to FSDP when the program compiles.
///
/// Derived with `#[derive(FsdpModule)]`, or implemented by `#[fsdp_unit]` for a unit.
#[diagnostic::on_unimplemented(
    message = "FSDP does not know what `{Self}` holds",
    label = "not a unit, a `FsdpModule`, a `burn::nn` module, a `Param`, or a container of those",
    note = "if `{Self}` is your own module, write `#[derive(Module, FsdpModule)]` on it (or `#[fsdp_unit]` below `#[derive(Module)]`, to make it a unit of its own)",
    note = "if it is a module of another crate, write `#[fsdp(leaf)]` on the field (`#[fsdp(unit, leaf)]` where it is to be a unit); if it is no module at all, `#[module(skip)]`"
)]
pub trait FsdpModule: Module {
    /// The type's static layout tree.
    const LAYOUT: Node;

    /// Whether it is a unit under `#[fsdp_unit(checkpoint)]`.
    #[doc(hidden)]
    const CHECKPOINT: bool = false;

    /// Its hooked methods, where it is a unit.
    #[doc(hidden)]
    const FORWARDS: &'static [Forward] = &[];

    /// Reads every field in layout order. Nested units are announced first, with [`ParamVisitor::unit`] or
    /// [`ParamVisitor::field_unit`].
    fn visit_params<W: ParamVisitor>(&self, walk: &mut W);

    /// Rebuilds the module with every parameter passed through `attach`, in layout order.
    fn map_params<A: ParamMapper>(self, attach: &mut A) -> Self;

    /// Reads the module as a field of another: what [`walk`](Self::walk) calls once a field.
    ///
    /// A method, so that generated code reaches it as it reaches `LAYOUT` and a field of an unknown
    /// type is one error.
    #[doc(hidden)]
    fn visit_field<W: ParamVisitor>(&self, child: &'static Child, walk: &mut W) {
        walk.enter(child, None);
        if child.unit {
            self.visit_units(walk);
        } else {
            walk_module(self, walk);
        }
        walk.exit();
    }

    /// Reads the module as a unit: what a field under `#[fsdp(unit)]` holds. A container has one for
    /// each module in it.
    #[doc(hidden)]
    fn visit_units<W: ParamVisitor>(&self, walk: &mut W) {
        if walk.field_unit(self) {
            self.visit_params(walk);
            walk.unit_end();
        }
    }

    /// Rebuilds the module as a field of another: what [`attach`](Self::attach) calls once a field.
    #[doc(hidden)]
    fn map_field<A: ParamMapper>(self, child: &'static Child, attach: &mut A) -> Self {
        attach.enter(child, None);
        let module = self.map_params(attach);
        attach.exit();
        module
    }
}

/// A module under `#[fsdp_unit]`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a unit",
    label = "not annotated with `#[fsdp_unit]`",
    note = "write `#[fsdp_unit]` below `#[derive(Module)]` on `{Self}`"
)]
pub trait FsdpUnit: FsdpModule {}

/// A unit whose `forward` carries the gather and reshard hooks; implemented by `#[fsdp_unit]` on
/// the `impl` block that holds it.
#[diagnostic::on_unimplemented(
    message = "unit `{Self}` has no hooked `forward`",
    label = "this unit would never be gathered as one",
    note = "write `#[fsdp_unit]` above the `impl {Self}` block that holds `pub fn forward(&self, ..)`"
)]
pub trait HookedForward: FsdpUnit {
    /// Whether the block says `#[fsdp_unit(field_units)]`: calls of field units in it are hooked.
    #[doc(hidden)]
    const HOOKS_FIELD_UNITS: bool = false;

    /// The hooked methods of the block.
    #[doc(hidden)]
    const HOOKED: &'static [Forward] = &[];
}

/// A read over the parameters of a module, in layout order.
pub trait ParamVisitor {
    /// Goes into a field. `index` is set for the elements of a list.
    fn enter(&mut self, _child: &'static Child, _index: Option<usize>) {}
    /// Leaves the field entered last.
    fn exit(&mut self) {}
    /// A nested unit comes next; `false` passes it by.
    fn unit<M: FsdpModule>(&mut self, _module: &M) -> bool {
        true
    }
    /// A unit comes next that is one through the field it lies in, under `#[fsdp(unit)]`; `false`
    /// passes it by.
    fn field_unit<M: Module>(&mut self, _module: &M) -> bool {
        true
    }
    /// A nested unit that was gone into ends.
    fn unit_end(&mut self) {}
    /// A float parameter.
    fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>);
    /// A running statistic, shown as a parameter: whole, each rank's own, and without a gradient.
    fn buffer<const D: usize>(&mut self, _buffer: &Param<Tensor<D>>) {}
    /// An integer or Boolean parameter.
    fn fixed(&mut self) {}
    /// A layer that draws from the model's random stream.
    fn random_source<R: RandomSource>(&mut self, _source: &R) {}
    /// A module of the type `ty` that does something else, or something more, when it runs again on
    /// the same input; `instead` says what to use.
    #[doc(hidden)]
    fn unrepeatable(&mut self, _ty: &'static str, _instead: &'static str) {}
    /// A module of the type `ty` that updates an f32 tensor from its input.
    #[doc(hidden)]
    fn full_precision(&mut self, _ty: &'static str) {}
    /// A parameter in a module that FSDP does not look into carries the reparameterization `name`.
    fn leaf_reparameterized(&mut self, _path: &[String], _name: &str) {}
    /// A float parameter in a module that FSDP does not look into; `path` is below the field.
    fn leaf_param<const D: usize>(&mut self, _path: &[String], param: &Param<Tensor<D>>) {
        self.param(param);
    }
}

/// A rebuild of a module's parameters, in layout order.
pub trait ParamMapper {
    /// Goes into a field. `index` is set for the elements of a list.
    fn enter(&mut self, _child: &'static Child, _index: Option<usize>) {}
    /// Leaves the field entered last.
    fn exit(&mut self) {}
    /// A float parameter: what to hold in its place.
    fn param<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>>;
    /// What is not managed, such as a plain tensor: what to hold in its place.
    fn unmanaged<M: Module>(&mut self, module: M) -> M {
        module
    }
    /// A layer that draws from the model's random stream: what to hold in its place.
    fn random_source<R: RandomSource>(&mut self, source: R) -> R {
        source
    }
}

fn walk_module<M: FsdpModule, W: ParamVisitor>(module: &M, walk: &mut W) {
    if !M::LAYOUT.is_unit() {
        module.visit_params(walk);
    } else if walk.unit(module) {
        module.visit_params(walk);
        walk.unit_end();
    }
}

impl<const D: usize> FsdpModule for Param<Tensor<D>> {
    const LAYOUT: Node = Node::plain("Param", Kind::Param { rank: D });

    fn visit_params<W: ParamVisitor>(&self, walk: &mut W) {
        walk.param(self);
        if let Some(lora) = Sharded::lora_of(self) {
            walk.enter(&LORA, None);
            lora.a.visit_field(&FACTORS[0], walk);
            lora.b.visit_field(&FACTORS[1], walk);
            walk.exit();
        }
    }

    fn map_params<A: ParamMapper>(self, attach: &mut A) -> Self {
        let Some(LoraAdapter { a, b, scale }) = self.adapter().cloned() else {
            return attach.param(self);
        };
        let base = attach.param(self);
        attach.enter(&LORA, None);
        let a = a.map_field(&FACTORS[0], attach);
        let b = b.map_field(&FACTORS[1], attach);
        attach.exit();
        match Sharded::of(&base).cloned() {
            Some(sharded) => sharded.with_lora(LoraAdapter { a, b, scale }).put_on(base),
            None => base,
        }
    }
}

/// A parameter's LoRA adapter, which the static tree knows nothing of, and its two factors.
static LORA: Child = Child { name: "lora", key: None, transposed: false, unit: false, node: &LEAF };
static FACTORS: [Child; 2] = {
    const FACTOR: Node = Node::plain("Param", Kind::Param { rank: 2 });
    [
        Child { name: "a", key: None, transposed: false, unit: false, node: &FACTOR },
        Child { name: "b", key: None, transposed: false, unit: false, node: &FACTOR },
    ]
};

macro_rules! fixed {
    ($kind:ty) => {
        impl<const D: usize> FsdpModule for Param<Tensor<D, $kind>> {
            const LAYOUT: Node = Node::plain("Param", Kind::Fixed);

            fn visit_params<W: ParamVisitor>(&self, walk: &mut W) {
                walk.fixed();
            }

            fn map_params<A: ParamMapper>(self, _: &mut A) -> Self {
                self
            }
        }
    };
}
fixed!(Int);
fixed!(Bool);

impl<M: FsdpModule> FsdpModule for Option<M> {
    const LAYOUT: Node = Node {
        ty: "Option",
        kind: Kind::Optional,
        children: &[Child {
            name: "",
            key: None,
            transposed: false,
            unit: false,
            node: &M::LAYOUT,
        }],
        ties: &[],
    };

    fn visit_params<W: ParamVisitor>(&self, walk: &mut W) {
        if let Some(module) = self {
            walk_module(module, walk);
        }
    }

    fn visit_units<W: ParamVisitor>(&self, walk: &mut W) {
        if let Some(module) = self {
            module.visit_units(walk);
        }
    }

    fn map_params<A: ParamMapper>(self, attach: &mut A) -> Self {
        self.map(|module| module.map_params(attach))
    }
}

/// The layout of a list of `M`.
const fn list<M: FsdpModule>(ty: &'static str) -> Node {
    struct Element<M>(M);
    impl<M: FsdpModule> Element<M> {
        const CHILDREN: &'static [Child] =
            &[Child { name: "", key: None, transposed: false, unit: false, node: &M::LAYOUT }];
    }
    Node { ty, kind: Kind::List, children: Element::<M>::CHILDREN, ties: &[] }
}

fn walk_list<M: FsdpModule, W: ParamVisitor>(
    list: &[M],
    child: &'static Child,
    walk: &mut W,
    each: fn(&M, &mut W),
) {
    for (index, module) in list.iter().enumerate() {
        walk.enter(child, Some(index));
        each(module, walk);
        walk.exit();
    }
}

impl<M: FsdpModule> FsdpModule for Vec<M> {
    const LAYOUT: Node = list::<M>("Vec");

    fn visit_params<W: ParamVisitor>(&self, walk: &mut W) {
        walk_list(self, &Self::LAYOUT.children[0], walk, walk_module);
    }

    fn visit_units<W: ParamVisitor>(&self, walk: &mut W) {
        walk_list(self, &Self::LAYOUT.children[0], walk, M::visit_units);
    }

    fn map_params<A: ParamMapper>(self, attach: &mut A) -> Self {
        let child = &Self::LAYOUT.children[0];
        let mut index = 0;
        let each = |module: M| {
            attach.enter(child, Some(index));
            let module = module.map_params(attach);
            attach.exit();
            index += 1;
            module
        };
        self.into_iter().map(each).collect()
    }
}

impl<M: FsdpModule, const N: usize> FsdpModule for [M; N] {
    const LAYOUT: Node = list::<M>("array");

    fn visit_params<W: ParamVisitor>(&self, walk: &mut W) {
        walk_list(self, &Self::LAYOUT.children[0], walk, walk_module);
    }

    fn visit_units<W: ParamVisitor>(&self, walk: &mut W) {
        walk_list(self, &Self::LAYOUT.children[0], walk, M::visit_units);
    }

    fn map_params<A: ParamMapper>(self, attach: &mut A) -> Self {
        let child = &Self::LAYOUT.children[0];
        let mut index = 0;
        self.map(|module| {
            attach.enter(child, Some(index));
            let module = module.map_params(attach);
            attach.exit();
            index += 1;
            module
        })
    }
}

macro_rules! tuple {
    ($($name:ident $index:tt)+) => {
        impl<$($name: FsdpModule),+> FsdpModule for ($($name,)+) {
            const LAYOUT: Node = Node {
                ty: "tuple",
                kind: Kind::Tuple,
                children: &[$(Child {
                    name: stringify!($index),
                    key: None,
                    transposed: false,
                    unit: false,
                    node: &$name::LAYOUT,
                }),+],
                ties: &[],
            };

            fn visit_params<W_: ParamVisitor>(&self, walk: &mut W_) {
                $(self.$index.visit_field(&Self::LAYOUT.children[$index], walk);)+
            }

            fn visit_units<W_: ParamVisitor>(&self, walk: &mut W_) {
                $(
                    walk.enter(&Self::LAYOUT.children[$index], None);
                    self.$index.visit_units(walk);
                    walk.exit();
                )+
            }

            fn map_params<A_: ParamMapper>(self, attach: &mut A_) -> Self {
                ($(self.$index.map_field(&Self::LAYOUT.children[$index], attach),)+)
            }
        }
    };
}
tuple!(A 0 B 1);
tuple!(A 0 B 1 C 2);
tuple!(A 0 B 1 C 2 D 3);

macro_rules! constant {
    ($($ty:ty),+) => {$(
        impl FsdpModule for $ty {
            const LAYOUT: Node = Node::plain(stringify!($ty), Kind::Constant);
            fn visit_params<W: ParamVisitor>(&self, _: &mut W) {}
            fn map_params<A: ParamMapper>(self, _: &mut A) -> Self {
                self
            }
        }
    )+};
}
pub(crate) use constant;
constant!(String, bool, f64, f32, usize, u64, u32, u16, u8, isize, i64, i32, i16, i8);
