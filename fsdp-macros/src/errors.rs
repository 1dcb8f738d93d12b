//! The errors of one annotated item, collected so that all of them are shown at once, and the
//! advice in their messages.

use std::fmt::Display;

use proc_macro2::TokenStream;
use quote::ToTokens;

/// The errors found so far.
#[derive(Default)]
pub(crate) struct Errors(Option<syn::Error>);

impl Errors {
    /// Adds an error that underlines `tokens`.
    pub(crate) fn push(&mut self, tokens: impl ToTokens, message: impl Display) {
        self.add(syn::Error::new_spanned(tokens, message));
    }

    /// Adds an error that has a span already.
    pub(crate) fn add(&mut self, error: syn::Error) {
        match &mut self.0 {
            Some(errors) => errors.combine(error),
            None => self.0 = Some(error),
        }
    }

    /// Returns whether no error was found.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_none()
    }
}

/// Expands to one `compile_error!` for each error.
impl ToTokens for Errors {
    fn to_tokens(&self, tokens: &mut TokenStream) {
        tokens.extend(self.0.as_ref().map(syn::Error::to_compile_error));
    }
}

/// Formats names as `` `a`, `b` or `c` ``.
pub(crate) fn one_of<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let names: Vec<_> = names.into_iter().map(|name| format!("`{name}`")).collect();
    match names.split_last() {
        None => "nothing".to_string(),
        Some((last, [])) => last.clone(),
        Some((last, rest)) => format!("{} or {last}", rest.join(", ")),
    }
}

/// Returns the name that was probably meant by `wrong`: the nearest one in edit distance, if that
/// distance is at most 2 and at most half of the name's length.
pub(crate) fn did_you_mean<'a>(
    wrong: &str,
    names: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    names
        .into_iter()
        .map(|name| (edit_distance(wrong, name), name))
        .filter(|(distance, name)| *distance <= 2 && distance * 2 <= name.len().max(4))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name)
}

/// Returns the Levenshtein distance: the number of letters to insert, remove or replace.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, letter) in a.chars().enumerate() {
        let mut diagonal = i;
        row[0] = i + 1;
        for (j, other) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(letter != *other);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}
