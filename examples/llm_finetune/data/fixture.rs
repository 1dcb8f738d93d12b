//! Data of tests.

use std::path::{Path, PathBuf};

use super::cache_file::CacheWriter;
use super::dataset::Dataset;
use super::encode::Encoded;
use super::prepare::CacheUse;
use super::report::Report;
use super::tokenizer::ChatTokenizer;

/// `tokenizer.json` of the tiny model.
pub const TOKENIZER: &[u8] = include_bytes!("../tiny/tokenizer.json");
/// `tokenizer_config.json` of the tiny model.
pub const CONFIG: &str = include_str!("../tiny/tokenizer_config.json");
/// `chat_template.jinja` of the tiny model.
pub const TEMPLATE: &str = include_str!("../tiny/chat_template.jinja");

/// Returns the path of a committed file for tests.
pub fn path(name: &str) -> PathBuf {
    folder().join("../fixtures").join(name)
}

/// Returns the folder of these modules.
pub fn folder() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join(file!());
    here.parent().unwrap().to_path_buf()
}

/// Returns the tokenizer of the tiny model.
pub fn tokenizer() -> ChatTokenizer {
    ChatTokenizer::from_parts(TOKENIZER, CONFIG, Some(TEMPLATE)).unwrap()
}

/// Creates a data set of these ids, with whether each counts.
pub fn counted(conversations: &[(&[u32], &[bool])]) -> Dataset {
    let mut writer = CacheWriter::new(None).unwrap();
    for (ids, counted) in conversations {
        writer.push(&Encoded { ids: ids.to_vec(), counted: counted.to_vec() }).unwrap();
    }
    let file = writer.finish(&Report::default(), &[0; 32], None).unwrap();
    Dataset::of_file(file, Report::default(), CacheUse::Built).unwrap()
}

/// Creates a data set of conversations of these lengths. The ids of the n-th go on from 100 n, and
/// all but the first count.
pub fn numbered(lengths: &[usize]) -> Dataset {
    let ids: Vec<Vec<u32>> =
        (0..).zip(lengths).map(|(at, length)| (100 * at..).take(*length).collect()).collect();
    let flags: Vec<Vec<bool>> =
        lengths.iter().map(|length| (0..*length).map(|token| token > 0).collect()).collect();
    let both: Vec<(&[u32], &[bool])> =
        ids.iter().zip(&flags).map(|(ids, flags)| (ids.as_slice(), flags.as_slice())).collect();
    counted(&both)
}
