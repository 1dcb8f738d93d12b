//! Report of the rows that are not used: counts by reason, with the first rows of each.

use std::fmt::{self, Display};

use serde::{Deserialize, Serialize};

use super::reason::Reason;

/// Rows named for each reason.
const EXAMPLES: usize = 3;

/// Counts of accepted and rejected rows. It displays as one line for each reason, and as nothing if
/// no row is rejected.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    accepted: u64,
    reasons: Vec<ReasonCount>,
    /// Names of the data files. A cache has none, because a file may be moved.
    #[serde(skip)]
    files: Vec<String>,
}

/// Number of rows rejected for one reason.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReasonCount {
    /// Name of the reason.
    pub kind: String,
    /// Number of rows.
    pub count: u64,
    /// First rows, at most 3.
    pub examples: Vec<Rejected>,
}

/// A rejected row.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rejected {
    /// Index of the data file.
    pub file: usize,
    /// Line of the file, or row of a Parquet file, from 1.
    pub line: u64,
    /// What is wrong with it.
    pub reason: String,
}

impl Report {
    /// Creates the report of data files without a row.
    pub fn new(files: Vec<String>) -> Self {
        Self { files, ..Self::default() }
    }

    /// Returns this report with the names of the data files.
    pub fn with_files(self, files: Vec<String>) -> Self {
        Self { files, ..self }
    }

    /// Counts a row that is used.
    pub fn accept(&mut self) {
        self.accepted += 1;
    }

    /// Counts a row that is not used.
    pub fn reject(&mut self, file: usize, line: u64, reason: &Reason) {
        let kind = reason.kind();
        let at = self.reasons.iter().position(|known| known.kind == kind).unwrap_or_else(|| {
            self.reasons.push(ReasonCount { kind: kind.into(), count: 0, examples: Vec::new() });
            self.reasons.len() - 1
        });
        let known = &mut self.reasons[at];
        known.count += 1;
        if known.examples.len() < EXAMPLES {
            known.examples.push(Rejected { file, line, reason: reason.to_string() });
        }
    }

    /// Returns the number of rows that are used.
    pub fn accepted(&self) -> u64 {
        self.accepted
    }

    /// Returns the number of rows that are not used.
    pub fn rejected(&self) -> u64 {
        self.reasons.iter().map(|reason| reason.count).sum()
    }

    /// Formats the first rejected row as `file:line: reason`. Returns `None` if no row is rejected.
    pub fn first(&self) -> Option<String> {
        let examples = self.reasons.iter().flat_map(|reason| &reason.examples);
        let first = examples.min_by_key(|row| (row.file, row.line))?;
        Some(self.describe(first))
    }

    fn describe(&self, row: &Rejected) -> String {
        let file = self.files.get(row.file).map_or("?", String::as_str);
        format!("{file}:{}: {}", row.line, row.reason)
    }
}

impl Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, reason) in self.reasons.iter().enumerate() {
            let end = if index == 0 { "" } else { "\n" };
            let rows = if reason.count == 1 { "row" } else { "rows" };
            write!(f, "{end}{} {rows} not used, {}: ", reason.count, reason.kind)?;
            let examples: Vec<_> = reason.examples.iter().map(|row| self.describe(row)).collect();
            f.write_str(&examples.join("; "))?;
            if reason.count as usize > examples.len() {
                f.write_str("; ..")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_is_a_line_with_its_first_rows() {
        let mut report = Report::new(vec!["a.jsonl".into(), "b.jsonl".into()]);
        assert_eq!(report.to_string(), "");
        report.accept();
        for line in [3, 5, 8, 9] {
            report.reject(0, line, &Reason::NoAssistant);
        }
        report.reject(1, 2, &Reason::Empty("`text`"));
        let none = "the conversation has no assistant turn";
        assert_eq!(
            report.to_string(),
            format!(
                "4 rows not used, no assistant turn: a.jsonl:3: {none}; a.jsonl:5: {none}; \
                 a.jsonl:8: {none}; ..\n1 row not used, empty: b.jsonl:2: `text` is empty"
            )
        );
        assert_eq!((report.accepted(), report.rejected()), (1, 5));
        assert_eq!(report.first(), Some(format!("a.jsonl:3: {none}")));
    }
}
