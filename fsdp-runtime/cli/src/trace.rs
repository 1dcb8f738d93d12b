//! `fsdp trace`: files of traces, joined or summed up.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Subcommand;
use serde_json::{Map, Value, json};

use crate::console;

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Joins the traces of several processes in one file, on one clock
    Merge {
        /// Files of the processes
        #[arg(required = true)]
        files: Vec<PathBuf>,
        /// File to write
        #[arg(short, long)]
        output: PathBuf,
    },
    /// Prints where the time of each rank and of each unit goes
    Summary {
        /// File of a trace
        file: PathBuf,
    },
}

/// Joins or sums up traces. Exits with 1 on an error.
pub(crate) fn run(args: &Args) -> ExitCode {
    let done = match &args.command {
        Command::Merge { files, output } => merge(files, output),
        Command::Summary { file } => Trace::read(file).map(|trace| summarize(&trace)),
    };
    match done {
        Ok(text) => {
            console::out(text.trim_end());
            ExitCode::SUCCESS
        }
        Err(error) => {
            console::err(error);
            ExitCode::FAILURE
        }
    }
}

/// A trace as a file has it.
struct Trace {
    /// Nanoseconds from the Unix epoch to time 0.
    epoch: u128,
    dropped: u64,
    events: Vec<Map<String, Value>>,
}

impl Trace {
    fn read(path: &Path) -> Result<Self, String> {
        let wrong = |reason: String| format!("{} is no trace of ranks: {reason}", path.display());
        let text = fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
        let mut file: Value =
            serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
        let epoch = file["otherData"]["epoch_ns"].as_str().and_then(|text| text.parse().ok());
        let epoch = epoch.ok_or_else(|| wrong("`otherData.epoch_ns` is missing".into()))?;
        let dropped = file["otherData"]["dropped_records"].as_u64().unwrap_or(0);
        let Value::Array(events) = file["traceEvents"].take() else {
            return Err(wrong("`traceEvents` is missing".into()));
        };
        let event = |(index, event)| match event {
            Value::Object(event) if event.contains_key("ph") && event.contains_key("pid") => {
                Ok(event)
            }
            _ => Err(wrong(format!("event {index} has no `ph` or no `pid`"))),
        };
        let events = events.into_iter().enumerate().map(event).collect::<Result<_, _>>()?;
        Ok(Self { epoch, dropped, events })
    }

    fn ranks(&self) -> BTreeSet<u64> {
        self.events.iter().filter_map(|event| event["pid"].as_u64()).collect()
    }
}

/// Writes the events of all files to one. Times count from the first process's begin.
fn merge(files: &[PathBuf], output: &Path) -> Result<String, String> {
    let mut traces = Vec::new();
    let mut owners: BTreeMap<u64, &PathBuf> = BTreeMap::new();
    for file in files {
        let trace = Trace::read(file)?;
        for rank in trace.ranks() {
            if let Some(other) = owners.insert(rank, file) {
                let (other, file) = (other.display(), file.display());
                return Err(format!("rank {rank} is in {other} and in {file}"));
            }
        }
        traces.push(trace);
    }
    let epoch = traces.iter().map(|trace| trace.epoch).min().unwrap_or(0);
    let dropped: u64 = traces.iter().map(|trace| trace.dropped).sum();
    let mut events = Vec::new();
    for trace in traces {
        let shift = (trace.epoch - epoch) as f64 / 1e3;
        events.extend(trace.events.into_iter().map(|mut event| {
            if let Some(time) = event.get("ts").and_then(Value::as_f64) {
                event.insert("ts".into(), json!(time + shift));
            }
            Value::Object(event)
        }));
    }
    let count = events.len();
    let merged = json!({
        "displayTimeUnit": "ms",
        "otherData": { "epoch_ns": epoch.to_string(), "dropped_records": dropped },
        "traceEvents": events,
    });
    fs::write(output, merged.to_string())
        .map_err(|error| format!("{}: {error}", output.display()))?;
    Ok(format!("{count} events of {} ranks in {}", owners.len(), output.display()))
}

/// Microseconds of one rank.
#[derive(Default)]
struct RankTimes {
    first: Option<f64>,
    last: f64,
    /// Time in which the rank's thread waited for collectives.
    waits: f64,
    optimizer: f64,
    checkpoints: f64,
    /// Time of collectives on the communication thread.
    collectives: f64,
    steps: usize,
}

/// Microseconds of one unit, over all ranks.
#[derive(Default)]
struct UnitTimes {
    forward: f64,
    backward: f64,
    collectives: f64,
    bytes: u64,
}

/// A span that has begun.
struct Open {
    name: String,
    category: String,
    begin: f64,
    /// Time of the spans inside it that count for themselves.
    inner: f64,
    bytes: u64,
}

#[derive(Default)]
struct Sums {
    ranks: BTreeMap<u64, RankTimes>,
    units: BTreeMap<String, UnitTimes>,
}

impl Sums {
    /// Adds a span that has ended. Returns the part of its time that does not count for the span
    /// around it.
    fn add(&mut self, rank: u64, thread: u64, span: &Open, time: f64) -> f64 {
        let lasted = time - span.begin;
        let own = lasted - span.inner;
        let of_rank = self.ranks.entry(rank).or_default();
        let unit_of = |name: &str| name.split_once(' ').map_or("", |(_, unit)| unit).to_string();
        match span.category.as_str() {
            "wait" => of_rank.waits += lasted,
            "optimizer" => {
                of_rank.optimizer += own;
                of_rank.steps += 1;
            }
            "checkpoint" => of_rank.checkpoints += own,
            "collective" => {
                if thread != 0 {
                    of_rank.collectives += lasted;
                }
                let unit = self.units.entry(unit_of(&span.name)).or_default();
                unit.collectives += lasted;
                unit.bytes += span.bytes;
            }
            "forward" => self.units.entry(unit_of(&span.name)).or_default().forward += own,
            "backward" => self.units.entry(unit_of(&span.name)).or_default().backward += own,
            _ => return span.inner,
        }
        lasted
    }
}

/// Sums up the spans by rank and by unit.
fn sum(trace: &Trace) -> Sums {
    let mut sums = Sums::default();
    let mut open: BTreeMap<(u64, u64), Vec<Open>> = BTreeMap::new();
    for event in &trace.events {
        let text = |key: &str| event.get(key).and_then(Value::as_str).unwrap_or("").to_string();
        let number = |key: &str| event.get(key).and_then(Value::as_u64).unwrap_or(0);
        let (rank, thread) = (number("pid"), number("tid"));
        let Some(time) = event.get("ts").and_then(Value::as_f64) else { continue };
        let of_rank = sums.ranks.entry(rank).or_default();
        of_rank.first = Some(of_rank.first.map_or(time, |first| first.min(time)));
        of_rank.last = of_rank.last.max(time);
        let spans = open.entry((rank, thread)).or_default();
        match text("ph").as_str() {
            "B" => {
                let bytes = event.get("args").and_then(|args| args["bytes"].as_u64()).unwrap_or(0);
                let (name, category) = (text("name"), text("cat"));
                spans.push(Open { name, category, begin: time, inner: 0.0, bytes });
            }
            "E" => {
                if let Some(span) = spans.pop() {
                    let counted = sums.add(rank, thread, &span, time);
                    if let Some(outer) =
                        open.get_mut(&(rank, thread)).and_then(|all| all.last_mut())
                    {
                        outer.inner += counted;
                    }
                }
            }
            _ => {}
        }
    }
    sums
}

/// Returns tables of the time of ranks and of units.
fn summarize(trace: &Trace) -> String {
    let Sums { ranks, units } = sum(trace);
    let mut lines = vec![format!(
        "{:<8}{:>8}{:>12}{:>12}{:>12}{:>14}{:>14}{:>14}",
        "rank", "steps", "total ms", "computes", "waits", "optimizer", "checkpoints", "collectives"
    )];
    let total = |times: &RankTimes| times.last - times.first.unwrap_or(times.last);
    let computes = |times: &RankTimes| total(times) - times.waits - times.checkpoints;
    for (rank, times) in &ranks {
        let total = total(times);
        let share = |part: f64| format!("{:.1} %", 100.0 * part / total.max(f64::MIN_POSITIVE));
        lines.push(format!(
            "{rank:<8}{:>8}{:>12.3}{:>12}{:>12}{:>14}{:>14}{:>14}",
            times.steps,
            total / 1e3,
            share(computes(times)),
            share(times.waits),
            share(times.optimizer),
            share(times.checkpoints),
            share(times.collectives),
        ));
    }
    let slowest = ranks.iter().max_by(|a, b| computes(a.1).total_cmp(&computes(b.1)));
    if let (Some((rank, times)), true) = (slowest, ranks.len() > 1) {
        let least = ranks.values().map(computes).fold(f64::INFINITY, f64::min);
        lines.push(format!(
            "rank {rank} computes longest: {:.3} ms, {:.3} ms more than the fastest",
            computes(times) / 1e3,
            (computes(times) - least) / 1e3
        ));
    }
    lines.push(format!(
        "\n{:<32}{:>12}{:>12}{:>16}{:>12}",
        "unit, all ranks", "forward ms", "backward ms", "collectives ms", "MiB"
    ));
    for (unit, times) in &units {
        lines.push(format!(
            "{:<32}{:>12.3}{:>12.3}{:>16.3}{:>12.3}",
            unit,
            times.forward / 1e3,
            times.backward / 1e3,
            times.collectives / 1e3,
            times.bytes as f64 / (1 << 20) as f64,
        ));
    }
    if trace.dropped > 0 {
        lines.push(format!("{} records had no room and are missing", trace.dropped));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(folder: &Path, name: &str, epoch: u64, rank: u64, events: &[Value]) -> PathBuf {
        let events: Vec<_> = events
            .iter()
            .map(|event| {
                let mut event = event.clone();
                event["pid"] = json!(rank);
                event
            })
            .collect();
        let file = json!({
            "otherData": { "epoch_ns": epoch.to_string(), "dropped_records": 0 },
            "traceEvents": events,
        });
        let path = folder.join(name);
        fs::write(&path, file.to_string()).unwrap();
        path
    }

    fn begin(time: f64, thread: u64, category: &str, name: &str) -> Value {
        json!({ "ph": "B", "ts": time, "tid": thread, "cat": category, "name": name })
    }

    fn end(time: f64, thread: u64) -> Value {
        json!({ "ph": "E", "ts": time, "tid": thread })
    }

    #[test]
    fn merged_traces_have_one_clock_and_every_rank_once() {
        let folder = tempfile::tempdir().unwrap();
        let events = [begin(5.0, 0, "wait", "wait"), end(7.0, 0)];
        let first = file(folder.path(), "0", 1_000_000, 0, &events);
        let second = file(folder.path(), "1", 1_002_000, 1, &events);
        let output = folder.path().join("merged");
        merge(&[second.clone(), first], &output).unwrap();
        let merged = Trace::read(&output).unwrap();
        assert_eq!(merged.ranks().into_iter().collect::<Vec<_>>(), [0, 1]);
        let begins = |rank: u64| {
            let events = merged.events.iter().filter(|event| event["pid"] == rank);
            events.map(|event| event["ts"].as_f64().unwrap()).collect::<Vec<_>>()
        };
        assert_eq!((begins(0), begins(1)), (vec![5.0, 7.0], vec![7.0, 9.0]));
        let error = merge(&[second.clone(), second], &output).unwrap_err();
        assert!(error.starts_with("rank 1 is in"), "{error}");
        fs::write(&output, "{}").unwrap();
        let error = Trace::read(&output).err().unwrap();
        assert!(error.contains("epoch_ns"), "{error}");
    }

    #[test]
    fn times_count_once_and_for_their_unit() {
        let folder = tempfile::tempdir().unwrap();
        let events = [
            begin(0.0, 0, "forward", "forward (root)"),
            begin(10.0, 0, "schedule", "pre_forward a"),
            begin(11.0, 0, "wait", "wait"),
            end(15.0, 0),
            end(16.0, 0),
            begin(16.0, 0, "forward", "forward a"),
            end(40.0, 0),
            end(50.0, 0),
            begin(12.0, 1, "collective", "all_gather a"),
            end(15.0, 1),
            begin(60.0, 0, "optimizer", "optimizer step"),
            end(100.0, 0),
        ];
        let trace = Trace::read(&file(folder.path(), "0", 0, 0, &events)).unwrap();
        let Sums { ranks, units } = sum(&trace);
        let rank = &ranks[&0];
        assert_eq!((rank.waits, rank.optimizer, rank.collectives), (4.0, 40.0, 3.0));
        assert_eq!((rank.first, rank.last, rank.steps), (Some(0.0), 100.0, 1));
        assert_eq!((units["a"].forward, units["a"].collectives), (24.0, 3.0));
        assert_eq!(units["(root)"].forward, 50.0 - 24.0 - 4.0);
        let text = summarize(&trace);
        assert!(text.contains("96.0 %") && text.contains("4.0 %"), "{text}");
    }
}
