//! The stream of a thread in host memory: when its collectives run, and when their end shows.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

thread_local! {
    static STREAM: Cell<OnStream> = const { Cell::new(OnStream::Prompt) };
    static ISSUED: RefCell<Issued> = RefCell::new(Issued::new(true));
}

/// When the collectives of a thread run, after they were put on the stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum OnStream {
    /// Before the call that puts them there is complete. Tests may read the results then.
    Prompt,
    /// As `Prompt`, but their end shows later.
    ShownLate,
    /// After the call, once all ranks have made it.
    Later,
    /// Never.
    Never,
    /// Never, and an error of NCCL shows after the call.
    Fails,
}

/// Time until the end of a collective, or its error, shows if it does so late.
pub(super) const LATE: Duration = Duration::from_millis(5);

/// Makes the later collectives of this thread run at some time after they were put on the stream.
pub(crate) fn run_on_stream(when: OnStream) {
    STREAM.set(when);
}

/// What a thread has put on its stream.
#[derive(Clone, Debug)]
pub(in crate::collectives::nccl) struct Issued(Arc<AtomicBool>);

impl Issued {
    pub(super) fn new(is_done: bool) -> Self {
        Self(Arc::new(AtomicBool::new(is_done)))
    }

    pub(super) fn set_done(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Returns whether it has run.
    pub(in crate::collectives::nccl) fn is_done(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// Returns what this thread has put on its stream.
pub(in crate::collectives::nccl) fn issued() -> Issued {
    ISSUED.with_borrow(Issued::clone)
}

/// Puts work on this thread's stream. Returns when it runs.
pub(super) fn issue() -> (OnStream, Issued) {
    let issued = Issued::new(false);
    ISSUED.replace(issued.clone());
    (STREAM.get(), issued)
}
