//! Hooks around the methods of a unit.
//!
//! The body of a hooked method moves to a hidden method, so that `return` and `?` end the body and
//! not the hooks. The method keeps its signature. It passes each argument through the unit's map of
//! inputs, calls the hidden method, and passes the output to the hooks. The hidden method runs on
//! `self`, or on a copy of it whose tables are cast; a method whose output may borrow from `self` runs
//! on `self` in any case.

use proc_macro2::{Ident, Span, TokenStream};
use quote::{ToTokens, format_ident, quote, quote_spanned};
use syn::{Attribute, ImplItem, ImplItemFn, ItemImpl, Meta, ReturnType, Visibility, parse_quote};

use super::inputs::Input;
use super::own_types::OwnTypes;
use super::references::{lent_arguments, may_borrow_self};
use super::signature::{argument_names, turbofish, with_argument_names};
use super::span::at;
use super::{field_calls, recompute};
use crate::parse::{CratePath, FSDP, ImplBlock, is_named};

/// Returns the block with every hooked method replaced by a wrapper and a hidden method, and with
/// hooked calls of field units if the block asks for them.
///
/// The hidden methods of a trait's block are in a trait of their own, below the user's.
pub(super) fn block(block: &ImplBlock<'_>) -> TokenStream {
    let mut hooked = block.original.clone();
    hooked.items = Vec::with_capacity(hooked.items.len() + block.forwards.len());
    let mut bodies = Bodies::default();
    let mut own_types = OwnTypes::of(block.original);
    for item in &block.original.items {
        let method = block
            .hooked()
            .find(|method| matches!(item, ImplItem::Fn(other) if std::ptr::eq(other, *method)));
        let outer = block.type_params();
        let Some(method) = method.map(|method| HookedMethod::new(method, outer, block.more)) else {
            hooked.items.push(hook_calls(without_own_attributes(item.clone()), block));
            continue;
        };
        hooked.items.push(ImplItem::Verbatim(method.wrapper(&block.crate_path)));
        let mut body = hook_calls(ImplItem::Fn(method.body()), block);
        match &mut own_types {
            None => hooked.items.push(body),
            Some(own_types) => {
                own_types.qualify_item(&mut body);
                bodies.declared.push(method.declaration(own_types));
                bodies.defined.push(body);
            }
        }
    }
    match &block.original.trait_ {
        Some((_, path, _)) if !bodies.defined.is_empty() => bodies.around(path, &hooked),
        _ => hooked.into_token_stream(),
    }
}

/// Returns an item with hooked calls of field units, if the block asks for them.
fn hook_calls(mut item: ImplItem, block: &ImplBlock<'_>) -> ImplItem {
    if let (true, ImplItem::Fn(method)) = (block.field_units, &mut item) {
        field_calls::hook(method, &block.type_params(), &block.crate_path);
    }
    item
}

/// Returns a method without the attributes of this crate.
fn without_own_attributes(mut item: ImplItem) -> ImplItem {
    if let ImplItem::Fn(method) = &mut item {
        method.attrs.retain(|attr| !is_named(attr, &[FSDP]));
    }
    item
}

/// The hidden methods of a trait's block.
#[derive(Default)]
struct Bodies {
    declared: Vec<TokenStream>,
    defined: Vec<ImplItem>,
}

impl Bodies {
    /// Generates the trait of the hidden methods, its implementation, and the block of the user's
    /// trait, which is below it.
    fn around(self, path: &syn::Path, block: &ItemImpl) -> TokenStream {
        let Self { declared, defined } = self;
        let conditions = block.attrs.iter().filter(|attr| is_named(attr, &["cfg"]));
        let conditions = quote!(#(#conditions)*);
        let ty = &block.self_ty;
        let (generics, arguments, bounds) = block.generics.split_for_impl();
        quote! {
            const _: () = {
                #conditions
                trait __FsdpBodies #generics: #path #bounds {
                    #(#declared)*
                }
                #conditions
                impl #generics __FsdpBodies #arguments for #ty #bounds {
                    #(#defined)*
                }
                #block
            };
        }
    }
}

/// A method to be hooked.
struct HookedMethod<'a> {
    original: &'a ImplItemFn,
    /// A name for each argument after `self`.
    arguments: Vec<Ident>,
    /// The name of the hidden method.
    hidden_name: Ident,
    /// Type parameters of the block.
    outer: Vec<&'a Ident>,
    /// Whether the method is in a further block, whose methods the type does not list.
    more: bool,
    /// Whether the hidden method runs on the caller's module, from which its output may borrow.
    runs_on_caller: bool,
}

impl<'a> HookedMethod<'a> {
    fn new(original: &'a ImplItemFn, outer: Vec<&'a Ident>, more: bool) -> Self {
        let arguments = argument_names(&original.sig);
        let hidden_name = format_ident!("__fsdp_{}", original.sig.ident);
        let runs_on_caller = may_borrow_self(&original.sig);
        Self { original, arguments, hidden_name, outer, more, runs_on_caller }
    }

    /// Generates the method itself: the hooks, around a call of the hidden method.
    fn wrapper(&self, crate_path: &CratePath) -> TokenStream {
        let method = self.original;
        let attrs = method.attrs.iter().filter(|attr| !is_named(attr, &[FSDP]));
        let attrs = attrs.map(without_expectations);
        let (visibility, defaultness) = (&method.vis, &method.defaultness);
        let arguments = &self.arguments;
        let signature = with_argument_names(&method.sig, arguments);
        let this = self.this();
        let mut probes = quote!(ProbeOther as _, ProbeUnitValue as _);
        let inputs = Input::of_method(&method.sig, &self.outer);
        if inputs.iter().any(|input| matches!(input, Input::Reference(_))) {
            probes.extend(quote! {
                , ReferenceModule as _, ReferenceOther as _, ReferenceTables as _, ReferenceTensors as _
            });
        }
        let run = match recompute::is_possible(method, &self.outer) {
            true => {
                probes.extend(quote!(, ProbeSavable as _, ProbeUnsavable as _));
                self.run_recomputable(&inputs)
            }
            false => self.run(),
        };
        let check = self.more.then(|| {
            probes.extend(quote!(, Fallback as _));
            let description = recompute::description(method, &self.outer);
            quote!(__fsdp::check_recomputable(&__fsdp_call, &#description);)
        });
        let import = crate_path.import_with(probes);
        let collected = inputs.iter().map(Input::collect);
        let mapped = inputs.iter().map(Input::map);
        let collect = quote!(|__fsdp_inputs| { #(#collected)* });
        let pre_forward = match self.runs_on_caller {
            true => quote!(let __fsdp_call = __fsdp::pre_forward(#this, #collect);),
            false => quote! {
                let (__fsdp_call, __fsdp_cast) = __fsdp::pre_forward_with_tables(#this, #collect);
                let __fsdp_self = ::core::option::Option::as_ref(&__fsdp_cast).unwrap_or(self);
            },
        };
        quote! {
            #(#attrs)*
            #visibility #defaultness #signature {
                #import
                #pre_forward
                #check
                #(let #arguments = #mapped;)*
                #run
            }
        }
    }

    /// Runs the hidden method, then the hook after it.
    fn run(&self) -> TokenStream {
        let run = self.run_hidden();
        let output = quote_spanned!(self.output_span()=> __fsdp_output);
        quote! {
            let __fsdp_output = #run;
            __fsdp::post_forward(__fsdp_call, #output)
        }
    }

    /// Runs the hidden method as [`Self::run`] does, and offers the inputs to the runtime. For a
    /// recomputed unit the runtime keeps the inputs, and a closure that runs the hidden method
    /// again.
    ///
    /// The inputs are passed as nested pairs, `(a, (b, ()))`, which stand for tuples of any length. An
    /// input by value is wrapped in `ByValue`; one by reference is a `Reference` already.
    fn run_recomputable(&self, inputs: &[Input]) -> TokenStream {
        let wrapped = inputs.iter().zip(&self.arguments).map(|(input, name)| match input {
            Input::Reference(_) => quote!(#name),
            _ => quote!(__fsdp::ByValue(#name)),
        });
        let nested = |rest, input| quote!((#input, #rest));
        let inputs = wrapped.rev().fold(quote!(()), nested);
        let run = self.run_hidden();
        let module = if self.runs_on_caller { self.this() } else { quote!(__fsdp_self) };
        let recompute = self.call_hidden(quote!(__fsdp_self));
        let post_forward = quote_spanned! {self.output_span()=>
            __fsdp::post_forward_recompute(__fsdp_call, __fsdp_output, __fsdp_recompute)
        };
        quote! {
            let __fsdp_inputs = #inputs;
            let (#inputs, __fsdp_recompute) = (&__fsdp::ValueProbe(&__fsdp_inputs))
                .savability()
                .keep(&__fsdp_call, #module, __fsdp_inputs, |__fsdp_self: &Self, #inputs| #recompute);
            let __fsdp_output = #run;
            #post_forward
        }
    }

    /// Runs the hidden method. Where nothing is borrowed, the runtime runs it, to report tensors of
    /// different dtypes.
    fn run_hidden(&self) -> TokenStream {
        if self.runs_on_caller {
            return self.call_hidden(quote!(self));
        }
        let call = self.call_hidden(quote!(__fsdp_self));
        quote!(__fsdp::run(&__fsdp_call, || #call))
    }

    fn call_hidden(&self, receiver: TokenStream) -> TokenStream {
        let name = &self.hidden_name;
        let arguments = lent_arguments(&self.original.sig, &self.outer);
        let turbofish = turbofish(&self.original.sig);
        let call = quote!(#receiver.#name #turbofish (#(#arguments),*));
        match self.original.sig.unsafety {
            // The body requires of the caller what the method itself requires.
            Some(_) => quote!(unsafe { #call }),
            None => call,
        }
    }

    /// Returns `self`, spanned at the method's name: the compiler reports there that the type is no
    /// unit.
    fn this(&self) -> TokenStream {
        quote_spanned!(at(&self.original.sig.ident)=> self)
    }

    /// Returns the span at which the compiler reports that the return type is no `UnitValue`.
    fn output_span(&self) -> Span {
        match &self.original.sig.output {
            ReturnType::Default => Span::call_site(),
            ReturnType::Type(_, ty) => at(ty),
        }
    }

    /// Generates the declaration of the hidden method in a trait.
    fn declaration(&self, own_types: &mut OwnTypes<'_>) -> TokenStream {
        let mut sig = with_argument_names(&self.original.sig, &self.arguments);
        sig.ident = self.hidden_name.clone();
        own_types.qualify_signature(&mut sig);
        let conditions = self.original.attrs.iter().filter(|attr| is_named(attr, &["cfg"]));
        quote!(#(#conditions)* #[allow(clippy::all, clippy::pedantic)] #sig;)
    }

    /// Returns the hidden method: the body as written, with the patterns of its arguments.
    fn body(&self) -> ImplItemFn {
        let mut body = self.original.clone();
        body.vis = Visibility::Inherited;
        body.sig.ident = self.hidden_name.clone();
        body.attrs.retain(|attr| is_named(attr, LINTS) || is_named(attr, &["cfg"]));
        body.attrs.push(parse_quote!(#[doc(hidden)]));
        body
    }
}

const LINTS: &[&str] = &["allow", "expect", "warn", "deny", "forbid"];

/// Turns `#[expect(..)]` into `#[allow(..)]`: a lint that is expected in the body does not fire in
/// the wrapper.
fn without_expectations(attr: &Attribute) -> TokenStream {
    match &attr.meta {
        Meta::List(list) if is_named(attr, &["expect"]) => {
            let lints = &list.tokens;
            quote!(#[allow(#lints)])
        }
        _ => attr.to_token_stream(),
    }
}
