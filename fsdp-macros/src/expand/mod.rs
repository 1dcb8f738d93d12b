//! Tokens: data and calls into the runtime, never algorithms.
//!
//! All of it but the hooked methods themselves stands in `const _: () = { .. };`, where `__fsdp` is
//! the runtime's `__private`. Tokens that a wrong use makes the compiler complain about carry the
//! place of what the user wrote.

mod calls;
mod forward;
mod layout;
mod replay;
mod unit;
mod value;

use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, quote};
use syn::spanned::Spanned;
use syn::{Data, DeriveInput};

use crate::ast::{Hooked, Module};

/// Everything generated for a struct. `sound`: no error was found, so the checks across types may
/// run; without it only what other items rely on is generated.
pub fn module(module: &Module<'_>, sound: bool) -> TokenStream {
    if module.is_a_unit_elsewhere() {
        return TokenStream::new();
    }
    let generated = match &module.original.data {
        Data::Union(_) => return TokenStream::new(),
        Data::Enum(_) => unit::opaque(module),
        Data::Struct(_) if !module.has_known_fields() => unit::opaque(module),
        Data::Struct(_) => {
            let layout = layout::constant(module);
            let walks = unit::walks(module);
            let implementation = unit::implementation(module, quote!(#layout #walks));
            let derived = sound.then(|| unit::derives_module(module));
            let checks = sound.then(|| unit::checks(module));
            quote!(#derived #implementation #checks)
        }
    };
    hidden(generated)
}

/// An `impl` block with its hooks.
pub fn hooks(hooked: &Hooked<'_>) -> TokenStream {
    let block = match hooked.takes_hooks() {
        true => forward::block(hooked).into_token_stream(),
        false => hooked.original.to_token_stream(),
    };
    let is_generic = !hooked.original.generics.params.is_empty();
    let marker = (!is_generic).then(|| hidden(forward::marker(hooked)));
    quote!(#block #marker)
}

/// `impl UnitValue`.
pub fn value(item: &DeriveInput) -> TokenStream {
    match &item.data {
        Data::Union(_) => TokenStream::new(),
        Data::Struct(_) | Data::Enum(_) => hidden(value::implementation(item)),
    }
}

fn hidden(generated: TokenStream) -> TokenStream {
    quote! {
        const _: () = {
            use ::fsdp_runtime::__private as __fsdp;
            #generated
        };
    }
}

/// The place of the user's tokens, with the names of generated code.
fn at(tokens: &impl Spanned) -> Span {
    Span::call_site().located_at(tokens.span())
}
