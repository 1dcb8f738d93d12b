//! The path at which generated code finds the crate `fsdp-runtime`.

use proc_macro2::{Span, TokenStream};
use quote::quote_spanned;
use syn::spanned::Spanned;
use syn::{Path, parse_quote};

/// The value of `crate = ".."`; `::fsdp_runtime` by default.
pub(crate) struct CratePath(Path);

impl CratePath {
    pub(super) fn new(given: Option<Path>) -> Self {
        Self(given.unwrap_or_else(|| parse_quote!(::fsdp_runtime)))
    }

    /// Generates the import of the module that generated code uses, as `__fsdp`.
    pub(crate) fn import(&self) -> TokenStream {
        let path = &self.0;
        quote_spanned!(self.span()=> use #path::__private as __fsdp;)
    }

    /// Generates [`Self::import`] with `traits`, a list of `Trait as _`.
    pub(crate) fn import_with(&self, traits: TokenStream) -> TokenStream {
        let path = &self.0;
        quote_spanned! {self.span()=>
            #[allow(unused_imports)]
            use #path::__private::{self as __fsdp, #traits};
        }
    }

    /// Returns the span of the string that the user wrote: the compiler reports there that the path
    /// leads nowhere.
    fn span(&self) -> Span {
        Span::call_site().located_at(self.0.span())
    }
}
