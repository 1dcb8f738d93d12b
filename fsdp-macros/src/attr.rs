//! The arguments of `#[fsdp_unit(..)]` and `#[fsdp(..)]`, as values that keep their spans.
//!
//! Parsing goes on after an error, so that one attribute reports all that is wrong with it.

use proc_macro2::TokenStream;
use syn::parse::Parser;
use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::{Attribute, Expr, Lit, LitStr, Meta, Path, Token};

use crate::error::{Errors, did_you_mean, one_of};

/// The helper attribute, on fields and under `#[derive(FsdpModule)]` on the struct.
pub const FSDP: &str = "fsdp";
/// The attribute of units.
pub const FSDP_UNIT: &str = "fsdp_unit";

const ROOT: &str = "root";
const CHECKPOINT: &str = "checkpoint";
const TIE: &str = "tie";
const KEY: &str = "key";
const LEAF: &str = "leaf";
const UNIT: &str = "unit";
const FIELD_UNITS: &str = "field_units";

const TIE_FORM: &str =
    r#"write `tie("a.b" = "c.d")`, with the paths of the two places that hold the weight"#;
const KEY_FORM: &str = r#"write `key = "name.in.checkpoint"`"#;

/// What stands on a struct.
#[derive(Default)]
pub struct StructArgs {
    /// `root`
    pub root: bool,
    /// `checkpoint`
    pub checkpoint: bool,
    /// `tie(..)`, in the order written.
    pub ties: Vec<Tie>,
}

/// `tie("first" = "second")`
pub struct Tie {
    /// The place that owns the weight.
    pub first: LitStr,
    /// The place that aliases it.
    pub second: LitStr,
}

/// What stands on a field.
#[derive(Default)]
pub struct FieldArgs {
    /// `key = ".."`
    pub key: Option<LitStr>,
    /// `leaf`
    pub leaf: Option<Path>,
    /// `unit`
    pub unit: Option<Path>,
}

/// What stands on an `impl` block.
#[derive(Default)]
pub struct BlockArgs {
    /// `field_units`
    pub field_units: bool,
}

impl StructArgs {
    /// Reads what stands in `#[fsdp_unit(..)]`.
    pub fn of_unit(args: TokenStream, errors: &mut Errors) -> Self {
        let mut parsed = Self::default();
        for meta in list(args, errors) {
            match name(&meta).as_str() {
                ROOT if parsed.root => repeated(&meta, ROOT, errors),
                ROOT => {
                    flag(&meta, ROOT, errors);
                    parsed.root = true;
                }
                CHECKPOINT if parsed.checkpoint => repeated(&meta, CHECKPOINT, errors),
                CHECKPOINT => {
                    flag(&meta, CHECKPOINT, errors);
                    parsed.checkpoint = true;
                }
                TIE => parsed.ties.extend(tie(&meta, errors)),
                _ => unknown(&meta, &[ROOT, CHECKPOINT, TIE], errors),
            }
        }
        parsed
    }

    /// Reads the `#[fsdp(..)]` above a struct under `#[derive(FsdpModule)]`.
    pub fn of_module(attrs: &[Attribute], errors: &mut Errors) -> Self {
        let mut parsed = Self::default();
        for meta in helper(attrs, errors) {
            match name(&meta).as_str() {
                TIE => parsed.ties.extend(tie(&meta, errors)),
                _ => unknown(&meta, &[TIE], errors),
            }
        }
        parsed
    }
}

impl FieldArgs {
    /// Reads the `#[fsdp(..)]` above a field.
    pub fn parse(attrs: &[Attribute], errors: &mut Errors) -> Self {
        let mut parsed = Self::default();
        for meta in helper(attrs, errors) {
            match name(&meta).as_str() {
                KEY if parsed.key.is_some() => repeated(&meta, KEY, errors),
                KEY => parsed.key = key(&meta, errors),
                LEAF if parsed.leaf.is_some() => repeated(&meta, LEAF, errors),
                LEAF => {
                    flag(&meta, LEAF, errors);
                    parsed.leaf = Some(meta.path().clone());
                }
                UNIT if parsed.unit.is_some() => repeated(&meta, UNIT, errors),
                UNIT => {
                    flag(&meta, UNIT, errors);
                    parsed.unit = Some(meta.path().clone());
                }
                _ => unknown(&meta, &[KEY, LEAF, UNIT], errors),
            }
        }
        parsed
    }
}

impl BlockArgs {
    /// Reads what stands in `#[fsdp_unit(..)]` on an `impl` block.
    pub fn parse(args: TokenStream, errors: &mut Errors) -> Self {
        let mut parsed = Self::default();
        for meta in list(args, errors) {
            match name(&meta).as_str() {
                FIELD_UNITS if parsed.field_units => repeated(&meta, FIELD_UNITS, errors),
                FIELD_UNITS => {
                    flag(&meta, FIELD_UNITS, errors);
                    parsed.field_units = true;
                }
                given @ (ROOT | CHECKPOINT | TIE) => errors.push(
                    &meta,
                    format!(
                        "`{given}` belongs on the struct, in the `#[fsdp_unit(..)]` there; on an \
                         `impl` block the attribute takes `{FIELD_UNITS}` or nothing"
                    ),
                ),
                _ => unknown(&meta, &[FIELD_UNITS], errors),
            }
        }
        parsed
    }
}

/// Whether Burn is told to pass a field by.
pub fn is_skipped(attrs: &[Attribute]) -> bool {
    attrs.iter().filter(|attr| attr.path().is_ident("module")).any(|attr| {
        let Meta::List(list) = &attr.meta else {
            return false;
        };
        list.tokens.clone().into_iter().any(|token| token.to_string() == "skip")
    })
}

/// The attribute that derives `trait_name`, if one does.
pub fn derives<'a>(attrs: &'a [Attribute], trait_name: &str) -> Option<&'a Attribute> {
    attrs.iter().filter(|attr| attr.path().is_ident("derive")).find(|attr| {
        attr.parse_args_with(Punctuated::<Path, Token![,]>::parse_terminated).is_ok_and(|paths| {
            paths
                .iter()
                .any(|path| path.segments.last().is_some_and(|last| last.ident == trait_name))
        })
    })
}

/// The arguments of every `#[fsdp(..)]` among `attrs`.
fn helper(attrs: &[Attribute], errors: &mut Errors) -> Vec<Meta> {
    let mut metas = Vec::new();
    for attr in attrs.iter().filter(|attr| attr.path().is_ident(FSDP)) {
        match &attr.meta {
            Meta::List(arguments) => metas.extend(list(arguments.tokens.clone(), errors)),
            _ => errors.push(attr, "`#[fsdp(..)]` needs arguments in parentheses"),
        }
    }
    metas
}

fn list(args: TokenStream, errors: &mut Errors) -> Vec<Meta> {
    match Punctuated::<Meta, Token![,]>::parse_terminated.parse2(args) {
        Ok(metas) => metas.into_iter().collect(),
        Err(error) => {
            errors.add(error);
            Vec::new()
        }
    }
}

fn name(meta: &Meta) -> String {
    meta.path().get_ident().map(ToString::to_string).unwrap_or_default()
}

/// `name`, without a value.
fn flag(meta: &Meta, name: &str, errors: &mut Errors) {
    if !matches!(meta, Meta::Path(_)) {
        errors.push(meta, format!("`{name}` takes no value; write `{name}`"));
    }
}

/// `key = "a.b"`
fn key(meta: &Meta, errors: &mut Errors) -> Option<LitStr> {
    let Meta::NameValue(pair) = meta else {
        errors.push(meta, KEY_FORM);
        return None;
    };
    let Expr::Lit(syn::ExprLit { lit: Lit::Str(key), .. }) = &pair.value else {
        errors.push(&pair.value, format!("a key is a string: {KEY_FORM}"));
        return None;
    };
    let value = key.value();
    if !value.is_empty() && !is_dotted(&value) {
        let message = "a key is made of names with single dots between them, such as \
                       `output.LayerNorm`; an empty one adds nothing to the key";
        errors.push(key, message);
        return None;
    }
    Some(key.clone())
}

/// `tie("a.b" = "c.d")`
fn tie(meta: &Meta, errors: &mut Errors) -> Option<Tie> {
    let Meta::List(arguments) = meta else {
        errors.push(meta, TIE_FORM);
        return None;
    };
    let parse = |input: syn::parse::ParseStream<'_>| {
        let first = input.parse()?;
        input.parse::<Token![=]>()?;
        let second = input.parse()?;
        input.parse::<Option<Token![,]>>()?;
        Ok(Tie { first, second })
    };
    let Ok(tie) = arguments.parse_args_with(parse) else {
        errors.push(meta, TIE_FORM);
        return None;
    };
    let mut valid = true;
    for path in [&tie.first, &tie.second] {
        if !is_dotted(&path.value()) {
            let message = "a tie path is made of field names with single dots between them, \
                           such as `embeddings.word.weight`";
            errors.push(path, message);
            valid = false;
        }
    }
    valid.then_some(tie)
}

fn is_dotted(path: &str) -> bool {
    path.split('.').all(|segment| !segment.is_empty() && !segment.contains(char::is_whitespace))
}

fn repeated(meta: &Meta, name: &str, errors: &mut Errors) {
    errors.push(meta, format!("`{name}` is given twice; remove one"));
}

fn unknown(meta: &Meta, valid: &[&'static str], errors: &mut Errors) {
    let path = meta.path();
    let given = name(meta);
    let advice = match did_you_mean(&given, valid.iter().copied()) {
        Some(name) => format!("did you mean `{name}`?"),
        None if given == ROOT || given == CHECKPOINT => {
            format!("it belongs to a unit: `#[fsdp_unit({given})]`")
        }
        None if given == TIE => format!("it belongs on the struct: {TIE_FORM} there"),
        None if given == FIELD_UNITS => {
            format!("it belongs on the `impl` block: `#[fsdp_unit({FIELD_UNITS})]`")
        }
        None if given == KEY || given == LEAF || given == UNIT => {
            format!("it belongs above a field: `#[fsdp({given}{})]`", ellipsis(&given))
        }
        None => format!("expected {}", one_of(valid.iter().copied())),
    };
    let given = if given.is_empty() { "this".to_string() } else { format!("`{given}`") };
    errors.add(syn::Error::new(path.span(), format!("unknown argument {given}; {advice}")));
}

fn ellipsis(name: &str) -> &'static str {
    if name == KEY { r#" = "..""# } else { "" }
}
