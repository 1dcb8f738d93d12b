//! Spans of generated tokens.

use proc_macro2::Span;
use syn::spanned::Spanned;

/// Returns a span located at the user's tokens, in which names resolve as those of generated code.
pub(super) fn at(tokens: &impl Spanned) -> Span {
    Span::call_site().located_at(tokens.span())
}
