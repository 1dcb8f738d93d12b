//! Event files of TensorBoard: `--tensorboard`.
//!
//! A file is a sequence of records, each a length, a message in the format of Protocol Buffers, and
//! checksums of both. The messages are the parts of TensorFlow's `event.proto` and `summary.proto`
//! that numbers need. The crates that write such files are no longer maintained, so that this one
//! builds on those for the format and for the checksum.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use anyhow::{Context, Result};
use clap::Args;
use fsdp_runtime::launch::env::RankEnv;
use prost::Message;

use super::report;

/// First event of a file.
const VERSION: &str = "brain.Event:2";

/// Where event files are written to.
#[derive(Args, Clone, Debug)]
pub struct TensorBoardArgs {
    /// Directory to write the numbers of the log to as a TensorBoard event file
    #[arg(long, value_name = "DIR")]
    tensorboard: Option<PathBuf>,
}

/// An event file, or none. Clones write to the same file.
#[derive(Clone, Debug, Default)]
pub struct TensorBoard(Option<Arc<Mutex<File>>>);

#[derive(Clone, PartialEq, Message)]
struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Summary>,
}

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<Value>,
}

#[derive(Clone, PartialEq, Message)]
struct Value {
    #[prost(string, tag = "1")]
    tag: String,
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

impl TensorBoardArgs {
    /// Creates an event file, if a directory is given and this process runs rank 0.
    ///
    /// # Errors
    ///
    /// If the file cannot be created.
    pub fn open(&self) -> Result<TensorBoard> {
        let Some(folder) = &self.tensorboard else { return Ok(TensorBoard::default()) };
        if !report::reports(RankEnv::read()?.as_ref()) {
            return Ok(TensorBoard::default());
        }
        let context = || format!("--tensorboard: cannot write to {}", folder.display());
        std::fs::create_dir_all(folder).with_context(context)?;
        let (since, process) = (seconds(), std::process::id());
        // A run that is restarted at once gets a file of its own.
        let names = (0..).map(|n| format!("events.out.tfevents.{}.{process}.{n}", since as u64));
        for name in names {
            match File::create_new(folder.join(name)) {
                Ok(file) => {
                    let board = TensorBoard(Some(Arc::new(Mutex::new(file))));
                    let file_version = Some(VERSION.into());
                    board.event(Event { wall_time: since, file_version, ..Event::default() });
                    return Ok(board);
                }
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error).with_context(context),
            }
        }
        Ok(TensorBoard::default())
    }
}

impl TensorBoard {
    /// Writes numbers after a step, each with a name such as `train/loss`. Numbers that cannot be
    /// written are reported on standard error: a full disk must not end the training.
    pub fn numbers(&self, step: usize, numbers: impl IntoIterator<Item = (String, f64)>) {
        if self.0.is_none() {
            return;
        }
        let value = |(tag, number): (String, f64)| {
            let simple_value = Some(number as f32);
            Value { tag, simple_value }
        };
        let summary = Some(Summary { value: numbers.into_iter().map(value).collect() });
        let (wall_time, step) = (seconds(), step as i64);
        self.event(Event { wall_time, step, summary, ..Event::default() });
    }

    fn event(&self, event: Event) {
        let Some(file) = &self.0 else { return };
        let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = file.write_all(&record(&event.encode_to_vec())) {
            eprintln!("--tensorboard: {error}");
        }
    }
}

/// Returns the record of a message.
fn record(message: &[u8]) -> Vec<u8> {
    let length = (message.len() as u64).to_le_bytes();
    let mut record = length.to_vec();
    record.extend(masked_checksum(&length).to_le_bytes());
    record.extend(message);
    record.extend(masked_checksum(message).to_le_bytes());
    record
}

/// Returns the checksum that TensorFlow's `masked_crc32c` gives.
fn masked_checksum(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

fn seconds() -> f64 {
    SystemTime::UNIX_EPOCH.elapsed().map_or(0.0, |since| since.as_secs_f64())
}

/// Reads the numbers of all event files in a directory, with step and name, for tests.
#[cfg(test)]
pub fn read(folder: &std::path::Path) -> Vec<(i64, String, f32)> {
    let mut numbers = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        let mut rest = &bytes[..];
        let mut events = 0;
        while let Some((length, _)) = rest.split_at_checked(8) {
            let length = u64::from_le_bytes(length.try_into().unwrap()) as usize;
            let message = &rest[12..12 + length];
            assert_eq!(record(message), rest[..16 + length]);
            rest = &rest[16 + length..];
            let event = Event::decode(message).unwrap();
            let version = event.file_version.as_deref();
            assert_eq!(version, (events == 0).then_some(VERSION));
            events += 1;
            let values = event.summary.into_iter().flat_map(|summary| summary.value);
            numbers
                .extend(values.map(|value| (event.step, value.tag, value.simple_value.unwrap())));
        }
        assert!(rest.is_empty(), "a whole number of records");
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes of TensorBoard's own `Event(..).SerializeToString()`, in Python.
    #[test]
    fn an_event_has_tensorboards_bytes() {
        let value = Value { tag: "loss".into(), simple_value: Some(0.5) };
        let summary = Some(Summary { value: vec![value] });
        let event = Event { wall_time: 1.5, step: 7, file_version: None, summary };
        let expected = [
            // 1: double, 2: varint, 5: message { 1: message { 1: string, 2: float } }
            &[0x09][..],
            &1.5f64.to_le_bytes(),
            &[0x10, 7, 0x2a, 13, 0x0a, 11, 0x0a, 4],
            b"loss",
            &[0x15],
            &0.5f32.to_le_bytes(),
        ];
        assert_eq!(event.encode_to_vec(), expected.concat());
        // RFC 3720, B.4: the checksum of 32 zeros is 0x8a9136aa.
        let masked = 0x8a91_36aau32.rotate_right(15).wrapping_add(0xa282_ead8);
        assert_eq!(masked_checksum(&[0; 32]), masked);
    }

    #[test]
    fn numbers_come_back_and_runs_have_files_of_their_own() {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join("runs/a");
        let args = TensorBoardArgs { tensorboard: Some(folder.clone()) };
        let (first, second) = (args.open().unwrap(), args.open().unwrap());
        first.numbers(1, [("train/loss".to_string(), 2.5), ("train/lr".to_string(), 0.125)]);
        first.clone().numbers(2, [("train/loss".to_string(), 1.5)]);
        second.numbers(3, [("train/loss".to_string(), 1.0)]);
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 2);
        let mut found = read(&folder);
        found.sort_by(|a, b| a.partial_cmp(b).unwrap());
        let number = |step, name: &str, number| (step, name.to_string(), number);
        let expected = [
            number(1, "train/loss", 2.5),
            number(1, "train/lr", 0.125),
            number(2, "train/loss", 1.5),
            number(3, "train/loss", 1.0),
        ];
        assert_eq!(found, expected);
        TensorBoardArgs { tensorboard: None }.open().unwrap().numbers(1, []);
    }

    /// Needs a Python with the package tensorboard.
    #[test]
    fn tensorboard_reads_the_numbers() {
        let packages = "tensorboard.backend.event_processing.event_accumulator";
        let Some(python) = crate::common::python::python_with(packages) else { return };
        let folder = tempfile::tempdir().unwrap();
        let board = TensorBoardArgs { tensorboard: Some(folder.path().into()) }.open().unwrap();
        board.numbers(7, [("valid/loss".to_string(), 0.5)]);
        let script = format!(
            "import sys; from {packages} import EventAccumulator; a = EventAccumulator(sys.argv[1]); \
             a.Reload(); e = a.Scalars('valid/loss')[0]; print(e.step, e.value)"
        );
        let mut command = std::process::Command::new(python);
        let output = command.args(["-c", &script]).arg(folder.path()).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "7 0.5", "{output:?}");
    }
}
