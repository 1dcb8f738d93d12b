//! Optimizer state that comes from a record into the host's memory.
//!
//! Burn rebuilds the state of all parameters on the default device, which may be none that the program
//! trains on and need not have room for it, and moves a parameter's to where its gradient lies when it
//! is stepped next. From the host it goes there as well, and stays where the optimizer steps there.

use burn::optim::{RecordState, StateSink, StateSource};
use burn::tensor::Device;

/// State `S`, in records as `S` is.
#[derive(Clone, Debug)]
pub struct OnHost<S>(pub S);

impl<S: RecordState> RecordState for OnHost<S> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        self.0.state_flatten(prefix, out);
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, device: &Device) -> Option<Self> {
        S::state_unflatten(prefix, src, &host(device)).map(Self)
    }
}

/// The host, where there is a backend for it; else `device`.
pub(super) fn host(device: &Device) -> Device {
    #[cfg(feature = "flex")]
    {
        let _ = device;
        Device::flex()
    }
    #[cfg(not(feature = "flex"))]
    device.clone()
}

#[cfg(all(test, feature = "flex", feature = "cpu"))]
mod tests {
    use burn::optim::AdamWState;
    use burn::tensor::Tensor;

    use super::*;

    #[test]
    fn state_of_a_record_comes_to_the_host_whatever_the_default_device() {
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
