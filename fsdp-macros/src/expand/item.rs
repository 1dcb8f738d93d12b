//! The annotated item itself, which `#[fsdp_unit]` emits again, also after an error: one mistake
//! then does not hide the type from the rest of the program.

use syn::{Attribute, Data, DeriveInput, Fields};

use crate::parse::{FSDP, FSDP_UNIT, is_named};

/// Returns a copy of an item without the attributes of this crate.
pub(crate) fn without_own_attributes(item: &DeriveInput) -> DeriveInput {
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

fn strip_fields(fields: &mut Fields) {
    fields.iter_mut().for_each(|field| strip(&mut field.attrs));
}

fn strip(attrs: &mut Vec<Attribute>) {
    attrs.retain(|attr| !is_named(attr, &[FSDP, FSDP_UNIT]));
}
