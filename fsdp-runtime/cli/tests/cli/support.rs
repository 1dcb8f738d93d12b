//! Runs of `fsdp`, the processes that they leave, and the files that they read.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Every run must end within this time.
pub const SOON: Duration = Duration::from_secs(10);

/// Environment variable that marks the processes of one run.
const MARK: &str = "FSDP_TEST_MARK";

/// Environment variables that would make `fsdp` a rank of a launcher that runs the tests.
const STARTERS: [&str; 12] = [
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "MASTER_ADDR",
    "MASTER_PORT",
    "FSDP_CONFIG",
    "FSDP_CONFIG_FLAGS",
    "OMP_NUM_THREADS",
];

/// `fsdp`, about to be run with a mark of its own and an empty cache directory.
pub struct Fsdp {
    pub command: Command,
    pub cache: tempfile::TempDir,
    mark: String,
}

/// The result of a run that has ended.
#[derive(Debug)]
pub struct Run {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
    pub took: Duration,
}

/// A running launcher.
pub struct Running {
    pub launcher: Child,
    mark: String,
    started: Instant,
    _cache: tempfile::TempDir,
}

/// A configuration file in a directory of its own, which is deleted with it.
pub struct ConfigFile {
    _directory: tempfile::TempDir,
    path: String,
}

impl ConfigFile {
    pub fn new(text: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config.yaml").to_str().unwrap().to_string();
        let file = Self { _directory: directory, path };
        file.write(text);
        file
    }

    /// Replaces the contents.
    pub fn write(&self, text: &str) {
        std::fs::write(&self.path, text).unwrap();
    }

    pub fn path(&self) -> &str {
        &self.path
    }
}

impl Fsdp {
    pub fn new(args: &[&str]) -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let mark = format!("{}-{next}", std::process::id());
        let cache = tempfile::tempdir().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_fsdp"));
        command.args(args).env(MARK, &mark).env("XDG_CACHE_HOME", cache.path());
        STARTERS.iter().for_each(|name| {
            command.env_remove(name);
        });
        Self { command, cache, mark }
    }

    /// Returns a run of `fsdp launch` with a shell script.
    pub fn script(args: &[&str], script: &str) -> Self {
        let mut fsdp = Self::new(&["launch"]);
        fsdp.command.args(args).args(["sh", "-c", script]);
        fsdp
    }

    pub fn env(mut self, name: &str, value: impl AsRef<std::ffi::OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    pub fn start(mut self) -> Running {
        let started = Instant::now();
        let launcher = self
            .command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Running { launcher, mark: self.mark, started, _cache: self.cache }
    }

    pub fn run(self) -> Run {
        self.start().wait()
    }
}

impl Running {
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.launcher), signal).unwrap();
    }

    /// Reads standard output until each of `ranks` ranks has printed `word` and its process id.
    /// Returns the ids by rank.
    pub fn pids(&mut self, word: &str, ranks: usize) -> Vec<(usize, Pid)> {
        let stdout = self.launcher.stdout.as_mut().unwrap();
        let mut found = Vec::new();
        // The pipe is read byte by byte, so that later output stays there for `wait`.
        while found.len() < ranks {
            let line = line(stdout);
            assert!(!line.is_empty(), "the output ended after {found:?}");
            let Some(rest) = line.strip_prefix("[rank ") else { continue };
            let (rank, rest) = rest.split_once("] ").unwrap();
            if let Some(pid) = rest.trim().strip_prefix(word) {
                let pid = Pid::from_raw(pid.trim().parse().unwrap()).unwrap();
                found.push((rank.trim().parse().unwrap(), pid));
            }
        }
        found.sort_unstable_by_key(|(rank, _)| *rank);
        found
    }

    /// Waits for the launcher to end, and asserts that it leaves no process.
    pub fn wait(mut self) -> Run {
        let status = self.ended();
        let took = self.started.elapsed();
        let (mut stdout, mut stderr) = (String::new(), String::new());
        self.launcher.stdout.take().unwrap().read_to_string(&mut stdout).unwrap();
        self.launcher.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        let code = status.code();
        let mut left = self.left();
        // `fsdp watch` ends shortly after `mpirun`.
        left.retain(|process| !process.contains("\0watch\0"));
        assert!(left.is_empty(), "left behind: {left:?}\n{stdout}\n{stderr}");
        self.nothing_left();
        Run { code, stdout, stderr, took }
    }

    /// Asserts that at least `count` processes of the launcher are found, as
    /// [`nothing_left`](Self::nothing_left) would find them.
    pub fn assert_found(&self, count: usize) {
        let left = self.left();
        assert!(left.len() >= count, "{count} processes run, and these are found: {left:?}");
    }

    /// Waits for the launcher to end, and then for all its processes. Panics if one is left after
    /// [`SOON`].
    pub fn nothing_left(&mut self) {
        let deadline = Instant::now() + SOON;
        self.ended();
        loop {
            let left = self.left();
            if left.is_empty() {
                return;
            }
            assert!(Instant::now() < deadline, "left behind: {left:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn ended(&mut self) -> ExitStatus {
        // The pipes are read afterwards: they hold 64 kB each, which no test exceeds.
        let deadline = Instant::now() + 3 * SOON;
        loop {
            if let Some(status) = self.launcher.try_wait().unwrap() {
                return status;
            }
            if Instant::now() > deadline {
                let _ = self.launcher.kill();
                panic!("the launcher does not end; left: {:?}", self.left());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Process ids and command lines of the processes with the mark, without the launcher.
    fn left(&self) -> Vec<String> {
        let mark = format!("{MARK}={}", self.mark);
        let launcher = self.launcher.id().to_string();
        let mut left = Vec::new();
        for entry in std::fs::read_dir("/proc").unwrap().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name == launcher || !name.bytes().all(|byte| byte.is_ascii_digit()) {
                continue;
            }
            let environ = read(&entry.path().join("environ"));
            if environ.split('\0').any(|variable| variable == mark) {
                left.push(format!("{name}: {}", read(&entry.path().join("cmdline"))));
            }
        }
        left
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.launcher.kill();
        let _ = self.launcher.wait();
    }
}

fn line(source: &mut impl Read) -> String {
    let mut bytes = Vec::new();
    // A buffer of one byte reads no further than the line.
    let mut reader = BufReader::with_capacity(1, source);
    reader.read_until(b'\n', &mut bytes).unwrap();
    String::from_utf8(bytes).unwrap()
}

/// Returns the contents of a file of `/proc`. Empty where the process has just ended.
fn read(path: &Path) -> String {
    std::fs::read(path).map_or(String::new(), |bytes| String::from_utf8_lossy(&bytes).into_owned())
}
