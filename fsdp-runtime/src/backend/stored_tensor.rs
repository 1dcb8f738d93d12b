//! Tensors in the place where they are stored between uses: on the device that computes with them,
//! or, under an offload policy, in host memory. There they are tensors of Flex, and optimizers
//! update them on the CPU.

use std::ops::Range;

#[cfg(feature = "flex")]
use burn::backend::Flex;
use burn::backend::autodiff::ops::NodeGuard;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{DType, DispatchTensor, Shape};
use fsdp_kernels::{Float, Kernels, Norm, RandomRounding, Tracked, cast};

use super::model_backend::{AutodiffContext, FloatTensor, ModelBackend, Raw, cast_model};
use super::shard_backend::{ShardBackend, bytes, decoded, encoded, numel};
#[cfg(feature = "flex")]
use super::shard_backend::{from_flex, to_flex};
use crate::layout::StorageType;

/// Shard or gradient in the place where it is stored.
#[derive(Debug)]
pub(crate) enum StoredTensor<B: Backend> {
    /// Tensor of the device that computes.
    Device(Float<B>),
    /// Tensor in host memory.
    #[cfg(feature = "flex")]
    Host(Float<Flex>),
}

/// Autodiff leaf of a parameter, in the place where the parameter is stored.
#[derive(Debug)]
pub(crate) enum StoredLeaf<B: Backend> {
    /// Leaf on the device that computes.
    Device(Tracked<B>),
    /// Leaf in host memory.
    #[cfg(feature = "flex")]
    Host(Tracked<Flex>),
}

impl<B: Backend> Clone for StoredTensor<B> {
    fn clone(&self) -> Self {
        match self {
            Self::Device(tensor) => Self::Device(tensor.clone()),
            #[cfg(feature = "flex")]
            Self::Host(tensor) => Self::Host(tensor.clone()),
        }
    }
}

impl<B: Backend> Clone for StoredLeaf<B> {
    fn clone(&self) -> Self {
        match self {
            Self::Device(leaf) => Self::Device(leaf.clone()),
            #[cfg(feature = "flex")]
            Self::Host(leaf) => Self::Host(leaf.clone()),
        }
    }
}

impl<B: ModelBackend> StoredLeaf<B> {
    /// Returns a leaf with the same elements and a new autodiff node, which belongs to no graph
    /// yet.
    pub(crate) fn with_new_node(&self) -> Self {
        match self {
            Self::Device(leaf) => Self::Device(new_leaf::<B>(leaf.primitive().clone())),
            #[cfg(feature = "flex")]
            Self::Host(leaf) => Self::Host(new_leaf::<Flex>(leaf.primitive().clone())),
        }
    }

    /// Returns the autodiff node.
    pub(crate) fn node(&self) -> NodeGuard {
        match self {
            Self::Device(leaf) => leaf.node(),
            #[cfg(feature = "flex")]
            Self::Host(leaf) => leaf.node(),
        }
    }
}

/// Returns a tracked tensor without parents.
pub(crate) fn new_leaf<B: ModelBackend>(value: Float<B>) -> Tracked<B> {
    Tracked::<B>::new(value).require_grad()
}

/// Parts of a stored Burn tensor: its elements, its autodiff leaf if it is tracked, and its
/// autodiff context if its device has one.
pub(super) type StoredParts<B> = (StoredTensor<B>, Option<StoredLeaf<B>>, Option<AutodiffContext>);

/// Device that stores a model's tensors between uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum StorageDevice {
    /// The device that computes.
    #[default]
    Device,
    /// The host. If `pinned`, copies to the device go through page-locked memory.
    Host { pinned: bool },
}

impl<B: ModelBackend> StoredTensor<B> {
    /// Takes a stored tensor out of Burn's dispatch type. Returns `None` if it is neither a float
    /// tensor of backend `B` nor, with storage on the host, one of Flex.
    pub(crate) fn from_dispatch(
        tensor: DispatchTensor,
        storage: StorageDevice,
    ) -> Option<StoredParts<B>> {
        #[cfg(feature = "flex")]
        if storage != StorageDevice::Device
            && let Some(value) = Flex::from_dispatch(tensor.clone())
        {
            return Some(match value {
                FloatTensor::Plain(tensor) => (Self::Host(tensor), None, None),
                FloatTensor::Autodiff(leaf, context) => {
                    let tensor = leaf.primitive().clone();
                    let leaf = leaf.is_tracked().then_some(StoredLeaf::Host(leaf));
                    (Self::Host(tensor), leaf, Some(context))
                }
            });
        }
        let _ = storage;
        Some(match B::from_dispatch(tensor)? {
            FloatTensor::Plain(tensor) => (Self::Device(tensor), None, None),
            FloatTensor::Autodiff(leaf, context) => {
                let tensor = leaf.primitive().clone();
                let leaf = leaf.is_tracked().then_some(StoredLeaf::Device(leaf));
                (Self::Device(tensor), leaf, Some(context))
            }
        })
    }

    /// Puts the tensor into Burn's dispatch type, without autodiff.
    pub(crate) fn into_dispatch(self) -> DispatchTensor {
        match self {
            Self::Device(tensor) => B::into_dispatch(FloatTensor::Plain(tensor)),
            #[cfg(feature = "flex")]
            Self::Host(tensor) => Flex::into_dispatch(FloatTensor::Plain(tensor)),
        }
    }

    /// Puts the tensor into Burn's dispatch type: untracked on an autodiff device if there is a
    /// context, else without autodiff.
    pub(crate) fn with_context(self, context: Option<AutodiffContext>) -> DispatchTensor {
        use burn::backend::{Autodiff, AutodiffBackend};
        let Some(context) = context else { return self.into_dispatch() };
        match self {
            Self::Device(tensor) => {
                B::into_dispatch(FloatTensor::Autodiff(Autodiff::<B>::from_inner(tensor), context))
            }
            #[cfg(feature = "flex")]
            Self::Host(tensor) => Flex::into_dispatch(FloatTensor::Autodiff(
                Autodiff::<Flex>::from_inner(tensor),
                context,
            )),
        }
    }

    /// Returns the elements of a whole parameter on the device, given its storage type, shape and
    /// dtype there: a copy if it is stored in host memory, or as codes. Nothing is lowered.
    pub(crate) fn on_model_device(
        self,
        device: &B::Device,
        (form, shape, dtype): (StorageType, &[usize], DType),
        storage: StorageDevice,
    ) -> Float<B> {
        match self {
            Self::Device(tensor) if form.is_coded() => {
                let shape = shape.to_vec();
                let output = (Shape::from(shape.clone()), dtype);
                let decode = move |codes: Vec<_>| {
                    let decode = |codes| decoded::<Raw<B>>(codes, form, &shape, dtype);
                    codes.into_iter().map(decode).collect()
                };
                let mut outputs = B::defer(vec![tensor], vec![output], decode);
                outputs.pop().expect("`defer` returns one tensor for each output")
            }
            Self::Device(tensor) => cast_model::<B>(tensor, dtype),
            #[cfg(feature = "flex")]
            Self::Host(tensor) => {
                let stored = StoredTensor::<Raw<B>>::Host(tensor);
                let stored = stored.on_device(device, form.sent_dtype(dtype), storage);
                B::raise(decoded::<Raw<B>>(stored, form, shape, dtype))
            }
        }
    }

    /// Returns the elements in f32. Nothing is lowered.
    pub(crate) fn widened(self) -> Self {
        match self {
            Self::Device(tensor) => Self::Device(cast_model::<B>(tensor, DType::F32)),
            #[cfg(feature = "flex")]
            Self::Host(tensor) => Self::Host(cast::<Flex>(tensor, DType::F32)),
        }
    }

    /// Returns f32 elements rounded to bf16 at random. Nothing is lowered.
    pub(crate) fn rounded(self, rounding: RandomRounding) -> Self {
        match self {
            Self::Device(tensor) => {
                Self::Device(B::defer_one(tensor, DType::BF16, move |tensor| {
                    Raw::<B>::round_at_random(tensor, &rounding)
                }))
            }
            #[cfg(feature = "flex")]
            Self::Host(tensor) => Self::Host(Flex::round_at_random(tensor, &rounding)),
        }
    }

    /// Returns the buffers of tensors, in order. The operations that write them are launched.
    pub(crate) fn lower(tensors: Vec<Self>) -> Vec<StoredTensor<Raw<B>>> {
        let on_device = |tensor: &Self| match tensor {
            Self::Device(tensor) => Some(tensor.clone()),
            #[cfg(feature = "flex")]
            Self::Host(_) => None,
        };
        let lowered: Vec<_> = tensors.iter().filter_map(on_device).collect();
        let mut lowered = B::lower(lowered).into_iter();
        let buffer = |tensor| match tensor {
            Self::Device(_) => {
                StoredTensor::Device(lowered.next().expect("`lower` returns as many buffers"))
            }
            #[cfg(feature = "flex")]
            Self::Host(tensor) => StoredTensor::Host(tensor),
        };
        tensors.into_iter().map(buffer).collect()
    }

    /// Returns the buffer of the tensor, as [`lower`](Self::lower) does.
    pub(crate) fn lower_one(self) -> StoredTensor<Raw<B>> {
        Self::lower(vec![self]).pop().expect("`lower` returns as many buffers")
    }

    /// Returns the tensor of a buffer.
    pub(crate) fn raise(buffer: StoredTensor<Raw<B>>) -> Self {
        match buffer {
            StoredTensor::Device(buffer) => Self::Device(B::raise(buffer)),
            #[cfg(feature = "flex")]
            StoredTensor::Host(tensor) => Self::Host(tensor),
        }
    }
}

impl<B: ShardBackend> StoredTensor<B> {
    /// Returns whether the tensor is on the device that computes and has this dtype.
    pub(crate) fn is_on_device(&self, dtype: DType) -> bool {
        matches!(self, Self::Device(tensor) if tensor.dtype() == dtype)
    }

    /// Moves a tensor of the device to where it is stored.
    pub(crate) fn store(tensor: Float<B>, storage: StorageDevice) -> Self {
        match storage {
            StorageDevice::Device => Self::Device(tensor),
            #[cfg(feature = "flex")]
            StorageDevice::Host { .. } => Self::Host(to_flex::<B>(tensor)),
            #[cfg(not(feature = "flex"))]
            StorageDevice::Host { .. } => unreachable!("offload without `flex` is refused earlier"),
        }
    }

    /// Returns the tensor on the device, cast to `dtype`: a copy if it is stored in host memory.
    pub(crate) fn on_device(
        self,
        device: &B::Device,
        dtype: DType,
        storage: StorageDevice,
    ) -> Float<B> {
        let _ = (device, storage);
        match self {
            Self::Device(tensor) => cast::<B>(tensor, dtype),
            // Casts before the copy, since a cast to half precision halves the bytes to copy.
            #[cfg(feature = "flex")]
            Self::Host(tensor) => {
                let pinned = storage == StorageDevice::Host { pinned: true };
                from_flex::<B>(tensor, dtype, device, pinned)
            }
        }
    }

    /// Returns the words of the elements' codes on the device. They are made where the tensor is stored.
    pub(crate) fn encoded(self, storage: StorageType, device: &B::Device) -> Float<B> {
        let range = 0..self.numel();
        let shape = Shape::from([storage.stored_len(range.len())]);
        match self {
            Self::Device(tensor) => encoded::<B>(tensor, range, storage, shape, device),
            #[cfg(feature = "flex")]
            Self::Host(tensor) => {
                let flex = burn::backend::flex::FlexDevice;
                let codes = encoded::<Flex>(tensor, range, storage, shape, &flex);
                let dtype = codes.dtype();
                from_flex::<B>(codes, dtype, device, false)
            }
        }
    }

    /// Adds two tensors that are stored in the same place.
    pub(crate) fn add(self, other: Self) -> Self {
        match (self, other) {
            (Self::Device(a), Self::Device(b)) => Self::Device(B::float_add(a, b)),
            #[cfg(feature = "flex")]
            (Self::Host(a), Self::Host(b)) => {
                use burn::backend::ops::FloatTensorOps;
                Self::Host(Flex::float_add(a, b))
            }
            #[cfg(feature = "flex")]
            _ => unreachable!("all gradients of a model are stored in the same place"),
        }
    }

    /// Returns the number of elements.
    pub(crate) fn numel(&self) -> usize {
        match self {
            Self::Device(tensor) => numel::<B>(tensor),
            #[cfg(feature = "flex")]
            Self::Host(tensor) => numel::<Flex>(tensor),
        }
    }

    /// Returns the size of the elements in bytes.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Device(tensor) => bytes::<B>(tensor),
            #[cfg(feature = "flex")]
            Self::Host(tensor) => bytes::<Flex>(tensor),
        }
    }

    /// Calls `f` once, with the bytes of all elements in order.
    pub(crate) fn with_bytes(self, f: &mut dyn FnMut(&[u8])) {
        match self {
            Self::Device(tensor) => B::with_bytes(tensor, f),
            #[cfg(feature = "flex")]
            Self::Host(tensor) => Flex::with_bytes(tensor, f),
        }
    }

    /// Returns the contribution to a norm of each flattened tensor's elements in the range, in the
    /// order of `parts`. All tensors are stored in the same place.
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
            assert!(device.is_empty(), "all gradients of a model are stored in the same place");
            return Flex::norm_sums(&host, norm);
        }
        B::norm_sums(&device, norm)
    }
}
