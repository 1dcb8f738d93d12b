//! `Self::Item` in the hidden methods of a trait's block.
//!
//! The hidden methods are in a trait of their own, in whose block `Self::Item` does not name the type
//! of the user's trait. So it becomes `<Self as Trait>::Item`.

use syn::punctuated::Punctuated;
use syn::visit_mut::{self, VisitMut};
use syn::{ExprPath, Ident, ImplItem, ItemImpl, Path, QSelf, Signature, TypePath, parse_quote};

/// The types that a trait's block defines.
pub(super) struct OwnTypes<'a> {
    path: &'a Path,
    names: Vec<&'a Ident>,
}

impl<'a> OwnTypes<'a> {
    /// Returns the types of a block; `None` for a block that is not one of a trait.
    pub(super) fn of(block: &'a ItemImpl) -> Option<Self> {
        let (_, path, _) = block.trait_.as_ref()?;
        let name = |item: &'a ImplItem| match item {
            ImplItem::Type(ty) => Some(&ty.ident),
            _ => None,
        };
        Some(Self { path, names: block.items.iter().filter_map(name).collect() })
    }

    /// Names the types with their trait in an item of the block.
    pub(super) fn qualify_item(&mut self, item: &mut ImplItem) {
        self.visit_impl_item_mut(item);
    }

    /// Names the types with their trait in a signature.
    pub(super) fn qualify_signature(&mut self, sig: &mut Signature) {
        self.visit_signature_mut(sig);
    }

    /// Returns a path that begins with `Self` and one of the types with the trait in front of it.
    fn qualified(&self, path: &Path) -> Option<(QSelf, Path)> {
        let mut segments = path.segments.iter();
        let begins = segments.next()?.ident == "Self";
        let ty = segments.clone().next()?;
        if !begins || !self.names.iter().any(|name| **name == ty.ident) {
            return None;
        }
        let own = self.path.segments.iter().chain(segments).cloned();
        let path = Path {
            leading_colon: self.path.leading_colon,
            segments: own.collect::<Punctuated<_, _>>(),
        };
        let position = self.path.segments.len();
        let qself = QSelf {
            lt_token: <_>::default(),
            ty: parse_quote!(Self),
            position,
            as_token: Some(<_>::default()),
            gt_token: <_>::default(),
        };
        Some((qself, path))
    }
}

impl VisitMut for OwnTypes<'_> {
    fn visit_type_path_mut(&mut self, ty: &mut TypePath) {
        visit_mut::visit_type_path_mut(self, ty);
        if let (None, Some((qself, path))) = (&ty.qself, self.qualified(&ty.path)) {
            *ty = TypePath { qself: Some(qself), path };
        }
    }

    fn visit_expr_path_mut(&mut self, expr: &mut ExprPath) {
        visit_mut::visit_expr_path_mut(self, expr);
        if let (None, Some((qself, path))) = (&expr.qself, self.qualified(&expr.path)) {
            *expr = ExprPath { attrs: std::mem::take(&mut expr.attrs), qself: Some(qself), path };
        }
    }
}
