//! `Manifest::parse` of manifests that are changed at random, and of earlier versions.

use std::cell::Cell;

use fsdp_runtime::checkpoint::{Manifest, seal};
use fsdp_runtime::errors::CheckpointError;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

/// A manifest of two ranks that has every field.
const VALID: &str = include_str!("manifests/two_ranks.json");

/// Asserts the guarantees of a manifest that the reader accepts.
fn holds(manifest: &Manifest) -> Result<(), TestCaseError> {
    prop_assert_eq!(manifest.files.len(), manifest.world_size);
    for (name, tensor) in manifest.tensors() {
        let numel = tensor.shape.iter().product::<usize>() * tensor.copies;
        prop_assert!(tensor.copies == 1 || tensor.copies == manifest.world_size, "{}", name);
        let mut covered = 0;
        for piece in &tensor.pieces {
            prop_assert!(piece.start == covered && piece.end > covered, "{}", name);
            let bytes = (piece.end - piece.start) * tensor.dtype.size();
            prop_assert!(bytes as u64 <= manifest.files[piece.file], "{}", name);
            covered = piece.end;
        }
        prop_assert_eq!(covered, numel, "{}", name);
    }
    // A manifest that was read can be written and read again.
    let again = Manifest::parse(manifest.to_text().as_bytes(), "again")
        .map_err(|error| TestCaseError::fail(error.to_string()))?;
    prop_assert_eq!(again.to_text(), manifest.to_text());
    Ok(())
}

/// Reads a body without a checksum, and with a valid one. Returns how many of the two manifests are
/// accepted.
fn read(body: &[u8]) -> Result<usize, TestCaseError> {
    let _ = Manifest::parse(body, "raw");
    let mut accepted = 0;
    for outcome in [
        Manifest::parse_body(body, "body"),
        Manifest::parse(seal(&String::from_utf8_lossy(body)).as_bytes(), "sealed"),
    ] {
        match outcome {
            Ok(manifest) => {
                holds(&manifest)?;
                accepted += 1;
            }
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }
    Ok(accepted)
}

#[derive(Clone, Debug)]
enum Change {
    Byte(prop::sample::Index, u8),
    Digits(prop::sample::Index, String),
    Cut(prop::sample::Index, usize),
    Repeat(prop::sample::Index, usize),
    Replace(usize, usize),
}

/// Tokens of a manifest, and numbers at the ends of ranges.
const TOKENS: [&str; 16] = [
    "0",
    "1",
    "2",
    "4",
    "24",
    "96",
    "-1",
    "1e3",
    "18446744073709551615",
    "9223372036854775808",
    "\"F32\"",
    "\"F64\"",
    "\"I8\"",
    "[]",
    "{}",
    "null",
];

fn change() -> impl Strategy<Value = Change> {
    use Change::*;
    prop_oneof![
        (any::<prop::sample::Index>(), any::<u8>()).prop_map(|(at, byte)| Byte(at, byte)),
        (any::<prop::sample::Index>(), "[0-9]{1,22}").prop_map(|(at, text)| Digits(at, text)),
        (any::<prop::sample::Index>(), 1usize..60).prop_map(|(at, len)| Cut(at, len)),
        (any::<prop::sample::Index>(), 1usize..200).prop_map(|(at, len)| Repeat(at, len)),
        (0..TOKENS.len(), 0..TOKENS.len()).prop_map(|(from, to)| Replace(from, to)),
    ]
}

fn apply(text: &mut Vec<u8>, change: &Change) {
    if text.is_empty() {
        return;
    }
    let len = text.len();
    match change {
        Change::Byte(at, byte) => text[at.index(len)] = *byte,
        Change::Digits(at, digits) => {
            // Replaces the next number.
            let from = at.index(len);
            let start = (from..len).find(|&at| text[at].is_ascii_digit()).unwrap_or(from);
            let end = (start..len).find(|&at| !text[at].is_ascii_digit()).unwrap_or(len);
            text.splice(start..end, digits.bytes());
        }
        Change::Cut(at, count) => {
            let start = at.index(len);
            text.drain(start..(start + count).min(len));
        }
        Change::Repeat(at, count) => {
            let start = at.index(len);
            let part = text[start..(start + count).min(len)].to_vec();
            text.splice(start..start, part);
        }
        Change::Replace(from, to) => {
            let replaced = String::from_utf8_lossy(text).replace(TOKENS[*from], TOKENS[*to]);
            *text = replaced.into_bytes();
        }
    }
}

#[test]
fn changed_manifests_are_refused_or_sound() {
    let config = ProptestConfig { source_file: Some(file!()), ..ProptestConfig::with_cases(2000) };
    let accepted = Cell::new(0);
    let tested = TestRunner::new(config).run(&prop::collection::vec(change(), 1..5), |changes| {
        let mut text = VALID.trim_end().as_bytes().to_vec();
        changes.iter().for_each(|change| apply(&mut text, change));
        accepted.set(accepted.get() + read(&text)?);
        Ok(())
    });
    tested.unwrap_or_else(|error| panic!("{error}"));
    println!("{} of 4000 were accepted", accepted.get());
    assert!(accepted.get() > 0, "the guarantees were checked on no changed manifest");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_bytes_are_refused_or_sound(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        read(&bytes)?;
    }
}

#[test]
fn a_valid_manifest_is_read() {
    let manifest = Manifest::parse_body(VALID.as_bytes(), "valid").unwrap();
    assert_eq!(manifest.tensors().count(), 6);
    assert_eq!(manifest.to_body(), VALID.trim_end());
    holds(&manifest).unwrap();
}

#[test]
fn a_manifest_of_version_1_is_read() {
    let mut value: serde_json::Value = serde_json::from_str(VALID).unwrap();
    value["version"] = 1.into();
    let net = value["models"]["net"].as_object_mut().unwrap();
    net.remove("keys").unwrap();
    net["tensors"].as_object_mut().unwrap().remove("scale").unwrap();
    let manifest = Manifest::parse(seal(&value.to_string()).as_bytes(), "m.json").unwrap();
    assert!(manifest.models["net"].keys.is_empty() && manifest.scalers.is_empty());
    assert!(manifest.tensors().all(|(_, tensor)| tensor.copies == 1));
    // Another number of copies than of ranks.
    let text = VALID.replace("\"copies\":2", "\"copies\":3");
    let error = Manifest::parse(seal(&text).as_bytes(), "m.json").unwrap_err();
    assert!(error.to_string().contains("3 copies of 2 ranks"), "{error}");
}

#[test]
fn every_contradiction_is_listed() {
    let text = VALID
        .replace("\"world_size\":2", "\"world_size\":3")
        .replace("{\"file\":1,\"start\":12,", "{\"file\":1,\"start\":13,")
        .replace("\"shape\":[4]", "\"shape\":[18446744073709551615,18446744073709551615]");
    let error = Manifest::parse(seal(&text).as_bytes(), "m.json").unwrap_err();
    let CheckpointError::Inconsistent { file, problems } = &error else { panic!("{error}") };
    assert_eq!(file, "m.json");
    let has = |text: &str| problems.iter().any(|problem| problem.contains(text));
    assert!(has("2 files for 3 ranks") && has("pieces must tile") && has("overflows"), "{error}");
}

#[test]
fn every_flipped_bit_is_found() {
    let text = seal(VALID.trim_end()).into_bytes();
    Manifest::parse(&text, "m.json").unwrap();
    for at in 0..text.len() {
        let mut flipped = text.clone();
        flipped[at] ^= 1 << (at % 8);
        assert!(Manifest::parse(&flipped, "m.json").is_err(), "byte {at}");
    }
}
