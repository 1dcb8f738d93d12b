//! Gradients divided by a loss scale and checked, in one pass over memory.

use std::collections::{HashMap, HashSet};

use burn::module::{Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Shape, Tensor};

use crate::backend::Norm;
use crate::backend::kernels::has_kernels;
use crate::backend::ops;
use crate::module::{FsdpModule, ParamVisitor};

/// Multiplies the gradients of a module's parameters, of ignored ones too, by `factor`, each in its
/// own memory where there is a kernel for it, and tells whether all elements are finite then.
pub(crate) fn unscale_gradients<M: FsdpModule>(
    module: &M,
    gradients: &mut GradientsParams,
    factor: f32,
) -> bool {
    let mut take = Take {
        gradients,
        factor,
        done: HashSet::new(),
        device: None,
        taken: Vec::new(),
        flat: Vec::new(),
        finite: true,
    };
    module.visit_params(&mut take);
    let Take { gradients, taken, flat, finite, .. } = take;
    let (flat, sums) = ops::unscale(flat, factor, Norm::Inf)
        .expect("`Take` has asked for the device and the dtype");
    let unscaled = taken.into_iter().zip(flat).map(|((id, shape), flat)| (id, (shape, flat)));
    module.visit_params(&mut Give { gradients, unscaled: unscaled.collect() });
    finite && sums.iter().all(ops::Sums::is_finite)
}

/// Takes the gradients that a kernel can multiply; the others it multiplies itself.
struct Take<'a> {
    gradients: &'a mut GradientsParams,
    factor: f32,
    /// A tied parameter stands at several places.
    done: HashSet<ParamId>,
    /// That of the first gradient.
    device: Option<Device>,
    taken: Vec<(ParamId, Shape)>,
    flat: Vec<Tensor<1>>,
    finite: bool,
}

impl ParamVisitor for Take<'_> {
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
        // NaN is not below anything; in f16 the bound itself would be infinite.
        let magnitude = gradient.clone().cast(DType::F32).abs();
        self.finite &= magnitude.lower_equal_elem(f32::MAX).all().into_scalar::<bool>();
        self.gradients.register(param.id, gradient);
    }
}

/// Puts them back.
struct Give<'a> {
    gradients: &'a mut GradientsParams,
    unscaled: HashMap<ParamId, (Shape, Tensor<1>)>,
}

impl ParamVisitor for Give<'_> {
    fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some((shape, flat)) = self.unscaled.remove(&param.id) {
            self.gradients.register(param.id, flat.reshape::<D, _>(shape));
        }
    }
}
