//! The hooks around the calls of field units, in a block under `#[fsdp_unit(field_units)]`.
//!
//! What a receiver is only its type and the model know, so every call `place.forward(..)` asks, and
//! goes on as written where it is no field unit. Receiver and arguments stay in their places, so the
//! order of evaluation stays; an argument that runs code passes through a `match`, the last of them
//! followed by `pre_forward`. The temporaries of arguments live until the call has returned.

use proc_macro2::TokenStream;
use quote::{quote, quote_spanned};
use syn::visit::{self, Visit};
use syn::visit_mut::{self, VisitMut};
use syn::{Expr, ExprMethodCall, ImplItemFn, Item, UnOp, parse_quote, parse_quote_spanned};

use super::at;
use crate::ast::is_forward;

/// Hooks the calls in a method's body.
pub fn hook(method: &mut ImplItemFn) {
    let sig = &method.sig;
    if sig.constness.is_some() || sig.asyncness.is_some() {
        return;
    }
    let mut calls = Calls { found: false };
    calls.visit_block_mut(&mut method.block);
    if calls.found {
        let imports = parse_quote! {
            #[allow(unused_imports)]
            use ::fsdp_runtime::__private::{
                self as __fsdp, CallElement as _, CallModule as _, CallOther as _,
                CallReference as _, CollectOther as _, CollectValue as _, ReturnsOther as _,
                ReturnsValue as _,
            };
        };
        method.block.stmts.insert(0, imports);
    }
}

struct Calls {
    found: bool,
}

impl VisitMut for Calls {
    fn visit_expr_mut(&mut self, expr: &mut Expr) {
        match expr {
            // What runs later, or when the program compiles.
            Expr::Async(_) | Expr::Const(_) => return,
            _ => visit_mut::visit_expr_mut(self, expr),
        }
        let Expr::MethodCall(call) = expr else { return };
        if !is_forward(&call.method.to_string()) || call.args.iter().any(awaits) {
            return;
        }
        let hooked = match &*call.receiver {
            Expr::Path(path) if path.path.is_ident("self") => return,
            place if is_place(place) => around(call.clone()),
            reference if is_reference(reference) => {
                let mut call = call.clone();
                let span = at(reference);
                let bound = parse_quote_spanned!(span=> __fsdp_receiver);
                let receiver = std::mem::replace(&mut call.receiver, bound);
                let hooked = around(call);
                quote_spanned!(span=> match #receiver { __fsdp_receiver => #hooked })
            }
            _ => return,
        };
        self.found = true;
        // In parentheses: a statement may begin with it.
        *expr = parse_quote_spanned!(at(&*expr)=> (#hooked));
    }

    /// An item inside a body is none of the block's.
    fn visit_item_mut(&mut self, _: &mut Item) {}

    fn visit_macro_mut(&mut self, mac: &mut syn::Macro) {
        let is_list =
            mac.path.get_ident().is_some_and(|name| LISTS.iter().any(|list| name == list));
        let parser = syn::punctuated::Punctuated::<Expr, syn::Token![,]>::parse_terminated;
        let Ok(mut elements) = (if is_list { mac.parse_body_with(parser) } else { return }) else {
            return;
        };
        elements.iter_mut().for_each(|element| self.visit_expr_mut(element));
        mac.tokens = quote!(#elements);
    }
}

/// Macros of the standard library whose arguments are expressions, each evaluated once.
const LISTS: &[&str] = &["vec", "dbg", "assert", "assert_eq", "assert_ne"];

/// A call with its hooks; the receiver may be named twice.
fn around(call: ExprMethodCall) -> TokenStream {
    let receiver = &call.receiver;
    let last = call.args.iter().rposition(runs_code);
    let mut places = TokenStream::new();
    let mut hooked = call.clone();
    for (index, argument) in hooked.args.iter_mut().enumerate() {
        let pre_forward = (Some(index) == last).then(|| quote!(__fsdp_call.pre_forward();));
        input(argument, pre_forward, &mut places);
    }
    let pre_forward = last.is_none().then(|| quote!(__fsdp_call.pre_forward();));
    quote_spanned! {at(&call)=>
        match (&&&&__fsdp::Receiver(&#receiver)).field_call() {
            mut __fsdp_call => {
                #places
                #pre_forward
                match #hooked {
                    __fsdp_output => {
                        (&__fsdp::Output(&__fsdp_output)).kind().post_forward(__fsdp_call, __fsdp_output)
                    }
                }
            }
        }
    }
}

/// Shows an argument to the hooks: a place before anything is evaluated, in `places`, and what runs
/// code where it is evaluated, followed by `then`. Where it stands, it passes through the unit's map
/// of inputs.
fn input(argument: &mut Expr, then: Option<TokenStream>, places: &mut TokenStream) {
    if let Some(place) = value(argument) {
        places.extend(collect(quote!(#place)));
        let mapped = mapped(quote!(#place));
        *argument = parse_quote_spanned!(at(&*argument)=> #mapped);
    } else if runs_code(argument) {
        if let Some(parts) = parts(argument) {
            parts.into_iter().for_each(|part| input(part, None, places));
        }
        let collect = collect(quote!(__fsdp_argument));
        let mapped = mapped(quote!(__fsdp_argument));
        *argument = parse_quote_spanned! {at(&*argument)=>
            match #argument {
                __fsdp_argument => {
                    #collect
                    #then
                    #mapped
                }
            }
        };
    }
}

/// What a value is put together from, such as `MhaInput::self_attn(x).mask_pad(mask)`: the tensors in
/// it are reached there, as the fields of a type from another crate may be private.
fn parts(argument: &mut Expr) -> Option<Vec<&mut Expr>> {
    match argument {
        Expr::Call(call) => {
            let Expr::Path(function) = &*call.func else { return None };
            let segments = &function.path.segments;
            let mut names = segments.iter().rev().take(2).map(|segment| segment.ident.to_string());
            let is_type = |name: &String| name.starts_with(char::is_uppercase) && name != "Tensor";
            names.any(|name| is_type(&name)).then(|| call.args.iter_mut().collect())
        }
        Expr::MethodCall(call) => {
            let mut found = parts(&mut call.receiver)?;
            found.extend(&mut call.args);
            Some(found)
        }
        _ => None,
    }
}

fn collect(value: TokenStream) -> TokenStream {
    quote! {
        __fsdp_call.input(|__fsdp_inputs| {
            (&__fsdp::Input(&#value)).collect(__fsdp_inputs);
        });
    }
}

/// A value as the unit that is called is to have it.
fn mapped(value: TokenStream) -> TokenStream {
    quote!((&__fsdp::Input(&#value)).kind().map(&__fsdp_call, #value))
}

/// A variable or field that an argument is, as far as it may hold tensors. Names of constants and
/// variants, such as `None`, begin with a capital.
fn value(argument: &Expr) -> Option<&Expr> {
    match argument {
        Expr::Path(path) => {
            let name = path.path.get_ident()?.to_string();
            name.starts_with(|first: char| first.is_lowercase() || first == '_').then_some(argument)
        }
        Expr::Field(field) if is_place(&field.base) => Some(argument),
        Expr::Paren(inner) => value(&inner.expr),
        _ => None,
    }
}

/// Whether evaluating an argument may do more than name a place or a constant.
fn runs_code(argument: &Expr) -> bool {
    match argument {
        Expr::Closure(_) | Expr::Lit(_) => false,
        Expr::Reference(inner) => runs_code(&inner.expr),
        Expr::Paren(inner) => runs_code(&inner.expr),
        Expr::Unary(inner) => runs_code(&inner.expr),
        place => !is_place(place),
    }
}

/// An expression that names a place, and may be written twice.
fn is_place(expr: &Expr) -> bool {
    match expr {
        Expr::Path(_) => true,
        Expr::Field(field) => is_place(&field.base),
        Expr::Index(index) => is_place(&index.expr) && is_constant(&index.index),
        Expr::Paren(inner) => is_place(&inner.expr),
        Expr::Unary(inner) => matches!(inner.op, UnOp::Deref(_)) && is_place(&inner.expr),
        _ => false,
    }
}

fn is_constant(index: &Expr) -> bool {
    matches!(index, Expr::Lit(_)) || is_place(index)
}

/// A reference to a module in a container, such as `self.head.as_ref()?`.
fn is_reference(expr: &Expr) -> bool {
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

/// Whether an expression waits: what the hooks hold must not be held then.
fn awaits(expr: &Expr) -> bool {
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
