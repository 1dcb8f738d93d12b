//! `fsdp env`: prints what a bug report should say about the machine.

use std::fs;
use std::process::{Command, ExitCode, Stdio};

use fsdp_runtime::launch::cuda;
use fsdp_runtime::launch::env::RankEnv;

use crate::{config, console};

/// Prints one row for each property. A property that cannot be read is a row too, so the exit code
/// is always 0.
pub(crate) fn run() -> ExitCode {
    let row = |name: &str, value: String| console::out(format_args!("{name:<12}{value}"));
    row("fsdp", env!("CARGO_PKG_VERSION").to_string());
    row("system", system());
    row("cores", cores());
    row("memory", memory());
    row("devices", compiled_devices());
    row("CUDA", gpus());
    row("libdevice", libdevice());
    row("cuBLASLt", cublaslt());
    row("NCCL", nccl());
    row("MPI", mpi());
    row("started by", started_by());
    row("config", config_file());
    ExitCode::SUCCESS
}

fn cores() -> String {
    std::thread::available_parallelism().map_or("unknown".into(), |n| n.to_string())
}

fn system() -> String {
    let (os, arch) = (std::env::consts::OS, std::env::consts::ARCH);
    match fs::read_to_string("/proc/sys/kernel/osrelease") {
        Ok(release) => format!("{os} {} {arch}", release.trim()),
        Err(_) => format!("{os} {arch}"),
    }
}

/// Formats a number of bytes in GiB.
fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

/// Returns the total and the available memory of the host, and the limit of the control group (v2).
fn memory() -> String {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = |name: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix("kB")?.trim().parse().ok()
    };
    let (Some(total), Some(free)) = (kib("MemTotal"), kib("MemAvailable")) else {
        return "unknown".into();
    };
    let limit = fs::read_to_string("/sys/fs/cgroup/memory.max")
        .ok()
        .and_then(|limit| limit.trim().parse().ok())
        .map_or(String::new(), |limit| format!(", limited to {} by the control group", gib(limit)));
    format!("{}, {} available{limit}", gib(total * 1024), gib(free * 1024))
}

/// Returns the device backends compiled into this build.
fn compiled_devices() -> String {
    let compiled = [
        ("flex", cfg!(feature = "flex")),
        ("cpu", cfg!(feature = "cpu")),
        ("wgpu", cfg!(feature = "wgpu")),
        ("cuda", cfg!(feature = "cuda")),
    ];
    let names: Vec<&str> =
        compiled.iter().filter(|(_, compiled)| *compiled).map(|(name, _)| *name).collect();
    if names.is_empty() { "none compiled in".into() } else { names.join(", ") }
}

fn gpus() -> String {
    match cuda::driver() {
        Err(error) => error.to_string(),
        Ok(driver) if driver.gpus.is_empty() => format!("{}, no GPU", driver.version),
        Ok(driver) => {
            let gpus = driver.gpus.iter().enumerate();
            let gpus = gpus
                .map(|(index, gpu)| format!("{index}: {}, {}", gpu.name, gib(gpu.memory as u64)));
            format!("{}; GPU {}", driver.version, gpus.collect::<Vec<_>>().join("; GPU "))
        }
    }
}

/// Returns the path of the file that CubeCL needs to compile kernels for NVIDIA GPUs.
fn libdevice() -> String {
    match cuda::libdevice() {
        Ok(path) => path.display().to_string(),
        Err(_) if !cuda::needs_libdevice() => "not needed: NVRTC compiles the kernels".into(),
        Err(error) => error.to_string(),
    }
}

/// Returns the version of the library of matrix products on NVIDIA GPUs.
fn cublaslt() -> String {
    #[cfg(feature = "cuda")]
    return match cuda::cublaslt_version() {
        Ok(version) => {
            let [major, minor, patch] = [version / 10_000, version / 100 % 100, version % 100];
            format!("{major}.{minor}.{patch}")
        }
        Err(error) => format!("not used: {error}"),
    };
    #[cfg(not(feature = "cuda"))]
    "not used: the tool is built without the feature `cuda`".into()
}

fn nccl() -> String {
    match cuda::nccl_version() {
        Err(error) => error.to_string(),
        Ok(version) if version < cuda::OLDEST_NCCL => {
            format!("{version}, too old: {} or later is required", cuda::OLDEST_NCCL)
        }
        Ok(version) => version.to_string(),
    }
}

fn mpi() -> String {
    let output = Command::new("mpirun").arg("--version").stdin(Stdio::null()).output();
    match output {
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stdout);
            let line = text.lines().find(|line| !line.trim().is_empty());
            line.map_or("`mpirun --version` printed nothing".into(), |line| line.trim().to_string())
        }
        Err(_) => "`mpirun` was not found".into(),
    }
}

/// Returns the launcher that started this process, and the rank of this process.
fn started_by() -> String {
    match RankEnv::read() {
        Ok(None) => "no launcher".into(),
        Ok(Some(env)) => {
            format!("{}, as rank {} of {}", env.launcher, env.rank, env.world)
        }
        Err(error) => error.to_string(),
    }
}

fn config_file() -> String {
    match config::default_path() {
        Some(path) if path.is_file() => path.display().to_string(),
        Some(path) => format!("none at {}", path.display()),
        None => "none: neither XDG_CACHE_HOME nor HOME is set".into(),
    }
}
