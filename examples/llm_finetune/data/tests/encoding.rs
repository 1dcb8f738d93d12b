//! Rows of each kind become the expected tokens.

use minijinja::Value;

use crate::data::encode::{EncodeOptions, Encoded, encode};
use crate::data::fixture::{CONFIG, TEMPLATE, TOKENIZER, tokenizer};
use crate::data::reason::Reason;
use crate::data::row::Row;
use crate::data::tokenizer::ChatTokenizer;

const OPTIONS: EncodeOptions =
    EncodeOptions { max_length: 64, truncate: false, train_on_prompt: false };

fn encoded_by(
    tokenizer: &ChatTokenizer,
    json: &str,
    options: EncodeOptions,
) -> Result<Encoded, Reason> {
    let value: Value = serde_json::from_str(json).unwrap();
    encode(tokenizer, &Row::parse(&value)?, &options)
}

fn encoded(json: &str, options: EncodeOptions) -> Result<Encoded, Reason> {
    encoded_by(&tokenizer(), json, options)
}

/// Returns the text of the counted tokens and whether the last of them is the end token.
fn counted_text(encoded: &Encoded) -> String {
    let pairs = encoded.ids.iter().zip(&encoded.counted);
    let ids: Vec<u32> = pairs.filter(|(_, counted)| **counted).map(|(id, _)| *id).collect();
    let eos = tokenizer().eos_ids()[0];
    let end = if ids.contains(&eos) { "<end>" } else { "" };
    format!("{}{end}", tokenizer().decode(&ids).unwrap())
}

const CHAT: &str = r#"{"messages":[{"role":"user","content":"Is it?"},
    {"role":"assistant","content":"Yes."}]}"#;
const COMPLETION: &str = r#"{"prompt":"Is it?","completion":" Yes."}"#;

#[test]
fn only_the_answer_counts_unless_all_is_trained_on() {
    let chat = encoded(CHAT, OPTIONS).unwrap();
    assert_eq!(counted_text(&chat), "Yes.\n<end>");
    let completion = encoded(COMPLETION, OPTIONS).unwrap();
    assert_eq!(counted_text(&completion), " Yes.<end>");
    let text = encoded(r#"{"text":"Is it? Yes."}"#, OPTIONS).unwrap();
    // The first token is not predicted by another.
    assert!(!text.counted[0] && text.counted[1..].iter().all(|counted| *counted));
    assert_eq!(text.ids.last(), tokenizer().eos_ids().first());
    let all = EncodeOptions { train_on_prompt: true, ..OPTIONS };
    for row in [CHAT, COMPLETION] {
        let whole = encoded(row, all).unwrap();
        assert!(!whole.counted[0] && whole.counted[1..].iter().all(|counted| *counted));
        assert_eq!(whole.ids, encoded(row, OPTIONS).unwrap().ids);
    }
}

#[test]
fn an_end_token_is_not_written_twice() {
    let once = encoded(r#"{"prompt":"a","completion":"b"}"#, OPTIONS).unwrap();
    let given = encoded(r#"{"prompt":"a","completion":"b<|im_end|>"}"#, OPTIONS).unwrap();
    assert_eq!(once, given);
}

#[test]
fn special_tokens_around_a_text_are_those_of_the_tokenizer() {
    // A tokenizer that writes a first and a last token around each text.
    let mut json: serde_json::Value = serde_json::from_slice(TOKENIZER).unwrap();
    let special = |id: &str| serde_json::json!({"SpecialToken": {"id": id, "type_id": 0}});
    let sequence = serde_json::json!({"Sequence": {"id": "A", "type_id": 0}});
    let token =
        |id: u32, token: &str| serde_json::json!({"id": token, "ids": [id], "tokens": [token]});
    json["post_processor"] = serde_json::json!({
        "type": "TemplateProcessing",
        "single": [special("<|endoftext|>"), sequence, special("<|im_end|>")],
        "pair": [sequence, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|endoftext|>": token(0, "<|endoftext|>"),
            "<|im_end|>": token(2, "<|im_end|>"),
        },
    });
    let json = serde_json::to_vec(&json).unwrap();
    let around = ChatTokenizer::from_parts(&json, CONFIG, Some(TEMPLATE)).unwrap();
    let plain = encoded(COMPLETION, OPTIONS).unwrap().ids;
    let completion = encoded_by(&around, COMPLETION, OPTIONS).unwrap();
    assert_eq!(completion.ids, [vec![0], plain].concat());
    let text = encoded_by(&around, r#"{"text":"a"}"#, OPTIONS).unwrap();
    assert_eq!(text.ids, [&[0], around.encode_piece("a", true).unwrap().as_slice(), &[2]].concat());
    // A conversation has the tokens of its template only.
    assert_eq!(encoded_by(&around, CHAT, OPTIONS).unwrap(), encoded(CHAT, OPTIONS).unwrap());
}

#[test]
fn long_rows_are_refused_or_cut() {
    let whole = encoded(CHAT, OPTIONS).unwrap();
    let tokens = whole.ids.len();
    let short = |max_length, truncate| EncodeOptions { max_length, truncate, ..OPTIONS };
    assert_eq!(
        encoded(CHAT, short(tokens - 1, false)),
        Err(Reason::TooLong { tokens, max: tokens - 1 })
    );
    assert!(encoded(CHAT, short(tokens, false)).is_ok());
    let cut = encoded(CHAT, short(tokens - 1, true)).unwrap();
    assert_eq!(cut.ids, whole.ids[..tokens - 1]);
    assert_eq!(encoded(CHAT, short(4, true)), Err(Reason::NothingCounted));
}

#[test]
fn a_row_with_messages_needs_a_template() {
    let bare = ChatTokenizer::from_parts(TOKENIZER, CONFIG, None).unwrap();
    let error = encoded_by(&bare, CHAT, OPTIONS).unwrap_err().to_string();
    assert!(error.contains("the model's folder has none"), "{error}");
    assert!(encoded_by(&bare, r#"{"text":"a"}"#, OPTIONS).is_ok());
    assert!(bare.encode_prompt(&[]).is_err());
}

#[test]
fn folders_give_tokenizer_template_and_end_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let write =
        |name: &str, contents: &[u8]| std::fs::write(folder.path().join(name), contents).unwrap();
    let error = format!("{:#}", ChatTokenizer::from_folder(folder.path()).unwrap_err());
    assert!(error.contains("tokenizer.json"), "{error}");
    write("tokenizer.json", TOKENIZER);
    write("tokenizer_config.json", CONFIG.as_bytes());
    write("chat_template.jinja", TEMPLATE.as_bytes());
    write("generation_config.json", br#"{"eos_token_id":[2,0]}"#);
    let read = ChatTokenizer::from_folder(folder.path()).unwrap();
    assert_eq!((read.eos_ids(), read.pad_id()), ([2, 0].as_slice(), 0));
    assert_eq!(read.fingerprint(), tokenizer().fingerprint());
    assert!(read.vocab_size() > 600);
    write("generation_config.json", br#"{"eos_token_id":"x"}"#);
    let error = format!("{:#}", ChatTokenizer::from_folder(folder.path()).unwrap_err());
    assert!(error.contains("generation_config.json"), "{error}");
    write("chat_template.jinja", b"{% if %}");
    let error = format!("{:#}", ChatTokenizer::from_folder(folder.path()).unwrap_err());
    assert!(error.contains("chat template"), "{error}");
}

#[test]
fn a_tokenizer_that_writes_a_space_first_writes_none_within() {
    // As SentencePiece: spaces are `▁`, and a text begins with one.
    let json = r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],
        "normalizer":null,"post_processor":null,"decoder":null,
        "pre_tokenizer":{"type":"Metaspace","replacement":"▁","prepend_scheme":"first",
        "split":false},
        "model":{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,
        "end_of_word_suffix":null,"fuse_unk":false,"byte_fallback":false,"ignore_merges":false,
        "vocab":{"▁":0,"a":1,"b":2,"\n":3},"merges":[]}}"#;
    let tokenizer = ChatTokenizer::from_parts(json.as_bytes(), "{}", None).unwrap();
    assert_eq!(tokenizer.encode_piece("a b", true).unwrap(), [0, 1, 0, 2]);
    assert_eq!(tokenizer.encode_piece("a b", false).unwrap(), [1, 0, 2]);
}
