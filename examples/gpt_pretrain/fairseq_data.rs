//! Tests of folders that fairseq-preprocess has written. Their files are written here from the
//! definition of the format, byte by byte, and by a Python script with NumPy.

use std::path::Path;
use std::process::Command;

use clap::Parser;

use crate::cli::Cli;
use crate::common::python::python_with;
use crate::data::Data;
use crate::dictionary::DictionaryError;
use crate::token_index::IndexError;
use crate::tokens::Tokens;

/// fairseq's number of each type of integers, its bytes, and whether it is signed.
const TYPES: [(u8, usize, bool); 8] = [
    (1, 1, false),
    (2, 1, true),
    (3, 2, true),
    (4, 4, true),
    (5, 8, true),
    (8, 2, false),
    (9, 4, false),
    (10, 8, false),
];

/// Texts as fairseq encodes them: each ends with `</s>`, the id 2.
const TEXTS: [&[i64]; 4] = [&[4, 5, 6, 2], &[2], &[7, 100, 2], &[4, 2]];

/// Word pieces of a dictionary, all that `TEXTS` has.
fn dictionary() -> String {
    (0..97).map(|piece| format!("{} {}\n", 13 * piece, 1000 - piece)).collect()
}

/// The header, the lengths and the offsets of an index.
fn index(code: u8, size: usize, texts: &[&[i64]]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend_from_slice(b"MMIDIDX\x00\x00");
    bytes.extend_from_slice(&[1, 0, 0, 0, 0, 0, 0, 0]);
    bytes.push(code);
    bytes.extend_from_slice(&i64::try_from(texts.len()).unwrap().to_le_bytes());
    for text in texts {
        bytes.extend_from_slice(&i32::try_from(text.len()).unwrap().to_le_bytes());
    }
    let mut pointer = 0i64;
    for text in texts {
        bytes.extend_from_slice(&pointer.to_le_bytes());
        pointer += (text.len() * size) as i64;
    }
    bytes
}

fn ids(size: usize, texts: &[&[i64]]) -> Vec<u8> {
    texts.concat().iter().flat_map(|id| id.to_le_bytes()[..size].to_vec()).collect()
}

/// Writes a folder as `fairseq-preprocess --only-source` does.
fn write_folder(folder: &Path, code: u8, size: usize) {
    for name in ["train", "valid"] {
        std::fs::write(folder.join(name).with_extension("idx"), index(code, size, &TEXTS)).unwrap();
        std::fs::write(folder.join(name).with_extension("bin"), ids(size, &TEXTS)).unwrap();
    }
    std::fs::write(folder.join("dict.txt"), dictionary()).unwrap();
}

fn read(folder: &Path) -> anyhow::Result<Data> {
    Data::read(&Cli::parse_from(["gpt_pretrain", folder.to_str().unwrap()]), 200)
}

fn all(tokens: &Tokens) -> Vec<u32> {
    tokens.read(0..tokens.len()).unwrap()
}

fn expected() -> Vec<u32> {
    TEXTS.concat().into_iter().map(|id| u32::try_from(id).unwrap()).collect()
}

#[test]
fn folders_with_ids_of_every_type_are_read() {
    for (code, size, _) in TYPES {
        let home = tempfile::tempdir().unwrap();
        write_folder(home.path(), code, size);
        let data = read(home.path()).unwrap();
        assert_eq!(data.vocabulary, 4 + 97, "fairseq's own four and the dictionary's");
        assert_eq!(all(&data.train), expected(), "type {code}");
        assert_eq!(all(&data.held_out), expected());
        assert_eq!(data.train.read(3..6).unwrap(), [2, 2, 7]);
        assert!(data.bpe.is_none());
    }
}

/// A negative id, or one above 32 bits, is not taken for another.
#[test]
fn ids_that_no_vocabulary_has_are_refused() {
    for (code, size, is_signed) in TYPES {
        let home = tempfile::tempdir().unwrap();
        write_folder(home.path(), code, size);
        let odd = match (is_signed, size) {
            (true, _) => -3,
            (false, 8) => (1 << 32) + 5,
            (false, _) => 201,
        };
        let texts: [&[i64]; 1] = [&[4, odd]];
        std::fs::write(home.path().join("train.idx"), index(code, size, &texts)).unwrap();
        std::fs::write(home.path().join("train.bin"), ids(size, &texts)).unwrap();
        let error = read(home.path()).unwrap().train.read(0..2).unwrap_err().to_string();
        assert!(error.contains("has the id") && error.contains("200 word pieces"), "{error}");
    }
}

/// Megatron-LM's index has the number of documents, and the first text of each at the end.
#[test]
fn an_index_with_documents_is_read() {
    let home = tempfile::tempdir().unwrap();
    write_folder(home.path(), 8, 2);
    let mut bytes = index(8, 2, &TEXTS);
    bytes.splice(26..26, 3i64.to_le_bytes());
    for document in [0i64, 2, 4] {
        bytes.extend_from_slice(&document.to_le_bytes());
    }
    std::fs::write(home.path().join("train.idx"), &bytes).unwrap();
    assert_eq!(all(&read(home.path()).unwrap().train), expected());
    bytes.truncate(bytes.len() - 8);
    std::fs::write(home.path().join("train.idx"), &bytes).unwrap();
    let error = read(home.path()).unwrap_err();
    let found = error.downcast_ref::<IndexError>();
    assert!(matches!(found, Some(IndexError::Texts { texts: 4, .. })), "{error:?}");
}

/// Returns the error of an index with these bytes beside the ids of `TEXTS` in `u16`.
fn refused(bytes: &[u8]) -> IndexError {
    let home = tempfile::tempdir().unwrap();
    write_folder(home.path(), 8, 2);
    std::fs::write(home.path().join("train.idx"), bytes).unwrap();
    let error = read(home.path()).unwrap_err();
    let text = format!("{error:#}");
    assert!(text.contains("train.idx"), "the file is named: {text}");
    error.downcast::<IndexError>().expect("a typed error")
}

#[test]
fn a_malformed_index_is_a_typed_error() {
    let good = index(8, 2, &TEXTS);
    let with = |at: usize, bytes: &[u8]| {
        let mut changed = good.clone();
        changed[at..at + bytes.len()].copy_from_slice(bytes);
        changed
    };
    use IndexError::{CutOff, Data, IdType, Length, Magic, Offset, OtherFormat, Texts, Version};
    for cut in 0..26 {
        let error = refused(&good[..cut]);
        assert!(matches!(error, CutOff { bytes } if bytes == cut as u64), "{cut}: {error:?}");
    }
    for cut in 26..good.len() {
        let error = refused(&good[..cut]);
        assert!(matches!(error, Texts { texts: 4, .. }), "{cut}: {error:?}");
    }
    let longer = [&good[..], &[0]].concat();
    assert!(matches!(refused(&longer), Texts { texts: 4, bytes } if bytes == longer.len() as u64));
    for (magic, impl_name) in [(&b"TNTIDX\0\0"[..], "lazy or cached"), (b"HUFFIDX\0\0", "huffman")]
    {
        let error = refused(&with(0, magic));
        assert!(matches!(error, OtherFormat { format } if format == impl_name), "{error:?}");
    }
    assert!(matches!(refused(&with(0, b"#")), Magic { found } if found[0] == b'#'));
    assert!(matches!(refused(&with(9, &[2])), Version { found: 2 }));
    for code in [0, 6, 7, 11, 255] {
        assert!(matches!(refused(&with(17, &[code])), IdType { found } if found == code));
    }
    for texts in [0, 3, 5, 1 << 40, u64::MAX] {
        let error = refused(&with(18, &texts.to_le_bytes()));
        assert!(matches!(error, Texts { texts: found, .. } if found == texts), "{error:?}");
    }
    let error = refused(&with(26 + 4, &(-1i32).to_le_bytes()));
    assert!(matches!(error, Length { text: 1, length: -1 }), "{error:?}");
    // The second text's offset, after four lengths.
    let error = refused(&with(26 + 16 + 8, &6i64.to_le_bytes()));
    assert!(matches!(error, Offset { text: 1, found: 6, expected: 8 }), "{error:?}");
    // The last text has another length, so the ids beside the index are too few.
    let error = refused(&with(26 + 12, &3i32.to_le_bytes()));
    assert!(matches!(error, Data { bytes: 20, end: 22 }), "{error:?}");
    let empty = refused(&index(8, 2, &[]));
    assert!(matches!(empty, Data { bytes: 20, end: 0 }), "{empty:?}");
}

#[test]
fn a_malformed_dictionary_is_a_typed_error() {
    let refused = |text: &[u8]| {
        let home = tempfile::tempdir().unwrap();
        write_folder(home.path(), 8, 2);
        std::fs::write(home.path().join("dict.txt"), text).unwrap();
        let error = read(home.path()).unwrap_err();
        assert!(format!("{error:#}").contains("dict.txt"), "{error:#}");
        error.downcast::<DictionaryError>().expect("a typed error")
    };
    use DictionaryError::{Form, Io, Repeated, Special};
    for text in
        ["13 850\nword\n", "13 850\nword many\n", "13 850\n\n", "13 850\n5 1#fairseq:overwrite"]
    {
        assert!(matches!(refused(text.as_bytes()), Form { line: 2, .. }), "{text:?}");
    }
    let error = refused(b"13 850\n5 3\n13 1\n");
    assert!(matches!(error, Repeated { first: 1, line: 3, .. }), "{error:?}");
    assert!(matches!(refused(b"13 850\n<pad> 3\n"), Special { line: 2, .. }));
    assert!(matches!(refused(&[b'1', 0xff, b' ', b'1']), Io(_)));
    // A word piece may have spaces, and fairseq's flag allows one that exists.
    let home = tempfile::tempdir().unwrap();
    write_folder(home.path(), 8, 2);
    let text = dictionary() + "a b 3\n13 2 #fairseq:overwrite\n<s> 0 #fairseq:overwrite\n";
    std::fs::write(home.path().join("dict.txt"), text).unwrap();
    assert_eq!(read(home.path()).unwrap().vocabulary, 4 + 97 + 3);
    std::fs::remove_file(home.path().join("dict.txt")).unwrap();
    let error = format!("{:#}", read(home.path()).unwrap_err());
    assert!(error.contains("dict.txt") && error.contains("tokenizer.json"), "{error}");
}

/// NumPy writes a folder by fairseq's definition, which trains with fairseq's positional argument; and
/// reads what `preprocess` has written as fairseq does.
#[test]
fn numpy_writes_and_reads_the_same_files() {
    let Some(python) = python_with("numpy") else { return };
    let home = tempfile::tempdir().unwrap();
    let script = |arguments: &[&str]| {
        let output = Command::new(&python)
            .args(["-B", "examples/gpt_pretrain/fairseq_folder.py"])
            .args(arguments)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    for dtype in ["uint16", "uint32", "int32", "int64"] {
        let folder = home.path().join(dtype);
        let written = script(&["write", folder.to_str().unwrap(), dtype, "300"]);
        let written: Vec<Vec<u32>> = serde_json::from_str(&written).unwrap();
        let data = read(&folder).unwrap();
        assert_eq!(all(&data.train), written.concat(), "{dtype}");
        assert!(data.train.len() > 3000, "{dtype}");
    }
    let folder = home.path().join("uint16");
    let flags = "--device flex --world-size 2 --quiet --arch tiny --tokens-per-sample 32 \
                 --batch-size 2 --max-update 3 --max-valid-steps 1 --no-save";
    let first = ["gpt_pretrain", folder.to_str().unwrap()];
    let cli = Cli::parse_from(first.into_iter().chain(flags.split_whitespace()));
    let summary = crate::tests::run_cli(&cli).unwrap();
    assert_eq!(summary.losses.len(), 3);
    assert!(summary.losses.iter().all(|loss| loss.is_finite()), "{:?}", summary.losses);

    let text = home.path().join("text.txt");
    std::fs::write(&text, crate::text::Text::embedded().unwrap().held_out).unwrap();
    let folder = home.path().join("ours");
    let paths = ["--trainpref", text.to_str().unwrap(), "--destdir", folder.to_str().unwrap()];
    let words = ["gpt_pretrain", "preprocess", "--vocabulary", "300", "--quiet"];
    crate::start(&Cli::parse_from([&words[..], &paths].concat())).unwrap();
    let read_back = script(&["read", folder.join("train").to_str().unwrap()]);
    let read_back: Vec<Vec<u32>> = serde_json::from_str(&read_back).unwrap();
    let data = Data::read(&Cli::parse_from(["gpt_pretrain", folder.to_str().unwrap()]), 300);
    assert_eq!(read_back.concat(), all(&data.unwrap().train));
}
