//! The kernels that every backend has.

use std::ops::Range;

use burn::backend::Backend;
use burn::tensor::{DType, Shape};

use super::mask::MaskSource;
use super::update_rules::{AdamStep, SgdStep};
use crate::backend::norm::Norm;
use crate::backend::tensor::Float;

/// The kernels of one backend. Launchers check lengths and panic where a caller inside this crate
/// has miscounted; dtypes are f32, bf16 and f16.
pub(crate) trait Kernels: Backend {
    /// The tensors' elements, each from its offset in the buffer on, rounded to the buffer's dtype.
    /// The rest of the buffer stays as it is. In the buffer's own memory where nothing shares it.
    fn pack(parts: Vec<(Float<Self>, usize)>, buffer: Float<Self>) -> Float<Self>;

    /// Tensors of their own of the given shapes, each from its offset in the buffer on: divided by
    /// `divisor` in f32 if given, rounded to `dtype`.
    fn unpack(
        buffer: Float<Self>,
        parts: Vec<(usize, Shape)>,
        dtype: DType,
        divisor: Option<f32>,
    ) -> Vec<Float<Self>>;

    /// The tensor's elements, divided by `divisor` in f32 if given, rounded to `dtype`.
    fn cast(tensor: Float<Self>, dtype: DType, divisor: Option<f32>) -> Float<Self>;

    /// The mean over `parts` of `range` of each flattened part, in f32: added in f32 in their order,
    /// then divided by `divisor`. All parts have one dtype.
    fn rank_mean(
        parts: &[Float<Self>],
        range: Range<usize>,
        divisor: usize,
        shape: Shape,
    ) -> Float<Self>;

    /// What each range of its flattened tensor adds to a norm.
    fn sums(parts: &[(Float<Self>, Range<usize>)], norm: Norm) -> Vec<Sums>;

    /// Multiplies the tensors by `factor`, in their own memory where nothing shares it, and tells what
    /// each adds to a norm then.
    fn unscale(tensors: Vec<Float<Self>>, factor: f32, norm: Norm)
    -> (Vec<Float<Self>>, Vec<Sums>);

    /// The tensor's elements times those of a dropout mask, which is in no memory.
    fn dropout(tensor: Float<Self>, source: &MaskSource) -> Float<Self>;

    /// Zeros in f32, in memory of their own.
    fn zeros(device: &Self::Device, shape: Shape) -> Float<Self> {
        Self::float_zeros(shape, device, DType::F32.into())
    }

    /// One step of Adam or AdamW on f32 tensors of one shape, each updated in its own memory where
    /// nothing shares it: if `later`, possibly only when the
    /// [`batched_steps::scope`](super::batched_steps::scope) around ends, until when nothing may look at
    /// them.
    fn adam(
        step: &AdamStep,
        grad: Float<Self>,
        tensors: AdamTensors<Float<Self>>,
        later: bool,
    ) -> AdamTensors<Float<Self>>;

    /// One step of SGD on f32 tensors of one shape, with momentum where there is a velocity, each
    /// updated in its own memory where nothing shares it; `later` as for [`adam`](Self::adam).
    fn sgd(
        step: &SgdStep,
        grad: Float<Self>,
        param: Float<Self>,
        velocity: Option<Float<Self>>,
        later: bool,
    ) -> (Float<Self>, Option<Float<Self>>);
}

/// What a step of Adam updates.
pub(crate) struct AdamTensors<T> {
    pub(crate) param: T,
    pub(crate) moment_1: T,
    pub(crate) moment_2: T,
    /// With AMSGrad, the largest second moments so far.
    pub(crate) max: Option<T>,
}

impl<T> AdamTensors<T> {
    /// The same of other tensors.
    pub(crate) fn map<U>(self, mut f: impl FnMut(T) -> U) -> AdamTensors<U> {
        AdamTensors {
            param: f(self.param),
            moment_1: f(self.moment_1),
            moment_2: f(self.moment_2),
            max: self.max.map(f),
        }
    }
}

/// What the elements of one tensor add to a norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sums {
    /// The sum of the norm's terms; 0 for the infinity norm.
    pub sum: f64,
    /// The largest magnitude; NaN where an element is NaN.
    pub largest: f32,
}

impl Sums {
    /// What is added to the norm.
    pub fn term(&self, norm: Norm) -> f64 {
        match norm {
            Norm::Inf => f64::from(self.largest),
            _ => self.sum,
        }
    }

    /// Whether no element is infinite or NaN, whatever their sum.
    pub fn is_finite(&self) -> bool {
        self.largest.is_finite()
    }
}
