//! Classification of expressions by their syntax, for the hooks around calls of field units.

use syn::visit::{self, Visit};
use syn::{Expr, UnOp};

/// Returns whether an expression names a place, so that it can be written twice.
pub(super) fn is_place(expr: &Expr) -> bool {
    match expr {
        Expr::Path(_) => true,
        Expr::Field(field) => is_place(&field.base),
        Expr::Index(index) => {
            is_place(&index.expr)
                && (matches!(*index.index, Expr::Lit(_)) || is_place(&index.index))
        }
        Expr::Paren(inner) => is_place(&inner.expr),
        Expr::Unary(inner) => matches!(inner.op, UnOp::Deref(_)) && is_place(&inner.expr),
        _ => false,
    }
}

/// Returns whether an expression is a reference to a module in a container, such as
/// `self.head.as_ref()?`.
pub(super) fn is_reference(expr: &Expr) -> bool {
    let inner = match expr {
        Expr::MethodCall(call) if REFERENCES.iter().any(|name| call.method == name) => {
            &call.receiver
        }
        Expr::Try(inner) => &inner.expr,
        Expr::Paren(inner) => &inner.expr,
        _ => return false,
    };
    is_place(inner) || is_reference(inner)
}

/// Methods of `Option`, slices and iterators that lead to a reference.
const REFERENCES: &[&str] =
    &["as_ref", "as_deref", "unwrap", "expect", "get", "first", "last", "iter", "next", "nth"];

/// Returns the variable or field that an argument names, if it can hold tensors. Names of constants
/// and variants, such as `None`, begin with a capital.
pub(super) fn variable(argument: &Expr) -> Option<&Expr> {
    match argument {
        Expr::Path(path) => {
            let name = path.path.get_ident()?.to_string();
            name.starts_with(|first: char| first.is_lowercase() || first == '_').then_some(argument)
        }
        Expr::Field(field) if is_place(&field.base) => Some(argument),
        Expr::Paren(inner) => variable(&inner.expr),
        _ => None,
    }
}

/// Returns whether evaluating an argument may do more than name a place or a constant.
pub(super) fn runs_code(argument: &Expr) -> bool {
    match argument {
        Expr::Closure(_) | Expr::Lit(_) => false,
        Expr::Reference(inner) => runs_code(&inner.expr),
        Expr::Paren(inner) => runs_code(&inner.expr),
        Expr::Unary(inner) => runs_code(&inner.expr),
        place => !is_place(place),
    }
}

/// Returns the arguments from which a constructor builds a value, as in
/// `MhaInput::self_attn(x).mask_pad(mask)`. The tensors of such a value are found in its arguments:
/// the fields of a type from another crate may be private.
pub(super) fn constructor_arguments(expr: &mut Expr) -> Option<Vec<&mut Expr>> {
    match expr {
        Expr::Call(call) => {
            let Expr::Path(function) = &*call.func else { return None };
            let segments = &function.path.segments;
            let mut names = segments.iter().rev().take(2).map(|segment| segment.ident.to_string());
            let is_type = |name: &String| name.starts_with(char::is_uppercase) && name != "Tensor";
            names.any(|name| is_type(&name)).then(|| call.args.iter_mut().collect())
        }
        Expr::MethodCall(call) => {
            let mut arguments = constructor_arguments(&mut call.receiver)?;
            arguments.extend(&mut call.args);
            Some(arguments)
        }
        _ => None,
    }
}

/// Returns whether an expression contains `.await`.
pub(super) fn awaits(expr: &Expr) -> bool {
    struct Awaits(bool);
    impl Visit<'_> for Awaits {
        fn visit_expr_await(&mut self, _: &syn::ExprAwait) {
            self.0 = true;
        }
    }
    let mut awaits = Awaits(false);
    visit::visit_expr(&mut awaits, expr);
    awaits.0
}
