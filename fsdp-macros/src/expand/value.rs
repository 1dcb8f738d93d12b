//! `UnitValue`: the tensors in what a `forward` takes and returns.

use proc_macro2::TokenStream;
use quote::{format_ident, quote, quote_spanned};
use syn::{Data, DeriveInput, Fields, Type, parse_quote};

use super::at;

/// `impl UnitValue`, one match arm a variant, each field in turn.
pub fn implementation(item: &DeriveInput) -> TokenStream {
    let name = &item.ident;
    let mut generics = item.generics.clone();
    for param in item.generics.type_params() {
        let param = &param.ident;
        generics.make_where_clause().predicates.push(parse_quote!(#param: __fsdp::UnitValue));
    }
    let (parameters, arguments, bounds) = generics.split_for_impl();
    let variants: Vec<_> = match &item.data {
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
    };
    let maps = variants.iter().map(|(path, fields)| map(path, fields));
    let visits = variants.iter().map(|(path, fields)| visit(path, fields));
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

fn map(path: &TokenStream, fields: &Fields) -> TokenStream {
    let bindings = (0..).map(|index| format_ident!("__fsdp_{index}"));
    let (members, bindings): (Vec<_>, Vec<_>) = fields.members().zip(bindings).unzip();
    let types = fields.iter().map(|field| method(&field.ty, quote!(map_tensors)));
    quote! {
        #path { #(#members: #bindings),* } => #path {
            #(#members: #types(#bindings, __fsdp_map)),*
        },
    }
}

fn visit(path: &TokenStream, fields: &Fields) -> TokenStream {
    let bindings = (0..).map(|index| format_ident!("__fsdp_{index}"));
    let (members, bindings): (Vec<_>, Vec<_>) = fields.members().zip(bindings).unzip();
    let types = fields.iter().map(|field| method(&field.ty, quote!(visit_tensors)));
    quote! {
        #path { #(#members: ref #bindings),* } => {
            #(#types(#bindings, __fsdp_visit);)*
        }
    }
}

/// A method of a field's type, with the place of that type: where the compiler says that it holds no
/// tensors it knows of.
fn method(ty: &Type, name: TokenStream) -> TokenStream {
    quote_spanned!(at(ty)=> <#ty as __fsdp::UnitValue>::#name)
}
