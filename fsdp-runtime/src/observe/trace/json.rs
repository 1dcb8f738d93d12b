//! The file of a trace: the JSON object format of Chrome's Trace Event Format.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{self, Write};

use serde_json::{Value, json};

use super::recorder::{Arrow, Lane, Record, Records, Role, What};

/// Writes all records, a line each. Spans that have not ended end with the last record.
pub(super) fn write(file: &mut impl Write, records: &Records<'_>) -> io::Result<()> {
    let Records { records, epoch, dropped } = records;
    // `fsdp trace merge` brings the times of several files to one clock.
    let other = json!({ "epoch_ns": epoch.to_string(), "dropped_records": dropped });
    write!(file, "{{\"displayTimeUnit\":\"ms\",\"otherData\":{other},\"traceEvents\":[")?;
    let mut lines = Lines { file, first: true };
    let lanes: BTreeSet<Lane> = records.iter().map(|record| record.lane).collect();
    for lane in &lanes {
        lines.metadata(lane)?;
    }
    let arrows = complete_arrows(records);
    let mut open: BTreeMap<Lane, usize> = BTreeMap::new();
    let mut memory: BTreeMap<(usize, bool), BTreeMap<&str, u64>> = BTreeMap::new();
    for (index, record) in records.iter().enumerate() {
        match &record.what {
            What::Begin { .. } => *open.entry(record.lane).or_default() += 1,
            What::End => *open.entry(record.lane).or_default() -= 1,
            What::Memory { kind, on_host, bytes } => {
                let levels = memory.entry((record.lane.rank, *on_host)).or_default();
                levels.insert(kind, *bytes);
            }
            What::Arrow(_) if !arrows.contains_key(&index) => continue,
            What::Arrow(_) => {}
        }
        lines.record(record, arrows.get(&index).copied(), &memory)?;
    }
    let last = records.last().map_or(0, |record| record.time);
    for (lane, count) in open {
        for _ in 0..count {
            lines.record(&Record { time: last, lane, what: What::End }, None, &memory)?;
        }
    }
    writeln!(file, "\n]}}")
}

/// Returns the records of arrows that have both ends, by their indices, each with the number of its
/// arrow. The other end of an arrow is in a step that was not recorded, or its collective was never
/// waited for. An arrow ends at its first wait.
fn complete_arrows(records: &[Record]) -> HashMap<usize, usize> {
    let mut open: HashMap<(usize, u64), Vec<usize>> = HashMap::new();
    let mut complete = HashMap::new();
    for (index, record) in records.iter().enumerate() {
        let What::Arrow(arrow) = record.what else { continue };
        let (Arrow::Start(number) | Arrow::Step(number) | Arrow::End(number)) = arrow;
        let key = (record.lane.rank, number);
        match arrow {
            Arrow::Start(_) => drop(open.insert(key, vec![index])),
            Arrow::Step(_) => {
                if let Some(parts) = open.get_mut(&key) {
                    parts.push(index);
                }
            }
            Arrow::End(_) => {
                let parts = open.remove(&key).unwrap_or_default();
                // Collectives are counted from 0 in each launch, so the first record is the number.
                if let Some(&first) = parts.first() {
                    complete.extend(parts.into_iter().chain([index]).map(|part| (part, first)));
                }
            }
        }
    }
    complete
}

struct Lines<'a, W> {
    file: &'a mut W,
    first: bool,
}

impl<W: Write> Lines<'_, W> {
    fn line(&mut self, value: &Value) -> io::Result<()> {
        let separator = if std::mem::take(&mut self.first) { "" } else { "," };
        write!(self.file, "{separator}\n{value}")
    }

    /// Names a rank and its thread.
    fn metadata(&mut self, lane: &Lane) -> io::Result<()> {
        let (pid, tid) = place(lane);
        let name = match lane.role {
            Role::Compute => "compute",
            Role::Communication => "communication",
        };
        for (what, argument, value) in [
            ("process_name", "name", json!(format!("rank {pid}"))),
            ("process_sort_index", "sort_index", json!(pid)),
            ("thread_name", "name", json!(name)),
            ("thread_sort_index", "sort_index", json!(tid)),
        ] {
            let args = json!({ argument: value });
            self.line(&json!({ "ph": "M", "name": what, "pid": pid, "tid": tid, "args": args }))?;
        }
        Ok(())
    }

    /// Writes a record. `arrow` is the number of its arrow, if it is a part of one.
    fn record(
        &mut self,
        record: &Record,
        arrow: Option<usize>,
        memory: &BTreeMap<(usize, bool), BTreeMap<&str, u64>>,
    ) -> io::Result<()> {
        let (pid, tid) = place(&record.lane);
        let time = record.time as f64 / 1e3;
        let mut line = json!({ "ts": time, "pid": pid, "tid": tid });
        let object = line.as_object_mut().expect("an object was made");
        let mut set = |key: &str, value: Value| {
            object.insert(key.to_string(), value);
        };
        match &record.what {
            What::Begin { category, name, bytes } => {
                set("ph", json!("B"));
                set("cat", json!(category));
                set("name", json!(**name));
                if let Some(bytes) = bytes {
                    set("args", json!({ "bytes": bytes }));
                }
            }
            What::End => set("ph", json!("E")),
            What::Arrow(part) => {
                let phase = match part {
                    Arrow::Start(_) => "s",
                    Arrow::Step(_) => "t",
                    Arrow::End(_) => "f",
                };
                set("ph", json!(phase));
                set("cat", json!("issue"));
                set("name", json!("collective"));
                // Files of several processes are joined.
                set("id", json!(format!("{pid}.{}", arrow.unwrap_or_default())));
                if phase == "f" {
                    set("bp", json!("e"));
                }
            }
            What::Memory { on_host, .. } => {
                let levels = memory.get(&(record.lane.rank, *on_host));
                set("ph", json!("C"));
                set("name", json!(if *on_host { "host memory" } else { "device memory" }));
                set("args", json!(levels));
            }
        }
        self.line(&line)
    }
}

/// Returns a lane's process and thread in the file.
fn place(lane: &Lane) -> (usize, usize) {
    (lane.rank, lane.role as usize)
}
