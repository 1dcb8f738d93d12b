//! The shapes of a model in a folder of Hugging Face: `config.json` and the headers of safetensors
//! files.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::Metadata;
use serde_json::Value;

use super::transformer::Transformer;
use crate::param_group::plan::shape::{ModelShape, ParamShape, UnitShape};

/// A folder that a plan cannot read a model from.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FolderError {
    /// A file or folder that cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Reason.
        source: std::io::Error,
    },
    /// A file that is not what its name says.
    #[error("{} cannot be read: {reason}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// Reason.
        reason: String,
    },
    /// A folder without weights.
    #[error("{} has no `*.safetensors` file; a plan needs their headers", path.display())]
    NoWeights {
        /// The folder.
        path: PathBuf,
    },
}

/// Largest header that is read, in bytes: the limit of the format.
const LARGEST_HEADER: u64 = 100_000_000;
/// Ends of the names of tensors that are no parameters.
const BUFFERS: [&str; 3] = [".masked_bias", "position_ids", ".inv_freq"];

impl ModelShape {
    /// Reads the shapes of a model from a folder with `config.json` and safetensors files, of which
    /// only the headers are read.
    ///
    /// Each numbered layer, such as `model.layers.3`, is a unit. Other parameters belong to the
    /// outermost unit. Embeddings are tables whose names contain `embed`, `wte` or `wpe`; without
    /// another projection the token embedding of a language model is also multiplied with.
    ///
    /// # Errors
    ///
    /// [`FolderError`] for a file that is missing or damaged.
    pub fn from_folder(folder: &Path) -> Result<Self, FolderError> {
        let config = read_config(&folder.join("config.json"))?;
        let mut params: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for file in weight_files(folder)? {
            params.extend(read_header(&file)?);
        }
        // GPT-2 stores the causal mask of each layer as a bias of four dimensions.
        let is_mask = |name: &str, dims| name.ends_with(".attn.bias") && dims == 4;
        let is_buffer = |name: &str| BUFFERS.iter().any(|end| name.ends_with(end));
        params.retain(|name, shape| !is_buffer(name) && !is_mask(name, shape.len()));
        let name = folder.file_name().map_or_else(String::new, |it| it.to_string_lossy().into());
        Ok(Self::new(name, units(&params, &config)))
    }
}

fn read_config(path: &Path) -> Result<Value, FolderError> {
    let text =
        std::fs::read(path).map_err(|source| FolderError::Io { path: path.into(), source })?;
    serde_json::from_slice(&text)
        .map_err(|error| FolderError::Invalid { path: path.into(), reason: error.to_string() })
}

/// Returns the safetensors files of a folder, in the order of their names.
fn weight_files(folder: &Path) -> Result<Vec<PathBuf>, FolderError> {
    let error = |source| FolderError::Io { path: folder.into(), source };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(error)? {
        let path = entry.map_err(error)?.path();
        if path.extension().is_some_and(|end| end == "safetensors") {
            files.push(path);
        }
    }
    files.sort();
    if files.is_empty() { Err(FolderError::NoWeights { path: folder.into() }) } else { Ok(files) }
}

/// Returns the float tensors of a safetensors file with their shapes.
fn read_header(path: &Path) -> Result<Vec<(String, Vec<usize>)>, FolderError> {
    let io = |source| FolderError::Io { path: path.into(), source };
    let invalid = |reason: String| FolderError::Invalid { path: path.into(), reason };
    let mut file = File::open(path).map_err(io)?;
    let mut len = [0; 8];
    file.read_exact(&mut len).map_err(io)?;
    let header = u64::from_le_bytes(len);
    if header > LARGEST_HEADER {
        let reason = format!("the header has {header} bytes, at most {LARGEST_HEADER} are valid");
        return Err(invalid(reason));
    }
    let mut bytes = Vec::new();
    file.take(header).read_to_end(&mut bytes).map_err(io)?;
    let metadata: Metadata =
        serde_json::from_slice(&bytes).map_err(|error| invalid(error.to_string()))?;
    let is_float =
        |dtype: Dtype| matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16);
    let tensors = metadata.tensors();
    let floats = tensors.iter().filter(|(_, info)| is_float(info.dtype));
    Ok(floats.map(|(name, info)| (name.clone(), info.shape.clone())).collect())
}

/// Returns the path of the numbered layer that a parameter lies in, with its number.
fn layer_of(name: &str) -> Option<(usize, usize)> {
    let mut end = 0;
    for part in name.split('.') {
        end += part.len();
        if let Ok(number) = part.parse() {
            return Some((end, number));
        }
        end += 1;
    }
    None
}

/// Groups parameters in units.
fn units(params: &BTreeMap<String, Vec<usize>>, config: &Value) -> Vec<UnitShape> {
    let mut root = Vec::new();
    // Layers in the order of their lists' names and their numbers.
    let mut layers: BTreeMap<(String, usize), (String, Vec<ParamShape>)> = BTreeMap::new();
    for (name, shape) in params {
        let param = ParamShape::new(name.clone(), shape.clone()).split_by_name();
        match layer_of(name) {
            Some((end, number)) => {
                let path = &name[..end];
                let list = path.trim_end_matches(|it: char| it.is_ascii_digit()).to_string();
                let unit = layers.entry((list, number));
                unit.or_insert_with(|| (path.to_string(), Vec::new())).1.push(param);
            }
            None => root.push(param),
        }
    }
    mark_lookups(&mut root, config);
    let sizes = sizes(config, params);
    let mut units = vec![UnitShape::new("", 0, root)];
    if let Some(sizes) = sizes {
        sizes.set_root(&mut units[0]);
    }
    for (path, params) in layers.into_values() {
        let mut unit = UnitShape::new(path, 1, params);
        if let Some(sizes) = sizes {
            sizes.set_activations(&mut unit);
            if unit.params.iter().any(|param| param.path.contains("q_norm")) {
                // The inputs of the norms of each head, as in Qwen 3.
                unit.saved_elements += (sizes.heads + sizes.kv_heads) * sizes.head_width;
            }
        }
        units.push(unit);
    }
    units
}

/// Marks the embeddings of the outermost unit.
fn mark_lookups(root: &mut [ParamShape], config: &Value) {
    let has_head = root.iter().any(|param| param.path.contains("lm_head"));
    let architecture = config["architectures"][0].as_str().unwrap_or("");
    let ends = ["ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForPreTraining"];
    let is_tied = !has_head && ends.iter().any(|end| architecture.ends_with(end));
    let vocabulary = config["vocab_size"].as_u64().unwrap_or(0) as usize;
    for param in root {
        let is_table = ["embed", "wte", "wpe"].iter().any(|part| param.path.contains(part));
        let is_projection = is_tied && param.shape.first() == Some(&vocabulary);
        param.is_lookup = is_table && !is_projection;
    }
}

/// Returns the sizes that a configuration has, by the names of GPT-2, BERT and Llama.
fn sizes(config: &Value, params: &BTreeMap<String, Vec<usize>>) -> Option<Transformer> {
    let number = |names: &[&str]| {
        names.iter().find_map(|name| config[*name].as_u64()).map(|number| number as usize)
    };
    let hidden = number(&["hidden_size", "n_embd"])?;
    let heads = number(&["num_attention_heads", "n_head"]).filter(|&heads| heads > 0)?;
    Some(Transformer {
        layers: 0,
        hidden,
        heads,
        kv_heads: number(&["num_key_value_heads"]).unwrap_or(heads),
        head_width: number(&["head_dim"]).unwrap_or(hidden / heads),
        feed_forward: number(&["intermediate_size", "n_inner"]).unwrap_or(4 * hidden),
        vocabulary: 0,
        positions: 0,
        is_llama: params.keys().any(|name| name.contains("gate_proj")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(config: &str, tensors: &[(&str, &[usize])]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), config).unwrap();
        let mut begin = 0;
        let entry = |(name, shape): &(&str, &[usize])| {
            let end = begin + 4 * shape.iter().product::<usize>();
            let entry = serde_json::json!({
                "dtype": "F32", "shape": shape, "data_offsets": [begin, end],
            });
            begin = end;
            ((*name).to_string(), entry)
        };
        let header: serde_json::Map<String, Value> = tensors.iter().map(entry).collect();
        let header = Value::Object(header).to_string();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        std::fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
        folder
    }

    #[test]
    fn numbered_layers_are_units() {
        let config = r#"{"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 11,
            "architectures": ["GPT2LMHeadModel"]}"#;
        let found = folder(
            config,
            &[
                ("h.10.mlp.weight", &[8, 8]),
                ("h.2.mlp.weight", &[8, 8]),
                ("h.2.attn.bias", &[1, 1, 4, 4]),
                ("wpe.weight", &[4, 8]),
                ("wte.weight", &[11, 8]),
            ],
        );
        let shape = ModelShape::from_folder(found.path()).unwrap();
        let paths: Vec<_> = shape.units.iter().map(|unit| unit.path.as_str()).collect();
        assert_eq!(paths, ["", "h.2", "h.10"]);
        assert_eq!(shape.num_params(), 64 + 64 + 32 + 88);
        let lookups: Vec<_> = shape.units[0].params.iter().map(|it| it.is_lookup).collect();
        assert_eq!(lookups, [true, false], "the tied table is also multiplied with");
    }

    #[test]
    fn damaged_files_are_errors_that_name_them() {
        let found = folder("{", &[]);
        let error = ModelShape::from_folder(found.path()).unwrap_err().to_string();
        assert!(error.contains("config.json"), "{error}");
        let found = folder("{}", &[("a", &[2])]);
        let file = found.path().join("model.safetensors");
        std::fs::write(&file, u64::MAX.to_le_bytes()).unwrap();
        let error = ModelShape::from_folder(found.path()).unwrap_err().to_string();
        assert!(error.contains("model.safetensors") && error.contains("at most"), "{error}");
        std::fs::remove_file(file).unwrap();
        let error = ModelShape::from_folder(found.path()).unwrap_err().to_string();
        assert!(error.contains("safetensors` file"), "{error}");
    }
}
