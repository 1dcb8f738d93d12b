//! The contract between the macros and the runtime: the traits that `#[fsdp_unit]` and
//! `#[derive(FsdpModule)]` implement, and the visitors and mappers that those traits accept.

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use super::node::{Child, Forward, Node};
use super::random::RandomSource;

/// A Burn module whose structure FSDP knows when the program compiles.
///
/// Write `#[derive(FsdpModule)]` for a module whose parameters belong to the enclosing unit, or
/// [`#[fsdp_unit]`](macro@crate::fsdp_unit) for a unit of its own, which is gathered and reduced as
/// a whole. The modules of `burn::nn`, `Param`, and `Option`, `Vec`, arrays and tuples of these
/// implement the trait already.
///
/// # Errors
///
/// A field of a type without this trait does not compile. For a module from another crate, write
/// `#[fsdp(leaf)]` on the field; for a value that is not a module, `#[module(skip)]`.
///
/// # Example
///
/// ```
/// use burn::module::Module;
/// use burn::nn::{Linear, Relu};
/// use burn::tensor::Tensor;
/// use fsdp_runtime::{FsdpModule, fsdp_unit};
///
/// // Not a unit: its parameters belong to `Block`.
/// #[derive(Module, FsdpModule, Debug)]
/// struct FeedForward {
///     up: Linear,
///     activation: Relu,
///     down: Linear,
/// }
///
/// // A unit: one all-gather before `forward`, one reduce-scatter after its backward.
/// #[derive(Module, Debug)]
/// #[fsdp_unit]
/// pub struct Block {
///     feed_forward: FeedForward,
/// }
///
/// #[fsdp_unit]
/// impl Block {
///     pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
///         let FeedForward { up, activation, down } = &self.feed_forward;
///         down.forward(activation.forward(up.forward(x)))
///     }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "FSDP does not know what `{Self}` holds",
    label = "not a unit, a `FsdpModule`, a `burn::nn` module, a `Param`, or a container of those",
    note = "if `{Self}` is your own module, write `#[derive(Module, FsdpModule)]` on it (or `#[fsdp_unit]` below `#[derive(Module)]`, to make it a unit of its own)",
    note = "if it is a module of another crate, write `#[fsdp(leaf)]` on the field (`#[fsdp(unit, leaf)]` where it is to be a unit); if it is no module at all, `#[module(skip)]`"
)]
pub trait FsdpModule: Module + 'static {
    /// Static layout tree of the type.
    const LAYOUT: Node;

    /// The same tree, by reference.
    #[doc(hidden)]
    const STATIC_LAYOUT: &'static Node = &Self::LAYOUT;

    /// Evaluates the compile-time checks of a generic type.
    #[doc(hidden)]
    const CHECKED: () = ();

    /// Whether the type is a unit that is recomputed in backward, under `#[fsdp_unit(checkpoint)]`.
    #[doc(hidden)]
    const RECOMPUTED: bool = false;

    /// Hooked methods of a unit; empty for any other module.
    #[doc(hidden)]
    const FORWARDS: &'static [Forward] = &[];

    /// Visits every field in layout order. A nested unit is announced first, with
    /// [`ParamVisitor::unit`] or [`ParamVisitor::field_unit`].
    fn visit_params<V: ParamVisitor>(&self, visitor: &mut V);

    /// Rebuilds the module with every parameter passed through `mapper`, in layout order.
    fn map_params<P: ParamMapper>(self, mapper: &mut P) -> Self;

    /// Visits the module as a field of another one. [`visit_params`](Self::visit_params) calls it
    /// once for each field.
    ///
    /// This is a method of the trait so that generated code reaches it in the same way as `LAYOUT`.
    /// A field of an unknown type is then a single error.
    #[doc(hidden)]
    fn visit_field<V: ParamVisitor>(&self, child: &'static Child, visitor: &mut V) {
        const { Self::CHECKED };
        visitor.enter(child, None);
        if child.unit {
            self.visit_units(visitor);
        } else {
            visit_module(self, visitor);
        }
        visitor.exit();
    }

    /// Visits the content of a field under `#[fsdp(unit)]` as a unit. In a container, each module
    /// is a unit.
    #[doc(hidden)]
    fn visit_units<V: ParamVisitor>(&self, visitor: &mut V) {
        if visitor.field_unit(self) {
            self.visit_params(visitor);
            visitor.unit_end();
        }
    }

    /// Rebuilds the module as a field of another one. [`map_params`](Self::map_params) calls it
    /// once for each field.
    #[doc(hidden)]
    fn map_field<P: ParamMapper>(self, child: &'static Child, mapper: &mut P) -> Self {
        mapper.enter(child, None);
        let module = self.map_params(mapper);
        mapper.exit();
        module
    }
}

/// A module under [`#[fsdp_unit]`](macro@crate::fsdp_unit): the parameters that are gathered
/// together before its `forward`, and whose gradients are reduced together after its backward.
///
/// Use it as a bound where only units are allowed, as [`UnitType::of`](crate::options::UnitType::of) does.
/// [`FsdpModule`] has an example of a unit.
///
/// # Errors
///
/// A type without the annotation does not compile where this trait is required.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a unit",
    label = "not annotated with `#[fsdp_unit]`",
    note = "write `#[fsdp_unit]` below `#[derive(Module)]` on `{Self}`"
)]
pub trait FsdpUnit: FsdpModule {}

/// A layer that can have a part of the columns of its values, under `#[fsdp(column)]`: a linear layer whose matrix is
/// split over tensor parallel ranks, or dropout of such values.
#[doc(hidden)]
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be split over tensor parallel ranks",
    label = "no `fsdp_runtime::nn::Linear`, and no `Dropout`",
    note = "`column` is for fields of type `fsdp_runtime::nn::Linear`, which sums over the ranks, and of type `fsdp_runtime::nn::Dropout`; `From` makes the first one of `burn::nn::Linear`",
    note = "norms and other small layers are the same on all ranks: remove the argument; an embedding takes `#[fsdp(vocab)]`"
)]
pub trait SplitColumns {}

impl<T: SplitColumns> SplitColumns for Option<T> {}

/// A linear layer whose matrix can be split over tensor parallel ranks, under `#[fsdp(column, gather)]` or
/// `#[fsdp(row)]`.
#[doc(hidden)]
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be split over tensor parallel ranks",
    label = "no `fsdp_runtime::nn::Linear`",
    note = "`row` and `column, gather` are for fields of type `fsdp_runtime::nn::Linear`, which sums over the ranks; `From` makes one of `burn::nn::Linear`",
    note = "norms and other small layers are the same on all ranks: remove the argument; an embedding takes `#[fsdp(vocab)]`"
)]
pub trait SplitLinear {}

impl<T: SplitLinear> SplitLinear for Option<T> {}

/// A layer whose matrix can be split by words over tensor parallel ranks, under `#[fsdp(vocab)]`.
#[doc(hidden)]
#[diagnostic::on_unimplemented(
    message = "the vocabulary of `{Self}` cannot be split over tensor parallel ranks",
    label = "no `fsdp_runtime::nn::Embedding`, and no head",
    note = "`vocab` is for the embedding and the head of a language model: fields of type `fsdp_runtime::nn::Embedding` and `fsdp_runtime::nn::LmHead`"
)]
pub trait SplitVocabulary {}

/// A unit whose `forward` carries the hooks that gather and reshard its parameters.
///
/// `#[fsdp_unit]` implements it on the `impl` block that holds `pub fn forward(&self, ..)`.
/// [`fully_shard`](crate::fully_shard) requires it of the outermost module; it is the bound to
/// write for a generic model. [`FsdpModule`] has an example of such a block.
///
/// # Errors
///
/// A unit without an annotated `impl` block does not compile: nothing would gather its parameters.
#[diagnostic::on_unimplemented(
    message = "unit `{Self}` has no hooked `forward`",
    label = "this unit would never be gathered as one",
    note = "write `#[fsdp_unit]` above the `impl {Self}` block that holds `pub fn forward(&self, ..)`"
)]
pub trait HookedForward: FsdpUnit {
    /// Whether the block is under `#[fsdp_unit(field_units)]`, so that the calls of field units in
    /// it are hooked.
    #[doc(hidden)]
    const HOOKS_FIELD_UNITS: bool = false;

    /// Hooked methods of the block.
    #[doc(hidden)]
    const HOOKED: &'static [Forward] = &[];
}

/// A read-only traversal of a module's parameters, in layout order.
pub trait ParamVisitor {
    /// Enters a field. `index` is set for the elements of a list.
    fn enter(&mut self, _child: &'static Child, _index: Option<usize>) {}
    /// Leaves the field that was entered last.
    fn exit(&mut self) {}
    /// Announces a nested unit. The unit is skipped if this returns `false`.
    fn unit<M: FsdpModule>(&mut self, _module: &M) -> bool {
        true
    }
    /// Announces a module that is a unit because its field is under `#[fsdp(unit)]`. The unit is
    /// skipped if this returns `false`.
    fn field_unit<M: Module>(&mut self, _module: &M) -> bool {
        true
    }
    /// Ends a nested unit that was not skipped.
    fn unit_end(&mut self) {}
    /// Visits a float parameter.
    fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>);
    /// Visits a running statistic, presented as a parameter. Each rank has its own full tensor,
    /// without a gradient.
    fn buffer<const D: usize>(&mut self, _buffer: &Param<Tensor<D>>) {}
    /// Visits a *table*: a float tensor that is neither a parameter nor a running statistic, which Burn
    /// neither trains nor saves. `in_device_dtype` says that the module computes in the device's
    /// default float dtype, whatever the dtype of its input, so that its table is cast only where a
    /// setting names it.
    fn table<const D: usize>(&mut self, _table: &Tensor<D>, _in_device_dtype: bool) {}
    /// Visits an integer or Boolean parameter.
    fn fixed(&mut self) {}
    /// Visits a layer that draws from the model's random stream.
    fn random_source<R: RandomSource>(&mut self, _source: &R) {}
    /// Visits a linear layer that applies a LoRA adapter to its input, in place of adding it to the
    /// weight. The weight comes next.
    #[doc(hidden)]
    fn applies_adapters(&mut self) {}
    /// Visits a module of the type `ty` whose forward cannot be recomputed, because a second run on
    /// the same input has another result or another side effect. `instead` says what to use.
    #[doc(hidden)]
    fn unrepeatable(&mut self, _ty: &'static str, _instead: &'static str) {}
    /// Visits a module of the type `ty` that updates an f32 tensor from its input.
    #[doc(hidden)]
    fn full_precision(&mut self, _ty: &'static str) {}
    /// Visits a parameter that carries the reparameterization `name`, in a module whose fields FSDP
    /// does not know. `path` is the path below that module's field.
    fn leaf_reparameterized(&mut self, _path: &[String], _name: &str) {}
    /// Visits a float parameter in a module whose fields FSDP does not know. `path` is the path
    /// below that module's field.
    fn leaf_param<const D: usize>(&mut self, _path: &[String], param: &Param<Tensor<D>>) {
        self.param(param);
    }
}

/// A rebuild of a module's parameters, in layout order. Each method returns the replacement of its
/// argument.
pub trait ParamMapper {
    /// Enters a field. `index` is set for the elements of a list.
    fn enter(&mut self, _child: &'static Child, _index: Option<usize>) {}
    /// Leaves the field that was entered last.
    fn exit(&mut self) {}
    /// Replaces a float parameter.
    fn param<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>>;
    /// Replaces a value that FSDP does not manage, such as a plain tensor.
    fn unmanaged<M: Module>(&mut self, module: M) -> M {
        module
    }
    /// Replaces a table, as [`ParamVisitor::table`] visits it.
    fn table<const D: usize>(&mut self, table: Tensor<D>, _in_device_dtype: bool) -> Tensor<D> {
        table
    }
    /// Replaces a layer that draws from the model's random stream.
    fn random_source<R: RandomSource>(&mut self, source: R) -> R {
        source
    }
}

/// Visits a module, and announces it first if its type is a unit.
pub(super) fn visit_module<M: FsdpModule, V: ParamVisitor>(module: &M, visitor: &mut V) {
    if !M::LAYOUT.is_unit() {
        module.visit_params(visitor);
    } else if visitor.unit(module) {
        module.visit_params(visitor);
        visitor.unit_end();
    }
}
