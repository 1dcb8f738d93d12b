//! The reparameterization through which `Param::val()` finds the full parameter.
//!
//! Burn stores a parameter's *base* and, where a reparameterization is attached, asks it for the
//! *effective value* on every `val()`. The base of a sharded parameter is this rank's shard; the
//! base of a replicated parameter is the full parameter. [`Sharded`] asks the schedule of its model
//! for the effective value. A unit's hooks find the schedule through the unit's own parameters, so
//! there is no global state.

use std::cell::RefCell;
use std::fmt::Debug;
use std::sync::{Arc, Weak};

use burn::module::{
    Content, Devices, LoraAdapter, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper,
    ModuleVisitor, Param, Reparameterization, Reparameterizer,
};
use burn::tensor::{Bool, DType, Device, DispatchTensor, Int, Tensor};

use super::adapter::{AdapterSettings, AttachedLora};
use super::exchange::Exchange;
use super::random::DrawnMask;
use super::running::RunningForward;
use super::runtime::{ParamIndex, Runtime};
use crate::error::{Error, raise};
use crate::layout::TensorSplit;

/// The reparameterization of a parameter in a sharded model.
#[derive(Module, Debug)]
pub struct Sharded {
    #[module(skip)]
    pub(crate) runtime: Arc<dyn Runtime>,
    #[module(skip)]
    pub(crate) index: ParamIndex,
    /// LoRA adapter of the parameter. The two factors of the adapter are sharded parameters too.
    pub(super) lora: Option<LoraAdapter>,
    /// Settings of the adapter that Burn's has no field for, if it has any.
    #[module(skip)]
    settings: Option<AdapterSettings>,
    marker: VisitMarker,
}

impl Reparameterization for Sharded {
    const NAME: &'static str = "fsdp";

    /// Returns the full parameter for this rank's shard `base`, gathered if need be.
    ///
    /// # Panics
    ///
    /// Unwinds with the [`Error`] if a collective fails; `launch` returns that error.
    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        let full = self.gathered(base);
        match &self.lora {
            Some(lora) => lora.apply(full),
            None => full,
        }
    }
}

/// Returns `value` with the autodiff settings of `old`.
pub(crate) fn with_autodiff_of<const D: usize>(old: &Tensor<D>, value: Tensor<D>) -> Tensor<D> {
    let Some(strategy) = old.gradient_checkpointing_strategy() else { return value };
    let value = Tensor::from_inner(value).with_gradient_checkpointing_strategy(strategy);
    value.set_require_grad(old.is_require_grad())
}

impl Sharded {
    /// Returns the full parameter for this rank's shard `base`, without its adapter.
    fn gathered<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        let value = exchanged(self.runtime.clone().materialize(self.index, base.into_dispatch()));
        if self.runtime.is_shared(self.index) { self.share_with_tensor_ranks(value) } else { value }
    }

    /// Returns the reparameterization of a parameter of which this rank has a part, and the part.
    pub(crate) fn split_of<const D: usize>(
        param: &Param<Tensor<D>>,
    ) -> Option<(&Self, TensorSplit)> {
        let sharded = Self::of(param)?;
        Some((sharded, sharded.split()?))
    }

    /// Returns the part of the parameter that this rank has among its tensor parallel ranks, if it has not
    /// the whole.
    fn split(&self) -> Option<TensorSplit> {
        self.runtime.split(self.index)
    }

    /// Returns ids as numbers among the `own` words of this rank's part, and which of them are words of other
    /// ranks. Those are 0. Unwinds with the error if tensor parallel ranks have different ids.
    pub(crate) fn own_ids<const D: usize>(
        &self,
        ids: Tensor<D, Int>,
        (split, own): (TensorSplit, usize),
    ) -> (Tensor<D, Int>, Tensor<D, Bool>) {
        self.check_ids(&ids);
        let ids = ids.sub_scalar((split.part * own) as i64);
        let others = ids.clone().lower_elem(0).bool_or(ids.clone().greater_equal_elem(own as i64));
        (ids.mask_fill(others.clone(), 0), others)
    }

    fn check_ids<const D: usize>(&self, ids: &Tensor<D, Int>) {
        let mut digest = || {
            let data = ids.clone().into_data();
            let number = |(at, id): (usize, f64)| id * (1.0 + (at % 97) as f64);
            data.iter::<f64>().enumerate().map(number).sum()
        };
        if let Err(error) = self.runtime.check_tensor_inputs(&mut digest) {
            raise(error);
        }
    }

    /// Returns a tensor that all tensor parallel ranks have, to be used with parts of matrices.
    pub(crate) fn share_with_tensor_ranks<const D: usize>(&self, tensor: Tensor<D>) -> Tensor<D> {
        self.exchange(Exchange::Shared, tensor)
    }

    /// Returns the tensors of all tensor parallel ranks, joined along the last dimension.
    pub(crate) fn gather_from_tensor_ranks<const D: usize>(&self, tensor: Tensor<D>) -> Tensor<D> {
        self.exchange(Exchange::Gathered, tensor)
    }

    /// Returns the input of split layers, to be used with parts of matrices: all positions.
    pub(crate) fn enter_split<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let in_parts = self.splits_sequence();
        self.exchange(if in_parts { Exchange::SequenceShared } else { Exchange::Shared }, input)
    }

    /// Returns the sum of what the tensor parallel ranks computed with parts of a matrix: under sequence parallel
    /// this rank's positions.
    pub(crate) fn leave_split<const D: usize>(&self, part: Tensor<D>) -> Tensor<D> {
        let in_parts = self.splits_sequence();
        self.exchange(if in_parts { Exchange::SequenceSummed } else { Exchange::Summed }, part)
    }

    /// Returns the outputs of all tensor parallel ranks, joined along the last dimension: under sequence parallel
    /// this rank's positions.
    pub(crate) fn gather_outputs<const D: usize>(&self, outputs: Tensor<D>) -> Tensor<D> {
        let all = self.exchange(Exchange::Gathered, outputs);
        if self.splits_sequence() { self.exchange(Exchange::SequencePart, all) } else { all }
    }

    /// Returns all positions of a tensor of which, under sequence parallel, this rank has a part.
    pub(crate) fn gather_sequence<const D: usize>(&self, tensor: Tensor<D>) -> Tensor<D> {
        match self.splits_sequence() {
            true => self.exchange(Exchange::SequenceGathered, tensor),
            false => tensor,
        }
    }

    /// Returns whether each tensor parallel rank has a part of the positions outside of split layers. So it is in
    /// the forward of a unit. Code that calls layers by themselves, as to generate text, has all positions.
    fn splits_sequence(&self) -> bool {
        self.runtime.ranks().splits_sequence() && RunningForward::current().is_some()
    }

    fn exchange<const D: usize>(&self, exchange: Exchange, tensor: Tensor<D>) -> Tensor<D> {
        let has_part = matches!(exchange, Exchange::Shared | Exchange::SequenceShared);
        RunningForward::note_part(has_part.then_some(self.index));
        exchanged(self.runtime.exchange(exchange, tensor.into_dispatch()))
    }

    pub(crate) fn new(runtime: Arc<dyn Runtime>, index: ParamIndex) -> Self {
        let marker = VisitMarker { runtime: runtime.clone(), index };
        Self { runtime, index, lora: None, settings: None, marker }
    }

    /// Adds a LoRA adapter whose factors are sharded already.
    pub(super) fn with_lora(self, lora: LoraAdapter, settings: Option<AdapterSettings>) -> Self {
        Self { lora: Some(lora), settings, ..self }
    }

    /// Takes the reparameterization of the parameter that Burn's own traversal visited last. Burn
    /// shows visitors the bare parameter first, and then the attached reparameterization as a
    /// module.
    pub(crate) fn visited() -> Option<Self> {
        let (runtime, index) = VISITED.take()?;
        Some(Self::new(runtime.upgrade()?, index))
    }

    /// Returns the reparameterization of a parameter; `None` if the parameter is not in a sharded
    /// model.
    pub(crate) fn of<const D: usize>(param: &Param<Tensor<D>>) -> Option<&Self> {
        param.reparameterization::<Self>()
    }

    /// Returns the LoRA adapter of a parameter, sharded or not.
    pub(crate) fn lora_of<const D: usize>(param: &Param<Tensor<D>>) -> Option<&LoraAdapter> {
        match Self::of(param) {
            Some(sharded) => sharded.lora.as_ref(),
            None => AttachedLora::of(param).map(|attached| attached.lora),
        }
    }

    /// Returns the settings of a parameter's LoRA adapter that Burn's has no field for, sharded or not.
    pub(crate) fn lora_settings_of<const D: usize>(
        param: &Param<Tensor<D>>,
    ) -> Option<&AdapterSettings> {
        match Self::of(param) {
            Some(sharded) => sharded.settings.as_ref(),
            None => AttachedLora::of(param).and_then(|attached| attached.settings),
        }
    }

    /// Attaches the reparameterization to a parameter and replaces any other one.
    pub(crate) fn put_on<const D: usize>(self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, base, mapper) = param.consume();
        Param::from_mapped_value(id, base, mapper).apply_reparameterization(AttachSharded(self))
    }
}

/// Returns the result of an exchange between ranks. Unwinds with the error if it failed.
fn exchanged<const D: usize>(result: Result<DispatchTensor, Error>) -> Tensor<D> {
    match result {
        Ok(value) => Tensor::from_dispatch(value),
        Err(error) => raise(error),
    }
}

/// The full value of a matrix, apart from its LoRA adapter.
#[derive(Clone, Debug)]
pub(crate) struct AdaptedWeight {
    /// Matrix without the adapter, `[inputs, outputs]`.
    pub(crate) base: Tensor<2>,
    pub(crate) adapter: Option<AdapterFactors>,
    /// Dtype in which the gradients of the matrix and of its factors are reduced; `None` for a parameter
    /// that is not sharded.
    pub(crate) reduce_dtype: Option<DType>,
}

/// The full values of an adapter's factors.
#[derive(Clone, Debug)]
pub(crate) struct AdapterFactors {
    /// `[inputs, rank]`
    pub(crate) a: Tensor<2>,
    /// `[rank, outputs]`
    pub(crate) b: Tensor<2>,
    /// Factor of the product of `a` and `b`.
    pub(crate) scale: f64,
    /// Mask of the adapter's input, if elements of it are dropped.
    pub(crate) dropout: Option<DrawnMask>,
}

impl AdaptedWeight {
    /// Returns the full value of a matrix, sharded or not, for an input on `device`. A
    /// reparameterization other than LoRA is applied.
    ///
    /// A mask of the adapter's input is drawn on an autodiff device, while a factor is trained.
    pub(crate) fn of(param: &Param<Tensor<2>>, device: &Device) -> Self {
        let factors = |LoraAdapter { a, b, scale }: &LoraAdapter| {
            let trains = || {
                device.is_autodiff() && [a, b].iter().any(|factor| factor.base().is_require_grad())
            };
            let dropout = Sharded::lora_settings_of(param).and_then(|it| it.dropout.as_ref());
            let dropout = dropout.filter(|_| trains()).map(|dropout| dropout.next_mask());
            AdapterFactors { a: a.val(), b: b.val(), scale: *scale, dropout }
        };
        let lora = Sharded::lora_of(param);
        match Sharded::of(param) {
            Some(sharded) => Self {
                base: sharded.gathered(param.base()),
                adapter: lora.map(factors),
                reduce_dtype: Some(sharded.runtime.reduce_dtype(sharded.index)),
            },
            None => Self {
                base: if lora.is_some() { param.base() } else { param.val() },
                adapter: lora.map(factors),
                reduce_dtype: None,
            },
        }
    }
}

/// Attaches one [`Sharded`] to one parameter.
struct AttachSharded(Sharded);

impl Reparameterizer for AttachSharded {
    type Reparam = Sharded;

    fn reparameterize<const D: usize>(
        &mut self,
        _: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Sharded>) {
        (param, Some(self.0.clone()))
    }
}

thread_local! {
    /// The [`VisitMarker`] that was visited last on this thread.
    static VISITED: RefCell<Option<(Weak<dyn Runtime>, ParamIndex)>> = const { RefCell::new(None) };
}

/// A module without parameters that notes in [`VISITED`] when Burn's traversal visits it.
#[derive(Clone, Debug)]
struct VisitMarker {
    runtime: Arc<dyn Runtime>,
    index: ParamIndex,
}

impl Module for VisitMarker {
    fn collect_devices(&self, devices: Devices) -> Devices {
        devices
    }

    fn fork(self, _: &Device) -> Self {
        self
    }

    fn to_device(self, _: &Device) -> Self {
        self
    }

    fn train(self) -> Self {
        self
    }

    fn valid(&self) -> Self {
        self.clone()
    }

    fn materialize(self) -> Self {
        self
    }

    fn visit<V: ModuleVisitor>(&self, _: &mut V) {
        VISITED.set(Some((Arc::downgrade(&self.runtime), self.index)));
    }

    fn map<M: ModuleMapper>(self, _: &mut M) -> Self {
        self
    }
}

impl ModuleDisplayDefault for VisitMarker {
    fn content(&self, _: Content) -> Option<Content> {
        None
    }
}

impl ModuleDisplay for VisitMarker {}
