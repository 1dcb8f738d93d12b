//! Optimizer state that is loaded from a record into host memory.
//!
//! Burn loads the state of all parameters on the default device. The program may not train on that
//! device, and the device may not have enough memory. When a parameter is stepped, Burn moves its
//! state to the device of the gradient. It does so from the host too; with offload, the optimizer
//! steps on the host and the state stays there.

use burn::optim::{RecordState, StateSink, StateSource};
use burn::tensor::Device;

use crate::backend::host_device;

/// State `S` of an optimizer, which a record loads into host memory. The record is that of `S`.
#[derive(Clone, Debug)]
pub struct OnHost<S>(pub S);

impl<S: RecordState> RecordState for OnHost<S> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        self.0.state_flatten(prefix, out);
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, device: &Device) -> Option<Self> {
        S::state_unflatten(prefix, src, &host_device(device)).map(Self)
    }
}

#[cfg(all(test, feature = "flex", feature = "cpu"))]
mod tests {
    use burn::optim::AdamWState;
    use burn::tensor::Tensor;

    use super::*;

    #[test]
    fn state_of_a_record_is_loaded_on_the_host_and_not_on_the_default_device() {
        let mut sink = StateSink::default();
        let moment = || Tensor::<1>::from_floats([1.0, 2.0], &Device::flex());
        let state = burn::optim::AdaptiveMomentumState::new(3, moment(), moment());
        OnHost(AdamWState::new(state)).state_flatten("p", &mut sink);
        let mut source = StateSource::new(sink.scalars.into_iter().collect());
        sink.tensors.into_iter().for_each(|(name, data)| source.insert_tensor(name, data));
        let OnHost(state) =
            OnHost::<AdamWState<1>>::state_unflatten("p", &mut source, &Device::cpu()).unwrap();
        assert_eq!(state.momentum.moment_1.device(), Device::flex());
        assert_eq!((state.momentum.time, state.momentum.moment_2.dims()), (3, [2]));
    }
}
