//! Tests of writing and reading a rank's file.

use super::header::parse_header;
use super::reader::RankFileReader;
use super::writer::{FLUSH, RankFileWriter};
use crate::checkpoint::manifest::{BLOCK, Dtype, Piece};
use crate::error::CheckpointError;

fn piece(elements: usize, checksums: Vec<u32>) -> Piece {
    Piece { file: 0, part: 0, start: 0, end: elements, checksums }
}

#[test]
fn the_reader_and_the_safetensors_crate_read_what_was_written() {
    let folder = tempfile::tempdir().unwrap();
    // With too little and with enough space reserved for the header.
    for names in [0, 4096] {
        let path = folder.path().join(format!("{names}.safetensors"));
        let mut writer = RankFileWriter::create(path.clone(), names).unwrap();
        let large: Vec<u8> = (0..BLOCK * 2 + 40).map(|i| (i * 7) as u8).collect();
        let sums = writer.write("model/a/\"quoted\"", Dtype::F32, &large).unwrap();
        writer.write("b", Dtype::U8, &[1, 2, 3]).unwrap();
        let len = writer.finish().unwrap();

        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(bytes.len() as u64, len);
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(file.tensor("model/a/\"quoted\"").unwrap().data(), large);
        assert_eq!(file.tensor("b").unwrap().data(), [1, 2, 3]);

        let reader = RankFileReader::open(path, len).unwrap();
        let piece = piece(large.len() / 4, sums);
        reader.check("model/a/\"quoted\"", Dtype::F32, &piece).unwrap();
        assert!(reader.check("b", Dtype::F32, &piece).is_err());
        let range = BLOCK - 8..BLOCK + 8;
        reader.verify("model/a/\"quoted\"", &piece, range.clone(), BLOCK as u64).unwrap();
        let mut read = vec![0; 16];
        reader.read("model/a/\"quoted\"", range.clone(), &mut read).unwrap();
        assert_eq!(read, large[range]);
    }
}

#[test]
fn a_file_flushed_while_it_is_written_is_complete() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("large.safetensors");
    let mut writer = RankFileWriter::create(path.clone(), 100).unwrap();
    let part: Vec<u8> = (0..FLUSH as usize / 2 + 5).map(|i| (i % 251) as u8).collect();
    let sums: Vec<_> =
        ["a", "b", "c"].map(|name| writer.write(name, Dtype::U8, &part).unwrap()).into();
    assert!(writer.flusher.is_some() && writer.flushed > 0);
    let len = writer.finish().unwrap();
    let reader = RankFileReader::open(path, len).unwrap();
    for (name, sums) in ["a", "b", "c"].into_iter().zip(sums) {
        let piece = piece(part.len(), sums);
        reader.verify(name, &piece, 0..part.len(), BLOCK as u64).unwrap();
        let mut read = vec![0; part.len()];
        reader.read(name, 0..part.len(), &mut read).unwrap();
        assert!(read == part, "`{name}`");
    }
}

#[test]
fn a_changed_byte_fails_only_the_checksum_of_its_block() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.safetensors");
    let mut writer = RankFileWriter::create(path.clone(), 100).unwrap();
    let sums = writer.write("a", Dtype::U8, &vec![5; BLOCK * 2]).unwrap();
    let len = writer.finish().unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let reader = RankFileReader::open(path, len).unwrap();
    let piece = piece(BLOCK * 2, sums);
    reader.verify("a", &piece, 0..BLOCK, BLOCK as u64).unwrap();
    let error = reader.verify("a", &piece, 0..BLOCK + 1, BLOCK as u64).unwrap_err();
    assert!(matches!(error, CheckpointError::Damaged { .. }), "{error}");
}

#[test]
fn headers_with_wrong_offsets_are_refused() {
    for header in [
        r#"{"a":{"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,18446744073709551615]}}"#,
        r#"{"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0]}}"#,
        r#"{"a":{"dtype":"U8","shape":[5],"data_offsets":[0,5]}}"#,
        r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[2,0]}}"#,
        r#"{"a":{"dtype":"X","shape":[2],"data_offsets":[0,2]}}"#,
        r#"{"a":3}"#,
        "[]",
    ] {
        assert!(parse_header(header.as_bytes(), 100..104).is_err(), "{header}");
    }
    let good = r#"{"a":{"dtype":"U8","shape":[2,2],"data_offsets":[0,4]}}"#;
    assert_eq!(parse_header(good.as_bytes(), 100..104).unwrap()["a"].bytes, 100..104);
}
