//! A running reduction of a unit's gradients, and the sum of gradients.

use crate::backend::{ShardBackend, StoredTensor};
use crate::collectives::device_work::DeviceWork;
use crate::param_group::memory::Counted;

/// The reduced gradient of each parameter, and the accounting of their memory on the device. The
/// accounting is `None` once the gradients are on the host.
pub(super) type Reduced<B> = (Vec<Option<StoredTensor<B>>>, Option<Counted>);

/// A running reduction of a unit's gradients.
#[derive(Debug)]
pub(super) struct Reduction<B: ShardBackend> {
    pub(super) unit: usize,
    /// Whether the results are sums over the shard group, which a later micro-batch reduces among
    /// the replicas.
    pub(super) is_partial: bool,
    /// Bytes of the full gradients, which are freed when the reduction ends.
    pub(super) bytes: usize,
    pub(super) work: DeviceWork<B, Reduced<B>>,
}

/// Adds reduced gradients to sums, parameter by parameter.
pub(super) fn add_up<B: ShardBackend>(
    sums: &mut [Option<StoredTensor<B>>],
    gradients: Vec<Option<StoredTensor<B>>>,
) {
    for (sum, gradient) in sums.iter_mut().zip(gradients) {
        *sum = match (sum.take(), gradient) {
            (Some(sum), Some(gradient)) => Some(sum.add(gradient)),
            (sum, gradient) => sum.or(gradient),
        };
    }
}
