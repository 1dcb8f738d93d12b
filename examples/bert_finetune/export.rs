//! Files next to the weights of an exported model, with which transformers loads it: `config.json`
//! and the tokenizer's files.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use fsdp_runtime::pretrained::SavePretrained;
use serde_json::{Map, Value, json};

use crate::bert_config::BertConfig;
use crate::common::tokenizers::read_files;
use crate::tokenizer::BertTokenizer;

/// Hugging Face's names of a tokenizer's files.
const TOKENIZER: [&str; 4] =
    ["tokenizer.json", "vocab.txt", "tokenizer_config.json", "special_tokens_map.json"];

/// Directory of an exported model, and the files next to its weights.
#[derive(Clone, Debug)]
pub struct Export {
    /// Directory.
    pub folder: PathBuf,
    /// Names and contents of the files.
    pub files: Vec<(String, Vec<u8>)>,
}

impl Export {
    /// Creates the directory and collects the files. The tokenizer's files are those of the
    /// pretrained model, if the run starts from one.
    ///
    /// It is called before training, so that a wrong path is found before the work is done.
    ///
    /// # Errors
    ///
    /// If the directory cannot be created, or if a file of the pretrained model cannot be read.
    pub fn new(
        folder: &Path,
        config: &BertConfig,
        classes: usize,
        tokenizer: &BertTokenizer,
        pretrained: Option<&Path>,
    ) -> Result<Self> {
        fs::create_dir_all(folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
        let mut files = vec![("config.json".into(), pretty_json(&classifier(config, classes)?)?)];
        files.extend(match pretrained {
            Some(directory) => read_files(directory, &TOKENIZER)?,
            None => write_tokenizer(tokenizer, config.max_position_embeddings)?,
        });
        Ok(Self { folder: folder.to_path_buf(), files })
    }

    /// Returns the options to save the model with.
    pub fn options(&self) -> SavePretrained {
        let files = self.files.iter().cloned();
        files.fold(SavePretrained::new(), |options, (name, contents)| {
            options.with_file(name, contents)
        })
    }
}

/// Returns the files of a tokenizer that was trained here.
fn write_tokenizer(tokenizer: &BertTokenizer, max_length: usize) -> Result<Vec<(String, Vec<u8>)>> {
    let settings = json!({
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": true,
        "model_max_length": max_length,
    });
    Ok(vec![
        ("tokenizer.json".into(), tokenizer.to_json()?.into_bytes()),
        ("vocab.txt".into(), tokenizer.vocabulary().into_bytes()),
        ("tokenizer_config.json".into(), pretty_json(&settings)?),
    ])
}

/// Returns the `config.json` of a `BertForSequenceClassification`.
fn classifier(config: &BertConfig, classes: usize) -> Result<Value> {
    let labels = || (0..classes).map(|class| (class, format!("LABEL_{class}")));
    let of_id: Map<_, _> =
        labels().map(|(class, label)| (class.to_string(), label.into())).collect();
    let to_id: Map<_, _> = labels().map(|(class, label)| (label, class.into())).collect();
    let mut json = serde_json::to_value(config)?;
    json["architectures"] = json!(["BertForSequenceClassification"]);
    json["id2label"] = of_id.into();
    json["label2id"] = to_id.into();
    json["dtype"] = "float32".into();
    Ok(json)
}

/// Formats JSON with indentation and a final line break.
fn pretty_json(value: &Value) -> Result<Vec<u8>> {
    let mut text = serde_json::to_vec_pretty(value)?;
    text.push(b'\n');
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::corpus::Example;

    #[test]
    fn exported_files_are_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let example = |text: &str| Example { label: 0, first: text.into(), second: None };
        let text = [example("one winner won one"), example("one million won, one by one")];
        let tokenizer = BertTokenizer::train(&text, 12).unwrap();
        let config = BertConfig::small(tokenizer.vocab_size(), 12);
        let export = Export::new(folder.path(), &config, 3, &tokenizer, None).unwrap();
        for (name, contents) in &export.files {
            fs::write(folder.path().join(name), contents).unwrap();
        }
        let read = BertConfig::read(&folder.path().join("config.json")).unwrap();
        assert_eq!(format!("{read:?}"), format!("{config:?}"));
        let encoded = tokenizer.encode(&text).unwrap();
        let by_json = BertTokenizer::read(folder.path(), 12).unwrap();
        assert_eq!(by_json.encode(&text).unwrap(), encoded);
        fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
        let by_vocabulary = BertTokenizer::read(folder.path(), 12).unwrap();
        assert_eq!(by_vocabulary.encode(&text).unwrap(), encoded);

        // The files of a pretrained model are copied.
        let again =
            Export::new(folder.path(), &config, 3, &tokenizer, Some(folder.path())).unwrap();
        let names: Vec<_> = again.files.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["config.json", "vocab.txt", "tokenizer_config.json"]);
    }
}
