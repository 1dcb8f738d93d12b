//! Bytes per second of each kernel, and its share of the bytes per second of a plain copy on the
//! same device.
//!
//!     cargo bench --bench kernels [--features cpu|cuda|wgpu] -- [--device flex|cpu|cuda|wgpu] [--runs N]
//!         [--only TEXT] [--json]
//!
//! Counted are the bytes that a kernel must read and write. The copy moves as many bytes, half of
//! them read and half written: on Flex with all threads, on CubeCL devices with one of Burn's own
//! kernels. A kernel that allocates its result is compared with a copy to new memory, any other
//! kernel with a copy to existing memory. Kernels and copies take turns, and times are medians.
//! Sizes are those of a tensor in f32. `--only` measures the kernels that have a text in their names.
//! `--json` prints an object for each row.

use std::hint::black_box;
use std::time::Instant;

use burn::optim::Optimizer;
use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use clap::{Parser, ValueEnum};
use fsdp_runtime::Norm;
use fsdp_runtime::kernels::{self, MaskSource};
use fsdp_runtime::optim::{AdamWConfig, SgdConfig};
use fsdp_runtime::options::StorageType;
use rayon::prelude::*;

const MEGABYTES: [usize; 3] = [1, 16, 64];
const WARM_UP: usize = 2;
/// Elements that one task of a copy takes.
const TASK: usize = 1 << 15;
/// Elements that one of Burn's kernels copies. A binding of wgpu has at most 128 MB by default.
const PIECE: usize = 1 << 24;
/// Elements of a small tensor, such as a bias.
const SMALL: usize = 1536;

#[derive(Parser)]
struct Options {
    /// The device; its Cargo feature must be on.
    #[arg(long, value_enum, default_value = "flex")]
    device: Which,
    /// Timed runs of each kernel.
    #[arg(long, default_value_t = 11)]
    runs: usize,
    /// Text in the names of the kernels to measure.
    #[arg(long, default_value = "")]
    only: String,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Set by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Which {
    Flex,
    Cpu,
    Cuda,
    Wgpu,
}

impl Which {
    fn device(self) -> Option<Device> {
        match self {
            #[cfg(feature = "flex")]
            Self::Flex => Some(Device::flex()),
            #[cfg(feature = "cpu")]
            Self::Cpu => Some(Device::cpu()),
            #[cfg(feature = "cuda")]
            Self::Cuda => Some(Device::cuda(0)),
            #[cfg(feature = "wgpu")]
            Self::Wgpu => Some(Device::wgpu(burn::tensor::DeviceKind::DefaultDevice)),
            #[allow(unreachable_patterns)]
            _ => None,
        }
    }
}

/// Memory that a result is written to.
#[derive(Clone, Copy, PartialEq)]
enum Target {
    /// New memory.
    New,
    /// Existing memory.
    Old,
}

/// A kernel to measure: its name, the bytes that it must move, and a run of it.
struct Case<'a> {
    name: &'static str,
    bytes: usize,
    into: Target,
    run: Box<dyn FnMut() + 'a>,
}

fn noise(len: usize, device: &Device, dtype: FloatDType) -> Tensor<1> {
    let values: Vec<f32> = (0..len).map(|i| ((i % 1021) as f32 - 510.0) / 1021.0).collect();
    Tensor::<1>::from_data(TensorData::new(values, [len]), device).cast(dtype)
}

/// Returns a tensor that each run updates in its own memory.
fn in_place(tensor: Tensor<1>, mut f: impl FnMut(Tensor<1>) -> Tensor<1>) -> impl FnMut() {
    let mut held = Some(tensor);
    move || held = held.take().map(&mut f)
}

fn expect<T>(result: Result<T, kernels::KernelError>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}

/// Returns a plain copy of `len` elements with one of Burn's kernels.
fn copy_on_cube(len: usize, into: Target, device: &Device) -> Box<dyn FnMut()> {
    let source = noise(len, device, FloatDType::F32);
    match into {
        Target::New => Box::new(move || drop(source.clone().neg())),
        Target::Old => {
            // Assigning to all of a tensor would return the source, without a copy.
            let target = noise(len + 64, device, FloatDType::F32);
            Box::new(in_place(target, move |target| target.slice_assign(0..len, source.clone())))
        }
    }
}

/// Returns a plain copy that moves `bytes` bytes, half of them read and half written.
fn copy(bytes: usize, into: Target, device: &Device, flex: bool) -> Case<'static> {
    let len = bytes / 2 / size_of::<f32>();
    let run: Box<dyn FnMut()> = match (flex, into) {
        (true, Target::New) => {
            let source = vec![1f32; len];
            Box::new(move || {
                let mut target: Vec<f32> = Vec::with_capacity(source.len());
                let room = &mut target.spare_capacity_mut()[..source.len()];
                let tasks = source.par_chunks(TASK).zip(room.par_chunks_mut(TASK));
                tasks.for_each(|(from, to)| {
                    to.write_copy_of_slice(from);
                });
                // SAFETY: the tasks have written every element.
                unsafe { target.set_len(source.len()) };
                black_box(target);
            })
        }
        (true, Target::Old) => {
            let (source, mut target) = (vec![1f32; len], vec![2f32; len]);
            Box::new(move || {
                let tasks = source.par_chunks(TASK).zip(target.par_chunks_mut(TASK));
                tasks.for_each(|(from, to)| to.copy_from_slice(from));
                black_box(&target);
            })
        }
        (false, into) => {
            let pieces = (0..len).step_by(PIECE).map(|at| PIECE.min(len - at));
            let mut copies: Vec<_> = pieces.map(|len| copy_on_cube(len, into, device)).collect();
            Box::new(move || copies.iter_mut().for_each(|copy| copy()))
        }
    };
    Case { name: "", bytes, into, run }
}

fn cases(len: usize, device: &Device) -> Vec<Case<'static>> {
    use FloatDType::{BF16, F32};
    use Target::{New, Old};
    let wide = noise(len, device, F32);
    let mut cases = Vec::new();
    let mut case = |name, per_element: usize, into, run: Box<dyn FnMut()>| {
        cases.push(Case { name, bytes: len * per_element, into, run });
    };

    let bf16 = kernels::computes(device, BF16);
    let cast = |tensor: &Tensor<1>, to, divisor| -> Box<dyn FnMut()> {
        let tensor = tensor.clone();
        Box::new(move || drop(expect(kernels::cast(tensor.clone(), to, divisor))))
    };
    case("cast f32 -> f32", 8, New, cast(&wide, F32, None));
    case("divide f32 -> f32", 8, New, cast(&wide, F32, Some(3.0)));
    if bf16 {
        let half = noise(len, device, BF16);
        case("cast f32 -> bf16", 6, New, cast(&wide, BF16, None));
        case("divide f32 -> bf16", 6, New, cast(&wide, BF16, Some(3.0)));
        case("widen bf16 -> f32", 6, New, cast(&half, F32, None));
    }

    let pack = |pieces: usize, to: FloatDType| -> Box<dyn FnMut()> {
        let piece = len / pieces;
        let parts: Vec<_> = (0..pieces).map(|i| (noise(piece, device, F32), i * piece)).collect();
        let buffer = noise(len, device, to);
        Box::new(in_place(buffer, move |buffer| expect(kernels::pack(parts.clone(), buffer))))
    };
    case("pack 8 shards, f32", 8, Old, pack(8, F32));
    if bf16 {
        case("pack 8 shards, bf16", 6, Old, pack(8, BF16));
    }
    let small = len / SMALL;
    case("pack tensors of 1,536", 8, Old, pack(small, F32));
    let ranges: Vec<_> = (0..small).map(|i| i * SMALL..(i + 1) * SMALL).collect();
    let buffer = wide.clone();
    let unpack = move || drop(expect(kernels::unpack(buffer.clone(), &ranges, F32, None)));
    case("unpack tensors of 1,536", 8, New, Box::new(unpack));

    let mean = |dtype| -> Box<dyn FnMut()> {
        let parts: Vec<_> = (0..4).map(|_| noise(len, device, dtype)).collect();
        Box::new(move || drop(expect(kernels::mean(&parts, 0..len, 4))))
    };
    case("mean of 4 ranks, f32", 20, New, mean(F32));
    if bf16 {
        case("mean of 4 ranks, bf16", 12, New, mean(BF16));
    }

    let tensors = [wide.clone()];
    let sums = move || drop(expect(kernels::norm_sums(&tensors, Norm::Two)));
    case("norm and finite check", 4, Old, Box::new(sums));
    let unscale = in_place(noise(len, device, F32), |tensor| {
        let (mut tensors, _) = expect(kernels::unscale(vec![tensor], 1.0, Norm::Two));
        tensors.remove(0)
    });
    case("unscale, norm and check", 8, Old, Box::new(unscale));

    let dropout = |dtype| -> Box<dyn FnMut()> {
        let input = noise(len, device, dtype);
        let source = MaskSource { key: [1, 2], counter: [3, 4], prob: 0.1 };
        Box::new(move || drop(expect(kernels::dropout(input.clone(), &source))))
    };
    case("dropout, f32", 8, New, dropout(F32));
    if bf16 {
        case("dropout, bf16", 4, New, dropout(BF16));
    }

    case("AdamW", 28, Old, step(AdamWConfig::new().build(), len, device));
    case(
        "SGD with momentum",
        20,
        Old,
        step(SgdConfig::new().with_momentum(0.9).build(), len, device),
    );
    cases.extend(decodes(&wide, bf16));
    cases
}

/// Returns the decoding of codes of a tensor, to f32 and, if the device supports it, to bf16.
fn decodes(elements: &Tensor<1>, bf16: bool) -> impl Iterator<Item = Case<'static>> {
    let all = [
        ("decode int8 -> f32", StorageType::INT8, FloatDType::F32),
        ("decode int8 -> bf16", StorageType::INT8, FloatDType::BF16),
        ("decode nf4 -> f32", StorageType::NF4, FloatDType::F32),
        ("decode nf4 -> bf16", StorageType::NF4, FloatDType::BF16),
    ];
    let supported = all.into_iter().filter(move |(.., to)| bf16 || *to == FloatDType::F32);
    supported.map(|(name, storage, to)| decode(name, elements, storage, to))
}

/// Returns the decoding of the codes of a tensor.
fn decode(
    name: &'static str,
    elements: &Tensor<1>,
    storage: StorageType,
    to: FloatDType,
) -> Case<'static> {
    let len = elements.shape().num_elements();
    let codes = expect(kernels::encode(elements.clone(), storage));
    let width = if to == FloatDType::F32 { 4 } else { 2 };
    let bytes = codes.shape().num_elements() * size_of::<f32>() + len * width;
    let run = move || drop(expect(kernels::decode(codes.clone(), storage, len, to)));
    Case { name, bytes, into: Target::New, run: Box::new(run) }
}

fn step<O: Optimizer>(optimizer: O, len: usize, device: &Device) -> Box<dyn FnMut()> {
    let gradient = noise(len, device, FloatDType::F32) * 0.01;
    let mut state = None;
    Box::new(in_place(noise(len, device, FloatDType::F32), move |param| {
        let (param, left) = optimizer.step(1e-3, param, gradient.clone(), state.take());
        state = left;
        param
    }))
}

pub fn main() {
    let options = Options::parse();
    let Some(device) = options.device.device() else {
        eprintln!("the device is not compiled in: add `--features cpu`, `cuda` or `wgpu`");
        std::process::exit(2);
    };
    let flex = matches!(options.device, Which::Flex);
    let sync = || device.sync().unwrap_or_else(|error| panic!("{error:?}"));
    if !options.json {
        println!("{:>3}  {:<24}  {:>8}  {:>8}  {:>9}", "MB", "kernel", "GB/s", "copy", "of a copy");
    }
    for megabytes in MEGABYTES {
        let len = megabytes * (1 << 20) / size_of::<f32>();
        let mut all = cases(len, &device);
        all.retain(|case| case.name.contains(&options.only));
        let kernels = all.len();
        // The index of the copy that each kernel is compared with.
        let mut held_against = Vec::new();
        for index in 0..kernels {
            let (bytes, into) = (all[index].bytes, all[index].into);
            let alike = |case: &Case<'_>| case.bytes == bytes && case.into == into;
            let found = all[kernels..].iter().position(alike).map(|at| kernels + at);
            held_against.push(found.unwrap_or(all.len()));
            if found.is_none() {
                all.push(copy(bytes, into, &device, flex));
            }
        }
        let mut times = vec![Vec::new(); all.len()];
        for run in 0..WARM_UP + options.runs {
            for (case, times) in all.iter_mut().zip(&mut times) {
                sync();
                let begin = Instant::now();
                (case.run)();
                sync();
                if run >= WARM_UP {
                    times.push(begin.elapsed().as_secs_f64());
                }
            }
        }
        let median = |times: &mut Vec<f64>| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        };
        let rates =
            all.iter().zip(&mut times).map(|(case, times)| case.bytes as f64 / median(times) / 1e9);
        let rates: Vec<f64> = rates.collect();
        for (index, copy) in held_against.into_iter().enumerate() {
            let (name, rate, copy) = (all[index].name, rates[index], rates[copy]);
            if options.json {
                println!(
                    r#"{{"megabytes": {megabytes}, "kernel": "{name}", "gb_per_s": {rate:.3}, "copy_gb_per_s": {copy:.3}}}"#
                );
            } else {
                let share = rate / copy;
                println!("{megabytes:>3}  {name:<24}  {rate:>8.2}  {copy:>8.2}  {share:>9.2}");
            }
        }
    }
}
