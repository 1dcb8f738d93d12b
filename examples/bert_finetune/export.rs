//! What lies beside the weights in a saved model's folder, so that transformers loads it:
//! `config.json` and the tokenizer's files.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use fsdp_runtime::SavePretrained;
use serde_json::{Map, Value, json};

use crate::config::BertConfig;
use crate::tokenize::BertTokenizer;

/// A tokenizer's files, as Hugging Face names them.
const TOKENIZER: [&str; 4] =
    ["tokenizer.json", "vocab.txt", "tokenizer_config.json", "special_tokens_map.json"];

/// Where a trained model goes, and what goes with it.
#[derive(Clone, Debug)]
pub struct Export {
    /// The folder.
    pub folder: PathBuf,
    /// Names and contents of the files beside the weights.
    pub files: Vec<(String, Vec<u8>)>,
}

impl Export {
    /// Makes the folder, and the files of a classifier; the tokenizer's are those of the model it
    /// started from, if any.
    ///
    /// # Errors
    ///
    /// If the folder cannot be made, or a file of that model cannot be read.
    pub fn new(
        folder: &Path,
        config: &BertConfig,
        classes: usize,
        tokenizer: &BertTokenizer,
        pretrained: Option<&Path>,
    ) -> Result<Self> {
        // Before training rather than after.
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let mut files = vec![("config.json".to_string(), json_of(&classifier(config, classes)?)?)];
        match pretrained {
            Some(directory) => {
                for name in TOKENIZER {
                    let path = directory.join(name);
                    if path.is_file() {
                        let contents = fs::read(&path)
                            .with_context(|| format!("cannot read {}", path.display()))?;
                        files.push((name.to_string(), contents));
                    }
                }
            }
            None => {
                let settings = json!({
                    "tokenizer_class": "BertTokenizer",
                    "do_lower_case": true,
                    "model_max_length": config.max_position_embeddings,
                });
                files.push(("tokenizer.json".into(), tokenizer.to_json()?.into_bytes()));
                files.push(("vocab.txt".into(), tokenizer.vocabulary().into_bytes()));
                files.push(("tokenizer_config.json".into(), json_of(&settings)?));
            }
        }
        Ok(Self { folder: folder.to_path_buf(), files })
    }

    /// How to write the model.
    pub fn options(&self) -> SavePretrained {
        let files = self.files.iter().cloned();
        files.fold(SavePretrained::new(), |options, (name, contents)| {
            options.with_file(name, contents)
        })
    }
}

/// `config.json` of `BertForSequenceClassification`.
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

fn json_of(value: &Value) -> Result<Vec<u8>> {
    let mut text = serde_json::to_vec_pretty(value)?;
    text.push(b'\n');
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Example;

    #[test]
    fn what_is_written_is_read_again() {
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

        // From a pretrained model its own files are taken over.
        let again =
            Export::new(folder.path(), &config, 3, &tokenizer, Some(folder.path())).unwrap();
        let names: Vec<_> = again.files.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["config.json", "vocab.txt", "tokenizer_config.json"]);
    }
}
