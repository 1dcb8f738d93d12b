//! Data on its way between processes: non-blocking sends and receives, from and into memory that
//! stays until they are complete.

use std::mem::ManuallyDrop;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use burn::tensor::{DType, TensorData};
use burn_std::Bytes;

use super::sys::{MpiError, Request};
use super::{MpiGroup, lock};
use crate::backend::gather_buffer::GatherBuffer;
use crate::backend::{Float, ShardBackend};
use crate::collectives::Op;
use crate::error::CollectiveError;
use crate::layout::Rank;

/// Bytes of the largest single message: a C int counts them.
const PIECE: usize = 1 << 30;

/// Data on its way: what is sent, what is received, and with whom.
#[derive(Default)]
pub(super) struct Transfers {
    requests: Vec<(Rank, Request)>,
    /// The first call that MPI refused.
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

/// Elements that a member sends, and where they go.
pub(super) struct Expected {
    pub(super) from: usize,
    pub(super) tag: usize,
    pub(super) range: Range<usize>,
}

impl MpiGroup {
    /// Starts to send elements, as bytes, to a member.
    ///
    /// # Safety
    ///
    /// They must stay, unchanged, until the transfers have ended well, and for ever otherwise.
    pub(super) unsafe fn send(
        &self,
        transfers: &mut Transfers,
        to: usize,
        tag: usize,
        elements: &[u8],
    ) {
        for piece in elements.chunks(PIECE) {
            // SAFETY: the caller keeps the elements.
            let request = unsafe { self.comm.send(piece.as_ptr(), piece.len(), to, tag) };
            transfers.add(self.members[to], request);
        }
    }

    /// Starts to receive `bytes` bytes from a member.
    ///
    /// # Safety
    ///
    /// Their place must stay, untouched, until the transfers have ended well, and for ever
    /// otherwise.
    unsafe fn receive(
        &self,
        transfers: &mut Transfers,
        from: usize,
        tag: usize,
        at: NonNull<u8>,
        bytes: usize,
    ) {
        for start in (0..bytes).step_by(PIECE) {
            let len = PIECE.min(bytes - start);
            // SAFETY: the caller keeps the place, which has `bytes` bytes.
            let request = unsafe {
                let at = at.add(start).as_ptr();
                self.comm.receive(at, len, from, tag)
            };
            transfers.add(self.members[from], request);
        }
    }

    /// Waits for transfers.
    fn complete(&self, op: &Op, transfers: Transfers) -> Result<(), CollectiveError> {
        self.link.check(op, transfers.refused.map_or(Ok(()), Err))?;
        self.link.complete(op, transfers.requests)
    }

    /// Receives, into `slot`, what `expected` says: from whom, under which tag and where; `send`
    /// starts what this rank sends meanwhile, from `kept`.
    pub(super) fn land<B: ShardBackend, K>(
        &self,
        op: &Op,
        slot: &Arc<GatherBuffer<B>>,
        device: &B::Device,
        expected: &[Expected],
        kept: K,
        send: impl FnOnce(&K, &mut Transfers),
    ) -> Result<K, CollectiveError> {
        let Some(start) = slot.host_memory().filter(|_| !always_staged()) else {
            return self.land_staged(op, slot, device, expected, kept, send);
        };
        // On an error, or a panic, transfers may go on: what they touch is never freed.
        let kept = ManuallyDrop::new((kept, slot.clone()));
        let mut transfers = Transfers::default();
        let size = slot.dtype().size();
        for Expected { from, tag, range } in expected {
            assert!(range.end <= slot.numel(), "what arrives stays within its slot");
            // SAFETY: the range lies within the slot, which nobody reads while it is filled, and
            // which `kept` holds.
            unsafe {
                let at = start.add(range.start * size);
                self.receive(&mut transfers, *from, *tag, at, range.len() * size);
            }
        }
        send(&kept.0, &mut transfers);
        self.complete(op, transfers)?;
        Ok(ManuallyDrop::into_inner(kept).0)
    }

    /// As [`land`](Self::land), by way of the host.
    fn land_staged<B: ShardBackend, K>(
        &self,
        op: &Op,
        slot: &Arc<GatherBuffer<B>>,
        device: &B::Device,
        expected: &[Expected],
        kept: K,
        send: impl FnOnce(&K, &mut Transfers),
    ) -> Result<K, CollectiveError> {
        let mut staging = std::mem::take(&mut *lock(&self.staging));
        let size = slot.dtype().size();
        let total: usize = expected.iter().map(|expected| expected.range.len() * size).sum();
        if staging.len() < total {
            staging.resize(total, 0);
        }
        // As above.
        let mut kept = ManuallyDrop::new((kept, staging));
        let mut transfers = Transfers::default();
        let start = NonNull::from(kept.1.as_mut_slice()).cast::<u8>();
        let mut at = 0;
        for Expected { from, tag, range } in expected {
            // SAFETY: the ranges lie one after the other in the staging buffer, which `kept` holds.
            unsafe { self.receive(&mut transfers, *from, *tag, start.add(at), range.len() * size) };
            at += range.len() * size;
        }
        send(&kept.0, &mut transfers);
        self.complete(op, transfers)?;
        let (kept, staging) = ManuallyDrop::into_inner(kept);
        let mut at = 0;
        for Expected { range, .. } in expected {
            let elements = staging[at..at + range.len() * size].to_vec();
            slot.write(range.start, from_host::<B>(device, elements, range.len(), slot.dtype()));
            at += range.len() * size;
        }
        *lock(&self.staging) = staging;
        Ok(kept)
    }
}

/// Tests of what devices need, where there is none, stage on Flex too.
#[cfg(test)]
pub(crate) static ALWAYS_STAGED: std::sync::atomic::AtomicBool =
    std::sync::atomic::AtomicBool::new(false);

fn always_staged() -> bool {
    #[cfg(test)]
    return ALWAYS_STAGED.load(std::sync::atomic::Ordering::Relaxed);
    #[cfg(not(test))]
    false
}

fn from_host<B: ShardBackend>(
    device: &B::Device,
    elements: Vec<u8>,
    numel: usize,
    dtype: DType,
) -> Float<B> {
    let bytes = Bytes::from_bytes_vec(elements);
    B::float_from_data(TensorData::from_bytes(bytes, [numel], dtype), device)
}
