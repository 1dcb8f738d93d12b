//! Batches that a thread prepares while the model computes.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::{Builder, JoinHandle};

use burn::data::dataset::DatasetError;

type Prepared<O> = Result<Result<O, DatasetError>, Box<dyn Any + Send>>;

/// An iterator over the batches that `prepare` returns for the numbers 0, 1, and so on, up to a
/// number of batches. A thread prepares them ahead. A panic of `prepare` continues in
/// [`next`](Self::next).
pub(super) struct Prefetch<O> {
    batches: Option<Receiver<Prepared<O>>>,
    thread: Option<JoinHandle<()>>,
}

impl<O: Send + 'static> Prefetch<O> {
    /// Starts a thread that prepares up to `ahead` batches, and at least one.
    pub(super) fn start(
        count: usize,
        ahead: usize,
        prepare: impl Fn(usize) -> Result<O, DatasetError> + Send + 'static,
    ) -> Self {
        // The thread holds one batch more than the channel.
        let (sender, batches) = sync_channel(ahead.saturating_sub(1));
        let run = move || {
            for number in 0..count {
                let batch = catch_unwind(AssertUnwindSafe(|| prepare(number)));
                let ends = !matches!(batch, Ok(Ok(_)));
                if sender.send(batch).is_err() || ends {
                    return;
                }
            }
        };
        let thread = Builder::new().name("fsdp-batches".into()).spawn(run);
        let thread = thread.expect("the operating system starts a thread");
        Self { batches: Some(batches), thread: Some(thread) }
    }

    /// Returns the next batch; `None` after the last one and after an error.
    pub(super) fn next(&mut self) -> Option<Result<O, DatasetError>> {
        match self.batches.as_ref()?.recv().ok()? {
            Ok(batch) => Some(batch),
            Err(panic) => resume_unwind(panic),
        }
    }
}

impl<O> Drop for Prefetch<O> {
    /// Ends the thread, which may still prepare one batch.
    fn drop(&mut self) {
        drop(self.batches.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the thread's own was sent as a batch.
            let _ = thread.join();
        }
    }
}
