//! Generation of `impl UnitValue`, for a type that a `forward` takes or returns.

use proc_macro2::TokenStream;
use quote::{format_ident, quote, quote_spanned};
use syn::{Data, DeriveInput, Fields, Type, parse_quote};

use super::span::at;

/// Generates `impl UnitValue`, with one match arm for each variant.
pub(super) fn implementation(item: &DeriveInput) -> TokenStream {
    let name = &item.ident;
    let mut generics = item.generics.clone();
    for param in item.generics.type_params() {
        let param = &param.ident;
        generics.make_where_clause().predicates.push(parse_quote!(#param: __fsdp::UnitValue));
    }
    let (parameters, arguments, bounds) = generics.split_for_impl();
    let variants = variants(&item.data);
    let maps = variants.iter().map(|(path, fields)| map_arm(path, fields));
    let visits = variants.iter().map(|(path, fields)| visit_arm(path, fields));
    quote! {
        impl #parameters __fsdp::UnitValue for #name #arguments #bounds {
            fn map_tensors(
                self,
                __fsdp_map: &mut dyn ::core::ops::FnMut(__fsdp::DispatchTensor) -> __fsdp::DispatchTensor,
            ) -> Self {
                match self {
                    #(#maps)*
                }
            }

            fn visit_tensors(
                &self,
                __fsdp_visit: &mut dyn ::core::ops::FnMut(__fsdp::DispatchTensor),
            ) {
                match *self {
                    #(#visits)*
                }
            }
        }
    }
}

/// Returns the path and the fields of each variant; a struct is one variant, `Self`.
fn variants(data: &Data) -> Vec<(TokenStream, &Fields)> {
    match data {
        Data::Struct(data) => vec![(quote!(Self), &data.fields)],
        Data::Enum(data) => data
            .variants
            .iter()
            .map(|variant| {
                let name = &variant.ident;
                (quote!(Self::#name), &variant.fields)
            })
            .collect(),
        Data::Union(_) => Vec::new(),
    }
}

fn map_arm(path: &TokenStream, fields: &Fields) -> TokenStream {
    let bindings = (0..).map(|index| format_ident!("__fsdp_{index}"));
    let (members, bindings): (Vec<_>, Vec<_>) = fields.members().zip(bindings).unzip();
    let methods = fields.iter().map(|field| method(&field.ty, quote!(map_tensors)));
    quote! {
        #path { #(#members: #bindings),* } => #path {
            #(#members: #methods(#bindings, __fsdp_map)),*
        },
    }
}

fn visit_arm(path: &TokenStream, fields: &Fields) -> TokenStream {
    let bindings = (0..).map(|index| format_ident!("__fsdp_{index}"));
    let (members, bindings): (Vec<_>, Vec<_>) = fields.members().zip(bindings).unzip();
    let methods = fields.iter().map(|field| method(&field.ty, quote!(visit_tensors)));
    quote! {
        #path { #(#members: ref #bindings),* } => {
            #(#methods(#bindings, __fsdp_visit);)*
        }
    }
}

/// Returns a method of a field's type, spanned at the type: the compiler shows there that the type
/// is no `UnitValue`.
fn method(ty: &Type, name: TokenStream) -> TokenStream {
    quote_spanned!(at(ty)=> <#ty as __fsdp::UnitValue>::#name)
}
