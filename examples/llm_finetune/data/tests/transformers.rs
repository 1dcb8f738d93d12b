//! Texts, ids and counted tokens are those of transformers, for three styles of templates.
//!
//! `fixtures/make_templates.py` wrote what transformers returns.

use minijinja::Value;
use serde::Deserialize;

use crate::data::clock::Moment;
use crate::data::encode::{EncodeOptions, encode};
use crate::data::fixture::{CONFIG, TOKENIZER, path};
use crate::data::row::{Chat, Row};
use crate::data::tokenizer::ChatTokenizer;

#[derive(Deserialize)]
struct Fixture {
    now: i64,
    tools: Value,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    template: String,
    messages: Value,
    tools: bool,
    text: String,
    ids: Vec<u32>,
    counted: Vec<[usize; 2]>,
    header: String,
    prompt_ids: Vec<u32>,
}

fn read(name: &str) -> String {
    std::fs::read_to_string(path(name)).unwrap()
}

impl Fixture {
    fn chat(&self, case: &Case) -> Chat {
        let mut columns = vec![("messages", case.messages.clone())];
        if case.tools {
            columns.push(("tools", self.tools.clone()));
        }
        let Ok(Row::Chat(chat)) = Row::parse(&Value::from_pairs(columns)) else { panic!() };
        chat
    }
}

#[test]
fn texts_ids_and_counted_tokens_are_those_of_transformers() {
    let fixture: Fixture = serde_json::from_str(&read("templates.json")).unwrap();
    let options = EncodeOptions { max_length: 10_000, truncate: false, train_on_prompt: false };
    assert_eq!(fixture.cases.len(), 23);
    for (index, case) in fixture.cases.iter().enumerate() {
        let place = format!("case {index}, {}", case.template);
        let template = read(&format!("{}.jinja", case.template));
        let now = Moment::from_unix(fixture.now);
        let tokenizer = ChatTokenizer::at(TOKENIZER, CONFIG, Some(&template), now).unwrap();
        let chat = fixture.chat(case);
        let (text, _) = tokenizer.render(&chat.messages, &chat.variables, false).unwrap();
        assert_eq!(text, case.text, "{place}");
        let (text, ids) = tokenizer.render(&chat.messages, &chat.variables, true).unwrap();
        assert_eq!(text, format!("{}{}", case.text, case.header), "{place}");
        assert_eq!(ids, case.prompt_ids, "{place}");
        if !case.tools {
            assert_eq!(tokenizer.encode_prompt(&chat.messages).unwrap(), ids, "{place}");
        }
        let encoded = encode(&tokenizer, &Row::Chat(chat), &options).unwrap();
        assert_eq!(encoded.ids, case.ids, "{place}");
        let counts =
            |token| case.counted.iter().any(|[start, end]| (*start..*end).contains(&token));
        let counted: Vec<bool> = (0..case.ids.len()).map(counts).collect();
        assert_eq!(encoded.counted, counted, "{place}");
    }
}
