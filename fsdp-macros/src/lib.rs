//! The macros of `fsdp-runtime`, which re-exports them all.
//!
//! Each macro is one pipeline, written out at the end of this file: `parse` the item, `check` it,
//! `expand` it. Errors are collected on the way and emitted together with the generated code. Rules
//! that need the layout of other types (whether two tied weights lie in one unit, whether two
//! checkpoint keys are equal) are `const` checks in the runtime, which the expansion calls. This
//! crate does not depend on Burn.
//!
//! The file `ROOMS` lists the modules in the order in which they may use each other. What each
//! macro expands to is in `tests/snapshots/`.

#![deny(missing_docs)]

mod check;
mod errors;
mod expand;
mod parse;
#[cfg(test)]
mod tests;

use proc_macro2::TokenStream;
use quote::quote;
use syn::{DeriveInput, Item, ItemImpl, parse_macro_input};

use errors::Errors;
use parse::{ImplBlock, Module, Value};

/// Makes a Burn module a *unit*: its parameters are gathered by one all-gather before its
/// `forward`, and their gradients are reduced by one reduce-scatter after its backward.
///
/// The attribute is written twice: on the struct, **below** `#[derive(Module)]`, and on the `impl`
/// block that holds the struct's `forward`.
///
/// ```ignore
/// use burn::module::Module;
/// use burn::nn::Linear;
/// use burn::tensor::Tensor;
/// use burn::tensor::activation::gelu;
/// use fsdp_runtime::fsdp_unit;
///
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
///
/// #[derive(Module, Debug)]
/// #[fsdp_unit(root)]
/// pub struct Model {
///     blocks: Vec<Block>,
///     #[fsdp(unit)]
///     head: Linear,
/// }
///
/// #[fsdp_unit(field_units)]
/// impl Model {
///     pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
///         let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
///         self.head.forward(x)
///     }
/// }
/// ```
///
/// # On a struct
///
/// - `root` (default: not the root): the outermost unit of a model. A root may hold no other root,
///   and needs no parameters of its own.
/// - `checkpoint` (default: `ActivationCheckpointing` in the run's options decides): activation
///   checkpointing. In training, only the inputs of the unit's `forward` are kept; the backward
///   recomputes the `forward`, under the all-gather that it needs anyway. So each hooked method
///   must take its inputs by value, of types that are `UnitValue + Clone + Send + 'static`, or by
///   reference to such a value or to any other one that is `Clone + Send + 'static` and holds no
///   trained parameter: a clone of it is kept. And it must depend on nothing but its inputs, the
///   parameters and `fsdp_runtime::nn::Dropout`.
/// - `tie("a.b" = "c.d")` (default: no tie; may be repeated): two places below this struct that
///   hold one weight. Both must lie in the same unit. A path is made of field names and leads to a
///   `Param`, or to a module with exactly one matrix. With `tie("a.b" = "c.d", if_shared)` the places
///   are tied only where the model's two parameters are clones of one, as a configuration may decide:
///   `tie_word_embeddings` of Hugging Face.
/// - `crate = "path"` (default: `::fsdp_runtime`): the path at which generated code finds the crate
///   `fsdp-runtime`, for a crate that knows it under another name or through a re-export, such as
///   `crate = "my_framework::fsdp"`. Write it on the struct and on the `impl` block.
///
/// The struct may have type parameters and constant parameters. A parameter that is a module needs the
/// bound `FsdpModule`, and for `#[derive(Module)]` the bound `ModuleDisplay`. The struct has all bounds
/// that its `impl` block under the attribute has. Checks of a generic unit run when a program that
/// shards it is built.
///
/// ```ignore
/// use burn::module::{Module, ModuleDisplay};
/// use burn::nn::LayerNorm;
/// use burn::tensor::Tensor;
/// use fsdp_runtime::{FsdpModule, fsdp_unit};
///
/// pub trait Layer {
///     fn apply(&self, x: Tensor<3>) -> Tensor<3>;
/// }
///
/// #[derive(Module, Debug)]
/// #[fsdp_unit]
/// pub struct Residual<M: FsdpModule + ModuleDisplay + Layer> {
///     inner: M,
///     norm: LayerNorm,
/// }
///
/// #[fsdp_unit]
/// impl<M: FsdpModule + ModuleDisplay + Layer> Residual<M> {
///     pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
///         x.clone() + self.inner.apply(self.norm.forward(x))
///     }
/// }
/// ```
///
/// # On a field
///
/// These arguments are written in `#[fsdp(..)]`.
///
/// - `key = "x.y"` (default: the field's name): the field's name in a checkpoint of another
///   library. `""` adds nothing to the key, which fits a wrapper that the checkpoint does not have.
/// - `leaf` (default: the type implements `FsdpModule`): FSDP does not read the field's structure
///   at compile time. It finds the field's parameters when the model is sharded.
/// - `unit` (default: part of the enclosing unit): the module in the field is a unit. It may be one
///   of another crate, such as `burn::nn::Linear`. In an `Option`, a `Vec`, an array or a tuple,
///   each module is a unit. Under `#[fsdp(unit, leaf)]`, each element of a `Vec` or an array is a
///   unit, and any other type is one unit.
/// - `unit = "name"`: the modules in all fields of the struct with that name are one unit. It is
///   gathered before the first of them runs, and resharded after each has run, at the latest at the
///   end of the enclosing unit's `forward`. Its module path is that of the struct, followed by the
///   name, so no field may have that name.
///
/// - `column`, `row` (default: every rank has the whole matrix): the layer in the field, a
///   `fsdp_runtime::nn::Linear`, has a part of its outputs, or of its inputs, on each tensor parallel
///   rank. A field under `column` comes before one under `row`, which takes what it returns, or is
///   under `column, gather`, which joins the outputs of all ranks.
/// - `vocab` (default: the whole table): the `nn::Embedding` or `nn::LmHead` in the field has a part of
///   the words on each tensor parallel rank. Two places of a tied weight are both under it.
/// - `shared` (default: used with whole values): the module in the field is whole on each tensor
///   parallel rank and used with parts of other values, as a norm of each head. Its gradients are
///   added up.
///
/// Fields under Burn's `#[module(skip)]` and values such as `usize` are not part of the layout, and
/// take none of these arguments.
///
/// # On an `impl` block
///
/// Every method that takes `&self` and is named `forward`, or whose name begins with `forward_`, is
/// hooked, and every other method with `&self` under `#[fsdp(forward)]`. Its body moves to a hidden
/// method, so early returns and `?` work. The block may be that of a trait. One `impl` block of a
/// unit carries the attribute, and further ones carry it with `more`.
///
/// ```ignore
/// use burn::module::Module;
/// use burn::nn::Linear;
/// use burn::tensor::Tensor;
/// use fsdp_runtime::fsdp_unit;
///
/// pub trait Encoder {
///     fn encode(&self, x: Tensor<3>) -> Tensor<3>;
/// }
///
/// #[derive(Module, Debug)]
/// #[fsdp_unit]
/// pub struct Head {
///     dense: Linear,
/// }
///
/// #[fsdp_unit]
/// impl Head {
///     pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
///         self.dense.forward(x)
///     }
/// }
///
/// #[fsdp_unit(more)]
/// impl Encoder for Head {
///     #[fsdp(forward)]
///     fn encode(&self, x: Tensor<3>) -> Tensor<3> {
///         self.dense.forward(x).detach()
///     }
/// }
/// ```
///
/// The tensors of an input that is a `UnitValue` order the unit's gather, and are cast under mixed
/// precision. An input of a generic type needs the bound `UnitValue`, as in
/// `T: Into<Tensor<2>> + UnitValue` or `x: impl Into<Tensor<2>> + UnitValue`: inside the generic
/// method the macro cannot find out which type the caller chose. References and closures need no
/// bound; a closure's type is recognised by a bound such as `Fn(..)`, `FnMut(..)` or `FnOnce(..)`.
/// The tensors that a closure captures neither order the gather nor are cast. Those behind a reference
/// do and are if the reference is a `&T` with an elided lifetime and `T` is a `UnitValue` with clones, in
/// a copy: `mask: &Tensor<3>`. If `T` is a `FsdpModule`, such as `tables: &Tables`, the tensors in its
/// fields that are no parameters are cast, in a copy.
///
/// - `field_units` (default: no calls are hooked): hooks the calls in this block of modules in
///   fields under `#[fsdp(unit)]`. It is required where such a field is in this struct, or below it
///   with no other unit in between. The hooked calls are those of a method named `forward` or
///   `forward_..`, in any method of the block. The receiver is a variable, a field, an element by
///   index, or a reference. References made with `as_ref`, `as_deref`, `get`, `first`, `last`,
///   `iter`, `next`, `nth`, `unwrap`, `expect` or `?` are known. At run time the hooks have an
///   effect on field units only.
/// - `more` (default: this is the one block that a unit must have): another block of the unit
///   carries the attribute without it. Under activation checkpointing by the run's options, a method
///   of such a block whose inputs cannot be kept is an error when it is called in training.
/// - `crate = "path"`: as on a struct.
///
/// A hooked call is otherwise unchanged, with two exceptions. Temporaries in its arguments live
/// until the call returns, not until the end of the statement. The type of an argument that is
/// itself a call must be known without the method's signature. A call written as
/// `Linear::forward(&self.head, x)` is not hooked: its parameters are then gathered one by one,
/// with the same result and more memory.
///
/// # Errors
///
/// A wrong use does not compile, and the message says what to write instead. Examples are:
///
/// - an enum or a union as a unit, a type parameter without the bound `FsdpModule`, a unit without
///   parameters, or a root inside a root;
/// - a field under `#[cfg]`, or a field of a type that FSDP does not know;
/// - two parameters with one checkpoint key;
/// - a group of fields with one field, or with the name of a field;
/// - a tied weight in two units, or a tie path that leads to no weight;
/// - a unit without a hooked `forward`, or a `forward` that is `async`, `const` or takes
///   `&mut self`;
/// - a `row` without a `column` before it, a `column` whose outputs no field takes, or either on a
///   norm, a list or a layer of Burn;
/// - a return type that is not `UnitValue`, or an input of a generic type without the bound
///   `UnitValue`;
/// - under `checkpoint`, an input that cannot be kept.
#[proc_macro_attribute]
pub fn fsdp_unit(
    args: proc_macro::TokenStream,
    item: proc_macro::TokenStream,
) -> proc_macro::TokenStream {
    unit(args.into(), item.into()).into()
}

/// Implements `FsdpModule` for a Burn module that is not a unit: its parameters belong to the
/// enclosing unit. It may contain units.
///
/// ```ignore
/// use burn::module::Module;
/// use burn::nn::{Embedding, Linear};
/// use fsdp_runtime::FsdpModule;
///
/// #[derive(Module, FsdpModule, Debug)]
/// pub struct Embeddings {
///     word: Embedding,
///     position: Embedding,
/// }
///
/// #[derive(Module, FsdpModule, Debug)]
/// #[fsdp(tie("embeddings.word" = "decoder"))]
/// pub struct Model {
///     embeddings: Embeddings,
///     #[fsdp(key = "cls.decoder")]
///     decoder: Linear,
/// }
/// ```
///
/// # Arguments
///
/// On the struct, `#[fsdp(..)]` takes `tie("a.b" = "c.d")` and `crate = "path"`. On a field it
/// takes `key = "x.y"`, `leaf`, `unit`, `column`, `row`, `vocab` and `shared`. Their meaning and defaults are those under
/// [`macro@fsdp_unit`].
///
/// # Errors
///
/// An enum or a union does not compile, nor does a type parameter without the bound `FsdpModule`, nor a
/// struct under `#[fsdp_unit]`, which implements `FsdpModule` too. Fields, keys and ties are checked as under
/// [`macro@fsdp_unit`].
#[proc_macro_derive(FsdpModule, attributes(fsdp))]
pub fn derive_fsdp_module(item: proc_macro::TokenStream) -> proc_macro::TokenStream {
    derived_module(parse_macro_input!(item)).into()
}

/// Implements `UnitValue` for a struct or an enum of such values, so that a unit's `forward` can
/// take and return it.
///
/// ```ignore
/// use burn::tensor::Tensor;
/// use fsdp_runtime::UnitValue;
///
/// #[derive(UnitValue)]
/// pub struct Output {
///     pub hidden: Tensor<3>,
///     pub pooled: Option<Tensor<2>>,
/// }
/// ```
///
/// Type parameters are bounded by `UnitValue`.
///
/// # Arguments
///
/// On the type, `#[fsdp(crate = "path")]` (default: `::fsdp_runtime`) gives the path at which
/// generated code finds the crate `fsdp-runtime`. Fields and variants take no arguments.
///
/// # Errors
///
/// A union does not compile, nor does a field whose type is not `UnitValue`.
#[proc_macro_derive(UnitValue, attributes(fsdp))]
pub fn derive_unit_value(item: proc_macro::TokenStream) -> proc_macro::TokenStream {
    derived_unit_value(parse_macro_input!(item)).into()
}

/// Expands `#[fsdp_unit(args)]` on any item.
fn unit(args: TokenStream, item: TokenStream) -> TokenStream {
    match syn::parse2(item.clone()) {
        Ok(Item::Impl(block)) => unit_impl(args, block),
        Ok(Item::Struct(item)) => unit_type(args, item.into()),
        Ok(Item::Enum(item)) => unit_type(args, item.into()),
        Ok(Item::Union(item)) => unit_type(args, item.into()),
        Ok(_) | Err(_) => misplaced_unit(item),
    }
}

/// Expands `#[fsdp_unit(args)]` on a struct. On an enum or a union it is an error.
fn unit_type(args: TokenStream, item: DeriveInput) -> TokenStream {
    let mut errors = Errors::default();
    let module = Module::parse_unit(args, &item, &mut errors);
    check::module(&module, &mut errors);
    let code = expand::module(&module, errors.is_empty());
    let item = expand::without_own_attributes(&item);
    quote!(#item #code #errors)
}

/// Expands `#[fsdp_unit(args)]` on an `impl` block.
fn unit_impl(args: TokenStream, block: ItemImpl) -> TokenStream {
    let mut errors = Errors::default();
    let block = ImplBlock::parse(args, &block, &mut errors);
    check::impl_block(&block, &mut errors);
    let code = expand::impl_block(&block);
    quote!(#code #errors)
}

/// Reports `#[fsdp_unit]` on any other item than a type or an `impl` block.
fn misplaced_unit(item: TokenStream) -> TokenStream {
    let mut errors = Errors::default();
    check::misplaced_unit(&mut errors);
    quote!(#item #errors)
}

/// Expands `#[derive(FsdpModule)]`.
fn derived_module(item: DeriveInput) -> TokenStream {
    let mut errors = Errors::default();
    let module = Module::parse_derive(&item, &mut errors);
    check::module(&module, &mut errors);
    let code = expand::module(&module, errors.is_empty());
    quote!(#code #errors)
}

/// Expands `#[derive(UnitValue)]`.
fn derived_unit_value(item: DeriveInput) -> TokenStream {
    let mut errors = Errors::default();
    let value = Value::parse(&item, &mut errors);
    check::unit_value(&value, &mut errors);
    let code = expand::unit_value(&value);
    quote!(#code #errors)
}
