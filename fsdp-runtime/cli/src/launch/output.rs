//! The output of ranks: forwarded line by line with the rank in front, and appended to the rank's
//! log file, if there is one. The last lines are kept for the report of a failure.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// Number of lines of each stream that are kept.
const KEPT_LINES: usize = 20;

/// Number of bytes of a kept line: the first ones.
const KEPT_BYTES: usize = 64 * 1024;

/// Maximum length of a line in bytes. A longer line is forwarded in pieces.
const MAX_LINE: u64 = 16 * 1024 * 1024;

/// An output stream of a process.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stream {
    Stdout,
    Stderr,
}

/// The last lines that a rank has printed, shared by the threads that read its two streams.
#[derive(Clone, Debug, Default)]
pub(super) struct Tail(Arc<Mutex<TailLines>>);

/// Lines are kept by stream, so that a long standard output does not displace the error messages.
#[derive(Debug, Default)]
struct TailLines {
    /// Number of lines that have arrived on both streams.
    arrived: usize,
    /// For each [`Stream`], the last lines, each with its place in the order of arrival.
    streams: [VecDeque<(usize, String)>; 2],
    /// File that all lines are appended to.
    file: Option<File>,
}

impl Tail {
    /// Returns the tail of a rank without output yet. All its lines are appended to the file
    /// `rank-<rank>.log` in the folder `logs`, which is created.
    pub(super) fn of_rank(rank: usize, logs: Option<&Path>) -> io::Result<Self> {
        let open = |folder: &Path| {
            fs::create_dir_all(folder)?;
            let path = folder.join(format!("rank-{rank}.log"));
            File::options().append(true).create(true).open(path)
        };
        let file = logs.map(open).transpose()?;
        Ok(Self(Arc::new(Mutex::new(TailLines { file, ..TailLines::default() }))))
    }

    fn push(&self, stream: Stream, line: &[u8]) {
        let mut tail = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = &mut tail.file {
            // Ignored as other write errors are: a full disk does not end a rank.
            let _ = file.write_all(&[line, b"\n"].concat());
        }
        tail.arrived += 1;
        let line = &line[..line.len().min(KEPT_BYTES)];
        let line = (tail.arrived, String::from_utf8_lossy(line).into_owned());
        let lines = &mut tail.streams[stream as usize];
        if lines.len() == KEPT_LINES {
            lines.pop_front();
        }
        lines.push_back(line);
    }

    /// Returns the last lines of both streams in the order of arrival.
    pub(super) fn lines(&self) -> Vec<String> {
        let tail = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut lines: Vec<_> = tail.streams.iter().flatten().cloned().collect();
        lines.sort_unstable_by_key(|(arrived, _)| *arrived);
        lines.into_iter().map(|(_, line)| line).collect()
    }
}

/// Calls `line` for each line of `source`, without its line ending, until the stream ends or fails.
pub(super) fn for_each_line(source: impl Read, mut line: impl FnMut(&[u8])) {
    let mut source = BufReader::new(source);
    let mut bytes = Vec::new();
    loop {
        bytes.clear();
        match source.by_ref().take(MAX_LINE).read_until(b'\n', &mut bytes) {
            Ok(0) => return,
            Ok(_) => line(visible(&bytes)),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

/// Returns a function that writes a line with a prefix to `sink` and appends the line to `tail`.
/// Write errors are ignored, so that a rank continues when nobody reads its output.
pub(super) fn forward_to(
    stream: Stream,
    mut sink: impl Write,
    prefix: String,
    tail: Tail,
) -> impl FnMut(&[u8]) {
    move |line| {
        tail.push(stream, line);
        // One write a line, so that lines of several ranks do not mix.
        let mut whole = Vec::with_capacity(prefix.len() + line.len() + 1);
        whole.extend_from_slice(prefix.as_bytes());
        whole.extend_from_slice(line);
        whole.push(b'\n');
        let _ = sink.write_all(&whole).and_then(|()| sink.flush());
    }
}

/// Returns the part of a line that a terminal would show in the end: without the line ending, and
/// after the last carriage return, which progress bars print to overwrite the line.
fn visible(line: &[u8]) -> &[u8] {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    line.rsplit(|byte| *byte == b'\r').next().unwrap_or(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn relayed(text: &[u8]) -> (String, Vec<String>) {
        let (mut sink, tail) = (Vec::new(), Tail::default());
        for_each_line(
            text,
            forward_to(Stream::Stdout, &mut sink, "[rank 1] ".into(), tail.clone()),
        );
        (String::from_utf8_lossy(&sink).into_owned(), tail.lines())
    }

    #[test]
    fn lines_get_their_rank() {
        let (text, _) = relayed(b"one\r\ntwo\n\n10%\r20%\r30%\nlast");
        assert_eq!(text, "[rank 1] one\n[rank 1] two\n[rank 1] \n[rank 1] 30%\n[rank 1] last\n");
    }

    #[test]
    fn the_last_lines_are_kept() {
        let text: String = (0..100).map(|line| format!("{line}\n")).collect();
        let (_, kept) = relayed(text.as_bytes());
        assert_eq!(kept.len(), KEPT_LINES);
        assert_eq!((kept[0].as_str(), kept[KEPT_LINES - 1].as_str()), ("80", "99"));
    }

    #[test]
    fn much_output_leaves_the_errors() {
        let tail = Tail::default();
        for_each_line(
            "disk full\n".as_bytes(),
            forward_to(Stream::Stderr, Vec::new(), String::new(), tail.clone()),
        );
        let text: String = (0..100).map(|line| format!("{line}\n")).collect();
        for_each_line(
            text.as_bytes(),
            forward_to(Stream::Stdout, Vec::new(), String::new(), tail.clone()),
        );
        let kept = tail.lines();
        assert_eq!((kept.len(), kept[0].as_str()), (KEPT_LINES + 1, "disk full"));
    }

    #[test]
    fn a_line_without_end_is_cut_and_wrong_bytes_pass() {
        let long = vec![b'x'; MAX_LINE as usize];
        let (text, kept) = relayed(&long);
        assert_eq!((text.lines().count(), text.len()), (1, "[rank 1] \n".len() + long.len()));
        assert_eq!(kept[0].len(), KEPT_BYTES);
        let (text, _) = relayed(&[&*long, b"xx"].concat());
        assert_eq!(text.lines().count(), 2);
        let (_, kept) = relayed(b"a\xffb\n");
        assert_eq!(kept, ["a\u{fffd}b"]);
    }
}
