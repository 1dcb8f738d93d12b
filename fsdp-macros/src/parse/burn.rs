//! Rules of Burn's `#[derive(Module)]` on fields that hold no parameters.

use syn::{Attribute, GenericArgument, Meta, PathArguments, Type};

use super::attributes::is_named;

/// Returns whether a field is under `#[module(skip)]`, so that Burn does not visit it.
pub(super) fn is_skipped(attrs: &[Attribute]) -> bool {
    attrs.iter().filter(|attr| is_named(attr, &["module"])).any(|attr| {
        let Meta::List(list) = &attr.meta else {
            return false;
        };
        list.tokens.clone().into_iter().any(|token| token.to_string() == "skip")
    })
}

/// Returns whether `#[derive(Module)]` treats a type as a value without parameters. Burn decides by
/// name: primitive types, and standard containers of such types only.
pub(super) fn is_constant(ty: &Type) -> bool {
    match ty {
        Type::Path(path) => path.path.segments.last().is_some_and(|last| {
            let name = last.ident.to_string();
            match &last.arguments {
                PathArguments::AngleBracketed(args) if CONTAINERS.contains(&name.as_str()) => args
                    .args
                    .iter()
                    .all(|arg| matches!(arg, GenericArgument::Type(ty) if is_constant(ty))),
                _ => PRIMITIVES.contains(&name.as_str()),
            }
        }),
        Type::Tuple(tuple) => tuple.elems.iter().all(is_constant),
        Type::Array(array) => is_constant(&array.elem),
        Type::Slice(slice) => is_constant(&slice.elem),
        Type::Reference(reference) => is_constant(&reference.elem),
        Type::Ptr(pointer) => is_constant(&pointer.elem),
        Type::Paren(paren) => is_constant(&paren.elem),
        _ => false,
    }
}

const PRIMITIVES: &[&str] = &[
    "bool", "char", "u8", "u16", "u32", "u64", "u128", "usize", "i8", "i16", "i32", "i64", "i128",
    "isize", "f32", "f64", "String",
];

const CONTAINERS: &[&str] = &[
    "Option",
    "Result",
    "Vec",
    "Box",
    "Arc",
    "Weak",
    "HashMap",
    "BTreeMap",
    "HashSet",
    "BTreeSet",
    "VecDeque",
    "LinkedList",
    "BinaryHeap",
    "PhantomData",
    "Cell",
    "RefCell",
    "Mutex",
    "RwLock",
];
