//! Expansions of the macros, compared with `tests/snapshots/<name>.expanded.rs`.
//!
//! `UPDATE_SNAPSHOTS=1 cargo test -p fsdp-macros` rewrites the snapshots.

use std::path::Path;
use std::{env, fs};

use proc_macro2::TokenStream;
use quote::ToTokens;
use syn::{Attribute, Item, Meta};

use crate::parse::{FSDP_UNIT, derives};

#[test]
fn plain_unit() {
    compare("plain_unit");
}

#[test]
fn root_with_ties() {
    compare("root_with_ties");
}

#[test]
fn hooked_impl() {
    compare("hooked_impl");
}

/// Calls are hooked only in a block under `field_units`.
#[test]
fn field_units() {
    compare("field_units");
}

#[test]
fn checkpointed_unit() {
    compare("checkpointed_unit");
}

#[test]
fn derived_module() {
    compare("derived_module");
}

#[test]
fn derived_value() {
    compare("derived_value");
}

/// All generated code uses the path given by `crate = ".."`.
#[test]
fn crate_path() {
    assert!(!compare("crate_path").contains("fsdp_runtime"));
}

/// After an error, the item and its traits are still emitted.
#[test]
fn wrong_unit() {
    compare("wrong_unit");
}

/// The unit of the README, whose expansion the guide shows.
#[test]
fn readme() {
    compare("readme");
}

/// Expands `<name>.rs`, compares the result with `<name>.expanded.rs`, and returns it.
fn compare(name: &str) -> String {
    let folder = Path::new("tests/snapshots");
    let source = fs::read_to_string(folder.join(format!("{name}.rs"))).expect("a source");
    let expanded = format(expand(syn::parse_file(&source).expect("Rust").items));
    let path = folder.join(format!("{name}.expanded.rs"));
    if env::var_os("UPDATE_SNAPSHOTS").is_some() {
        fs::write(&path, &expanded).expect("a writable snapshot");
    }
    let snapshot = fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(expanded, snapshot, "{name} (UPDATE_SNAPSHOTS=1 accepts the new expansion)");
    expanded
}

/// Expands the macros on each item as the compiler would. Derives above the attribute are removed.
fn expand(items: Vec<Item>) -> TokenStream {
    items
        .into_iter()
        .map(|mut item| {
            let attrs = attributes(&mut item);
            if let Some(place) = attrs.iter().position(|attr| attr.path().is_ident(FSDP_UNIT)) {
                let args = match attrs.remove(place).meta {
                    Meta::List(list) => list.tokens,
                    _ => TokenStream::new(),
                };
                attrs.drain(..place);
                crate::unit(args, item.into_token_stream())
            } else if derives(attrs, "FsdpModule").is_some() {
                let derive = syn::parse2(item.to_token_stream()).expect("a struct");
                let code = crate::derived_module(derive);
                quote::quote!(#item #code)
            } else if derives(attrs, "UnitValue").is_some() {
                let code =
                    crate::derived_unit_value(syn::parse2(item.to_token_stream()).expect("a type"));
                quote::quote!(#item #code)
            } else {
                item.into_token_stream()
            }
        })
        .collect()
}

fn attributes(item: &mut Item) -> &mut Vec<Attribute> {
    match item {
        Item::Struct(item) => &mut item.attrs,
        Item::Enum(item) => &mut item.attrs,
        Item::Impl(item) => &mut item.attrs,
        other => panic!("no snapshot of {}", other.to_token_stream()),
    }
}

fn format(code: TokenStream) -> String {
    let file = syn::parse2(code.clone()).unwrap_or_else(|error| panic!("{error}: {code}"));
    prettyplease::unparse(&file)
}
