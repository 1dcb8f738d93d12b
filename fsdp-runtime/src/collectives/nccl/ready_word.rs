//! Order on the device between CubeCL's work and a collective of NCCL.
//!
//! NCCL runs on a stream of its own, as CubeCL does not give its streams out. By default the
//! communication thread waits on the host until its CubeCL stream is idle, and then queues the
//! collective. With [`STREAM_ORDER_VARIABLE`] CubeCL's stream writes a number into a word of device
//! memory after all that it was given, and NCCL's stream waits for that number. So the collective is
//! queued while earlier work still runs. The host waits for its end in either case, since it also
//! looks for failures and the time-out.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use burn::tensor::{DType, Shape};

use crate::backend::gather_buffer::GatherBuffer;
use crate::backend::{DeviceMemory, ShardBackend};
use crate::collectives::cuda::STREAM_ORDER_VARIABLE;
use crate::collectives::regions::ReusedBuffers;

/// Numbers are written as f32, which has this many consecutive positive ones.
const NUMBERS: u32 = 1 << 24;

/// Address of a word in device memory, and the bits that it holds once earlier work has run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ready {
    pub(super) at: u64,
    pub(super) bits: u32,
}

/// The word of one process group, if its collectives are ordered on the device.
#[derive(Debug)]
pub(in crate::collectives) struct ReadyWord {
    is_on: bool,
    word: ReusedBuffers,
    written: AtomicU32,
}

/// Keeps the word allocated.
pub(super) type HeldWord<B> = (DeviceMemory, Arc<GatherBuffer<B>>);

impl ReadyWord {
    pub(in crate::collectives) fn new(is_on: bool) -> Self {
        Self { is_on, word: ReusedBuffers::default(), written: AtomicU32::new(0) }
    }

    /// Reads [`STREAM_ORDER_VARIABLE`]: `1` is on, and everything else is off.
    pub(super) fn from_env() -> Self {
        Self::new(std::env::var(STREAM_ORDER_VARIABLE).is_ok_and(|value| value == "1"))
    }

    /// Returns the word of another process group, with the same setting.
    pub(super) fn of_split(&self) -> Self {
        Self::new(self.is_on)
    }

    /// Makes the device write the word after all work that the calling thread has issued. Returns
    /// `None` if this is off.
    ///
    /// The collective that waits for the word must end before the next call.
    pub(super) fn write<B: ShardBackend>(
        &self,
        device: &B::Device,
    ) -> Result<Option<(Ready, HeldWord<B>)>, String> {
        if !self.is_on {
            return Ok(None);
        }
        // Differs from the number before, which the word holds until this write has run.
        let number = self.written.fetch_add(1, Ordering::Relaxed) % NUMBERS + 1;
        let value = number as f32;
        let buffer = self.word.buffer::<B>(device, 1, DType::F32);
        buffer.write(0, B::float_full(Shape::from([1]), value.into(), device, DType::F32.into()));
        // The request of the address is in order with the write, so that the write is launched.
        let memory = buffer.device_memory()?;
        let ready = Ready { at: memory.start, bits: value.to_bits() };
        Ok(Some((ready, (memory, buffer))))
    }
}
