//! Labelled text to train on: the embedded corpus, or the user's files.
//!
//! A corpus consists of a training split and a held-out split of labelled sentences or sentence
//! pairs. The header of a file names its columns. Every error names the file, line and column.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};

/// Labelled sentence or sentence pair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Example {
    /// Class, counted from 0.
    pub label: usize,
    /// Only sentence, or first sentence of a pair.
    pub first: String,
    /// Second sentence of a pair.
    pub second: Option<String>,
}

/// Training split and held-out split.
#[derive(Clone, Debug)]
pub struct Corpus {
    /// Name, to be shown to the user.
    pub name: String,
    /// Examples to train on.
    pub train: Vec<Example>,
    /// Held-out examples to evaluate on.
    pub test: Vec<Example>,
    /// Number of classes, at least 2.
    pub classes: usize,
}

/// Names of the training file that a directory may hold, in the order in which they are tried.
const TRAIN_FILES: &[&str] = &["train.tsv", "train.csv", "msr_paraphrase_train.txt"];
/// Names of the test file that a directory may hold, in the order in which they are tried.
const TEST_FILES: &[&str] = &[
    "test.tsv",
    "test.csv",
    "dev.tsv",
    "dev.csv",
    "validation.tsv",
    "validation.csv",
    "msr_paraphrase_test.txt",
];

/// One in `HELD_OUT` examples of a single file is held out.
const HELD_OUT: u64 = 10;

impl Corpus {
    /// Returns the embedded corpus: mail with label 0 (ham) or 1 (spam). See `data/README.md`.
    ///
    /// # Errors
    ///
    /// If the embedded files are malformed.
    pub fn embedded() -> Result<Self> {
        let train = tsv("spam_train.tsv", include_str!("data/spam_train.tsv"))?;
        let test = tsv("spam_test.tsv", include_str!("data/spam_test.tsv"))?;
        Self::new("SpamAssassin mail (embedded)".into(), train, test)
    }

    /// Reads a directory with a training and a test file, or a single file, of which a tenth is
    /// held out.
    ///
    /// # Errors
    ///
    /// If a file is missing, unreadable or malformed.
    pub fn read(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        if path.is_dir() {
            let train = read_file(&find(path, TRAIN_FILES)?)?;
            let test = read_file(&find(path, TEST_FILES)?)?;
            return Self::new(name, train, test);
        }
        let (test, train): (Vec<_>, Vec<_>) =
            read_file(path)?.into_iter().partition(|example| example.hash() % HELD_OUT == 0);
        ensure!(
            !train.is_empty() && !test.is_empty(),
            "{name}: too few examples to hold a tenth of them out; \
             give a directory with a train and a test file instead"
        );
        Self::new(name, train, test)
    }

    fn new(name: String, train: Vec<Example>, test: Vec<Example>) -> Result<Self> {
        let largest = |split: &[Example]| split.iter().map(|example| example.label).max();
        let classes = largest(&train).unwrap_or(0) + 1;
        ensure!(classes >= 2, "{name}: every training example has the label 0");
        let absent = (0..classes).find(|class| train.iter().all(|example| example.label != *class));
        if let Some(absent) = absent {
            bail!(
                "{name}: no training example has the label {absent}, though some have {}; \
                 number the classes 0, 1, 2, ... without gaps",
                classes - 1
            );
        }
        if let Some(unseen) = largest(&test).filter(|label| *label >= classes) {
            bail!("{name}: the test split has the label {unseen}, which no training example has");
        }
        Ok(Self { name, train, test, classes })
    }
}

impl Example {
    /// Hashes the text with FNV-1a, folded to use all 64 bits. Unlike a standard library hasher, it
    /// splits a file the same way with every compiler and on every machine.
    fn hash(&self) -> u64 {
        let second = self.second.as_deref().unwrap_or_default();
        let bytes = self.first.bytes().chain([0]).chain(second.bytes());
        let hash = bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        hash ^ (hash >> 32)
    }
}

/// Returns the first of the named files that exists in a directory.
fn find(directory: &Path, names: &[&str]) -> Result<PathBuf> {
    let mut paths = names.iter().map(|name| directory.join(name));
    paths.find(|path| path.is_file()).ok_or_else(|| {
        anyhow!(
            "{} holds none of {}; a single file may be given instead, of which a tenth is held out",
            directory.display(),
            names.join(", ")
        )
    })
}

fn read_file(path: &Path) -> Result<Vec<Example>> {
    let name = path.display().to_string();
    let bytes = fs::read(path).with_context(|| format!("cannot read {name}"))?;
    let text = String::from_utf8(bytes).map_err(|error| {
        let valid = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let line = 1 + valid.iter().filter(|byte| **byte == b'\n').count();
        anyhow!("{name}, line {line}: not UTF-8 text")
    })?;
    let is_csv = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("csv"));
    if is_csv { csv(&name, &text) } else { tsv(&name, &text) }
}

/// Reads tab-separated text. Quotation marks have no special meaning.
fn tsv(name: &str, text: &str) -> Result<Vec<Example>> {
    let mut lines = without_byte_order_mark(text).lines().zip(1..);
    let header: Vec<_> = lines.next().unwrap_or_default().0.split('\t').collect();
    let columns = Columns::find(name, &header)?;
    let lines = lines.filter(|(line, _)| !line.trim().is_empty());
    let rows = lines.map(|(line, number)| {
        let fields: Vec<_> = line.split('\t').collect();
        columns.example(name, number, &fields)
    });
    not_empty(name, rows.collect::<Result<_>>()?)
}

/// Reads comma-separated text with the quoting of RFC 4180.
fn csv(name: &str, text: &str) -> Result<Vec<Example>> {
    let mut reader = csv::ReaderBuilder::new()
        .flexible(true)
        .has_headers(false)
        .from_reader(without_byte_order_mark(text).as_bytes());
    let mut records = reader.records();
    let header = records.next().transpose().with_context(|| format!("cannot read {name}"))?;
    let columns = Columns::find(name, &header.iter().flatten().collect::<Vec<_>>())?;
    let rows = records.map(|record| {
        let record = record.with_context(|| format!("cannot read {name}"))?;
        let line = record.position().map_or(0, csv::Position::line);
        columns.example(name, line, &record.iter().collect::<Vec<_>>())
    });
    not_empty(name, rows.collect::<Result<_>>()?)
}

/// Removes a byte order mark from the start of the text.
fn without_byte_order_mark(text: &str) -> &str {
    text.strip_prefix('\u{feff}').unwrap_or(text)
}

fn not_empty(name: &str, examples: Vec<Example>) -> Result<Vec<Example>> {
    ensure!(!examples.is_empty(), "{name}: a header and no example below it");
    Ok(examples)
}

/// Positions and names of the columns of a file.
struct Columns {
    count: usize,
    label: Column,
    first: Column,
    second: Option<Column>,
}

#[derive(Clone, Copy)]
struct Column {
    index: usize,
    name: &'static str,
}

impl Columns {
    /// Finds the columns in a file's header.
    fn find(file: &str, header: &[&str]) -> Result<Self> {
        let find = |name: &'static str| {
            let index = header.iter().position(|field| field.trim() == name)?;
            Some(Column { index, name })
        };
        let need = |name| {
            find(name).ok_or_else(|| {
                anyhow!(
                    "{file}, line 1: no column `{name}`; it has {}. Expected `label`, `sentence1` \
                     and, for pairs, `sentence2`, or the header of the Microsoft paraphrase files",
                    header.iter().map(|field| format!("`{field}`")).collect::<Vec<_>>().join(", ")
                )
            })
        };
        let count = header.len();
        if let (Some(label), Some(first)) = (find("Quality"), find("#1 String")) {
            return Ok(Self { count, label, first, second: Some(need("#2 String")?) });
        }
        Ok(Self {
            count,
            label: need("label")?,
            first: need("sentence1")?,
            second: find("sentence2"),
        })
    }

    /// Converts the fields of one line to an example.
    fn example(&self, file: &str, line: u64, fields: &[&str]) -> Result<Example> {
        ensure!(
            fields.len() == self.count,
            "{file}, line {line}: {} columns, where the header has {}",
            fields.len(),
            self.count
        );
        let text = |column: Column| {
            let text = fields[column.index].trim();
            ensure!(!text.is_empty(), "{file}, line {line}, column `{}`: no text", column.name);
            Ok(text.to_string())
        };
        let label = fields[self.label.index].trim();
        Ok(Example {
            label: label.parse().map_err(|_| {
                anyhow!(
                    "{file}, line {line}, column `{}`: `{label}` is not a class; \
                     classes are numbered 0, 1, 2, ...",
                    self.label.name
                )
            })?,
            first: text(self.first)?,
            second: self.second.map(text).transpose()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &str, text: &str) -> Result<Corpus> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(name);
        fs::write(&path, text).unwrap();
        Corpus::read(&path)
    }

    fn message(result: Result<impl std::fmt::Debug>) -> String {
        format!("{:#}", result.unwrap_err())
    }

    #[test]
    fn the_embedded_corpus_has_two_classes_and_no_text_in_both_splits() {
        let corpus = Corpus::embedded().unwrap();
        assert_eq!(corpus.classes, 2);
        assert!(corpus.train.len() > corpus.test.len());
        let train: std::collections::HashSet<_> = corpus.train.iter().map(|e| &e.first).collect();
        assert!(corpus.test.iter().all(|example| !train.contains(&example.first)));
    }

    #[test]
    fn paraphrase_files_are_read_without_quoting() {
        let text = "\u{feff}Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n\
                    1\t1\t2\tHe said \"no.\tShe said, \"no\".\r\n0\t3\t4\tA\tB\n";
        let examples = tsv("msr", text).unwrap();
        assert_eq!(examples[0].first, "He said \"no.");
        assert_eq!(examples[0].second.as_deref(), Some("She said, \"no\"."));
        assert_eq!((examples[0].label, examples[1].label), (1, 0));
    }

    #[test]
    fn csv_is_read_with_quoting_and_true_line_numbers() {
        let text = "sentence1,label\n\"two\nlines, one field\",1\nplain,0\n";
        let examples = csv("a.csv", text).unwrap();
        assert_eq!(examples[0].first, "two\nlines, one field");
        assert_eq!(examples[0].second, None);
        let wrong = csv("a.csv", &format!("{text}plain,x\n"));
        assert!(message(wrong).contains("a.csv, line 5, column `label`: `x`"));
    }

    #[test]
    fn errors_name_file_line_and_column() {
        for (text, expected) in [
            ("text\tlabel\nx\t1\n", "line 1: no column `sentence1`; it has `text`, `label`"),
            ("label\tsentence1\n1\ta\nspam\tb\n", "line 3, column `label`: `spam`"),
            ("label\tsentence1\n-1\ta\n", "line 2, column `label`: `-1`"),
            ("label\tsentence1\n1\ta\tb\n", "line 2: 3 columns, where the header has 2"),
            ("label\tsentence1\n1\t \n", "line 2, column `sentence1`: no text"),
            ("label\tsentence1\n", "a header and no example"),
            ("", "line 1: no column"),
        ] {
            let message = message(tsv("a.tsv", text));
            assert!(message.contains("a.tsv") && message.contains(expected), "{message}");
        }
    }

    #[test]
    fn a_single_file_is_split_the_same_way_each_time() {
        let rows: String = (0..1000).map(|i| format!("{}\tsentence {i}\n", i % 2)).collect();
        let text = format!("label\tsentence1\n{rows}");
        let (one, two) = (read("a.tsv", &text).unwrap(), read("a.tsv", &text).unwrap());
        assert_eq!(one.test, two.test);
        assert_eq!(one.train.len() + one.test.len(), 1000);
        assert!((60..140).contains(&one.test.len()), "{}", one.test.len());
        assert!(message(read("a.tsv", "label\tsentence1\n1\ta\n")).contains("too few examples"));
    }

    #[test]
    fn a_directory_needs_both_splits() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("train.tsv"), "label\tsentence1\n1\ta\n0\tb\n").unwrap();
        assert!(message(Corpus::read(directory.path())).contains("holds none of test.tsv"));
        fs::write(directory.path().join("dev.csv"), "label,sentence1\n1,c\n").unwrap();
        let corpus = Corpus::read(directory.path()).unwrap();
        assert_eq!((corpus.train.len(), corpus.test.len()), (2, 1));
    }

    #[test]
    fn labels_have_no_gaps_and_the_test_split_no_new_ones() {
        let example = |label| Example { label, first: "a".into(), second: None };
        let corpus = |train: &[usize], test: &[usize]| {
            let split = |labels: &[usize]| labels.iter().copied().map(example).collect();
            Corpus::new("c".into(), split(train), split(test))
        };
        assert_eq!(corpus(&[0, 1, 2], &[0]).unwrap().classes, 3);
        assert!(message(corpus(&[0, 2], &[0])).contains("no training example has the label 1"));
        assert!(message(corpus(&[0, 1], &[2])).contains("test split has the label 2"));
        assert!(message(corpus(&[0], &[0])).contains("every training example has the label 0"));
    }

    #[test]
    fn text_that_is_not_utf8_is_named_by_line() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.tsv");
        fs::write(&path, b"label\tsentence1\n1\t\xff\n").unwrap();
        assert!(message(Corpus::read(&path)).contains("line 2: not UTF-8"));
    }
}
