//! Test of GPT-2's own vocabulary, whose files are downloaded with npm. It is skipped where they are
//! not available.

use std::path::Path;
use std::process::Command;

use crate::bpe::{Bpe, END_OF_TEXT};
use crate::common::python::python_with;
use crate::text::Text;

/// Ids that are published: in the documentation of transformers' `GPT2Tokenizer`, and in the tests
/// of OpenAI's tiktoken.
const PUBLISHED: [(&str, &[u32]); 8] = [
    ("Hello world", &[15496, 995]),
    (" Hello world", &[18435, 995]),
    ("hello world", &[31373, 995]),
    ("hello <|endoftext|>", &[31373, 220, 50256]),
    ("0", &[15]),
    ("0000", &[2388]),
    ("000000000", &[10535, 830]),
    ("00000000000000000", &[8269, 10535, 830]),
];

/// White space, contractions, numbers and characters of several bytes.
const ODD: &str = "\n\n \n  The whale's way -- isn't it?\t12,345.6 \u{a0}\u{2003}x\r\n\r\n\n — “鯨” 🐋 \n\
    \u{3000}\n we'LL  end   \n ";

/// Writes the vocabulary to `folder`, and returns whether it could be.
fn download(python: &str, folder: &Path) -> bool {
    let script = Command::new(python)
        .args(["-B", "examples/gpt_pretrain/gpt2_vocabulary.py", "--destination"])
        .arg(folder)
        .output();
    match script {
        Ok(output) if output.status.success() => true,
        Ok(output) => {
            eprintln!("skipped: {}", String::from_utf8_lossy(&output.stderr).trim());
            false
        }
        Err(error) => {
            eprintln!("skipped: {python} cannot be run: {error}");
            false
        }
    }
}

#[test]
fn ids_of_gpt2s_vocabulary_are_the_published_ones() {
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".into());
    let folder = tempfile::tempdir().unwrap();
    if !download(&python, folder.path()) {
        return;
    }
    let (vocabulary, merges) = (folder.path().join("vocab.json"), folder.path().join("merges.txt"));
    let bpe = Bpe::gpt2(&vocabulary, &merges).unwrap();
    assert_eq!(bpe.vocabulary(), 50_257);
    assert_eq!(bpe.end_of_text(), Some(50_256));
    for (text, ids) in PUBLISHED {
        assert_eq!(bpe.encode(text).unwrap(), ids, "{text:?}");
        assert_eq!(bpe.decode(ids).unwrap(), text);
    }
    let text = Text::embedded().unwrap().held_out + ODD + END_OF_TEXT + ODD;
    let ids = bpe.encode(&text).unwrap();
    assert_eq!(bpe.decode(&ids).unwrap(), text);

    let Some(python) = python_with("transformers") else { return };
    let file = folder.path().join("text.txt");
    std::fs::write(&file, &text).unwrap();
    let output = Command::new(python)
        .args(["-B", "examples/gpt_pretrain/transformers_ids.py"])
        .args([&vocabulary, &merges, &file])
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let expected: Vec<u32> = serde_json::from_slice(&output.stdout).unwrap();
    assert!(expected.len() > 30_000, "{}", expected.len());
    assert_eq!(ids, expected);
}
