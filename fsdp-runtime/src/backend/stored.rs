//! Where a tensor rests between its uses: on the device that computes with it, or, under an offload
//! policy, in the host's memory, where Flex steps it.

use std::ops::Range;

#[cfg(feature = "flex")]
use burn::backend::Flex;
use burn::backend::TensorMetadata;
use burn::backend::autodiff::ops::NodeGuard;
use burn::tensor::{DType, DispatchTensor};

use super::shard_backend::{Context, ShardBackend, Value, cast};
use super::tensor::{Float, Tracked};
use crate::backend::Norm;

/// A shard or a gradient at rest.
#[derive(Debug)]
pub(crate) enum StoredTensor<B: ShardBackend> {
    /// On the device that computes.
    Device(Float<B>),
    /// In the host's memory.
    #[cfg(feature = "flex")]
    Host(Float<Flex>),
}

/// The autodiff leaf of a parameter at rest.
#[derive(Debug)]
pub(crate) enum Leaf<B: ShardBackend> {
    /// On the device that computes.
    Device(Tracked<B>),
    /// In the host's memory.
    #[cfg(feature = "flex")]
    Host(Tracked<Flex>),
}

impl<B: ShardBackend> Clone for StoredTensor<B> {
    fn clone(&self) -> Self {
        match self {
            Self::Device(tensor) => Self::Device(tensor.clone()),
            #[cfg(feature = "flex")]
            Self::Host(tensor) => Self::Host(tensor.clone()),
        }
    }
}

impl<B: ShardBackend> Clone for Leaf<B> {
    fn clone(&self) -> Self {
        match self {
            Self::Device(leaf) => Self::Device(leaf.clone()),
            #[cfg(feature = "flex")]
            Self::Host(leaf) => Self::Host(leaf.clone()),
        }
    }
}

impl<B: ShardBackend> Leaf<B> {
    /// A leaf of the same elements in a graph of its own.
    pub(crate) fn anew(&self) -> Self {
        match self {
            Self::Device(leaf) => Self::Device(new_leaf::<B>(leaf.primitive().clone())),
            #[cfg(feature = "flex")]
            Self::Host(leaf) => Self::Host(new_leaf::<Flex>(leaf.primitive().clone())),
        }
    }

    /// The node of its graph.
    pub(crate) fn node(&self) -> NodeGuard {
        match self {
            Self::Device(leaf) => leaf.node(),
            #[cfg(feature = "flex")]
            Self::Host(leaf) => leaf.node(),
        }
    }
}

/// A tracked tensor without parents.
pub(crate) fn new_leaf<B: ShardBackend>(value: Float<B>) -> Tracked<B> {
    Tracked::<B>::new(value).require_grad()
}

/// What a Burn tensor at rest was taken apart into: the elements, the leaf where it is tracked, and
/// the autodiff context where it has one.
pub(crate) type Parts<B> = (StoredTensor<B>, Option<Leaf<B>>, Option<Context>);

/// Where tensors of a model rest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum StorageDevice {
    /// On the device that computes.
    #[default]
    Device,
    /// In the host's memory; `pinned` says whether copies go through pages that stay in place.
    Host { pinned: bool },
}

impl<B: ShardBackend> StoredTensor<B> {
    /// Takes a Burn tensor apart; `None` when it lies on neither the device nor, where tensors rest
    /// there, the host.
    pub(crate) fn read(tensor: DispatchTensor, rest: StorageDevice) -> Option<Parts<B>> {
        #[cfg(feature = "flex")]
        if rest != StorageDevice::Device
            && let Some(value) = Flex::from_dispatch(tensor.clone())
        {
            return Some(match value {
                Value::Plain(tensor) => (Self::Host(tensor), None, None),
                Value::Autodiff(leaf, context) => {
                    let tensor = leaf.primitive().clone();
                    let leaf = leaf.is_tracked().then_some(Leaf::Host(leaf));
                    (Self::Host(tensor), leaf, Some(context))
                }
            });
        }
        let _ = rest;
        Some(match B::from_dispatch(tensor)? {
            Value::Plain(tensor) => (Self::Device(tensor), None, None),
            Value::Autodiff(leaf, context) => {
                let tensor = leaf.primitive().clone();
                let leaf = leaf.is_tracked().then_some(Leaf::Device(leaf));
                (Self::Device(tensor), leaf, Some(context))
            }
        })
    }

    /// A tensor of the device, laid to rest.
    pub(crate) fn rest(tensor: Float<B>, rest: StorageDevice) -> Self {
        match rest {
            StorageDevice::Device => Self::Device(tensor),
            #[cfg(feature = "flex")]
            StorageDevice::Host { .. } => Self::Host(super::shard_backend::to_host::<B>(tensor)),
            #[cfg(not(feature = "flex"))]
            StorageDevice::Host { .. } => unreachable!("offload without `flex` is refused"),
        }
    }

    /// The tensor on the device, in a type.
    pub(crate) fn on_device(
        self,
        device: &B::Device,
        dtype: DType,
        rest: StorageDevice,
    ) -> Float<B> {
        let _ = (device, rest);
        match self {
            Self::Device(tensor) => cast::<B>(tensor, dtype),
            // Cast first: fewer bytes cross over.
            #[cfg(feature = "flex")]
            Self::Host(tensor) => {
                let pinned = rest == StorageDevice::Host { pinned: true };
                super::shard_backend::from_host::<B>(cast::<Flex>(tensor, dtype), device, pinned)
            }
        }
    }

    /// A Burn tensor without autodiff.
    pub(crate) fn into_dispatch(self) -> DispatchTensor {
        match self {
            Self::Device(tensor) => B::into_dispatch(Value::Plain(tensor)),
            #[cfg(feature = "flex")]
            Self::Host(tensor) => Flex::into_dispatch(Value::Plain(tensor)),
        }
    }

    /// A Burn tensor with an autodiff context, where there is one.
    pub(crate) fn with_context(self, context: Option<Context>) -> DispatchTensor {
        use burn::backend::{Autodiff, AutodiffBackend};
        let Some(context) = context else { return self.into_dispatch() };
        match self {
            Self::Device(tensor) => {
                B::into_dispatch(Value::Autodiff(Autodiff::<B>::from_inner(tensor), context))
            }
            #[cfg(feature = "flex")]
            Self::Host(tensor) => {
                Flex::into_dispatch(Value::Autodiff(Autodiff::<Flex>::from_inner(tensor), context))
            }
        }
    }

    /// The sum of two tensors that rest at one place.
    pub(crate) fn add(self, other: Self) -> Self {
        match (self, other) {
            (Self::Device(a), Self::Device(b)) => Self::Device(B::float_add(a, b)),
            #[cfg(feature = "flex")]
            (Self::Host(a), Self::Host(b)) => {
                use burn::backend::ops::FloatTensorOps;
                Self::Host(Flex::float_add(a, b))
            }
            #[cfg(feature = "flex")]
            _ => unreachable!("all of a model's gradients rest at one place"),
        }
    }

    /// Whether it lies on the device that computes, in this type.
    pub(crate) fn is_on_device(&self, dtype: DType) -> bool {
        matches!(self, Self::Device(tensor) if tensor.dtype() == dtype)
    }

    /// Its number of elements.
    pub(crate) fn numel(&self) -> usize {
        match self {
            Self::Device(tensor) => super::shard_backend::numel::<B>(tensor),
            #[cfg(feature = "flex")]
            Self::Host(tensor) => super::shard_backend::numel::<Flex>(tensor),
        }
    }

    /// Bytes of its elements.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Device(tensor) => super::shard_backend::bytes::<B>(tensor),
            #[cfg(feature = "flex")]
            Self::Host(tensor) => super::shard_backend::bytes::<Flex>(tensor),
        }
    }

    /// Shows the elements in order, as bytes of the host.
    pub(crate) fn with_bytes(self, f: &mut dyn FnMut(&[u8])) {
        match self {
            Self::Device(tensor) => B::with_bytes(tensor, f),
            #[cfg(feature = "flex")]
            Self::Host(tensor) => Flex::with_bytes(tensor, f),
        }
    }

    /// What each range of its flattened tensor adds to a norm, in order.
    pub(crate) fn norm_sums(parts: Vec<(Self, Range<usize>)>, norm: Norm) -> Vec<f64> {
        let mut device = Vec::new();
        #[cfg(feature = "flex")]
        let mut host = Vec::new();
        for (part, range) in parts {
            match part {
                Self::Device(tensor) => device.push((tensor, range)),
                #[cfg(feature = "flex")]
                Self::Host(tensor) => host.push((tensor, range)),
            }
        }
        #[cfg(feature = "flex")]
        if !host.is_empty() {
            assert!(device.is_empty(), "all of a model's gradients rest at one place");
            return Flex::norm_sums(&host, norm);
        }
        B::norm_sums(&device, norm)
    }
}
