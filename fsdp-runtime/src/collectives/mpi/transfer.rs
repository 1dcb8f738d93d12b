//! Transfers of tensor data: non-blocking sends and receives, whose memory stays valid until they
//! are complete.

use std::mem::ManuallyDrop;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use burn::tensor::{DType, TensorData};
use burn_std::Bytes;

use super::group::MpiGroup;
use super::sys::{MpiError, Request};
use crate::backend::gather_buffer::GatherBuffer;
use crate::backend::{Float, ShardBackend};
use crate::collectives::op::Op;
use crate::error::{CollectiveError, IgnorePoison};
use crate::layout::Rank;

/// Largest size of a single message in bytes: MPI counts the bytes in a C int.
const LARGEST_MESSAGE: usize = 1 << 30;

/// Sends and receives that have been started, with their peers.
#[derive(Default)]
pub(super) struct Transfers {
    requests: Vec<(Rank, Request)>,
    /// Error of the first send or receive that MPI refused to start.
    refused: Option<MpiError>,
}

impl Transfers {
    fn add(&mut self, peer: Rank, request: Result<Request, MpiError>) {
        match request {
            Ok(request) => self.requests.push((peer, request)),
            Err(error) => {
                self.refused.get_or_insert(error);
            }
        }
    }
}

/// Elements to receive from one member.
pub(super) struct Expected {
    /// Position of the sender among the members.
    pub(super) from: usize,
    pub(super) tag: usize,
    /// Elements of the buffer that are received.
    pub(super) range: Range<usize>,
}

/// Parts that a transfer receives, and the buffer for them.
pub(super) struct Receive<'a, B: ShardBackend> {
    pub(super) buffer: &'a Arc<GatherBuffer<B>>,
    pub(super) device: &'a B::Device,
    pub(super) expected: &'a [Expected],
}

impl MpiGroup {
    /// Starts to send elements, as bytes, to a member.
    ///
    /// # Safety
    ///
    /// The elements must stay valid and unchanged until the transfers have succeeded, and forever
    /// if they fail.
    pub(super) unsafe fn send(
        &self,
        transfers: &mut Transfers,
        to: usize,
        tag: usize,
        elements: &[u8],
    ) {
        for message in elements.chunks(LARGEST_MESSAGE) {
            // SAFETY: the caller keeps the elements.
            let request = unsafe { self.comm.send(message.as_ptr(), message.len(), to, tag) };
            transfers.add(self.members[to], request);
        }
    }

    /// Starts to receive `bytes` bytes from a member, into the memory that starts at `start`.
    ///
    /// # Safety
    ///
    /// The memory must stay valid, and nobody else may read or write it, until the transfers have
    /// succeeded, and forever if they fail.
    unsafe fn receive(
        &self,
        transfers: &mut Transfers,
        from: usize,
        tag: usize,
        start: NonNull<u8>,
        bytes: usize,
    ) {
        for offset in (0..bytes).step_by(LARGEST_MESSAGE) {
            let len = LARGEST_MESSAGE.min(bytes - offset);
            // SAFETY: the caller keeps the memory, which has `bytes` bytes.
            let request = unsafe {
                let at = start.add(offset).as_ptr();
                self.comm.receive(at, len, from, tag)
            };
            transfers.add(self.members[from], request);
        }
    }

    /// Waits until all transfers are complete.
    fn complete(&self, op: &Op, transfers: Transfers) -> Result<(), CollectiveError> {
        self.control.check(op, transfers.refused.map_or(Ok(()), Err))?;
        self.control.complete(op, transfers.requests)
    }

    /// Runs the receives of `receive` and the sends of `start_sends` at the same time, waits for
    /// all of them, and returns `sent`.
    ///
    /// `sent` owns the memory of the sends. It is kept until all transfers are complete, and is never
    /// freed if one fails.
    pub(super) fn transfer<B: ShardBackend, K>(
        &self,
        op: &Op,
        receive: Receive<'_, B>,
        sent: K,
        start_sends: impl FnOnce(&K, &mut Transfers),
    ) -> Result<K, CollectiveError> {
        let Receive { buffer, expected, .. } = receive;
        let Some(start) = buffer.host_memory().filter(|_| !always_staged()) else {
            return self.transfer_staged(op, receive, sent, start_sends);
        };
        // After an error or a panic MPI may still use the memory: then it is never freed.
        let owned = ManuallyDrop::new((sent, buffer.clone()));
        let mut transfers = Transfers::default();
        let size = buffer.dtype().size();
        for Expected { from, tag, range } in expected {
            assert!(range.end <= buffer.numel(), "received elements lie within the buffer");
            // SAFETY: the range lies within the buffer, which `owned` keeps, and which nobody reads
            // while it is filled.
            unsafe {
                let at = start.add(range.start * size);
                self.receive(&mut transfers, *from, *tag, at, range.len() * size);
            }
        }
        start_sends(&owned.0, &mut transfers);
        self.complete(op, transfers)?;
        Ok(ManuallyDrop::into_inner(owned).0)
    }

    /// Performs a [`transfer`](Self::transfer) through host memory, for devices whose memory the
    /// host cannot write.
    fn transfer_staged<B: ShardBackend, K>(
        &self,
        op: &Op,
        receive: Receive<'_, B>,
        sent: K,
        start_sends: impl FnOnce(&K, &mut Transfers),
    ) -> Result<K, CollectiveError> {
        let Receive { buffer, device, expected } = receive;
        let mut staging = std::mem::take(&mut *self.staging.lock().ignore_poison());
        let size = buffer.dtype().size();
        let total: usize = expected.iter().map(|expected| expected.range.len() * size).sum();
        if staging.len() < total {
            staging.resize(total, 0);
        }
        // After an error or a panic MPI may still use the memory: then it is never freed.
        let mut owned = ManuallyDrop::new((sent, staging));
        let mut transfers = Transfers::default();
        let start = NonNull::from(owned.1.as_mut_slice()).cast::<u8>();
        let mut offset = 0;
        for Expected { from, tag, range } in expected {
            let bytes = range.len() * size;
            // SAFETY: the ranges lie one after the other in the staging buffer, which `owned`
            // keeps.
            unsafe { self.receive(&mut transfers, *from, *tag, start.add(offset), bytes) };
            offset += bytes;
        }
        start_sends(&owned.0, &mut transfers);
        self.complete(op, transfers)?;
        let (sent, staging) = ManuallyDrop::into_inner(owned);
        let mut offset = 0;
        for Expected { range, .. } in expected {
            let elements = staging[offset..offset + range.len() * size].to_vec();
            let tensor = from_host::<B>(device, elements, range.len(), buffer.dtype());
            buffer.write(range.start, tensor);
            offset += range.len() * size;
        }
        *self.staging.lock().ignore_poison() = staging;
        Ok(sent)
    }
}

/// Makes Flex receive through the staging buffer too, so that tests cover it without another
/// device.
#[cfg(test)]
pub(in crate::collectives) static ALWAYS_STAGED: std::sync::atomic::AtomicBool =
    std::sync::atomic::AtomicBool::new(false);

fn always_staged() -> bool {
    #[cfg(test)]
    return ALWAYS_STAGED.load(std::sync::atomic::Ordering::Relaxed);
    #[cfg(not(test))]
    false
}

/// Copies `numel` elements, given as bytes, to a tensor on `device`.
fn from_host<B: ShardBackend>(
    device: &B::Device,
    elements: Vec<u8>,
    numel: usize,
    dtype: DType,
) -> Float<B> {
    let bytes = Bytes::from_bytes_vec(elements);
    B::float_from_data(TensorData::from_bytes(bytes, [numel], dtype), device)
}
