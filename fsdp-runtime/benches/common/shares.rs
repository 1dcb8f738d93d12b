//! Shares of a step's processor time by kind of work, from samples that Linux's `perf` takes of this process.

use std::io::ErrorKind;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Samples a second of each thread that runs.
const FREQUENCY: usize = 999;

/// Kinds of work, each with parts of the names of its functions. A function is of the first kind that fits.
const KINDS: [(&str, &[&str]); 11] = [
    ("clearing of new pages", &["clear_page", "folio_zero"]),
    ("the kernel, else", &["[k]"]),
    (
        "matrix products",
        &[
            "gemm_f32::",
            "gemm_f16::",
            "gemm_common::gemm",
            "pairs::multiply_by_instruction",
            "amx::instructions",
        ],
    ),
    ("packing of their factors", &["gemm_common::", "transpose::", "flex::product"]),
    ("attention, without products", &["flex::attention"]),
    ("means of gradients", &["loops::mean"]),
    ("conversions of dtypes", &["loops::convert", "float::widen"]),
    ("optimizer", &["update_rules"]),
    ("norms, activations, loss", &["fsdp_kernels::flex"]),
    ("copies of memory", &["memmove", "memcpy"]),
    ("zeros", &["memset"]),
];
const REST: &str = "the rest";

/// A run of `perf` that samples this process.
pub struct Sampling {
    perf: Child,
    file: tempfile::NamedTempFile,
}

impl Sampling {
    /// Starts to sample all threads of this process.
    ///
    /// # Panics
    ///
    /// If `perf` cannot be started.
    pub fn start() -> Self {
        let file = tempfile::NamedTempFile::new().expect("a file for samples");
        let pid = std::process::id().to_string();
        let perf = Command::new("perf")
            .args([
                "record",
                "-q",
                "-e",
                "cpu-clock",
                "-F",
                &FREQUENCY.to_string(),
                "-p",
                &pid,
                "-o",
            ])
            .arg(file.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| match error.kind() {
                ErrorKind::NotFound => panic!("--shares needs perf: apt-get install linux-perf"),
                _ => panic!("perf: {error}"),
            });
        // It attaches to the threads one by one.
        std::thread::sleep(Duration::from_millis(500));
        Self { perf, file }
    }

    /// Ends the sampling, and prints for each kind of work the processor time of a step, of all ranks together, its
    /// share, the `bytes` that it must read and write, and these bytes a second.
    ///
    /// # Panics
    ///
    /// If `perf` fails, or if bytes are given for work of another name.
    pub fn print(mut self, name: &str, steps: usize, bytes: &[(&str, usize)]) {
        let perf = self.perf.id().to_string();
        Command::new("kill").args(["-INT", &perf]).status().expect("a program `kill`");
        self.perf.wait().expect("perf ends");
        let report = Command::new("perf")
            .args(["report", "--stdio", "-n", "--no-children", "--sort", "symbol", "-t", "|", "-i"])
            .arg(self.file.path())
            .stderr(Stdio::null())
            .output()
            .expect("perf has run before");
        let report = String::from_utf8_lossy(&report.stdout).into_owned();
        let kinds = KINDS.map(|(kind, _)| kind).into_iter().chain([REST]);
        let mut samples: Vec<(&str, usize)> = kinds.map(|kind| (kind, 0)).collect();
        for (function, count) in report.lines().filter_map(sampled) {
            let fits =
                |(_, names): &(&str, &[&str])| names.iter().any(|name| function.contains(name));
            let kind = KINDS.iter().position(fits).unwrap_or(KINDS.len());
            samples[kind].1 += count;
        }
        let all: usize = samples.iter().map(|(_, count)| count).sum();
        assert!(all > 0, "perf took no samples:\n{report}");
        samples.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        for (kind, _) in bytes {
            assert!(samples.iter().any(|(name, _)| name == kind), "no work has the name {kind}");
        }
        println!(
            "\n{name}: processor time of a step, of all ranks together\n{:<30}{:>9}{:>9}{:>9}{:>8}",
            "", "ms", "share", "MB", "GB/s"
        );
        for (kind, count) in samples {
            let seconds = count as f64 / FREQUENCY as f64 / steps as f64;
            let share = 100.0 * count as f64 / all as f64;
            print!("{kind:<30}{:>9.1}{share:>7.1} %", 1e3 * seconds);
            match bytes.iter().find(|(name, _)| *name == kind) {
                Some(&(_, bytes)) if count > 0 => {
                    println!("{:>9.0}{:>8.1}", bytes as f64 / 1e6, bytes as f64 / 1e9 / seconds);
                }
                _ => println!(),
            }
        }
    }
}

/// Returns the function of a line of the report, and its number of samples.
fn sampled(line: &str) -> Option<(&str, usize)> {
    let mut fields = line.split('|');
    let (_share, count, function) = (fields.next()?, fields.next()?, fields.next()?);
    Some((function, count.trim().parse().ok()?))
}
