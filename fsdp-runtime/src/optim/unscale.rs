//! The division of gradients by a loss scale, and the check that they are finite, in one pass over
//! memory.

use std::collections::{HashMap, HashSet};

use burn::module::{Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Shape, Tensor};
use fsdp_kernels::has_kernels;

use crate::backend::{Norm, ops};
use crate::module::{FsdpModule, ParamVisitor};

/// Multiplies the gradients of a module's parameters by `factor`, including those of ignored
/// parameters. Returns whether all elements are finite afterwards.
///
/// Gradients that a kernel takes are multiplied in place.
pub(super) fn unscale_gradients<M: FsdpModule>(
    module: &M,
    gradients: &mut GradientsParams,
    factor: f32,
) -> bool {
    let mut take = TakeScaledGradients {
        gradients,
        factor,
        done: HashSet::new(),
        device: None,
        taken: Vec::new(),
        flat: Vec::new(),
        finite: true,
    };
    module.visit_params(&mut take);
    let TakeScaledGradients { gradients, taken, flat, finite, .. } = take;
    let (flat, sums) = ops::unscale(flat, factor, Norm::Inf)
        .expect("`TakeScaledGradients` has checked the device and the dtype");
    let unscaled = taken.into_iter().zip(flat).map(|((id, shape), flat)| (id, (shape, flat)));
    module.visit_params(&mut PutGradients { gradients, unscaled: unscaled.collect() });
    finite && sums.iter().all(ops::Sums::is_finite)
}

/// Takes out the gradients that a kernel can multiply, and multiplies the others with tensor
/// operations.
struct TakeScaledGradients<'a> {
    gradients: &'a mut GradientsParams,
    factor: f32,
    /// Parameters that were handled: the traversal reaches a tied weight several times.
    done: HashSet<ParamId>,
    /// Device of the first gradient that a kernel can multiply. The kernel takes gradients of one
    /// device.
    device: Option<Device>,
    /// Ids and shapes of the gradients in `flat`.
    taken: Vec<(ParamId, Shape)>,
    /// Gradients for the kernel, flattened.
    flat: Vec<Tensor<1>>,
    /// Whether the gradients that tensor operations multiplied are finite.
    finite: bool,
}

impl ParamVisitor for TakeScaledGradients<'_> {
    fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.done.insert(param.id) {
            return;
        }
        let Some(gradient) = self.gradients.remove::<D>(param.id) else { return };
        let device = gradient.device();
        let kernel = matches!(gradient.dtype(), DType::F32 | DType::BF16 | DType::F16)
            && has_kernels(&device)
            && *self.device.get_or_insert_with(|| device.clone()) == device;
        if kernel {
            let shape = gradient.shape();
            self.flat.push(gradient.reshape([shape.num_elements()]));
            self.taken.push((param.id, shape));
            return;
        }
        let gradient = gradient.mul_scalar(self.factor);
        // A comparison with NaN is false. The cast is needed because `f32::MAX` is infinite in f16.
        let magnitude = gradient.clone().cast(DType::F32).abs();
        self.finite &= magnitude.lower_equal_elem(f32::MAX).all().into_scalar::<bool>();
        self.gradients.register(param.id, gradient);
    }
}

/// Puts the gradients that the kernel has multiplied back.
struct PutGradients<'a> {
    gradients: &'a mut GradientsParams,
    unscaled: HashMap<ParamId, (Shape, Tensor<1>)>,
}

impl ParamVisitor for PutGradients<'_> {
    fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some((shape, flat)) = self.unscaled.remove(&param.id) {
            self.gradients.register(param.id, flat.reshape::<D, _>(shape));
        }
    }
}
