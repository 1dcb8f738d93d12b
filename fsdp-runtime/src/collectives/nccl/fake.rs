//! A NCCL for tests: NCCL's functions in host memory, between threads of one process.
//!
//! As NVIDIA's NCCL does with `blocking = 0`, calls return at once, and the caller polls for their
//! end. So tests without a GPU cover the engine's addresses, counts, order of collectives, and how
//! it ends. They do not cover NVIDIA's NCCL, the driver, and CubeCL's streams.

mod stream;
mod work;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant};

use self::stream::LATE;
pub(super) use self::stream::{Issued, issued};
pub(crate) use self::stream::{OnStream, run_on_stream};
use self::work::work;
use super::sys::{
    Code, Library, cudaStream_t, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t,
    ncclUniqueId,
};

const SUCCESS: Code = 0;
const INVALID: Code = 4;
const REMOTE: Code = 6;
const IN_PROGRESS: Code = 7;

/// Operation of a call.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    AllGather,
    ReduceScatter,
    AllReduce,
    Broadcast(usize),
    Send(usize),
    Receive(usize),
    Split { color: c_int, key: c_int },
}

/// One call of a rank. Addresses are numbers, which can be sent to other threads.
#[derive(Clone, Copy, Debug)]
struct Post {
    kind: Kind,
    from: usize,
    to: usize,
    count: usize,
    /// Size of an element in bytes.
    size: usize,
}

#[derive(Default)]
struct State {
    joined: usize,
    /// Calls of the ranks, by the collective's sequence number.
    rounds: HashMap<usize, Vec<Option<Post>>>,
    /// Number of complete collectives.
    complete: usize,
    mail: HashMap<(usize, usize), Vec<Vec<u8>>>,
}

struct World {
    size: usize,
    state: Mutex<State>,
    changed: Condvar,
}

struct Comm {
    world: Arc<World>,
    rank: usize,
    sequence: AtomicUsize,
    aborted: AtomicBool,
    /// Result of `ncclCommGetAsyncError`.
    code: AtomicU32,
    /// What was put on streams.
    issued: Mutex<Vec<Issued>>,
}

thread_local! {
    static QUEUE: RefCell<Vec<(ncclComm_t, Post)>> = const { RefCell::new(Vec::new()) };
    static FAIL: Cell<bool> = const { Cell::new(false) };
    static HANG: Cell<bool> = const { Cell::new(false) };
    static SLOW: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    static LAUNCHED: Cell<Option<Instant>> = const { Cell::new(None) };
    static FINALIZED: Cell<usize> = const { Cell::new(0) };
}

static ABORTS: AtomicUsize = AtomicUsize::new(0);

/// Makes this thread's next collective fail.
pub(in crate::collectives) fn fail_next() {
    FAIL.set(true);
}

/// Makes this thread's next collective hang.
pub(in crate::collectives) fn hang_next() {
    HANG.set(true);
}

/// Makes this thread's next collective take this long until it is on the stream.
pub(in crate::collectives) fn launch_slowly(time: Duration) {
    SLOW.set(time);
}

/// Returns when this thread has put its last collective on the stream.
pub(in crate::collectives) fn launched() -> Option<Instant> {
    LAUNCHED.get()
}

/// Returns the number of communicators that this thread has finalized.
pub(in crate::collectives) fn finalized() -> usize {
    FINALIZED.get()
}

/// Returns the number of communicators that were aborted until now.
pub(in crate::collectives) fn aborts() -> usize {
    ABORTS.load(Ordering::SeqCst)
}

/// Returns the table of the fake's functions.
pub(crate) fn library() -> Arc<Library> {
    Arc::new(Library {
        ncclGetErrorString: error_string,
        ncclGetLastError: last_error,
        ncclGetUniqueId: unique_id,
        ncclCommInitRankConfig: init_rank,
        ncclCommSplit: split,
        ncclCommFinalize: finalize,
        ncclCommDestroy: destroy,
        ncclCommAbort: abort,
        ncclCommGetAsyncError: async_error,
        ncclGroupStart: group_start,
        ncclGroupEnd: group_end,
        ncclAllGather: all_gather,
        ncclReduceScatter: reduce_scatter,
        ncclAllReduce: all_reduce,
        ncclBroadcast: broadcast,
        ncclSend: send,
        ncclRecv: receive,
    })
}

fn worlds() -> &'static Mutex<HashMap<ncclUniqueId, Arc<World>>> {
    static WORLDS: OnceLock<Mutex<HashMap<ncclUniqueId, Arc<World>>>> = OnceLock::new();
    WORLDS.get_or_init(Mutex::default)
}

fn world(size: usize) -> Arc<World> {
    Arc::new(World { size, state: Mutex::default(), changed: Condvar::new() })
}

/// Creates a rank's communicator, as a handle that owns one reference.
fn handle(world: Arc<World>, rank: usize) -> ncclComm_t {
    world.state.lock().unwrap().joined += 1;
    let comm = Comm {
        world,
        rank,
        sequence: AtomicUsize::new(0),
        aborted: AtomicBool::new(false),
        code: AtomicU32::new(SUCCESS),
        issued: Mutex::default(),
    };
    Arc::into_raw(Arc::new(comm)).cast_mut().cast()
}

/// Returns the communicator of a handle.
///
/// # Safety
///
/// The handle still owns its reference.
unsafe fn comm(handle: ncclComm_t) -> Arc<Comm> {
    let handle = handle.cast::<Comm>().cast_const();
    // SAFETY: `handle` made the pointer, and the reference count is incremented before `from_raw`
    // takes one reference over.
    unsafe {
        Arc::increment_strong_count(handle);
        Arc::from_raw(handle)
    }
}

unsafe extern "C" fn error_string(_: Code) -> *const c_char {
    c"an error of the fake".as_ptr()
}

unsafe extern "C" fn last_error(_: ncclComm_t) -> *const c_char {
    std::ptr::null()
}

unsafe extern "C" fn unique_id(id: *mut ncclUniqueId) -> Code {
    static IDS: AtomicUsize = AtomicUsize::new(1);
    let mut internal = [0; 128];
    let number = IDS.fetch_add(1, Ordering::SeqCst).to_le_bytes();
    internal.iter_mut().zip(number).for_each(|(to, byte)| *to = byte as c_char);
    // SAFETY: the caller passes a valid pointer.
    unsafe { *id = ncclUniqueId { internal } };
    SUCCESS
}

unsafe extern "C" fn init_rank(
    made: *mut ncclComm_t,
    size: c_int,
    id: ncclUniqueId,
    rank: c_int,
    config: *mut ncclConfig_t,
) -> Code {
    // SAFETY: the caller passes valid pointers to a configuration and a handle.
    unsafe {
        if (*config).magic != 0xcafe_beef || (*config).blocking != 0 {
            return INVALID;
        }
        let mut worlds = worlds().lock().unwrap();
        let world = worlds.entry(id).or_insert_with(|| world(size as usize)).clone();
        *made = handle(world, rank as usize);
    }
    IN_PROGRESS
}

unsafe extern "C" fn finalize(_: ncclComm_t) -> Code {
    FINALIZED.set(FINALIZED.get() + 1);
    SUCCESS
}

unsafe extern "C" fn destroy(handle: ncclComm_t) -> Code {
    // SAFETY: the caller gives up the handle's reference.
    drop(unsafe { Arc::from_raw(handle.cast::<Comm>().cast_const()) });
    SUCCESS
}

unsafe extern "C" fn abort(handle: ncclComm_t) -> Code {
    // SAFETY: the caller gives up the handle's reference.
    let comm = unsafe { Arc::from_raw(handle.cast::<Comm>().cast_const()) };
    let state = comm.world.state.lock().unwrap();
    comm.aborted.store(true, Ordering::SeqCst);
    drop(state);
    comm.world.changed.notify_all();
    ABORTS.fetch_add(1, Ordering::SeqCst);
    SUCCESS
}

unsafe extern "C" fn async_error(handle: ncclComm_t, code: *mut Code) -> Code {
    // SAFETY: the caller passes its own handle, and a valid pointer for the code.
    unsafe {
        let comm = comm(handle);
        let joined = comm.world.state.lock().unwrap().joined == comm.world.size;
        *code = if joined { comm.code.load(Ordering::SeqCst) } else { IN_PROGRESS };
    }
    SUCCESS
}

fn post(
    comm: ncclComm_t,
    kind: Kind,
    (from, to): (*const c_void, *mut c_void),
    count: usize,
    dtype: ncclDataType_t,
) -> Code {
    let sums = matches!(kind, Kind::ReduceScatter | Kind::AllReduce);
    let size = match dtype {
        ncclDataType_t::ncclFloat32 => 4,
        ncclDataType_t::ncclFloat16 | ncclDataType_t::ncclBfloat16 if !sums => 2,
        _ => return INVALID,
    };
    let post = Post { kind, from: from.addr(), to: to.addr(), count, size };
    QUEUE.with_borrow_mut(|queue| queue.push((comm, post)));
    SUCCESS
}

unsafe extern "C" fn group_start() -> Code {
    QUEUE.with_borrow_mut(Vec::clear);
    SUCCESS
}

unsafe extern "C" fn group_end() -> Code {
    let queue = QUEUE.take();
    let Some((handle, _)) = queue.first() else { return SUCCESS };
    // SAFETY: the caller passes its own handle.
    let comm = unsafe { comm(*handle) };
    if FAIL.take() {
        comm.code.store(REMOTE, Ordering::SeqCst);
        return SUCCESS;
    }
    comm.code.store(IN_PROGRESS, Ordering::SeqCst);
    if HANG.take() {
        return IN_PROGRESS;
    }
    let posts = queue.into_iter().map(|(_, post)| post).collect();
    std::thread::sleep(SLOW.take());
    let (when, issued) = stream::issue();
    comm.issued.lock().unwrap().push(issued.clone());
    LAUNCHED.set(Some(Instant::now()));
    let is_prompt = matches!(when, OnStream::Prompt | OnStream::ShownLate);
    if !is_prompt {
        comm.code.store(SUCCESS, Ordering::SeqCst);
    }
    std::thread::spawn(move || {
        match when {
            OnStream::Never => return,
            OnStream::Fails => {
                std::thread::sleep(LATE);
                return comm.code.store(REMOTE, Ordering::SeqCst);
            }
            OnStream::Later => std::thread::sleep(LATE),
            OnStream::Prompt | OnStream::ShownLate => {}
        }
        if when != OnStream::ShownLate {
            return work(&comm, posts, &issued);
        }
        work(&comm, posts, &Issued::new(false));
        std::thread::sleep(LATE);
        issued.set_done();
    });
    IN_PROGRESS
}

unsafe extern "C" fn split(
    parent: ncclComm_t,
    color: c_int,
    key: c_int,
    made: *mut ncclComm_t,
    config: *mut ncclConfig_t,
) -> Code {
    // SAFETY: the caller passes a valid pointer to a configuration, and its own handle.
    let comm = unsafe {
        if (*config).magic != 0xcafe_beef || (*config).blocking != 0 {
            return INVALID;
        }
        comm(parent)
    };
    // NVIDIA's NCCL may wait for ever.
    if !comm.issued.lock().unwrap().iter().all(Issued::is_done) {
        return INVALID;
    }
    comm.code.store(IN_PROGRESS, Ordering::SeqCst);
    let to = made.expose_provenance();
    let post = Post { kind: Kind::Split { color, key }, from: 0, to, count: 0, size: 0 };
    std::thread::spawn(move || work(&comm, vec![post], &Issued::new(false)));
    IN_PROGRESS
}

macro_rules! posts {
    ($($name:ident($kind:expr $(, $last:ident: $type:ty)*);)*) => {
        $(unsafe extern "C" fn $name(
            from: *const c_void,
            to: *mut c_void,
            count: usize,
            dtype: ncclDataType_t,
            $($last: $type,)*
            comm: ncclComm_t,
            _: cudaStream_t,
        ) -> Code {
            if $(!fits(&$last) ||)* false {
                return INVALID;
            }
            post(comm, $kind, (from, to), count, dtype)
        })*
    };
}

/// Checks an argument that the engine always passes with the same kind of value.
trait Fits {
    fn fits(&self) -> bool;
}

impl Fits for ncclRedOp_t {
    fn fits(&self) -> bool {
        *self == Self::ncclSum
    }
}

impl Fits for c_int {
    fn fits(&self) -> bool {
        *self >= 0
    }
}

fn fits(argument: &impl Fits) -> bool {
    argument.fits()
}

posts! {
    all_gather(Kind::AllGather);
    reduce_scatter(Kind::ReduceScatter, op: ncclRedOp_t);
    all_reduce(Kind::AllReduce, op: ncclRedOp_t);
    broadcast(Kind::Broadcast(root as usize), root: c_int);
}

unsafe extern "C" fn send(
    from: *const c_void,
    count: usize,
    dtype: ncclDataType_t,
    peer: c_int,
    comm: ncclComm_t,
    _: cudaStream_t,
) -> Code {
    post(comm, Kind::Send(peer as usize), (from, std::ptr::null_mut()), count, dtype)
}

unsafe extern "C" fn receive(
    to: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    peer: c_int,
    comm: ncclComm_t,
    _: cudaStream_t,
) -> Code {
    post(comm, Kind::Receive(peer as usize), (std::ptr::null(), to), count, dtype)
}
