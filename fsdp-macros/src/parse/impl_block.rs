//! An `impl` block under `#[fsdp_unit]`, and its methods to be hooked: those named `forward` or
//! `forward_..`, and those under `#[fsdp(forward)]`.

use proc_macro2::TokenStream;
use syn::{Ident, ImplItem, ImplItemFn, ItemImpl, Path, Type};

use super::arguments::{BlockArgs, MethodArgs};
use super::crate_path::CratePath;
use crate::errors::Errors;

/// An `impl` block under `#[fsdp_unit]`, with its arguments.
pub(crate) struct ImplBlock<'a> {
    /// The block as written.
    pub(crate) original: &'a ItemImpl,
    /// Whether calls in the block of modules in fields under `#[fsdp(unit)]` are hooked.
    pub(crate) field_units: bool,
    /// Whether another block of the type is the one with the hooks that the type must have.
    pub(crate) more: bool,
    /// The methods named `forward` or `forward_..`, and those under `#[fsdp(forward)]`.
    pub(crate) forwards: Vec<Forward<'a>>,
    /// Path at which generated code finds the runtime crate.
    pub(crate) crate_path: CratePath,
}

impl<'a> ImplBlock<'a> {
    /// Parses a block under `#[fsdp_unit(args)]`.
    pub(crate) fn parse(args: TokenStream, original: &'a ItemImpl, errors: &mut Errors) -> Self {
        let BlockArgs { field_units, more, crate_path } = BlockArgs::parse(args, errors);
        let methods = original.items.iter().filter_map(|item| match item {
            ImplItem::Fn(method) => Some(method),
            _ => None,
        });
        let forward = |method: &'a ImplItemFn| {
            let marked = MethodArgs::parse(&method.attrs, errors).forward;
            let hooks = marked.is_some() || is_forward(&method.sig.ident.to_string());
            hooks.then(|| Forward { original: method, marked, receiver: Receiver::of(method) })
        };
        let forwards = methods.filter_map(forward).collect();
        let crate_path = CratePath::new(crate_path);
        Self { original, field_units, more, forwards, crate_path }
    }

    /// Returns whether the block is of one type: it has no generic parameters.
    pub(crate) fn is_of_one_type(&self) -> bool {
        self.original.generics.params.is_empty()
    }

    /// Returns the type parameters of the block.
    pub(crate) fn type_params(&self) -> Vec<&'a Ident> {
        self.original.generics.type_params().map(|param| &param.ident).collect()
    }

    /// Returns the methods that are hooked.
    pub(crate) fn hooked(&self) -> impl Iterator<Item = &'a ImplItemFn> {
        self.forwards.iter().filter(|forward| forward.is_hooked()).map(|forward| forward.original)
    }
}

/// The name of the method that must be hooked where it exists.
const FORWARD: &str = "forward";

/// Returns whether methods of this name, and calls of them, are hooked: `forward` or `forward_..`.
pub(crate) fn is_forward(name: &str) -> bool {
    name == FORWARD || name.strip_prefix(FORWARD).is_some_and(|rest| rest.starts_with('_'))
}

/// A method to be hooked, by its name or by an attribute.
pub(crate) struct Forward<'a> {
    /// The method as written.
    pub(crate) original: &'a ImplItemFn,
    /// The word `forward` in `#[fsdp(forward)]`.
    pub(crate) marked: Option<Path>,
    /// Receiver of the method: `&self`, `&mut self` or another form.
    pub(crate) receiver: Receiver,
}

impl Forward<'_> {
    /// Returns whether the method must be hooked where it exists.
    pub(crate) fn is_required(&self) -> bool {
        self.marked.is_some() || self.original.sig.ident == FORWARD
    }

    /// Returns whether the method can be hooked: it takes `&self` and is neither `async` nor
    /// `const`.
    pub(crate) fn is_hooked(&self) -> bool {
        let sig = &self.original.sig;
        self.receiver == Receiver::Shared && sig.asyncness.is_none() && sig.constness.is_none()
    }
}

/// Receiver of a method.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Receiver {
    /// The receiver `&self`.
    Shared,
    /// The receiver `&mut self`.
    Exclusive,
    /// `self`, or a pointer such as `self: Arc<Self>`
    Owned,
    /// No receiver: an associated function.
    Absent,
}

impl Receiver {
    fn of(method: &ImplItemFn) -> Self {
        match method.sig.receiver().map(|receiver| &*receiver.ty) {
            None => Self::Absent,
            Some(Type::Reference(ty)) if !is_self(&ty.elem) => Self::Owned,
            Some(Type::Reference(ty)) if ty.mutability.is_some() => Self::Exclusive,
            Some(Type::Reference(_)) => Self::Shared,
            Some(_) => Self::Owned,
        }
    }
}

fn is_self(ty: &Type) -> bool {
    matches!(ty, Type::Path(path) if path.path.is_ident("Self"))
}
