//! Hooks around the calls of field units, in a block under `#[fsdp_unit(field_units)]`.
//!
//! Whether a receiver is a field unit depends on its type and on the model, so every call
//! `place.forward(..)` asks the runtime, and runs as written if it is not one. Receiver and
//! arguments keep their places, so the order of evaluation is unchanged: an argument that runs code
//! passes through a `match`, and `pre_forward` follows the last such argument. Temporaries in
//! arguments live until the call has returned.

use proc_macro2::{Ident, TokenStream};
use quote::{quote, quote_spanned};
use syn::visit::{self, Visit};
use syn::visit_mut::{self, VisitMut};
use syn::{Expr, ExprMethodCall, ImplItemFn, Item, parse_quote, parse_quote_spanned};

use super::expressions::{
    awaits, constructor_arguments, is_place, is_reference, runs_code, variable,
};
use super::inputs::Input;
use super::span::at;
use crate::parse::{CratePath, is_forward};

/// Hooks the calls in a method's body; `outer` are the type parameters of its block.
pub(super) fn hook(method: &mut ImplItemFn, outer: &[&Ident], crate_path: &CratePath) {
    let sig = &method.sig;
    if sig.constness.is_some() || sig.asyncness.is_some() {
        return;
    }
    let mut calls = Calls { generic_inputs: generic_inputs(method, outer), found: false };
    calls.visit_block_mut(&mut method.block);
    if calls.found {
        let import = crate_path.import_with(quote! {
            CallElement as _, CallModule as _, CallOther as _, CallReference as _,
            ProbeOther as _, ProbeUnitValue as _
        });
        method.block.stmts.insert(0, parse_quote!(#import));
    }
}

/// Returns the names of the method's own inputs of generic types, which a call may pass on. A
/// variable that the body declares may have any type, so its name is left out.
fn generic_inputs(method: &ImplItemFn, outer: &[&Ident]) -> Vec<Ident> {
    let mut declared = Declared(Vec::new());
    declared.visit_block(&method.block);
    let inputs = Input::of_method(&method.sig, outer).into_iter().filter_map(|input| match input {
        Input::Generic(name) => Some(name),
        Input::Probed(_) | Input::Reference(_) => None,
    });
    inputs.filter(|name| !declared.0.contains(name)).collect()
}

/// The variables that a body declares.
struct Declared(Vec<Ident>);

impl Visit<'_> for Declared {
    fn visit_pat_ident(&mut self, pattern: &syn::PatIdent) {
        self.0.push(pattern.ident.clone());
        visit::visit_pat_ident(self, pattern);
    }
}

/// The calls in a body, hooked in place.
struct Calls {
    /// Inputs of the method that have generic types.
    generic_inputs: Vec<Ident>,
    /// Whether there was a call to hook.
    found: bool,
}

impl VisitMut for Calls {
    fn visit_expr_mut(&mut self, expr: &mut Expr) {
        match expr {
            // These run later, or at compile time.
            Expr::Async(_) | Expr::Const(_) => return,
            _ => visit_mut::visit_expr_mut(self, expr),
        }
        let Expr::MethodCall(call) = expr else { return };
        // The hooks hold what must not be held over an `.await`.
        if !is_forward(&call.method.to_string()) || call.args.iter().any(awaits) {
            return;
        }
        let hooked = match &*call.receiver {
            Expr::Path(path) if path.path.is_ident("self") => return,
            place if is_place(place) => self.around(call.clone()),
            reference if is_reference(reference) => {
                let mut call = call.clone();
                let span = at(reference);
                let bound = parse_quote_spanned!(span=> __fsdp_receiver);
                let receiver = std::mem::replace(&mut call.receiver, bound);
                let hooked = self.around(call);
                quote_spanned!(span=> match #receiver { __fsdp_receiver => #hooked })
            }
            _ => return,
        };
        self.found = true;
        // In parentheses, because a statement may begin with the call.
        *expr = parse_quote_spanned!(at(&*expr)=> (#hooked));
    }

    /// Leaves an item inside a body as it is: it is not part of the block.
    fn visit_item_mut(&mut self, _: &mut Item) {}

    fn visit_macro_mut(&mut self, mac: &mut syn::Macro) {
        let is_known =
            mac.path.get_ident().is_some_and(|name| MACROS.iter().any(|known| name == known));
        if !is_known {
            return;
        }
        let parser = syn::punctuated::Punctuated::<Expr, syn::Token![,]>::parse_terminated;
        let Ok(mut arguments) = mac.parse_body_with(parser) else { return };
        arguments.iter_mut().for_each(|argument| self.visit_expr_mut(argument));
        mac.tokens = quote!(#arguments);
    }
}

/// Macros of the standard library whose arguments are expressions, each evaluated once.
const MACROS: &[&str] = &["vec", "dbg", "assert", "assert_eq", "assert_ne"];

impl Calls {
    /// Generates a call with its hooks. The receiver must be a place: it is written twice.
    fn around(&self, call: ExprMethodCall) -> TokenStream {
        let receiver = &call.receiver;
        let last = call.args.iter().rposition(runs_code);
        let mut collected = TokenStream::new();
        let mut hooked = call.clone();
        for (index, argument) in hooked.args.iter_mut().enumerate() {
            let pre_forward = (Some(index) == last).then(|| quote!(__fsdp_call.pre_forward();));
            self.pass(argument, pre_forward, &mut collected);
        }
        let pre_forward = last.is_none().then(|| quote!(__fsdp_call.pre_forward();));
        quote_spanned! {at(&call)=>
            match (&&&&__fsdp::Receiver(&#receiver)).field_call() {
                mut __fsdp_call => {
                    #collected
                    #pre_forward
                    match #hooked {
                        __fsdp_output => {
                            (&__fsdp::ValueProbe(&__fsdp_output)).kind().post_forward(__fsdp_call, __fsdp_output)
                        }
                    }
                }
            }
        }
    }

    /// Passes an argument to the hooks, then through the unit's map of inputs. A variable is passed
    /// before any argument is evaluated, in `collected`; an argument that runs code is passed where
    /// it is evaluated, followed by `then`.
    fn pass(&self, argument: &mut Expr, then: Option<TokenStream>, collected: &mut TokenStream) {
        if let Some(place) = variable(argument) {
            let input = self.variable(place);
            collected.extend(collect(&input));
            let mapped = input.map();
            *argument = parse_quote_spanned!(at(&*argument)=> #mapped);
        } else if runs_code(argument) {
            for part in constructor_arguments(argument).into_iter().flatten() {
                self.pass(part, None, collected);
            }
            let input = Input::Probed(quote!(__fsdp_argument));
            let (collect, mapped) = (collect(&input), input.map());
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

    /// Returns the input that a variable or field is.
    fn variable(&self, place: &Expr) -> Input {
        let is_named =
            |name: &&Ident| matches!(place, Expr::Path(path) if path.path.is_ident(*name));
        match self.generic_inputs.iter().find(is_named) {
            Some(name) => Input::Generic(name.clone()),
            None => Input::Probed(quote!(#place)),
        }
    }
}

/// Generates the call that passes the tensors of an input to the hooks.
fn collect(input: &Input) -> TokenStream {
    let collect = input.collect();
    quote!(__fsdp_call.input(|__fsdp_inputs| { #collect });)
}
