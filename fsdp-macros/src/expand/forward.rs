//! The hooks around a unit's `forward`.
//!
//! The body moves to a hidden sibling, so `return` and `?` in it end the body, not the hooks. The
//! method keeps its signature and hands over its arguments, each through the unit's map of inputs.

use proc_macro2::{Ident, Span, TokenStream};
use quote::{ToTokens, format_ident, quote, quote_spanned};
use syn::{
    Attribute, FnArg, GenericParam, ImplItem, ImplItemFn, ItemImpl, Pat, ReturnType, Signature,
    Visibility,
};

use super::{at, calls, replay};
use crate::ast::Hooked;

/// The block, with every hooked method split in two.
pub fn block(hooked: &Hooked<'_>) -> ItemImpl {
    let mut block = hooked.original.clone();
    block.items = Vec::with_capacity(block.items.len() + hooked.forwards.len());
    for item in &hooked.original.items {
        let forward = hooked
            .forwards
            .iter()
            .filter(|forward| forward.is_hooked())
            .map(|forward| forward.original)
            .find(|method| matches!(item, ImplItem::Fn(other) if std::ptr::eq(other, *method)));
        match forward {
            Some(method) => {
                block.items.push(ImplItem::Verbatim(wrapper(method).into_token_stream()));
                block.items.push(ImplItem::Fn(body(method)));
            }
            None => block.items.push(item.clone()),
        }
    }
    if hooked.field_units {
        let methods = block.items.iter_mut().filter_map(|item| match item {
            ImplItem::Fn(method) => Some(method),
            _ => None,
        });
        methods.for_each(calls::hook);
    }
    block
}

/// `impl HookedForward`, which tells the struct that its block is there.
pub fn marker(hooked: &Hooked<'_>) -> TokenStream {
    let ty = &hooked.original.self_ty;
    let conditions = hooked.original.attrs.iter().filter(|attr| is(attr, &["cfg"]));
    let field_units = hooked.field_units.then(|| {
        quote!(
            const HOOKS_FIELD_UNITS: ::core::primitive::bool = true;
        )
    });
    let conditions = quote!(#(#conditions)*);
    let hooked = || hooked.forwards.iter().filter(|forward| forward.is_hooked());
    let forwards = hooked().map(|forward| replay::description(forward.original));
    let checks = hooked().flat_map(|forward| replay::checks(forward.original, ty));
    quote_spanned! {at(ty)=>
        #conditions
        impl __fsdp::HookedForward for #ty {
            #field_units
            const HOOKED: &'static [__fsdp::Forward] = {
                use __fsdp::MayNotRecompute as _;
                &[#(#forwards),*]
            };
        }
        #(#conditions #checks)*
    }
}

/// The method itself: the hooks, around a call of the body.
fn wrapper(method: &ImplItemFn) -> TokenStream {
    let arguments = argument_names(&method.sig);
    let signature = public_signature(&method.sig, &arguments);
    let attrs = method.attrs.iter().map(expectation_as_permission);
    let visibility = &method.vis;
    let defaultness = &method.defaultness;
    let body = hidden_name(&method.sig.ident);
    let turbofish = turbofish(&method.sig);

    // What is wrong with the unit's type or the return type is shown there.
    let this = quote_spanned!(at(&method.sig.ident)=> self);
    let returned = match &method.sig.output {
        ReturnType::Default => Span::call_site(),
        ReturnType::Type(_, ty) => at(ty),
    };
    let call = |receiver: TokenStream| {
        let call = quote!(#receiver.#body #turbofish (#(#arguments),*));
        match method.sig.unsafety {
            // The body asks of the caller what the method itself does.
            Some(_) => quote!(unsafe { #call }),
            None => call,
        }
    };
    let here = call(quote!(self));
    let end = if replay::is_replayed(method) {
        let inputs = replay::nested(&arguments);
        let again = call(quote!(__fsdp_self));
        let end = quote_spanned! {returned=>
            ::fsdp_runtime::__private::post_forward_recompute(__fsdp_call, __fsdp_output, __fsdp_recompute)
        };
        quote! {
            let __fsdp_inputs = #inputs;
            let (#inputs, __fsdp_recompute) = (&::fsdp_runtime::__private::Input(&__fsdp_inputs))
                .replays()
                .keep(&__fsdp_call, #this, __fsdp_inputs, |__fsdp_self: &Self, #inputs| #again);
            let __fsdp_output = #here;
            #end
        }
    } else {
        let output = quote_spanned!(returned=> __fsdp_output);
        quote! {
            let __fsdp_output = #here;
            ::fsdp_runtime::__private::post_forward(__fsdp_call, #output)
        }
    };
    let replayed = replay::is_replayed(method).then(|| quote!(, KeepOther as _, KeepValue as _));
    quote! {
        #(#attrs)*
        #visibility #defaultness #signature {
            #[allow(unused_imports)]
            use ::fsdp_runtime::__private::{CollectOther as _, CollectValue as _ #replayed};
            let __fsdp_call = ::fsdp_runtime::__private::pre_forward(#this, |__fsdp_inputs| {
                #((&::fsdp_runtime::__private::Input(&#arguments)).collect(__fsdp_inputs);)*
            });
            #(
                let #arguments = (&::fsdp_runtime::__private::Input(&#arguments))
                    .kind()
                    .map(&__fsdp_call, #arguments);
            )*
            #end
        }
    }
}

/// The hidden sibling: the body as written, with its patterns.
fn body(method: &ImplItemFn) -> ImplItemFn {
    let mut body = method.clone();
    body.vis = Visibility::Inherited;
    body.sig.ident = hidden_name(&method.sig.ident);
    body.attrs.retain(|attr| is(attr, LINTS) || is(attr, &["cfg"]));
    body.attrs.push(syn::parse_quote!(#[doc(hidden)]));
    body
}

const LINTS: &[&str] = &["allow", "expect", "warn", "deny", "forbid"];

pub fn is(attr: &Attribute, names: &[&str]) -> bool {
    names.iter().any(|name| attr.path().is_ident(name))
}

fn hidden_name(name: &Ident) -> Ident {
    format_ident!("__fsdp_{name}")
}

/// The user's own names, which documentation and editors show; patterns get one by index.
pub fn argument_names(sig: &Signature) -> Vec<Ident> {
    let typed = sig.inputs.iter().filter_map(|input| match input {
        FnArg::Typed(input) => Some(&*input.pat),
        FnArg::Receiver(_) => None,
    });
    typed
        .enumerate()
        .map(|(index, pattern)| match pattern {
            Pat::Ident(pattern) if pattern.by_ref.is_none() && pattern.subpat.is_none() => {
                pattern.ident.clone()
            }
            _ => format_ident!("__fsdp_{index}"),
        })
        .collect()
}

/// The signature with a name for each argument.
fn public_signature(sig: &Signature, names: &[Ident]) -> Signature {
    let mut sig = sig.clone();
    let typed = sig.inputs.iter_mut().filter_map(|input| match input {
        FnArg::Typed(input) => Some(input),
        FnArg::Receiver(_) => None,
    });
    for (input, name) in typed.zip(names) {
        input.pat = syn::parse_quote!(#name);
    }
    sig
}

/// The method's own type and constant parameters, handed on; lifetimes are inferred.
fn turbofish(sig: &Signature) -> Option<TokenStream> {
    let arguments: Vec<_> = sig
        .generics
        .params
        .iter()
        .filter_map(|param| match param {
            GenericParam::Type(param) => Some(&param.ident),
            GenericParam::Const(param) => Some(&param.ident),
            GenericParam::Lifetime(_) => None,
        })
        .collect();
    (!arguments.is_empty()).then(|| quote!(::<#(#arguments),*>))
}

/// A lint expected in the body does not fire around the call of it.
fn expectation_as_permission(attr: &Attribute) -> TokenStream {
    match &attr.meta {
        syn::Meta::List(list) if is(attr, &["expect"]) => {
            let lints = &list.tokens;
            quote!(#[allow(#lints)])
        }
        _ => attr.to_token_stream(),
    }
}
