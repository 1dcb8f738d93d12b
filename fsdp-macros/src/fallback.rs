//! What is emitted when something is wrong: the user's item as written, and the errors.
//!
//! The item stays, so that one mistake does not hide the type from the rest of the program.

use proc_macro2::TokenStream;
use quote::quote;
use syn::{Attribute, Data, DeriveInput, Fields};

use crate::attr::{FSDP, FSDP_UNIT};
use crate::error::Errors;

/// An item with what was generated for it, and the errors found.
pub fn join(item: Option<DeriveInput>, code: TokenStream, errors: Errors) -> TokenStream {
    let errors = errors.into_tokens();
    quote!(#item #code #errors)
}

/// An item without the attributes that only our macros know.
pub fn without_own_attributes(item: &DeriveInput) -> DeriveInput {
    let mut item = item.clone();
    strip(&mut item.attrs);
    match &mut item.data {
        Data::Struct(data) => strip_fields(&mut data.fields),
        Data::Enum(data) => {
            for variant in &mut data.variants {
                strip(&mut variant.attrs);
                strip_fields(&mut variant.fields);
            }
        }
        Data::Union(data) => data.fields.named.iter_mut().for_each(|field| strip(&mut field.attrs)),
    }
    item
}

/// `#[fsdp_unit]` on something that is neither a type nor an `impl` block.
pub fn misplaced(item: TokenStream) -> TokenStream {
    let mut errors = Errors::default();
    errors.add(syn::Error::new(
        proc_macro2::Span::call_site(),
        "`#[fsdp_unit]` stands on a struct, below `#[derive(Module)]`, and on the `impl` block that \
         holds its `forward`",
    ));
    let errors = errors.into_tokens();
    quote!(#item #errors)
}

fn strip_fields(fields: &mut Fields) {
    fields.iter_mut().for_each(|field| strip(&mut field.attrs));
}

fn strip(attrs: &mut Vec<Attribute>) {
    attrs.retain(|attr| !attr.path().is_ident(FSDP) && !attr.path().is_ident(FSDP_UNIT));
}
