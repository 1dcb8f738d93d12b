//! The compile-time half of `fsdp-runtime`, which re-exports everything here.
//!
//! One pipeline for all macros: parse (`ast`, `attr`), check (`check`), expand (`expand`).
//! What needs other types than the annotated one (whether two tied weights lie in one unit, whether
//! two checkpoint keys are equal) is left to `const` checks in the runtime, which the expansion
//! calls. Nothing here depends on Burn.

#![deny(missing_docs)]

mod ast;
mod attr;
mod check;
mod error;
mod expand;
mod fallback;
#[cfg(test)]
mod tests;

use proc_macro2::TokenStream;
use syn::{DeriveInput, Item, ItemImpl};

use ast::{Hooked, Module, Role};
use error::Errors;

/// Makes a Burn module a *unit*: one all-gather before its `forward`, one reduce-scatter after its
/// backward.
///
/// Written twice: on the struct, **below** `#[derive(Module)]`, and on the `impl` block that holds
/// its `forward`.
///
/// ```ignore
/// #[derive(Module, Debug)]
/// #[fsdp_unit]
/// pub struct Block {
///     #[fsdp(key = "intermediate.dense")]
///     up: Linear,
///     #[fsdp(key = "output.dense")]
///     down: Linear,
/// }
///
/// #[fsdp_unit]
/// impl Block {
///     pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
///         self.down.forward(gelu(self.up.forward(x)))
///     }
/// }
/// ```
///
/// # On a struct
///
/// - `root`: the outermost unit of a model.
/// - `checkpoint`: in training, only the inputs of the unit's `forward` are kept, and it is run again
///   in backward, under the all-gather that the backward needs anyway. So each hooked method takes
///   its inputs by value, of types that are `UnitValue + Clone + Send + 'static`, and depends on
///   nothing but them, the parameters and `fsdp_runtime::nn::Dropout`. `ActivationCheckpointing` in
///   the options chooses units without this.
/// - `tie("a.b" = "c.d")`, any number of times: two places below this struct that hold one weight.
///   Both must lie in the same unit. A path is made of field names; it names a `Param`, or a module
///   with exactly one matrix.
///
/// # On a field
///
/// - `#[fsdp(key = "x.y")]`: the field's name in a checkpoint from elsewhere. `""` adds nothing to
///   the key, as a transparent wrapper asks for.
/// - `#[fsdp(leaf)]`: FSDP does not look into the field's type when compiling; its parameters are
///   found when the model is sharded.
/// - `#[fsdp(unit)]`: the module in the field is a unit, as `burn::nn::Linear` or one of another
///   crate may have to be; of an `Option`, `Vec`, array or tuple, each module in it. One that FSDP
///   does not look into is marked `#[fsdp(unit, leaf)]`.
///
/// Fields under Burn's `#[module(skip)]` are no part of the layout, nor are values such as `usize`.
///
/// # On an `impl` block
///
/// Every method named `forward`, or whose name begins with `forward_`, that takes `&self` is hooked.
/// Its body moves to a hidden method, so early returns and `?` work. One `impl` block of a unit
/// carries the attribute.
///
/// - `field_units`: the calls in this block are hooked, too, for the fields under `#[fsdp(unit)]` at
///   or below this struct, which is asked for where there are any. These are the calls of a method
///   named `forward` or `forward_..`, in any method of the block, on a variable, a field, an element by
///   index, or a reference made with `as_ref`, `get`, `first`, `last`, `iter`, `next`, `nth`,
///   `unwrap`, `expect` or `?`. At run time only those of a field unit do anything.
///
/// The rest of the call stays as written, but temporaries in its arguments live until it returns, not
/// until the end of the statement, and the type of an argument that is itself a call must be known
/// without the method's signature. Written as `Linear::forward(&self.head, x)`, a call is left alone;
/// the parameters are then gathered one by one, with the same result and more memory.
#[proc_macro_attribute]
pub fn fsdp_unit(
    args: proc_macro::TokenStream,
    item: proc_macro::TokenStream,
) -> proc_macro::TokenStream {
    unit(args.into(), item.into()).into()
}

/// Implements `FsdpModule` for a Burn module that is no unit of its own: its parameters belong to
/// the unit around it. It may contain units.
///
/// ```ignore
/// #[derive(Module, FsdpModule, Debug)]
/// #[fsdp(tie("embeddings.word" = "decoder"))]
/// pub struct Model {
///     embeddings: Embeddings,
///     #[fsdp(key = "cls.decoder")]
///     decoder: Linear,
/// }
/// ```
///
/// The struct takes `#[fsdp(tie("a.b" = "c.d"))]`; fields take what they take under
/// [`macro@fsdp_unit`].
#[proc_macro_derive(FsdpModule, attributes(fsdp))]
pub fn derive_fsdp_module(item: proc_macro::TokenStream) -> proc_macro::TokenStream {
    match syn::parse(item) {
        Ok(item) => module(Role::Module, item).into(),
        Err(error) => error.into_compile_error().into(),
    }
}

/// Implements `UnitValue` for a struct or an enum of such values, so that a unit's `forward` can
/// return it.
///
/// ```ignore
/// #[derive(UnitValue)]
/// pub struct Output {
///     pub hidden: Tensor<3>,
///     pub pooled: Option<Tensor<2>>,
/// }
/// ```
#[proc_macro_derive(UnitValue)]
pub fn derive_unit_value(item: proc_macro::TokenStream) -> proc_macro::TokenStream {
    match syn::parse(item) {
        Ok(item) => value(item).into(),
        Err(error) => error.into_compile_error().into(),
    }
}

/// `#[fsdp_unit]`, on whatever it was written.
fn unit(args: TokenStream, item: TokenStream) -> TokenStream {
    match syn::parse2(item.clone()) {
        Ok(Item::Impl(block)) => hooks(args, block),
        Ok(Item::Struct(item)) => module(Role::Unit(args), item.into()),
        Ok(Item::Enum(item)) => module(Role::Unit(args), item.into()),
        Ok(Item::Union(item)) => module(Role::Unit(args), item.into()),
        Ok(_) | Err(_) => fallback::misplaced(item),
    }
}

/// A struct: the layout tree, the walks over its fields and the checks of both.
fn module(role: Role, item: DeriveInput) -> TokenStream {
    let mut errors = Errors::default();
    let module = Module::parse(&role, &item, &mut errors);
    check::module(&module, &mut errors);
    let code = expand::module(&module, errors.is_empty());
    let item = role.is_unit().then(|| fallback::without_own_attributes(&item));
    fallback::join(item, code, errors)
}

/// An `impl` block: the hooks around every `forward`.
fn hooks(args: TokenStream, block: ItemImpl) -> TokenStream {
    let mut errors = Errors::default();
    let hooked = Hooked::parse(&block, args, &mut errors);
    check::hooks(&hooked, &mut errors);
    fallback::join(None, expand::hooks(&hooked), errors)
}

/// A struct or an enum of tensors: the walks over the values in it.
fn value(item: DeriveInput) -> TokenStream {
    let mut errors = Errors::default();
    check::value(&item, &mut errors);
    fallback::join(None, expand::value(&item), errors)
}
