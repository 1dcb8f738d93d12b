//! Arguments of `#[fsdp_unit(..)]` and `#[fsdp(..)]`, one struct for each place that they are
//! written in.
//!
//! Parsing continues after an error, so that one attribute reports all of its errors.

use proc_macro2::TokenStream;
use syn::spanned::Spanned;
use syn::{Attribute, LitStr, Meta, Path};

use super::attributes::{argument_list, helper_arguments};
use super::values::{TIE_FORM, Tie, crate_path, flag, group, key, tie};
use crate::errors::{Errors, did_you_mean, one_of};

const ROOT: &str = "root";
const CHECKPOINT: &str = "checkpoint";
const TIE: &str = "tie";
const CRATE: &str = "crate";
const KEY: &str = "key";
const LEAF: &str = "leaf";
const UNIT: &str = "unit";
const FIELD_UNITS: &str = "field_units";
const MORE: &str = "more";
const FORWARD: &str = "forward";
const COLUMN: &str = "column";
const ROW: &str = "row";
const VOCAB: &str = "vocab";
const SHARED: &str = "shared";
const GATHER: &str = "gather";

/// `#[fsdp_unit(..)]` on a struct.
#[derive(Default)]
pub(super) struct UnitArgs {
    pub(super) root: bool,
    pub(super) checkpoint: bool,
    /// Declared ties, in the order written.
    pub(super) ties: Vec<Tie>,
    pub(super) crate_path: Option<Path>,
}

impl UnitArgs {
    pub(super) fn parse(args: TokenStream, errors: &mut Errors) -> Self {
        let mut parsed = Self::default();
        for meta in argument_list(args, errors) {
            match name(&meta).as_str() {
                ROOT if parsed.root => repeated(&meta, errors),
                ROOT => {
                    flag(&meta, ROOT, errors);
                    parsed.root = true;
                }
                CHECKPOINT if parsed.checkpoint => repeated(&meta, errors),
                CHECKPOINT => {
                    flag(&meta, CHECKPOINT, errors);
                    parsed.checkpoint = true;
                }
                TIE => parsed.ties.extend(tie(&meta, errors)),
                CRATE if parsed.crate_path.is_some() => repeated(&meta, errors),
                CRATE => parsed.crate_path = crate_path(&meta, errors),
                _ => unknown(&meta, &[ROOT, CHECKPOINT, TIE, CRATE], errors),
            }
        }
        parsed
    }
}

/// `#[fsdp(..)]` on a struct under `#[derive(FsdpModule)]`.
#[derive(Default)]
pub(super) struct ModuleArgs {
    /// Declared ties, in the order written.
    pub(super) ties: Vec<Tie>,
    pub(super) crate_path: Option<Path>,
}

impl ModuleArgs {
    pub(super) fn parse(attrs: &[Attribute], errors: &mut Errors) -> Self {
        let mut parsed = Self::default();
        for meta in helper_arguments(attrs, errors) {
            match name(&meta).as_str() {
                TIE => parsed.ties.extend(tie(&meta, errors)),
                CRATE if parsed.crate_path.is_some() => repeated(&meta, errors),
                CRATE => parsed.crate_path = crate_path(&meta, errors),
                _ => unknown(&meta, &[TIE, CRATE], errors),
            }
        }
        parsed
    }
}

/// `#[fsdp(..)]` on a type under `#[derive(UnitValue)]`.
#[derive(Default)]
pub(super) struct ValueArgs {
    pub(super) crate_path: Option<Path>,
}

impl ValueArgs {
    pub(super) fn parse(attrs: &[Attribute], errors: &mut Errors) -> Self {
        let mut parsed = Self::default();
        for meta in helper_arguments(attrs, errors) {
            match name(&meta).as_str() {
                CRATE if parsed.crate_path.is_some() => repeated(&meta, errors),
                CRATE => parsed.crate_path = crate_path(&meta, errors),
                _ => unknown(&meta, &[CRATE], errors),
            }
        }
        parsed
    }
}

/// How the matrix of a layer is split over tensor parallel ranks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Split {
    /// A rank has a part of the outputs.
    Column,
    /// A rank has a part of the inputs.
    Row,
    /// A rank has a part of the vocabulary.
    Vocab,
    /// Every rank has the whole, and uses it with parts of other values.
    Shared,
}

impl Split {
    fn named(name: &str) -> Self {
        match name {
            COLUMN => Self::Column,
            ROW => Self::Row,
            SHARED => Self::Shared,
            _ => Self::Vocab,
        }
    }

    /// Returns the argument.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Column => COLUMN,
            Self::Row => ROW,
            Self::Vocab => VOCAB,
            Self::Shared => SHARED,
        }
    }
}

/// `#[fsdp(..)]` on a field of a module.
#[derive(Default)]
pub(super) struct FieldArgs {
    pub(super) key: Option<LitStr>,
    /// The argument `leaf`, if it is given.
    pub(super) leaf: Option<Path>,
    /// The argument `unit`, if it is given.
    pub(super) unit: Option<Path>,
    /// The string in `unit = ".."`, if it is given.
    pub(super) group: Option<LitStr>,
    /// The arguments `column`, `row`, `vocab` and `shared`, in the order written.
    pub(super) splits: Vec<(Split, Path)>,
    /// The argument `gather`, if it is given.
    pub(super) gather: Option<Path>,
}

impl FieldArgs {
    pub(super) fn parse(attrs: &[Attribute], errors: &mut Errors) -> Self {
        let mut parsed = Self::default();
        for meta in helper_arguments(attrs, errors) {
            match name(&meta).as_str() {
                KEY if parsed.key.is_some() => repeated(&meta, errors),
                KEY => parsed.key = key(&meta, errors),
                LEAF if parsed.leaf.is_some() => repeated(&meta, errors),
                LEAF => {
                    flag(&meta, LEAF, errors);
                    parsed.leaf = Some(meta.path().clone());
                }
                UNIT if parsed.unit.is_some() => repeated(&meta, errors),
                UNIT => {
                    parsed.group = group(&meta, errors);
                    parsed.unit = Some(meta.path().clone());
                }
                given @ (COLUMN | ROW | VOCAB | SHARED) => {
                    let split = Split::named(given);
                    flag(&meta, split.name(), errors);
                    match parsed.splits.iter().any(|(other, _)| *other == split) {
                        true => repeated(&meta, errors),
                        false => parsed.splits.push((split, meta.path().clone())),
                    }
                }
                GATHER if parsed.gather.is_some() => repeated(&meta, errors),
                GATHER => {
                    flag(&meta, GATHER, errors);
                    parsed.gather = Some(meta.path().clone());
                }
                _ => {
                    let valid = [KEY, LEAF, UNIT, COLUMN, ROW, VOCAB, SHARED, GATHER];
                    unknown(&meta, &valid, errors);
                }
            }
        }
        parsed
    }
}

/// `#[fsdp_unit(..)]` on an `impl` block.
#[derive(Default)]
pub(super) struct BlockArgs {
    pub(super) field_units: bool,
    /// Whether another block of the type is the one with the hooks that the type must have.
    pub(super) more: bool,
    pub(super) crate_path: Option<Path>,
}

impl BlockArgs {
    pub(super) fn parse(args: TokenStream, errors: &mut Errors) -> Self {
        let mut parsed = Self::default();
        for meta in argument_list(args, errors) {
            match name(&meta).as_str() {
                FIELD_UNITS if parsed.field_units => repeated(&meta, errors),
                FIELD_UNITS => {
                    flag(&meta, FIELD_UNITS, errors);
                    parsed.field_units = true;
                }
                MORE if parsed.more => repeated(&meta, errors),
                MORE => {
                    flag(&meta, MORE, errors);
                    parsed.more = true;
                }
                CRATE if parsed.crate_path.is_some() => repeated(&meta, errors),
                CRATE => parsed.crate_path = crate_path(&meta, errors),
                given @ (ROOT | CHECKPOINT | TIE) => errors.push(
                    &meta,
                    format!(
                        "`{given}` belongs on the struct, in the `#[fsdp_unit(..)]` there; on an \
                         `impl` block the attribute takes only `{FIELD_UNITS}`, `{MORE}` and \
                         `{CRATE}`"
                    ),
                ),
                _ => unknown(&meta, &[FIELD_UNITS, MORE, CRATE], errors),
            }
        }
        parsed
    }
}

/// `#[fsdp(..)]` on a method in an `impl` block under `#[fsdp_unit]`.
#[derive(Default)]
pub(super) struct MethodArgs {
    /// The argument `forward`, if it is given.
    pub(super) forward: Option<Path>,
}

impl MethodArgs {
    pub(super) fn parse(attrs: &[Attribute], errors: &mut Errors) -> Self {
        let mut parsed = Self::default();
        for meta in helper_arguments(attrs, errors) {
            match name(&meta).as_str() {
                FORWARD if parsed.forward.is_some() => repeated(&meta, errors),
                FORWARD => {
                    flag(&meta, FORWARD, errors);
                    parsed.forward = Some(meta.path().clone());
                }
                _ => unknown(&meta, &[FORWARD], errors),
            }
        }
        parsed
    }
}

fn name(meta: &Meta) -> String {
    meta.path().get_ident().map(ToString::to_string).unwrap_or_default()
}

fn repeated(meta: &Meta, errors: &mut Errors) {
    errors.push(meta, format!("`{}` is given twice; remove one", name(meta)));
}

/// Reports an argument that is not among `valid`, and says where it belongs if that is known.
fn unknown(meta: &Meta, valid: &[&'static str], errors: &mut Errors) {
    let given = name(meta);
    let advice = match did_you_mean(&given, valid.iter().copied()) {
        Some(name) => format!("did you mean `{name}`?"),
        None => match given.as_str() {
            ROOT | CHECKPOINT => format!("it belongs to a unit: `#[fsdp_unit({given})]`"),
            TIE => format!("it belongs on the struct of a module: {TIE_FORM}"),
            CRATE => format!(r#"it belongs on the struct: `{CRATE} = ".."` there"#),
            FIELD_UNITS | MORE => {
                format!("it belongs on the `impl` block: `#[fsdp_unit({given})]`")
            }
            FORWARD => format!("it belongs on a method of the unit: `#[fsdp({FORWARD})]`"),
            KEY => format!(r#"it belongs on a field: `#[fsdp({KEY} = "..")]`"#),
            LEAF | UNIT | COLUMN | ROW | VOCAB | SHARED => {
                format!("it belongs on a field: `#[fsdp({given})]`")
            }
            GATHER => format!("it belongs on a field: `#[fsdp({COLUMN}, {GATHER})]`"),
            // PyTorch's names of the styles.
            "colwise" => format!("did you mean `{COLUMN}`?"),
            "rowwise" => format!("did you mean `{ROW}`?"),
            _ => format!("expected {}", one_of(valid.iter().copied())),
        },
    };
    let given = if given.is_empty() { "this".to_string() } else { format!("`{given}`") };
    let message = format!("unknown argument {given}; {advice}");
    errors.add(syn::Error::new(meta.path().span(), message));
}
