//! Order between the streams of CubeCL.
//!
//! # The rule
//!
//! Each thread issues its work on a CubeCL stream of its own. CubeCL orders streams by where and
//! when a handle was *allocated*, not by who last wrote it. If work on stream A binds a handle that
//! was allocated on stream B, A first waits for all work that B has been given so far. A does not
//! wait if it has waited for B since that allocation (`update_shared_bindings` in cubecl-server's
//! `stream/event.rs`). So three pairs of accesses have no order:
//!
//! - A's read of a handle that is older than A's last wait for B, after a later write on B.
//! - A's read of a handle that was allocated on B and written on a third stream.
//! - B's write into its own handle, after a read on A.
//!
//! All three occur in sharded training: an optimizer updates shards in their own memory, and gather
//! buffers live as long as the model. So nothing here relies on the handles of the data. A thread
//! that passes data on makes a [`Fence`], a handle that is allocated for this purpose, and the
//! thread that receives the data binds it before it touches the data. As the handle is new, the
//! receiver's stream waits for all that the sender's stream was given before, and for all that the
//! sender's stream had waited for itself. (CubeCL marks the place in the sender's stream when the
//! receiver binds the handle, so the wait may cover work that the sender was given later.)
//!
//! # The fences
//!
//! M is a rank's own thread, C its communication thread.
//!
//! | from | to | what is passed on |
//! |---|---|---|
//! | M | C | shards, after an optimizer's step; gradients; kept parts |
//! | M | C | a gather buffer, at reshard, after M's reads |
//! | C | C of another rank | shards and gradients, with engine `local` |
//! | C | M | shards of other ranks, with engine `local`; gathered parameters, reduced gradients |

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::tensor::DType;
use burn_cubecl::CubeDevice;
use burn_fusion::custom::StreamId;
use cubecl::server::Handle;

use fsdp_kernels::cube::{BufferSlice, copy};

/// Number of the next fence.
static NEXT: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The newest fence of each thread that this thread has waited for.
    static WAITED: RefCell<Vec<Fence>> = const { RefCell::new(Vec::new()) };
}

/// Mark of the operations that a thread has issued on a device.
#[derive(Clone, Debug)]
pub(crate) struct Fence(Arc<Mark>);

#[derive(Debug)]
struct Mark {
    /// Fences of one thread have ascending numbers.
    number: u64,
    device: CubeDevice,
    /// One element, allocated on the stream of the thread that made the fence. It has no content.
    handle: Handle,
}

impl Fence {
    /// Marks at least the operations that the calling thread has issued on the device so far.
    pub(super) fn new(device: &CubeDevice) -> Self {
        let handle = device.client().empty(size_of::<f32>());
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        #[cfg(test)]
        super::stream_order::made(number);
        Self(Arc::new(Mark { number, device: device.clone(), handle }))
    }

    /// Orders all later operations of the calling thread after those that the fence marks.
    #[cfg_attr(test, track_caller)]
    pub(super) fn wait(&self) {
        #[cfg(test)]
        super::stream_order::waits(self.0.number, std::panic::Location::caller());
        let is_new = WAITED.with_borrow_mut(|waited| {
            let same = |other: &&mut Self| {
                other.0.device == self.0.device && other.0.handle.stream == self.0.handle.stream
            };
            match waited.iter_mut().find(same) {
                Some(other) if other.0.number >= self.0.number => false,
                Some(other) => {
                    *other = self.clone();
                    true
                }
                None => {
                    waited.push(self.clone());
                    true
                }
            }
        });
        if is_new && self.0.handle.stream != StreamId::current() {
            self.bind();
        }
    }

    /// Launches a kernel that binds the handle. It copies the handle's element to memory that is
    /// never read.
    fn bind(&self) {
        let client = self.0.device.client();
        let slice = |handle| BufferSlice { handle, start: 0, dtype: DType::F32 };
        let unused = client.empty(size_of::<f32>());
        copy(&client, &slice(self.0.handle.clone()), &slice(unused), 1, None);
    }
}
