//! Values of single arguments. A value that cannot be read is reported on the user's tokens.

use syn::{Expr, ExprLit, Ident, Lit, LitStr, Meta, MetaNameValue, Path, Token};

use crate::errors::Errors;

/// Advice on the form of `tie`, for messages.
pub(super) const TIE_FORM: &str =
    r#"write `tie("a.b" = "c.d")`, with the paths of the two places that hold the weight"#;
const IF_SHARED: &str = "if_shared";
const KEY_FORM: &str = r#"write `key = "name.in.checkpoint"`"#;
const GROUP_FORM: &str =
    r#"write `unit`, or `unit = "name"` on each field of a group that is one unit"#;
const CRATE_FORM: &str = r#"write `crate = "path::to::fsdp_runtime"`"#;

/// A tie of two places that hold one weight: `tie("first" = "second")`, or
/// `tie("first" = "second", if_shared)`.
pub(crate) struct Tie {
    /// The place that owns the weight.
    pub(crate) first: LitStr,
    /// The place that aliases the weight.
    pub(crate) second: LitStr,
    /// Whether the places are tied only in a model whose two parameters are clones of one.
    pub(crate) if_shared: bool,
}

/// Reports an argument that has a value but takes none.
pub(super) fn flag(meta: &Meta, name: &str, errors: &mut Errors) {
    if !matches!(meta, Meta::Path(_)) {
        errors.push(meta, format!("`{name}` takes no value; write `{name}`"));
    }
}

/// Reads `key = "a.b"`.
pub(super) fn key(meta: &Meta, errors: &mut Errors) -> Option<LitStr> {
    let Meta::NameValue(pair) = meta else {
        errors.push(meta, KEY_FORM);
        return None;
    };
    let Some(key) = string(pair) else {
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

/// Reads `unit` or `unit = "name"`, and returns the name.
pub(super) fn group(meta: &Meta, errors: &mut Errors) -> Option<LitStr> {
    let pair = match meta {
        Meta::Path(_) => return None,
        Meta::NameValue(pair) => pair,
        Meta::List(_) => {
            errors.push(meta, GROUP_FORM);
            return None;
        }
    };
    let Some(name) = string(pair) else {
        errors.push(&pair.value, format!("the name of a group is a string: {GROUP_FORM}"));
        return None;
    };
    if name.parse::<Ident>().is_err() {
        let message = "the name of a group is a segment of module paths, and made of letters, \
                       digits and underscores as a field's name is";
        errors.push(name, message);
        return None;
    }
    Some(name.clone())
}

/// Reads `crate = "a::b"`. The path's tokens have the span of the string.
pub(super) fn crate_path(meta: &Meta, errors: &mut Errors) -> Option<Path> {
    let Meta::NameValue(pair) = meta else {
        errors.push(meta, CRATE_FORM);
        return None;
    };
    let Some(path) = string(pair) else {
        errors.push(&pair.value, format!("a crate's path is a string: {CRATE_FORM}"));
        return None;
    };
    let parsed = path.parse_with(Path::parse_mod_style).ok();
    if parsed.is_none() {
        let given = path.token();
        errors.push(path, format!("`{given}` is not the path of a crate; {CRATE_FORM}"));
    }
    parsed
}

/// Reads `tie("a.b" = "c.d")` and `tie("a.b" = "c.d", if_shared)`.
pub(super) fn tie(meta: &Meta, errors: &mut Errors) -> Option<Tie> {
    let Meta::List(arguments) = meta else {
        errors.push(meta, TIE_FORM);
        return None;
    };
    let parse = |input: syn::parse::ParseStream<'_>| {
        let first = input.parse()?;
        input.parse::<Token![=]>()?;
        let second = input.parse()?;
        input.parse::<Option<Token![,]>>()?;
        let condition = input.parse::<Option<Ident>>()?;
        input.parse::<Option<Token![,]>>()?;
        Ok((first, second, condition))
    };
    let Ok((first, second, condition)) = arguments.parse_args_with(parse) else {
        errors.push(meta, TIE_FORM);
        return None;
    };
    let tie = Tie { first, second, if_shared: condition.is_some() };
    let mut valid = true;
    if let Some(condition) = condition.filter(|condition| condition != IF_SHARED) {
        let message = format!(
            "unknown condition `{condition}` of a tie; the only one is `{IF_SHARED}`, for places that \
             some models tie and others do not"
        );
        errors.push(condition, message);
        valid = false;
    }
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

fn string(pair: &MetaNameValue) -> Option<&LitStr> {
    match &pair.value {
        Expr::Lit(ExprLit { lit: Lit::Str(string), .. }) => Some(string),
        _ => None,
    }
}

fn is_dotted(path: &str) -> bool {
    path.split('.').all(|segment| !segment.is_empty() && !segment.contains(char::is_whitespace))
}
