//! A struct under `#[fsdp_unit]` or `#[derive(FsdpModule)]`, and its fields.

use proc_macro2::TokenStream;
use syn::ext::IdentExt;
use syn::{Attribute, Data, DeriveInput, Fields, LitStr, Member};

use super::arguments::{FieldArgs, ModuleArgs, Split, UnitArgs};
use super::attributes::{FSDP_UNIT, is_named};
use super::burn::{is_constant, is_skipped};
use super::crate_path::CratePath;
use super::values::Tie;
use crate::errors::Errors;

/// A struct under one of the two macros. An enum or a union is an error, and has no fields here.
pub(crate) struct Module<'a> {
    /// The item as written.
    pub(crate) original: &'a DeriveInput,
    /// The arguments of a unit; `None` under `#[derive(FsdpModule)]`.
    pub(crate) unit: Option<Unit>,
    /// The fields in declaration order.
    pub(crate) fields: Vec<Field<'a>>,
    /// The ties in the order written.
    pub(crate) ties: Vec<Tie>,
    /// Path at which generated code finds the runtime crate.
    pub(crate) crate_path: CratePath,
}

/// Flags of a unit.
#[derive(Clone, Copy)]
pub(crate) struct Unit {
    /// Whether the unit is the outermost one of its model.
    pub(crate) root: bool,
    /// Whether `forward` is recomputed in backward, whatever the run's options select.
    pub(crate) checkpoint: bool,
}

impl<'a> Module<'a> {
    /// Parses an item under `#[fsdp_unit(args)]`.
    pub(crate) fn parse_unit(
        args: TokenStream,
        original: &'a DeriveInput,
        errors: &mut Errors,
    ) -> Self {
        let UnitArgs { root, checkpoint, ties, crate_path } = UnitArgs::parse(args, errors);
        let unit = Some(Unit { root, checkpoint });
        let fields = Field::parse_all(&original.data, errors);
        Self { original, unit, fields, ties, crate_path: CratePath::new(crate_path) }
    }

    /// Parses an item under `#[derive(FsdpModule)]`.
    pub(crate) fn parse_derive(original: &'a DeriveInput, errors: &mut Errors) -> Self {
        let ModuleArgs { ties, crate_path } = ModuleArgs::parse(&original.attrs, errors);
        let fields = Field::parse_all(&original.data, errors);
        Self { original, unit: None, fields, ties, crate_path: CratePath::new(crate_path) }
    }

    /// Returns whether the struct is not generic.
    pub(crate) fn is_one_type(&self) -> bool {
        self.original.generics.params.is_empty()
    }

    /// Returns whether the layout can be generated: no field is conditional.
    pub(crate) fn has_known_fields(&self) -> bool {
        self.fields.iter().all(|field| field.condition().is_none())
    }

    /// Returns whether a struct under `#[derive(FsdpModule)]` is also under `#[fsdp_unit]`, which
    /// implements `FsdpModule` too.
    pub(crate) fn is_also_a_unit(&self) -> bool {
        self.unit.is_none() && self.fsdp_unit().is_some()
    }

    /// Returns the first `#[fsdp_unit]` among the item's attributes. The compiler has removed the
    /// one that is being expanded.
    pub(crate) fn fsdp_unit(&self) -> Option<&'a Attribute> {
        self.original
            .attrs
            .iter()
            .find(|attr| attr.path().segments.last().is_some_and(|last| last.ident == FSDP_UNIT))
    }

    /// Returns the fields that are part of the layout.
    pub(crate) fn layout_fields(&self) -> impl Iterator<Item = &Field<'a>> {
        self.fields.iter().filter(|field| field.content.is_in_layout())
    }
}

/// A field of a struct.
pub(crate) struct Field<'a> {
    /// The field as written.
    pub(crate) original: &'a syn::Field,
    /// The field's name, or its index in a tuple struct.
    pub(crate) member: Member,
    /// The string in `#[fsdp(key = "..")]`.
    pub(crate) key: Option<LitStr>,
    /// The word `leaf` in `#[fsdp(leaf)]`.
    pub(crate) leaf: Option<syn::Path>,
    /// The word `unit` in `#[fsdp(unit)]` or `#[fsdp(unit = "name")]`.
    pub(crate) unit: Option<syn::Path>,
    /// The name in `#[fsdp(unit = "name")]`, which makes one unit of the fields with that name.
    pub(crate) group: Option<LitStr>,
    /// The words `column`, `row`, `vocab` and `shared` in `#[fsdp(..)]`, in the order written.
    pub(crate) splits: Vec<(Split, syn::Path)>,
    /// The word `gather` in `#[fsdp(column, gather)]`.
    pub(crate) gather: Option<syn::Path>,
    /// Content of the field, according to its declaration.
    pub(crate) content: Content,
}

/// Content of a field, according to its declaration.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Content {
    /// A module that implements `FsdpModule`.
    Module,
    /// A module under `#[fsdp(leaf)]`.
    Leaf,
    /// A value under `#[module(skip)]`.
    Skipped,
    /// A value such as `Option<usize>`, which Burn skips without an attribute.
    Constant,
}

impl Content {
    /// Returns whether a field with this content is part of the layout.
    pub(crate) fn is_in_layout(self) -> bool {
        matches!(self, Self::Module | Self::Leaf)
    }
}

impl<'a> Field<'a> {
    fn parse_all(data: &'a Data, errors: &mut Errors) -> Vec<Self> {
        let fields: &Fields = match data {
            Data::Struct(data) => &data.fields,
            Data::Enum(_) | Data::Union(_) => return Vec::new(),
        };
        fields
            .iter()
            .zip(fields.members())
            .map(|(field, member)| Self::parse(field, member, errors))
            .collect()
    }

    fn parse(original: &'a syn::Field, member: Member, errors: &mut Errors) -> Self {
        let FieldArgs { key, leaf, unit, group, splits, gather } =
            FieldArgs::parse(&original.attrs, errors);
        let content = if is_skipped(&original.attrs) {
            Content::Skipped
        } else if is_constant(&original.ty) {
            Content::Constant
        } else if leaf.is_some() {
            Content::Leaf
        } else {
            Content::Module
        };
        Self { original, member, key, leaf, unit, group, splits, gather, content }
    }

    /// Returns how the matrix in the field is split over tensor parallel ranks, if it is.
    pub(crate) fn split(&self) -> Option<&(Split, syn::Path)> {
        self.splits.first()
    }

    /// Returns the field's segment of a module path, as Burn's traversal names it.
    pub(crate) fn name(&self) -> String {
        match &self.member {
            Member::Named(name) => name.to_string(),
            Member::Unnamed(index) => index.index.to_string(),
        }
    }

    /// Returns the `#[cfg]` that the field depends on.
    pub(crate) fn condition(&self) -> Option<&'a Attribute> {
        self.original.attrs.iter().find(|attr| is_named(attr, &["cfg"]))
    }

    /// Returns the field's segment of a checkpoint key, where it differs from [`Self::name`].
    pub(crate) fn key(&self) -> Option<String> {
        match (&self.key, &self.member) {
            (Some(key), _) => Some(key.value()),
            (None, Member::Named(name)) if name.unraw() != *name => Some(name.unraw().to_string()),
            (None, _) => None,
        }
    }

    /// Returns the field's segment of a checkpoint key.
    pub(crate) fn key_or_name(&self) -> String {
        self.key().unwrap_or_else(|| self.name())
    }
}
