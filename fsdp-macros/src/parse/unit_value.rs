//! A type under `#[derive(UnitValue)]`.

use syn::{Attribute, Data, DeriveInput, Fields};

use super::arguments::ValueArgs;
use super::attributes::{FSDP, is_named};
use super::crate_path::CratePath;
use crate::errors::Errors;

/// A struct or an enum of tensors. A union is an error.
pub(crate) struct Value<'a> {
    /// The item as written.
    pub(crate) original: &'a DeriveInput,
    /// Path at which generated code finds the runtime crate.
    pub(crate) crate_path: CratePath,
}

impl<'a> Value<'a> {
    /// Parses the item.
    pub(crate) fn parse(original: &'a DeriveInput, errors: &mut Errors) -> Self {
        let ValueArgs { crate_path } = ValueArgs::parse(&original.attrs, errors);
        Self { original, crate_path: CratePath::new(crate_path) }
    }

    /// Returns each `#[fsdp(..)]` on a field or a variant, where it has no meaning.
    pub(crate) fn misplaced_attributes(&self) -> Vec<&'a Attribute> {
        let of_fields =
            |fields: &'a Fields| fields.iter().flat_map(|field| &field.attrs).collect::<Vec<_>>();
        let attrs = match &self.original.data {
            Data::Struct(data) => of_fields(&data.fields),
            Data::Enum(data) => data
                .variants
                .iter()
                .flat_map(|variant| variant.attrs.iter().chain(of_fields(&variant.fields)))
                .collect(),
            Data::Union(_) => Vec::new(),
        };
        attrs.into_iter().filter(|attr| is_named(attr, &[FSDP])).collect()
    }
}
