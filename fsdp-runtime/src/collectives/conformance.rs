//! Conformance tests: one list of checks that every engine must pass, in worlds of 1 to 4 ranks.
//!
//! A check is a function that every rank of a process group runs, on the tensors of any backend. On
//! `local`, the ranks are threads. For `mpi`, the test starts this test program again under
//! `mpirun`, which then runs [`mpi::as_a_process`] alone; without `mpirun` the test is skipped. For
//! `nccl`, threads run the checks on a NCCL that works in host memory, and on NVIDIA's if the
//! machine has GPUs.

mod codes;
mod faults;
mod meshes;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use burn::backend::flex::FlexDevice;
use burn::backend::{Flex, TensorMetadata};
use burn::tensor::{DType, Shape, TensorData};

use self::codes::{all_gather_codes, gather_codes};
use self::faults::{failure, mismatch, mismatch_of_sizes, time_out, time_out_of_waiting_ranks};
use self::meshes::groups_of_a_mesh;
use super::group::AnyProcessGroup;
use super::op::Op;
use super::process_group::{ProcessGroup, Reduce, ReduceScatter};
use crate::backend::gather_buffer::GatherBuffer;
use crate::backend::{Float, ShardBackend, cast};
use crate::error::CollectiveError;
use crate::layout::{FlatRange, Rank, UnitLayout, WorldSize};

/// A check, and the settings of the process group that it runs on.
struct Check {
    name: &'static str,
    timeout: Duration,
    debug: bool,
    run: fn(&AnyProcessGroup),
}

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(400);

/// A backend to test, with the device of the calling rank.
trait Tested: ShardBackend {
    fn device() -> Self::Device;
}

impl Tested for Flex {
    fn device() -> FlexDevice {
        FlexDevice
    }
}

fn checks<B: Tested>() -> [Check; 21] {
    let check = |name, run| Check { name, timeout: LONG, debug: false, run };
    let debug = |check| Check { debug: true, ..check };
    [
        check("exchange", exchange),
        check("gather of values", gather_values),
        check("all_gather", all_gather::<B>),
        check("all_gather of codes", all_gather_codes::<B>),
        check("all_gather_one", all_gather_one::<B>),
        check("gather", gather_to_one::<B>),
        check("gather of codes", gather_codes::<B>),
        debug(check("reduce_scatter", reduce_scatter::<B>)),
        check("all_reduce", all_reduce),
        check("absent gradients", absent_gradients::<B>),
        check("several types", several_types::<B>),
        check("broadcast", broadcast::<B>),
        debug(check("ten million elements", ten_million::<B>)),
        check("split", split::<B>),
        check("groups of a mesh", groups_of_a_mesh::<B>),
        check("issue order", issue_order::<B>),
        Check { timeout: SHORT, ..check("time-out", time_out) },
        Check { timeout: SHORT, ..check("time-out of waiting ranks", time_out_of_waiting_ranks) },
        check("mismatch", mismatch),
        debug(check("mismatch of sizes", mismatch_of_sizes)),
        check("failure", failure),
    ]
}

/// Numbers of elements that are hard for engines: fewer than ranks, primes, and sizes around and
/// far above the largest message that MPI sends eagerly.
const SIZES: [usize; 6] = [1, 3, 64, 7919, 100_003, 1 << 20];

fn op(name: &'static str, unit: &str) -> Op {
    Op::new(name, unit)
}

fn on<B: Tested>(group: &AnyProcessGroup) -> &dyn ProcessGroup<B> {
    group
}

fn tensor<B: Tested>(elements: Vec<f32>) -> Float<B> {
    let shape = [elements.len()];
    B::float_from_data(TensorData::new(elements, shape), &B::device())
}

/// Returns a tensor of the type `dtype`.
fn tensor_as<B: Tested>(elements: Vec<f32>, dtype: DType) -> Float<B> {
    cast::<B>(tensor::<B>(elements), dtype)
}

fn buffer<B: Tested>(numel: usize) -> Arc<GatherBuffer<B>> {
    Arc::new(GatherBuffer::new(&B::device(), numel, DType::F32))
}

fn elements<B: Tested>(tensor: &Float<B>) -> Vec<f32> {
    let mut elements = Vec::new();
    let tensor = cast::<B>(tensor.clone(), DType::F32);
    B::with_bytes(tensor, &mut |bytes| elements = bytemuck::pod_collect_to_vec(bytes));
    elements
}

/// Rounds elements to the type `dtype`.
fn rounded(values: Vec<f32>, dtype: DType) -> Vec<f32> {
    elements::<Flex>(&tensor_as::<Flex>(values, dtype))
}

/// Types in which parameters and gradients are sent.
const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Returns an element of a rank's tensor. The values are such that the order of a sum changes its
/// bits.
fn value(rank: usize, index: usize) -> f32 {
    ((index * 31 + rank * 7919) % 10_007) as f32 * 1e-3 - 3.3
}

fn values(rank: usize, range: Range<usize>) -> Vec<f32> {
    range.map(|index| value(rank, index)).collect()
}

/// Sums the ranks' elements in rank order, in f32, and divides the sum.
fn mean(ranks: &[usize], range: Range<usize>, divisor: usize, dtype: DType) -> Vec<f32> {
    let add = |sum: Vec<f32>, part: Vec<f32>| sum.iter().zip(part).map(|(a, b)| a + b).collect();
    let parts = ranks.iter().map(|&rank| rounded(values(rank, range.clone()), dtype));
    let sum: Vec<f32> = parts.reduce(add).unwrap();
    sum.iter().map(|sum| sum / divisor as f32).collect()
}

fn index(group: &AnyProcessGroup) -> usize {
    group.members().iter().position(|&rank| rank == group.rank()).unwrap()
}

fn layout(group: &AnyProcessGroup, matrices: &[(DType, usize)]) -> UnitLayout {
    UnitLayout::new(matrices.iter().copied(), WorldSize::new(group.size()).unwrap())
}

/// Returns matrices of one type.
fn of(dtype: DType, numels: &[usize]) -> Vec<(DType, usize)> {
    numels.iter().map(|&numel| (dtype, numel)).collect()
}

fn exchange(group: &AnyProcessGroup) {
    for round in 0..20 {
        let value = (round, format!("rank {}", group.rank()), f64::NAN, vec![0u8; 1000 * round]);
        let all = group.exchange(&op("all_gather", "values"), value).unwrap();
        assert_eq!(all.len(), group.size());
        for (rank, value) in group.members().iter().zip(&all) {
            assert_eq!((value.0, value.1.as_str()), (round, format!("rank {rank}").as_str()));
            assert!(value.2.is_nan() && value.3.len() == 1000 * round);
        }
    }
}

/// A gather of host values gives them to one member, and the other ones receive none. (The engine
/// `mpi` asserts that no bytes of them arrive, and the store has a test of its own.)
fn gather_values(group: &AnyProcessGroup) {
    let own = index(group);
    for to in 0..group.size() {
        let value = (own, vec![own as u8; 100_000 * to]);
        let all = group.gather_values(&op("gather", "values"), to, value).unwrap();
        assert_eq!(all.is_some(), own == to);
        for (rank, value) in all.iter().flatten().enumerate() {
            assert_eq!(**value, (rank, vec![rank as u8; 100_000 * to]));
        }
    }
}

/// All-gathers the matrices of a unit into a buffer that is larger than the unit.
fn gather<B: Tested>(group: &AnyProcessGroup, numels: &[usize], buffer: &Arc<GatherBuffer<B>>) {
    let layout = layout(group, &of(buffer.dtype(), numels));
    let [FlatRange { layout: flat, .. }] = layout.ranges() else { panic!("one type") };
    let rank = WorldSize::new(group.size()).unwrap().ranks().nth(index(group)).unwrap();
    let mut shards = Vec::new();
    for matrix in 0..numels.len() {
        let range = layout.shard_of(matrix, rank);
        if !range.is_empty() {
            let at = layout.segment(matrix).start + range.start;
            shards.push((at, tensor_as::<B>(values(matrix, range), buffer.dtype())));
        }
    }
    buffer.release();
    let op = op("all_gather", "unit").of(flat.padded_len());
    group.all_gather(&op, &B::device(), shards, flat.shard_len(), buffer).unwrap();
    for (matrix, &numel) in numels.iter().enumerate() {
        let full = buffer.view(layout.segment(matrix).start, &[numel]);
        let expected = rounded(values(matrix, 0..numel), buffer.dtype());
        assert!(elements::<B>(&full) == expected, "{numel} elements of {:?}", buffer.dtype());
    }
}

fn all_gather<B: Tested>(group: &AnyProcessGroup) {
    for dtype in DTYPES {
        let buffer = Arc::new(GatherBuffer::<B>::new(&B::device(), 3 * (1 << 20) + 1000, dtype));
        for numel in SIZES {
            for numels in [vec![numel], vec![numel, 5, numel / 2 + 1]] {
                gather::<B>(group, &numels, &buffer);
            }
        }
    }
}

fn all_gather_one<B: Tested>(group: &AnyProcessGroup) {
    for numel in SIZES {
        // Of several ranks, the last one has no shard.
        let holders = if group.size() > 1 { group.size() - 1 } else { 1 };
        let at = index(group);
        let mine = (at < holders).then(|| tensor::<B>(values(at, 0..numel + at)));
        let op = op("all_gather", "weight");
        let all = on::<B>(group).all_gather_one(&op, &B::device(), mine).unwrap();
        assert_eq!(all.len(), group.size());
        for (rank, shard) in all.iter().enumerate() {
            match shard {
                Some(shard) => {
                    assert!(elements::<B>(shard) == values(rank, 0..numel + rank));
                }
                None => assert!(rank >= holders),
            }
        }
    }
}

/// Gathers with every rank as the receiver once; the first rank has no shard.
fn gather_to_one<B: Tested>(group: &AnyProcessGroup) {
    let at = index(group);
    for (to, numel) in (0..group.size()).zip(SIZES) {
        let mine = (at > 0).then(|| tensor::<B>(values(at, 0..numel + at)));
        let op = op("gather", "weight");
        let all = on::<B>(group).gather(&op, &B::device(), to, mine).unwrap();
        if at != to {
            assert!(all.is_empty());
            continue;
        }
        assert_eq!(all.len(), group.size());
        assert!(all[0].is_none());
        for (rank, shard) in all.iter().enumerate().skip(1) {
            let shard = shard.as_ref().unwrap();
            assert!(elements::<B>(shard) == values(rank, 0..numel + rank));
        }
    }
}

/// Reduces the gradients of `numels.len()` sharded matrices and as many replicated ones. Rank r has
/// the gradient `entry` if `has(r, entry)`. Sums must have the bits of sums in rank order.
fn reduce<B: Tested>(
    group: &AnyProcessGroup,
    numels: &[usize],
    has: impl Fn(usize, usize) -> bool,
) {
    for dtype in DTYPES {
        reduce_as::<B>(group, &of(dtype, numels), &has, None);
    }
}

/// Reduces gradients as [`reduce`] does, for matrices of several types. Gradients are sent in the
/// type `sent_as`, or each in its own type if that is `None`.
fn reduce_as<B: Tested>(
    group: &AnyProcessGroup,
    matrices: &[(DType, usize)],
    has: impl Fn(usize, usize) -> bool,
    sent_as: Option<DType>,
) {
    let (layout, at) = (layout(group, matrices), index(group));
    let rank = WorldSize::new(group.size()).unwrap().ranks().nth(at).unwrap();
    let mut keep = Vec::new();
    for (matrix, &(own, numel)) in matrices.iter().enumerate() {
        let range = layout.shard_of(matrix, rank);
        let dtype = sent_as.unwrap_or(own);
        let shape = vec![range.len().max(1), 1];
        keep.push(Reduce { shape, range, segment: Some(matrix), dtype });
        keep.push(Reduce { shape: vec![1, numel], range: 0..numel, segment: None, dtype });
    }
    let mine =
        |entry: usize| tensor_as::<B>(values(at, 0..matrices[entry / 2].1), keep[entry].dtype);
    let gradient = |entry: usize| has(at, entry).then(|| mine(entry));
    let gradients: Vec<_> = (0..keep.len()).map(gradient).collect();
    let divisor = group.size();
    let op = op("reduce_scatter", "unit").of(matrices.iter().map(|(_, numel)| numel).sum());
    let request = ReduceScatter::<B> { gradients, keep: &keep, layout: &layout, divisor };
    let reduced = on::<B>(group).reduce_scatter(&op, &B::device(), request).unwrap();
    assert_eq!(reduced.len(), keep.len());
    for (entry, (keep, reduced)) in keep.iter().zip(&reduced).enumerate() {
        let ranks: Vec<usize> = (0..group.size()).filter(|&rank| has(rank, entry)).collect();
        if ranks.is_empty() || keep.range.is_empty() {
            assert!(reduced.is_none());
            continue;
        }
        let reduced = reduced.as_ref().unwrap();
        assert_eq!(reduced.shape(), Shape::from(keep.shape.clone()));
        let expected = mean(&ranks, keep.range.clone(), divisor, keep.dtype);
        assert_eq!(reduced.dtype(), DType::F32);
        let reduced = elements::<B>(reduced);
        assert!(is_sum(group, &reduced, &expected), "{matrices:?} as {sent_as:?}, entry {entry}");
    }
}

/// Compares sums: bit by bit, but to a tolerance for NCCL with more than two ranks, which sums in
/// an order of its own.
fn is_sum(group: &AnyProcessGroup, found: &[f32], expected: &[f32]) -> bool {
    let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * b.abs().max(1.0);
    match group.engine() {
        "nccl" if group.size() > 2 => {
            found.len() == expected.len() && found.iter().zip(expected).all(near)
        }
        _ => found == expected,
    }
}

fn reduce_scatter<B: Tested>(group: &AnyProcessGroup) {
    for numel in SIZES {
        reduce::<B>(group, &[numel, 130, numel / 3 + 1], |_, _| true);
    }
    // Reuses the buffers of a larger unit.
    reduce::<B>(group, &[5], |_, _| true);
}

fn absent_gradients<B: Tested>(group: &AnyProcessGroup) {
    reduce::<B>(group, &[100, 7], |_, _| false);
    reduce::<B>(group, &[100, 7], |_, entry| entry % 2 == 0);
    reduce::<B>(group, &[1000, 1001], |rank, entry| (rank + entry) % 2 == 0);
    reduce::<B>(group, &[1000, 1001], |rank, _| rank == 0);
    // Large enough for one thread to reduce a replicated gradient for all.
    reduce::<B>(group, &[40_000, 70_000, 20_000], |rank, entry| (rank + entry) % 3 == 0);
    reduce::<B>(group, &[40_000, 70_000], |_, entry| entry == 3);
}

/// Reduces matrices of several types, with gradients sent in their own types, or all in one type.
fn several_types<B: Tested>(group: &AnyProcessGroup) {
    let [full, half, other] = DTYPES;
    let matrices = [(full, 1000), (half, 130), (other, 7919), (full, 5), (half, 77)];
    for sent_as in [None, Some(full), Some(half)] {
        let reduce = |has: fn(usize, usize) -> bool| {
            reduce_as::<B>(group, &matrices, has, sent_as);
        };
        reduce(|_, _| true);
        reduce(|rank, entry| (rank + entry) % 3 != 0);
        // Two types have no gradient, or only replicated parameters have any.
        reduce(|_, entry| entry == 2 || entry == 8);
        reduce(|_, entry| entry == 6);
        reduce(|_, entry| entry % 2 == 1);
    }
}

fn all_reduce(group: &AnyProcessGroup) {
    let own = value(index(group), 5);
    let all = group.exchange(&op("all_reduce", "values"), own).unwrap();
    let sum: f32 = all.iter().map(|value| **value).sum();
    assert_eq!(sum, (0..group.size()).map(|rank| value(rank, 5)).sum::<f32>());
}

fn broadcast<B: Tested>(group: &AnyProcessGroup) {
    for (round, numel) in SIZES.into_iter().enumerate() {
        let root = index(group) == round % group.size();
        let data = TensorData::new(values(3, 0..2 * numel), [2, numel]);
        let mine = root.then(|| B::float_from_data(data, &B::device()));
        let op = op("broadcast", "weight");
        let all = on::<B>(group).broadcast(&op, &B::device(), mine).unwrap();
        assert_eq!(all.shape(), Shape::from([2, numel]));
        assert!(elements::<B>(&all) == values(3, 0..2 * numel));
    }
}

fn ten_million<B: Tested>(group: &AnyProcessGroup) {
    let numel = 10_000_019;
    gather::<B>(group, &[numel], &buffer(numel + 64));
    reduce::<B>(group, &[numel / 8], |_, _| true);
}

fn split<B: Tested>(group: &AnyProcessGroup) {
    let at = index(group);
    let part = group.split(at % 2).unwrap();
    let members: Vec<usize> = part.members().iter().map(|rank| rank.index()).collect();
    assert_eq!(members, (0..group.size()).filter(|rank| rank % 2 == at % 2).collect::<Vec<_>>());
    assert_eq!(part.rank(), group.rank());
    gather::<B>(&part, &[7919, 5], &buffer(20_000));
    reduce::<B>(&part, &[7919, 5], |rank, entry| rank != 1 || entry < 2);
    let alone = part.split(at).unwrap();
    assert_eq!(alone.size(), 1);
    reduce::<B>(&alone, &[10], |_, _| true);
    // Collectives of the parts do not disturb those of the parent group.
    gather::<B>(group, &[1000], &buffer(2000));
}

/// Issues collectives of overlapping groups, in one order on all ranks, while some ranks are late.
fn issue_order<B: Tested>(group: &AnyProcessGroup) {
    let (at, buffer) = (index(group), buffer(200_000));
    let part = group.split(at / 2).unwrap();
    for round in 0..30 {
        if (round + at) % 5 == 0 {
            std::thread::sleep(Duration::from_millis(3));
        }
        let numel = 1 + (round * 7919) % 100_000;
        gather::<B>(group, &[numel, 3], &buffer);
        reduce::<B>(&part, &[numel / 2 + 1], |_, _| true);
        let rounds = group.exchange(&op("barrier", "the round"), round).unwrap();
        assert_eq!(rounds.len(), group.size());
        assert!(rounds.iter().all(|other| **other == round));
    }
}

mod local {
    use super::*;
    use crate::collectives::local::{Hub, LocalGroup};

    #[test]
    fn threads_conform() {
        for size in 1..=4 {
            let world = WorldSize::new(size).unwrap();
            for check in &checks::<Flex>() {
                println!("{size} ranks: {}", check.name);
                let hub = Hub::new(world, check.timeout, check.debug);
                std::thread::scope(|scope| {
                    for rank in world.ranks() {
                        let group = AnyProcessGroup::Local(LocalGroup::new(hub.clone(), rank));
                        scope.spawn(move || (check.run)(&group));
                    }
                });
            }
        }
    }
}

#[cfg(feature = "nccl")]
#[path = "nccl/conformance.rs"]
mod nccl;

#[cfg(feature = "mpi")]
mod mpi {
    use std::process::Command;
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::collectives::mpi::{ALWAYS_STAGED, MpiGroup, sys};

    /// Path of [`as_a_process`] in this test program.
    const RANK: &str = "collectives::conformance::mpi::as_a_process";

    #[test]
    fn processes_conform() {
        if Command::new("mpirun").arg("--version").output().is_err() {
            eprintln!("skipped: there is no `mpirun`");
            return;
        }
        let program = std::env::current_exe().unwrap();
        for size in 1..=4 {
            let output = Command::new("mpirun")
                .args(["--allow-run-as-root", "--oversubscribe", "-n", &size.to_string()])
                .arg(&program)
                .args(["--exact", RANK, "--ignored", "--nocapture"])
                .output()
                .unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{size} ranks:\n{text}\n{errors}");
            assert_eq!(text.matches("all checks passed").count(), size, "{text}");
        }
    }

    #[test]
    #[ignore = "one rank of `processes_conform`, for `mpirun` to start"]
    fn as_a_process() {
        for staged in [false, true] {
            ALWAYS_STAGED.store(staged, Ordering::Relaxed);
            for check in &checks::<Flex>() {
                let group =
                    AnyProcessGroup::Mpi(MpiGroup::world(check.timeout, check.debug).unwrap());
                println!("{}: {}, staged: {staged}", group.rank(), check.name);
                (check.run)(&group);
            }
        }
        println!("all checks passed");
        sys::finalise();
    }
}
