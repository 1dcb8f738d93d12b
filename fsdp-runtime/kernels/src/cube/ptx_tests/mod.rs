//! Every kernel of this crate, compiled to PTX for NVIDIA GPUs of several generations and assembled
//! with `ptxas`. No GPU and no driver is needed.
//!
//! The kernels are launched by the functions that launch them on a GPU, on a device that only
//! compiles. So they have the vector widths, tiles and options that they have on a GPU.
//!
//! The environment variable `PTX_OUT` names a folder for the PTX of the kernels with matrix instructions,
//! which `kernels/ptx` runs without a GPU. `PTXAS` names the assembler. Without it the PTX is not assembled, and
//! kernels that need `libdevice.10.bc` are skipped if CubeCL does not find that file.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use burn::tensor::DType;
use cubecl::prelude::KernelId;

use self::launches::Gpu;
use crate::takes;

mod launches;
mod server;

/// Dtypes that kernels take.
const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Begin of the names of kernels with matrix instructions, which take bf16 and f16.
const MATRIX_KERNELS: &str = "flash_";
/// Bytes of shared memory that a cube may have on every device with these matrix instructions.
const SHARED_MEMORY: usize = 99 << 10;
/// Bytes of registers that the assembler may spill to make place for one more cube at a time, counted when they are
/// written, read and reserved. With place for one cube only, it may spill none.
const SPILLED_FOR_CUBES: usize = 64;

/// Begin of CubeCL's error for a kernel that calls a math function without libdevice.
const NO_LIBDEVICE: &str = "libdevice.10.bc was not found";

/// Returns the name of the kernel's function. CubeCL names the kernel's type
/// `..::function::Function`.
fn kernel_name(id: &KernelId) -> String {
    let path = id.type_name().split('<').next().unwrap_or_default();
    path.rsplit("::").nth(1).unwrap_or(path).to_string()
}

/// Returns the names of the functions with the attribute `#[cube(launch..)]` below a source folder,
/// each with the number of combinations of dtypes that it is compiled in.
fn kernels_in(folder: &Path) -> BTreeMap<String, usize> {
    let mut kernels = BTreeMap::new();
    for entry in fs::read_dir(folder).expect("the sources can be read") {
        let path = entry.expect("the sources can be read").path();
        if path.is_dir() {
            kernels.extend(kernels_in(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let source = fs::read_to_string(&path).expect("the sources can be read");
            for (at, _) in source.match_indices("#[cube(launch") {
                let line = source[..at].rsplit('\n').next().unwrap_or_default();
                if !line.trim().is_empty() {
                    continue; // A comment.
                }
                let (_, function) = source[at..].split_once("fn ").expect("a function");
                let name: String =
                    function.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
                let (arguments, _) = function.split_once(") {").expect("the function's body");
                let defined = arguments.split_once("#[define(").map_or(0, |(_, defined)| {
                    let (defined, _) = defined.split_once(')').expect("the attribute's end");
                    defined.split(',').count()
                });
                let dtypes = match name.starts_with(MATRIX_KERNELS) {
                    true => DTYPES.len() - 1,
                    false => DTYPES.len(),
                };
                kernels.insert(name, dtypes.pow(defined as u32));
            }
        }
    }
    kernels
}

/// Returns the names of the dtypes in the ID of a kernel, in the order in which it defines them.
fn dtypes_in(id: &str) -> Vec<String> {
    let name = |text: &str| text.chars().take_while(|c| *c != ')').collect();
    id.split("Float(").skip(1).map(name).collect()
}

/// What a kernel needs of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Resources {
    registers: usize,
    spilled_bytes: usize,
    shared_bytes: usize,
}

impl Resources {
    /// Returns the resources that `ptxas -v` and the last line of the PTX report.
    fn of(report: &str, ptx: &str) -> Self {
        let report = [report, ptx.lines().next_back().unwrap_or_default()].concat();
        let before = |unit: &str| {
            let number = |text: &str| text.split_whitespace().next_back()?.parse::<usize>().ok();
            report.match_indices(unit).filter_map(|(at, _)| number(&report[..at])).sum()
        };
        Self {
            registers: before(" registers"),
            spilled_bytes: before(" bytes spill") + before(" bytes stack frame"),
            shared_bytes: before(" bytes smem"),
        }
    }
}

/// Returns the PTX of a kernel with the directive that a multiprocessor holds at least one cube. The assembler then uses
/// as many registers as one cube may have.
fn for_one_cube(ptx: &str) -> String {
    let threads = ptx.find(".reqntid").expect("the number of threads");
    [&ptx[..threads], ".minnctapersm 1\n", &ptx[threads..]].concat()
}

/// Assembles PTX. The error is the output of `ptxas`.
fn assemble(ptxas: &Path, folder: &Path, ptx: &str) -> Result<Resources, String> {
    let target = ptx.lines().find_map(|line| line.strip_prefix(".target "));
    let target = target.and_then(|target| target.split(',').next()).ok_or("no .target")?;
    let file = folder.join("kernel.ptx");
    fs::write(&file, ptx).map_err(|error| error.to_string())?;
    let mut command = Command::new(ptxas);
    command.arg(format!("-arch={}", target.trim())).arg("-o").arg(folder.join("kernel.cubin"));
    let output = command.arg("-v").arg(&file).output();
    let output = output.map_err(|error| format!("{}: {error}", ptxas.display()))?;
    let report = String::from_utf8_lossy(&output.stderr).into_owned();
    match output.status.success() {
        true => Ok(Resources::of(&report, ptx)),
        false => Err(report),
    }
}

/// Writes the PTX of the kernels with matrix instructions to the folder that `PTX_OUT` names. The last line of a file is
/// the kernel's ID.
fn write_matrix_kernels(arch: u32, kernels: &[(String, String, server::Ptx)]) {
    let Some(folder) = std::env::var_os("PTX_OUT").map(PathBuf::from) else { return };
    fs::create_dir_all(&folder).expect("a folder for PTX");
    let of_matrices = kernels.iter().filter(|(name, ..)| name.starts_with(MATRIX_KERNELS));
    for (number, (name, id, ptx)) in of_matrices.enumerate() {
        let Ok(ptx) = ptx else { continue };
        let id: String = id.split_whitespace().collect();
        let file = folder.join(format!("{arch}_{name}_{number}.ptx"));
        fs::write(file, format!("{ptx}\n// ID {id}\n")).expect("a file of PTX");
    }
}

/// Compiles every kernel for GPUs of compute capability `arch`, such as 90 for 9.0.
fn compile_all(arch: u32) {
    let ptxas = std::env::var_os("PTXAS").map(PathBuf::from);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (mut wrong, mut skipped, mut assembled) = (Vec::new(), BTreeSet::new(), 0);
    let mut resources = Vec::new();
    let mut compiled: BTreeMap<String, BTreeSet<Vec<String>>> = BTreeMap::new();
    let all = Gpu::new(arch).launch_all();
    write_matrix_kernels(arch, &all);
    for (name, id, ptx) in &all {
        compiled.entry(name.clone()).or_default().insert(dtypes_in(id));
        match (ptx, &ptxas) {
            (Err(reason), None) if reason.contains(NO_LIBDEVICE) => {
                skipped.insert(name);
            }
            (Err(reason), _) => wrong.push(format!("{name} does not compile: {reason}\n{id}")),
            (Ok(ptx), None) => assert!(ptx.contains(".visible .entry"), "{ptx}"),
            (Ok(ptx), Some(ptxas)) => match assemble(ptxas, folder.path(), ptx) {
                Ok(needed) => {
                    assembled += 1;
                    if name.starts_with(MATRIX_KERNELS) {
                        let spills =
                            |ptx| assemble(ptxas, folder.path(), ptx).unwrap().spilled_bytes;
                        let fits = needed.spilled_bytes <= SPILLED_FOR_CUBES
                            && (needed.spilled_bytes == 0 || spills(&for_one_cube(ptx)) == 0)
                            && needed.shared_bytes <= SHARED_MEMORY;
                        resources.push((name, needed));
                        if !fits {
                            wrong.push(format!("{name} needs too much: {needed:?}\n{id}"));
                        }
                    }
                }
                Err(reason) => {
                    wrong.push(format!("ptxas refuses {name}: {reason}\n{id}\n{ptx}"));
                }
            },
        }
    }
    resources.sort_unstable();
    resources.dedup();
    for (name, Resources { registers, spilled_bytes, shared_bytes }) in resources {
        println!(
            "sm_{arch}: {name}: {registers} registers, {spilled_bytes} bytes of them spilled, \
             {shared_bytes} bytes of shared memory"
        );
    }
    assert!(wrong.is_empty(), "sm_{arch}, {} of {}:\n{}", wrong.len(), all.len(), wrong[0]);

    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let count = |(name, dtypes): (&String, &BTreeSet<Vec<String>>)| (name.clone(), dtypes.len());
    let compiled: BTreeMap<String, usize> = compiled.iter().map(count).collect();
    assert_eq!(compiled, kernels_in(&sources), "kernels, and combinations of dtypes of each");
    let of_kernels = compiled.len();
    println!(
        "sm_{arch}: {} compilations of {of_kernels} kernels, {assembled} assembled",
        all.len()
    );
    for name in skipped {
        println!("sm_{arch}: skipped where {name} calls a math function: {NO_LIBDEVICE}");
    }
}

#[test]
fn the_kernels_take_the_dtypes_of_this_test() {
    let floats = [DType::F64, DType::F32, DType::Flex32, DType::F16, DType::BF16];
    assert!(floats.into_iter().all(|dtype| takes(dtype) == DTYPES.contains(&dtype)));
}

#[test]
fn every_kernel_compiles_to_ptx_for_sm_80() {
    compile_all(80);
}

#[test]
fn every_kernel_compiles_to_ptx_for_sm_90() {
    compile_all(90);
}

#[test]
fn every_kernel_compiles_to_ptx_for_sm_100() {
    compile_all(100);
}
