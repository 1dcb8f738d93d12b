//! What a macro was written on, borrowed from `syn` so that every part keeps its span.
//!
//! Parsing here is lenient: what cannot be read is reported and left out, so that the rest of the
//! item can still be checked and expanded.

use proc_macro2::TokenStream;
use syn::ext::IdentExt;
use syn::{
    Attribute, Data, DeriveInput, Fields, GenericArgument, ImplItem, ImplItemFn, ItemImpl, LitStr,
    Member, PathArguments, Type,
};

use crate::attr::{self, BlockArgs, FieldArgs, StructArgs, Tie};
use crate::error::Errors;

/// Which macro was written.
pub enum Role {
    /// `#[fsdp_unit(..)]`, with its arguments.
    Unit(TokenStream),
    /// `#[derive(FsdpModule)]`
    Module,
}

impl Role {
    /// Whether the macro makes a unit.
    pub fn is_unit(&self) -> bool {
        matches!(self, Self::Unit(_))
    }
}

/// A struct (or an enum or union, in an error) under one of the macros.
pub struct Module<'a> {
    /// The item as written.
    pub original: &'a DeriveInput,
    /// Whether it is a unit, and then whether it is the root.
    pub unit: Option<Root>,
    /// Whether it is a unit whose forward is run again in backward.
    pub checkpoint: bool,
    /// Its fields, in declaration order.
    pub fields: Vec<Field<'a>>,
    /// The weights declared as one.
    pub ties: Vec<Tie>,
}

/// Whether a unit is the outermost of its model.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Root(pub bool);

impl<'a> Module<'a> {
    /// Reads the item and all attributes of the macros on it.
    pub fn parse(role: &Role, original: &'a DeriveInput, errors: &mut Errors) -> Self {
        let (unit, args) = match role {
            Role::Unit(args) => {
                let args = StructArgs::of_unit(args.clone(), errors);
                (Some(Root(args.root)), args)
            }
            Role::Module => (None, StructArgs::of_module(&original.attrs, errors)),
        };
        let fields = match &original.data {
            Data::Struct(data) => Field::parse_all(&data.fields, errors),
            Data::Enum(_) | Data::Union(_) => Vec::new(),
        };
        Self { original, unit, checkpoint: args.checkpoint, fields, ties: args.ties }
    }

    /// Whether it is one type whose fields are all there.
    pub fn has_known_fields(&self) -> bool {
        let is_generic = !self.original.generics.params.is_empty();
        !is_generic && self.fields.iter().all(|field| field.condition().is_none())
    }

    /// Whether `#[fsdp_unit]` stands on a struct under `#[derive(FsdpModule)]`, and generates all.
    pub fn is_a_unit_elsewhere(&self) -> bool {
        self.unit.is_none() && self.fsdp_unit().is_some()
    }

    /// The `#[fsdp_unit]` among the item's remaining attributes.
    pub fn fsdp_unit(&self) -> Option<&'a Attribute> {
        self.original.attrs.iter().find(|attr| {
            attr.path().segments.last().is_some_and(|last| last.ident == attr::FSDP_UNIT)
        })
    }

    /// The fields that stand in the layout.
    pub fn layout_fields(&self) -> impl Iterator<Item = &Field<'a>> {
        self.fields.iter().filter(|field| field.content.is_in_layout())
    }
}

/// A field of a struct.
pub struct Field<'a> {
    /// The field as written.
    pub original: &'a syn::Field,
    /// How it is reached: by name, or by index in a tuple struct.
    pub member: Member,
    /// `#[fsdp(key = "..")]`
    pub key: Option<LitStr>,
    /// `#[fsdp(leaf)]`
    pub leaf: Option<syn::Path>,
    /// `#[fsdp(unit)]`
    pub unit: Option<syn::Path>,
    /// What it holds.
    pub content: Content,
}

/// What a field holds, as far as its declaration tells.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// A module that implements `FsdpModule`.
    Module,
    /// A module under `#[fsdp(leaf)]`.
    Leaf,
    /// A value under `#[module(skip)]`.
    Skipped,
    /// A value such as `Option<usize>`, which Burn passes by without being told to.
    Constant,
}

impl Content {
    /// Whether a field of this kind stands in the layout.
    pub fn is_in_layout(self) -> bool {
        matches!(self, Self::Module | Self::Leaf)
    }
}

impl<'a> Field<'a> {
    fn parse_all(fields: &'a Fields, errors: &mut Errors) -> Vec<Self> {
        let members = fields.members();
        fields
            .iter()
            .zip(members)
            .map(|(field, member)| Self::parse(field, member, errors))
            .collect()
    }

    fn parse(original: &'a syn::Field, member: Member, errors: &mut Errors) -> Self {
        let FieldArgs { key, leaf, unit } = FieldArgs::parse(&original.attrs, errors);
        let content = if attr::is_skipped(&original.attrs) {
            Content::Skipped
        } else if is_constant(&original.ty) {
            Content::Constant
        } else if leaf.is_some() {
            Content::Leaf
        } else {
            Content::Module
        };
        Self { original, member, key, leaf, unit, content }
    }

    /// The field's segment of a module path, as Burn's traversal names it.
    pub fn name(&self) -> String {
        match &self.member {
            Member::Named(name) => name.to_string(),
            Member::Unnamed(index) => index.index.to_string(),
        }
    }

    /// The `#[cfg]` it depends on.
    pub fn condition(&self) -> Option<&'a Attribute> {
        self.original.attrs.iter().find(|attr| attr.path().is_ident("cfg"))
    }

    /// Its segment of a checkpoint key, where that differs from its name.
    pub fn key(&self) -> Option<String> {
        match (&self.key, &self.member) {
            (Some(key), _) => Some(key.value()),
            (None, Member::Named(name)) if name.unraw() != *name => Some(name.unraw().to_string()),
            (None, _) => None,
        }
    }

    /// Its segment of a checkpoint key.
    pub fn key_or_name(&self) -> String {
        self.key().unwrap_or_else(|| self.name())
    }
}

/// Whether `#[derive(Module)]` takes a type for a value without parameters. The rule is Burn's own:
/// primitive types, and standard containers of nothing but those.
fn is_constant(ty: &Type) -> bool {
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

/// An `impl` block under `#[fsdp_unit]`.
pub struct Hooked<'a> {
    /// The block as written.
    pub original: &'a ItemImpl,
    /// Whether the calls in it of modules in fields under `#[fsdp(unit)]` are hooked.
    pub field_units: bool,
    /// Its methods named `forward` or `forward_..`.
    pub forwards: Vec<Forward<'a>>,
}

/// A method named `forward` or `forward_..`.
pub struct Forward<'a> {
    /// The method as written.
    pub original: &'a ImplItemFn,
    /// How it takes the unit.
    pub receiver: Receiver,
}

/// How a method takes its object.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Receiver {
    /// `&self`
    Shared,
    /// `&mut self`
    Exclusive,
    /// `self`, or a pointer such as `self: Arc<Self>`
    Owned,
    /// An associated function.
    Absent,
}

impl<'a> Hooked<'a> {
    /// Reads the block.
    pub fn parse(original: &'a ItemImpl, args: TokenStream, errors: &mut Errors) -> Self {
        let BlockArgs { field_units } = BlockArgs::parse(args, errors);
        let methods = original.items.iter().filter_map(|item| match item {
            ImplItem::Fn(method) => Some(method),
            _ => None,
        });
        let forwards = methods
            .filter(|method| is_forward(&method.sig.ident.to_string()))
            .map(|method| Forward { original: method, receiver: Receiver::of(method) })
            .collect();
        Self { original, field_units, forwards }
    }

    /// Whether the block can carry hooks: it is inherent, and its type is no pattern of types.
    pub fn takes_hooks(&self) -> bool {
        self.original.trait_.is_none() && self.original.generics.params.is_empty()
    }
}

/// Whether a method of this name is hooked, or a call of it.
pub fn is_forward(name: &str) -> bool {
    name == FORWARD || name.strip_prefix(FORWARD).is_some_and(|rest| rest.starts_with('_'))
}

/// The method that is always hooked.
pub const FORWARD: &str = "forward";

impl Forward<'_> {
    /// Whether the method can be hooked.
    pub fn is_hooked(&self) -> bool {
        let sig = &self.original.sig;
        self.receiver == Receiver::Shared && sig.asyncness.is_none() && sig.constness.is_none()
    }
}

impl Receiver {
    fn of(method: &ImplItemFn) -> Self {
        match method.sig.receiver().map(|receiver| &*receiver.ty) {
            None => Self::Absent,
            Some(Type::Reference(ty)) if !is_self(&ty.elem) => Self::Owned,
            Some(Type::Reference(ty)) if ty.mutability.is_some() => Self::Exclusive,
            Some(Type::Reference(_)) => Self::Shared,
            Some(_) => Self::Owned,
        }
    }
}

fn is_self(ty: &Type) -> bool {
    matches!(ty, Type::Path(path) if path.path.is_ident("Self"))
}
