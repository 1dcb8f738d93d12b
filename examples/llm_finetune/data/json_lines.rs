//! Reads the lines of a file of JSON lines.

use std::io::{BufRead, BufReader, Read};

use anyhow::{Context, Result, bail};

use super::record::{Content, Record, Records};

/// Bytes that a text may begin with to say that it is UTF-8.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Returns the rows of a file. Blank lines are skipped. `name` is the file's name for errors.
///
/// # Errors
///
/// If the file cannot be read, or is one JSON array. The iterator's errors are those of reading on.
pub fn records(contents: impl Read + 'static, name: String) -> Result<Records> {
    let mut reader = BufReader::with_capacity(1 << 20, contents);
    let start = reader.fill_buf().with_context(|| format!("cannot read {name}"))?;
    let text = start.strip_prefix(BYTE_ORDER_MARK).unwrap_or(start);
    if text.trim_ascii_start().first() == Some(&b'[') {
        bail!("{name} begins with a JSON array; write one object a line (JSON lines)");
    }
    let marked = start.len() - text.len();
    reader.consume(marked);
    let mut line = 0;
    let next = move || {
        loop {
            let mut text = Vec::new();
            let read = reader.read_until(b'\n', &mut text);
            line += 1;
            match read.with_context(|| format!("cannot read {name}:{line}")) {
                Ok(0) => return None,
                Ok(_) if text.trim_ascii().is_empty() => {}
                Ok(bytes) => {
                    let content = Content::Json(text);
                    return Some(Ok(Record { line, bytes: bytes as u64, content }));
                }
                Err(error) => return Some(Err(error)),
            }
        }
    };
    Ok(Box::new(std::iter::from_fn(next)))
}

#[cfg(test)]
mod tests {
    use super::super::reason::Reason;
    use super::super::row::Row;
    use super::*;

    fn lines(contents: &'static [u8]) -> Vec<(u64, Result<Row, Reason>)> {
        let records = records(contents, "here".into()).unwrap();
        records.map(Result::unwrap).map(|record| (record.line, record.parse())).collect()
    }

    #[test]
    fn lines_are_numbered_from_one_and_blank_ones_skipped() {
        let rows = lines(
            b"\xef\xbb\xbf{\"text\":\"a\"}\n\n{\"text\":}\r\n{\"text\":\"\xff\"}\n{\"text\":\"b\"}",
        );
        let numbers: Vec<_> = rows.iter().map(|(line, _)| *line).collect();
        assert_eq!(numbers, [1, 3, 4, 5]);
        assert!(rows[0].1.is_ok() && rows[3].1.is_ok());
        let reason = rows[1].1.as_ref().unwrap_err();
        assert_eq!(reason.to_string(), "not valid JSON: expected value at column 9");
        assert!(matches!(rows[2].1, Err(Reason::Json(_))), "{:?}", rows[2].1);
    }

    #[test]
    fn a_json_array_is_refused() {
        let error = records(b" [{\"text\":\"a\"}]".as_slice(), "here".into()).err().unwrap();
        assert!(error.to_string().contains("here begins with a JSON array"), "{error}");
    }
}
