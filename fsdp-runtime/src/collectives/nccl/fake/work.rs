//! The work of collectives in host memory.

use std::ffi::c_int;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::super::sys::ncclComm_t;
use super::stream::Issued;
use super::{Comm, IN_PROGRESS, Kind, Post, SUCCESS, handle, world};

/// Copies the bytes at an address.
///
/// # Safety
///
/// There are `bytes` bytes at `at`. They stay valid, and nobody writes them, until the engine has
/// polled the end of the collective.
unsafe fn read(at: usize, bytes: usize) -> Vec<u8> {
    // SAFETY: as the caller promises.
    unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(at), bytes) }.to_vec()
}

/// Writes bytes at an address.
///
/// # Safety
///
/// There is room for the bytes at `at`. It stays valid, and nobody reads it, until the engine has
/// polled the end of the collective.
unsafe fn write(at: usize, bytes: &[u8]) {
    let to: *mut u8 = std::ptr::with_exposed_provenance_mut(at);
    // SAFETY: as the caller promises.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
}

/// Runs the calls that a rank has queued as one group, and marks them and the communicator as done.
pub(super) fn work(comm: &Comm, posts: Vec<Post>, issued: &Issued) {
    // Sends come first, as they do not wait for other ranks.
    let (sends, others): (Vec<_>, Vec<_>) =
        posts.into_iter().partition(|post| matches!(post.kind, Kind::Send(_)));
    for post in sends.into_iter().chain(others) {
        let done = match post.kind {
            Kind::Send(to) => {
                // SAFETY: the engine keeps the elements until it has polled the end of the
                // collective.
                let elements = unsafe { read(post.from, post.count * post.size) };
                let mut state = comm.world.state.lock().unwrap();
                state.mail.entry((comm.rank, to)).or_default().push(elements);
                true
            }
            Kind::Receive(from) => receive_from(comm, from, post),
            _ => join_collective(comm, post),
        };
        comm.world.changed.notify_all();
        if !done {
            return;
        }
    }
    issued.set_done();
    let _ = comm.code.compare_exchange(IN_PROGRESS, SUCCESS, Ordering::SeqCst, Ordering::SeqCst);
}

fn receive_from(comm: &Comm, from: usize, post: Post) -> bool {
    let mut state = comm.world.state.lock().unwrap();
    loop {
        if comm.aborted.load(Ordering::SeqCst) {
            return false;
        }
        if let Some(mail) = state.mail.get_mut(&(from, comm.rank)).filter(|mail| !mail.is_empty()) {
            let elements = mail.remove(0);
            assert_eq!(
                elements.len(),
                post.count * post.size,
                "sender and receiver pass the same count"
            );
            // SAFETY: the engine keeps the memory until it has polled the end of the collective.
            unsafe { write(post.to, &elements) };
            return true;
        }
        (state, _) = comm.world.changed.wait_timeout(state, Duration::from_millis(20)).unwrap();
    }
}

/// Waits for every rank's call of the same collective; the last rank does the work of all. Returns
/// whether the collective was completed.
fn join_collective(comm: &Comm, post: Post) -> bool {
    let world = &comm.world;
    let sequence = comm.sequence.fetch_add(1, Ordering::SeqCst);
    let mut state = world.state.lock().unwrap();
    let round = state.rounds.entry(sequence).or_insert_with(|| vec![None; world.size]);
    round[comm.rank] = Some(post);
    if round.iter().all(Option::is_some) {
        let posts: Vec<Post> =
            state.rounds.remove(&sequence).unwrap().into_iter().flatten().collect();
        if comm.aborted.load(Ordering::SeqCst) {
            return false;
        }
        complete(&posts);
        state.complete = sequence + 1;
        return true;
    }
    while state.complete <= sequence {
        if comm.aborted.load(Ordering::SeqCst) {
            return false;
        }
        (state, _) = world.changed.wait_timeout(state, Duration::from_millis(20)).unwrap();
    }
    true
}

fn complete(posts: &[Post]) {
    let (kind, count) = (posts[0].kind, posts[0].count);
    assert!(
        posts.iter().all(|post| post.count == count),
        "all ranks pass the same count: {posts:?}"
    );
    if let Kind::Split { .. } = kind {
        return split_all(posts);
    }
    assert!(
        posts.iter().all(|post| post.kind == kind),
        "all ranks call the same collective: {posts:?}"
    );
    let size = posts[0].size;
    let all = |numel: usize| -> Vec<Vec<u8>> {
        // SAFETY: every rank waits in the collective, so its elements stay valid.
        posts.iter().map(|post| unsafe { read(post.from, numel * size) }).collect()
    };
    let sum = |numel| -> Vec<u8> {
        let add =
            |sum: Vec<f32>, part: Vec<f32>| sum.iter().zip(part).map(|(a, b)| a + b).collect();
        let parts = all(numel).into_iter().map(|part| bytemuck::pod_collect_to_vec(&part));
        let sum: Vec<f32> = parts.reduce(add).expect("a world has a rank");
        bytemuck::cast_slice(&sum).to_vec()
    };
    let results: Vec<Vec<u8>> = match kind {
        Kind::AllGather => vec![all(count).concat(); posts.len()],
        Kind::ReduceScatter => {
            sum(count * posts.len()).chunks(count * size).map(<[u8]>::to_vec).collect()
        }
        Kind::AllReduce => vec![sum(count); posts.len()],
        Kind::Broadcast(root) => vec![all(count).swap_remove(root); posts.len()],
        Kind::Send(_) | Kind::Receive(_) | Kind::Split { .. } => {
            unreachable!("not a collective on data")
        }
    };
    for (post, result) in posts.iter().zip(results) {
        // SAFETY: as above, with room for the result.
        unsafe { write(post.to, &result) };
    }
}

fn split_all(posts: &[Post]) {
    let mut ranks: Vec<(c_int, c_int, usize)> = Vec::new();
    for (rank, post) in posts.iter().enumerate() {
        let Kind::Split { color, key } = post.kind else {
            panic!("all ranks call the same collective")
        };
        ranks.push((color, key, rank));
    }
    ranks.sort_unstable();
    for group in ranks.chunk_by(|a, b| a.0 == b.0) {
        let world = world(group.len());
        for (position, &(_, _, rank)) in group.iter().enumerate() {
            let made: *mut ncclComm_t = std::ptr::with_exposed_provenance_mut(posts[rank].to);
            // SAFETY: every rank waits for its handle, and keeps the memory for it.
            unsafe { *made = handle(world.clone(), position) };
        }
    }
}
