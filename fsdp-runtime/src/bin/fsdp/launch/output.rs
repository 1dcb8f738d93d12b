//! What ranks print: relayed line by line with the rank in front, and the last lines kept.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::sync::{Arc, Mutex, PoisonError};

/// Lines of each stream that are kept for the report of a failure.
const KEPT: usize = 20;

/// A longer line is relayed in pieces.
const LONGEST: u64 = 64 * 1024;

/// One of a rank's streams.
#[derive(Clone, Copy, Debug)]
pub enum Stream {
    Output,
    Error,
}

/// The last lines of a rank.
#[derive(Clone, Debug, Default)]
pub struct Tail(Arc<Mutex<Kept>>);

/// By stream, so that much output leaves the errors, which may arrive first, in place.
#[derive(Debug, Default)]
struct Kept {
    arrived: usize,
    streams: [VecDeque<(usize, String)>; 2],
}

impl Tail {
    fn push(&self, stream: Stream, line: &[u8]) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.arrived += 1;
        let line = (kept.arrived, String::from_utf8_lossy(line).into_owned());
        let lines = &mut kept.streams[stream as usize];
        if lines.len() == KEPT {
            lines.pop_front();
        }
        lines.push_back(line);
    }

    /// The lines, in the order of their arrival.
    pub fn lines(&self) -> Vec<String> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut lines: Vec<_> = kept.streams.iter().flatten().cloned().collect();
        lines.sort_unstable_by_key(|(arrived, _)| *arrived);
        lines.into_iter().map(|(_, line)| line).collect()
    }
}

/// Hands each line of `source`, as a terminal would leave it, to `line`.
pub fn lines(source: impl Read, mut line: impl FnMut(&[u8])) {
    let mut source = BufReader::new(source);
    let mut bytes = Vec::new();
    loop {
        bytes.clear();
        match source.by_ref().take(LONGEST).read_until(b'\n', &mut bytes) {
            Ok(0) => return,
            Ok(_) => line(shown(&bytes)),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

/// Writes lines with a prefix, and keeps the last. That nobody reads them does not stop the rank.
pub fn relay(
    stream: Stream,
    mut sink: impl Write,
    prefix: String,
    tail: Tail,
) -> impl FnMut(&[u8]) {
    move |line| {
        tail.push(stream, line);
        // In one write, so that lines of several ranks do not mix.
        let mut whole = Vec::with_capacity(prefix.len() + line.len() + 1);
        whole.extend_from_slice(prefix.as_bytes());
        whole.extend_from_slice(line);
        whole.push(b'\n');
        let _ = sink.write_all(&whole).and_then(|()| sink.flush());
    }
}

/// A line as a terminal would leave it: without its end, and from the last carriage return on.
fn shown(line: &[u8]) -> &[u8] {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    line.rsplit(|byte| *byte == b'\r').next().unwrap_or(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn relayed(text: &[u8]) -> (String, Vec<String>) {
        let (mut sink, tail) = (Vec::new(), Tail::default());
        lines(text, relay(Stream::Output, &mut sink, "[rank 1] ".into(), tail.clone()));
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
        assert_eq!(kept.len(), KEPT);
        assert_eq!((kept[0].as_str(), kept[KEPT - 1].as_str()), ("80", "99"));
    }

    #[test]
    fn much_output_leaves_the_errors() {
        let tail = Tail::default();
        lines(
            "disk full\n".as_bytes(),
            relay(Stream::Error, Vec::new(), String::new(), tail.clone()),
        );
        let text: String = (0..100).map(|line| format!("{line}\n")).collect();
        lines(text.as_bytes(), relay(Stream::Output, Vec::new(), String::new(), tail.clone()));
        let kept = tail.lines();
        assert_eq!((kept.len(), kept[0].as_str()), (KEPT + 1, "disk full"));
    }

    #[test]
    fn a_line_without_end_is_cut_and_wrong_bytes_pass() {
        let long = vec![b'x'; 3 * LONGEST as usize];
        let (text, _) = relayed(&long);
        assert_eq!(text.lines().count(), 3);
        let (_, kept) = relayed(b"a\xffb\n");
        assert_eq!(kept, ["a\u{fffd}b"]);
    }
}
