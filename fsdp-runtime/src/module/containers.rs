//! [`FsdpModule`] for parameters, containers and constants.

use burn::module::{LoraAdapter, Param};
use burn::tensor::{Bool, Int, Tensor};

use super::adapter::AttachedLora;
use super::contract::{FsdpModule, ParamMapper, ParamVisitor, visit_module};
use super::node::{Child, Kind, LEAF, Node};
use super::param::Sharded;

impl<const D: usize> FsdpModule for Param<Tensor<D>> {
    const LAYOUT: Node = Node::plain("Param", Kind::Param { rank: D });

    fn visit_params<V: ParamVisitor>(&self, visitor: &mut V) {
        visitor.param(self);
        if let Some(lora) = Sharded::lora_of(self) {
            visitor.enter(&LORA, None);
            lora.a.visit_field(&FACTORS[0], visitor);
            lora.b.visit_field(&FACTORS[1], visitor);
            if let Some(dropout) =
                Sharded::lora_settings_of(self).and_then(|it| it.dropout.as_ref())
            {
                visitor.random_source(dropout);
            }
            visitor.exit();
        }
    }

    fn map_params<P: ParamMapper>(self, mapper: &mut P) -> Self {
        let Some(AttachedLora { lora, settings }) = AttachedLora::of(&self) else {
            return mapper.param(self);
        };
        let (LoraAdapter { a, b, scale }, mut settings) = (lora.clone(), settings.cloned());
        let base = mapper.param(self);
        mapper.enter(&LORA, None);
        let a = a.map_field(&FACTORS[0], mapper);
        let b = b.map_field(&FACTORS[1], mapper);
        if let Some(settings) = &mut settings {
            settings.dropout = settings.dropout.take().map(|dropout| mapper.random_source(dropout));
        }
        mapper.exit();
        match Sharded::of(&base).cloned() {
            Some(sharded) => sharded.with_lora(LoraAdapter { a, b, scale }, settings).put_on(base),
            None => base,
        }
    }
}

/// Path segment of a parameter's LoRA adapter. The static layout tree does not contain adapters.
static LORA: Child = Child::plain("lora", &LEAF);
/// The two low-rank factors of a LoRA adapter.
static FACTORS: [Child; 2] = {
    const FACTOR: Node = Node::plain("Param", Kind::Param { rank: 2 });
    [Child::plain("a", &FACTOR), Child::plain("b", &FACTOR)]
};

/// Implements [`FsdpModule`] for a parameter that is never sharded.
macro_rules! fixed {
    ($kind:ty) => {
        impl<const D: usize> FsdpModule for Param<Tensor<D, $kind>> {
            const LAYOUT: Node = Node::plain("Param", Kind::Fixed);

            fn visit_params<V: ParamVisitor>(&self, visitor: &mut V) {
                visitor.fixed();
            }

            fn map_params<P: ParamMapper>(self, _: &mut P) -> Self {
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
        children: &[Child::plain("", &M::LAYOUT)],
        ties: &[],
    };

    fn visit_params<V: ParamVisitor>(&self, visitor: &mut V) {
        if let Some(module) = self {
            visit_module(module, visitor);
        }
    }

    fn visit_units<V: ParamVisitor>(&self, visitor: &mut V) {
        if let Some(module) = self {
            module.visit_units(visitor);
        }
    }

    fn map_params<P: ParamMapper>(self, mapper: &mut P) -> Self {
        self.map(|module| module.map_params(mapper))
    }
}

/// Returns the layout of a list of `M`.
const fn list<M: FsdpModule>(ty: &'static str) -> Node {
    struct Element<M>(M);
    impl<M: FsdpModule> Element<M> {
        const CHILDREN: &'static [Child] = &[Child::plain("", &M::LAYOUT)];
    }
    Node { ty, kind: Kind::List, children: Element::<M>::CHILDREN, ties: &[] }
}

/// Visits every element of a list with `each`.
fn visit_list<M: FsdpModule, V: ParamVisitor>(
    list: &[M],
    child: &'static Child,
    visitor: &mut V,
    each: fn(&M, &mut V),
) {
    for (index, module) in list.iter().enumerate() {
        visitor.enter(child, Some(index));
        each(module, visitor);
        visitor.exit();
    }
}

/// Rebuilds one element of a list.
fn map_element<M: FsdpModule, P: ParamMapper>(
    module: M,
    child: &'static Child,
    index: usize,
    mapper: &mut P,
) -> M {
    mapper.enter(child, Some(index));
    let module = module.map_params(mapper);
    mapper.exit();
    module
}

impl<M: FsdpModule> FsdpModule for Vec<M> {
    const LAYOUT: Node = list::<M>("Vec");

    fn visit_params<V: ParamVisitor>(&self, visitor: &mut V) {
        visit_list(self, &Self::LAYOUT.children[0], visitor, visit_module);
    }

    fn visit_units<V: ParamVisitor>(&self, visitor: &mut V) {
        visit_list(self, &Self::LAYOUT.children[0], visitor, M::visit_units);
    }

    fn map_params<P: ParamMapper>(self, mapper: &mut P) -> Self {
        let child = &Self::LAYOUT.children[0];
        let elements = self.into_iter().enumerate();
        elements.map(|(index, module)| map_element(module, child, index, mapper)).collect()
    }
}

impl<M: FsdpModule, const N: usize> FsdpModule for [M; N] {
    const LAYOUT: Node = list::<M>("array");

    fn visit_params<V: ParamVisitor>(&self, visitor: &mut V) {
        visit_list(self, &Self::LAYOUT.children[0], visitor, visit_module);
    }

    fn visit_units<V: ParamVisitor>(&self, visitor: &mut V) {
        visit_list(self, &Self::LAYOUT.children[0], visitor, M::visit_units);
    }

    fn map_params<P: ParamMapper>(self, mapper: &mut P) -> Self {
        let child = &Self::LAYOUT.children[0];
        let mut index = 0;
        self.map(|module| {
            index += 1;
            map_element(module, child, index - 1, mapper)
        })
    }
}

/// Implements [`FsdpModule`] for a tuple.
macro_rules! tuple {
    ($($name:ident $index:tt)+) => {
        impl<$($name: FsdpModule),+> FsdpModule for ($($name,)+) {
            const LAYOUT: Node = Node {
                ty: "tuple",
                kind: Kind::Tuple,
                children: &[$(Child::plain(stringify!($index), &$name::LAYOUT)),+],
                ties: &[],
            };

            fn visit_params<V_: ParamVisitor>(&self, visitor: &mut V_) {
                $(self.$index.visit_field(&Self::LAYOUT.children[$index], visitor);)+
            }

            fn visit_units<V_: ParamVisitor>(&self, visitor: &mut V_) {
                $(
                    visitor.enter(&Self::LAYOUT.children[$index], None);
                    self.$index.visit_units(visitor);
                    visitor.exit();
                )+
            }

            fn map_params<P_: ParamMapper>(self, mapper: &mut P_) -> Self {
                ($(self.$index.map_field(&Self::LAYOUT.children[$index], mapper),)+)
            }
        }
    };
}
tuple!(A 0 B 1);
tuple!(A 0 B 1 C 2);
tuple!(A 0 B 1 C 2 D 3);

/// Implements [`FsdpModule`] for types without parameters.
macro_rules! constant {
    ($($ty:ty),+) => {$(
        impl FsdpModule for $ty {
            const LAYOUT: Node = Node::plain(stringify!($ty), Kind::Constant);
            fn visit_params<V: ParamVisitor>(&self, _: &mut V) {}
            fn map_params<P: ParamMapper>(self, _: &mut P) -> Self {
                self
            }
        }
    )+};
}
pub(super) use constant;
constant!(String, bool, f64, f32, usize, u64, u32, u16, u8, isize, i64, i32, i16, i8);
