//! Weights of a Hugging Face GPT-2: `--pretrained`.
//!
//! Its files have other names and forms than the model here. `c_attn` holds the projections to
//! queries, keys and values side by side, and the matrices of `Conv1D` are the transposes of those of
//! a linear layer. Each process therefore writes a temporary file in the form of the model, tensor by
//! tensor, of which every rank reads its own shards.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, bail, ensure};
use safetensors::tensor::Metadata;
use safetensors::{Dtype, View, serialize_to_file};
use serde::Deserialize;
use tempfile::TempPath;

use crate::arch::Arch;
use crate::bpe::Bpe;

/// Bytes of the number before a safetensors header.
const HEADER_LENGTH: usize = 8;
/// Prefix of names in a model with a head.
const PREFIX: &str = "transformer.";
/// Projections in `c_attn`, in their order.
const PROJECTIONS: [&str; 3] = ["query", "key", "value"];
/// Epsilon of Burn's layer normalization.
const EPSILON: f64 = 1e-5;

/// `config.json` of a GPT-2: the parts that the model depends on.
#[derive(Clone, Debug, Deserialize)]
pub struct Gpt2Config {
    model_type: String,
    n_layer: usize,
    n_embd: usize,
    n_head: usize,
    vocab_size: usize,
    /// Maximum length of a text.
    pub n_positions: usize,
    n_inner: Option<usize>,
    #[serde(default = "gelu_new")]
    activation_function: String,
    #[serde(default = "epsilon")]
    layer_norm_epsilon: f64,
    #[serde(default)]
    scale_attn_by_inverse_layer_idx: bool,
    #[serde(default = "yes")]
    scale_attn_weights: bool,
    #[serde(default = "yes")]
    tie_word_embeddings: bool,
}

fn gelu_new() -> String {
    "gelu_new".into()
}

fn epsilon() -> f64 {
    EPSILON
}

fn yes() -> bool {
    true
}

impl Gpt2Config {
    /// Reads `config.json` of a directory.
    ///
    /// # Errors
    ///
    /// If it cannot be read, or if the model differs from GPT-2 in a way that is not supported here.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("config.json");
        let context = || format!("--pretrained: {}", path.display());
        let text = std::fs::read(&path).with_context(context)?;
        let config: Self = serde_json::from_slice(&text).with_context(context)?;
        config.check().with_context(context)?;
        Ok(config)
    }

    fn check(&self) -> Result<()> {
        ensure!(self.model_type == "gpt2", "model_type {}, where gpt2 is known", self.model_type);
        ensure!(
            self.n_inner.is_none_or(|inner| inner == 4 * self.n_embd),
            "n_inner is not four times n_embd"
        );
        ensure!(
            self.n_head > 0 && self.n_embd.is_multiple_of(self.n_head),
            "n_embd is no multiple of n_head"
        );
        ensure!(self.layer_norm_epsilon == EPSILON, "layer_norm_epsilon is not {EPSILON}");
        ensure!(
            self.scale_attn_weights && !self.scale_attn_by_inverse_layer_idx,
            "the attention is not scaled by the width of its heads alone"
        );
        ensure!(self.tie_word_embeddings, "the head is not tied to the embedding");
        ensure!(
            ["gelu_new", "gelu_pytorch_tanh", "gelu"].contains(&self.activation_function.as_str()),
            "activation_function {}, where gelu_new and gelu are known",
            self.activation_function
        );
        Ok(())
    }

    /// Returns the sizes of the model.
    pub fn arch(&self) -> Arch {
        Arch {
            name: "pretrained",
            fairseq: None,
            layers: self.n_layer,
            width: self.n_embd,
            heads: self.n_head,
            vocabulary: self.vocab_size,
        }
    }

    /// Returns whether the GELU is its tanh approximation.
    pub fn tanh_gelu(&self) -> bool {
        self.activation_function != "gelu"
    }
}

/// Reads the word pieces of a directory: `vocab.json` and `merges.txt`, or `tokenizer.json`.
///
/// # Errors
///
/// If the files cannot be read.
pub fn tokenizer(folder: &Path) -> Result<Bpe> {
    let (vocabulary, merges) = (folder.join("vocab.json"), folder.join("merges.txt"));
    if vocabulary.is_file() && merges.is_file() {
        return Bpe::gpt2(&vocabulary, &merges);
    }
    Bpe::read(&folder.join("tokenizer.json"))
        .context("--pretrained: neither vocab.json and merges.txt nor tokenizer.json")
}

/// Writes the weights of a directory to a temporary file in the form of the model here, which is
/// removed with the value.
///
/// # Errors
///
/// If the weights cannot be read, or if the file cannot be written.
pub fn convert(folder: &Path) -> Result<TempPath> {
    let file = tempfile::Builder::new().prefix("gpt2-").suffix(".safetensors").tempfile()?;
    let path = file.into_temp_path();
    let files = weights_files(folder)?;
    let files = files.iter().map(|path| WeightsFile::open(path)).collect::<Result<Vec<_>>>()?;
    let mut tensors = BTreeMap::new();
    for file in &files {
        for (name, info) in file.metadata.tensors() {
            for (name, part, transposed) in names(&name) {
                let columns = part_of(&info.shape, part);
                let tensor = Tensor::new(file, info, columns, transposed)
                    .with_context(|| format!("{}: {name}", file.path.display()))?;
                tensors.insert(name, tensor);
            }
        }
    }
    ensure!(!tensors.is_empty(), "{} has no weights of a GPT-2", folder.display());
    serialize_to_file(tensors, None, &path).with_context(|| {
        format!("cannot write {}; TMPDIR chooses another directory", path.display())
    })?;
    for file in &files {
        if let Some(error) = file.failed.lock().unwrap_or_else(PoisonError::into_inner).take() {
            return Err(error).with_context(|| format!("cannot read {}", file.path.display()));
        }
    }
    Ok(path)
}

/// Returns the weights files of a directory.
fn weights_files(folder: &Path) -> Result<Vec<PathBuf>> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let index = folder.join("model.safetensors.index.json");
    if !index.is_file() {
        return Ok(vec![folder.join("model.safetensors")]);
    }
    let context = || format!("cannot read {}", index.display());
    let text = std::fs::read(&index).with_context(context)?;
    let Index { weight_map } = serde_json::from_slice(&text).with_context(context)?;
    let mut names: Vec<_> = weight_map.into_values().collect();
    names.sort();
    names.dedup();
    for name in &names {
        let plain = Path::new(name).file_name().is_some_and(|file| file == name.as_str());
        ensure!(plain, "{}: {name} is no name of a file beside it", index.display());
    }
    Ok(names.into_iter().map(|name| folder.join(name)).collect())
}

/// Returns the names that a tensor of GPT-2 has here, each with the third of its columns, and whether
/// it is transposed. A buffer and the tied head have none.
pub fn names(name: &str) -> Vec<(String, Option<usize>, bool)> {
    let name = name.strip_prefix(PREFIX).unwrap_or(name);
    let whole = |name: String| vec![(name, None, false)];
    match name {
        "wte.weight" => return whole("tokens.weight".into()),
        "wpe.weight" => return whole("positions.weight".into()),
        "ln_f.weight" | "ln_f.bias" => return whole(name.replace("ln_f", "norm")),
        _ => {}
    }
    let parts = name.strip_prefix("h.").and_then(|rest| rest.split_once('.'));
    let Some((layer, rest)) = parts else { return Vec::new() };
    let Some((module, kind)) = rest.rsplit_once('.') else { return Vec::new() };
    let here = |field: &str| format!("blocks.{layer}.{field}.{kind}");
    let matrix = |field: &str| vec![(here(field), None, kind == "weight")];
    match module {
        "ln_1" => whole(here("attention_norm")),
        "ln_2" => whole(here("norm")),
        "attn.c_proj" => matrix("attention.output"),
        "mlp.c_fc" => matrix("up"),
        "mlp.c_proj" => matrix("down"),
        "attn.c_attn" => {
            let third = |(part, field): (usize, &&str)| {
                (here(&format!("attention.{field}")), Some(part), kind == "weight")
            };
            PROJECTIONS.iter().enumerate().map(third).collect()
        }
        // `attn.bias` and `attn.masked_bias` are masks.
        _ => Vec::new(),
    }
}

/// Returns the columns of a third of a tensor, or all of them.
fn part_of(shape: &[usize], part: Option<usize>) -> Range<usize> {
    let width = shape.last().copied().unwrap_or(1);
    match part {
        Some(part) => part * (width / 3)..(part + 1) * (width / 3),
        None => 0..width,
    }
}

/// Open safetensors file.
struct WeightsFile {
    path: PathBuf,
    file: Mutex<File>,
    /// Bytes before the tensors.
    start: u64,
    metadata: Metadata,
    /// Error of a read while another file was written, whose writer takes no errors.
    failed: Mutex<Option<std::io::Error>>,
}

impl WeightsFile {
    fn open(path: &Path) -> Result<Self> {
        let context = || format!("--pretrained: cannot read {}", path.display());
        let mut file = File::open(path).with_context(context)?;
        let size = file.metadata().with_context(context)?.len();
        let mut length = [0; HEADER_LENGTH];
        file.read_exact(&mut length).with_context(context)?;
        let start = u64::from_le_bytes(length).checked_add(HEADER_LENGTH as u64);
        let Some(start) = start.filter(|start| *start <= size) else {
            bail!("{} is no safetensors file, or is cut off", path.display());
        };
        let mut header = Vec::new();
        (&mut file)
            .take(start - HEADER_LENGTH as u64)
            .read_to_end(&mut header)
            .with_context(context)?;
        let metadata = serde_json::from_slice(&header).with_context(context)?;
        let (file, failed) = (Mutex::new(file), Mutex::new(None));
        Ok(Self { path: path.into(), file, start, metadata, failed })
    }

    fn read(&self, range: Range<usize>) -> std::io::Result<Vec<u8>> {
        let mut bytes = vec![0; range.len()];
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        file.seek(SeekFrom::Start(self.start + range.start as u64))?;
        file.read_exact(&mut bytes)?;
        Ok(bytes)
    }
}

/// Tensor of the temporary file: some columns of a tensor, perhaps transposed.
struct Tensor<'a> {
    file: &'a WeightsFile,
    bytes: Range<usize>,
    dtype: Dtype,
    rows: usize,
    width: usize,
    columns: Range<usize>,
    transposed: bool,
    shape: Vec<usize>,
}

impl<'a> Tensor<'a> {
    fn new(
        file: &'a WeightsFile,
        info: &safetensors::tensor::TensorInfo,
        columns: Range<usize>,
        transposed: bool,
    ) -> Result<Self> {
        let shape = match (info.shape.as_slice(), transposed) {
            ([_], false) => vec![columns.len()],
            ([rows, _], false) => vec![*rows, columns.len()],
            ([rows, _], true) => vec![columns.len(), *rows],
            (shape, _) => bail!("the shape {shape:?} is not GPT-2's"),
        };
        ensure!(
            matches!(info.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F64),
            "{:?}, where a float is expected",
            info.dtype
        );
        let width = info.shape.last().copied().unwrap_or(1);
        Ok(Self {
            file,
            bytes: info.data_offsets.0..info.data_offsets.1,
            dtype: info.dtype,
            rows: if info.shape.len() == 2 { info.shape[0] } else { 1 },
            width,
            columns,
            transposed,
            shape,
        })
    }

    fn converted(&self) -> std::io::Result<Vec<u8>> {
        let all = self.file.read(self.bytes.clone())?;
        let size = self.dtype.bitsize() / 8;
        let at = |row: usize, column: usize| {
            let start = (row * self.width + column) * size;
            &all[start..start + size]
        };
        let mut bytes = Vec::with_capacity(self.data_len());
        match self.transposed {
            true => self.columns.clone().for_each(|column| {
                (0..self.rows).for_each(|row| bytes.extend_from_slice(at(row, column)));
            }),
            false => (0..self.rows).for_each(|row| {
                let start = (row * self.width + self.columns.start) * size;
                bytes.extend_from_slice(&all[start..start + self.columns.len() * size]);
            }),
        }
        Ok(bytes)
    }
}

impl View for Tensor<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        match self.converted() {
            Ok(bytes) => bytes.into(),
            Err(error) => {
                *self.file.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                vec![0; self.data_len()].into()
            }
        }
    }

    fn data_len(&self) -> usize {
        self.rows * self.columns.len() * self.dtype.bitsize() / 8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_model() {
        let here = |name: &str| {
            names(name).into_iter().map(|(name, ..)| name).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(here("transformer.wte.weight"), "tokens.weight");
        assert_eq!(here("h.11.mlp.c_proj.bias"), "blocks.11.down.bias");
        assert_eq!(here("h.0.ln_1.weight"), "blocks.0.attention_norm.weight");
        assert_eq!(
            here("h.3.attn.c_attn.bias"),
            "blocks.3.attention.query.bias blocks.3.attention.key.bias blocks.3.attention.value.bias"
        );
        for buffer in ["h.0.attn.bias", "h.0.attn.masked_bias", "lm_head.weight"] {
            assert_eq!(here(buffer), "", "{buffer}");
        }
        assert_eq!(part_of(&[4, 12], Some(2)), 8..12);
    }

    #[test]
    fn another_model_is_refused_with_the_reason() {
        let config = |change: &str| {
            let folder = tempfile::tempdir().unwrap();
            let base = r#"{"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2,
                "vocab_size": 9, "n_positions": 16, "other": null"#;
            let text = format!("{base}{change}}}");
            std::fs::write(folder.path().join("config.json"), text).unwrap();
            Gpt2Config::read(folder.path())
        };
        let read = config("").unwrap();
        assert!(read.tanh_gelu() && read.arch().vocabulary == 9 && read.n_positions == 16);
        assert!(!config(r#", "activation_function": "gelu""#).unwrap().tanh_gelu());
        for (change, expected) in [
            (r#", "activation_function": "relu""#, "relu"),
            (r#", "n_inner": 9"#, "n_inner"),
            (r#", "layer_norm_epsilon": 1e-6"#, "layer_norm_epsilon"),
            (r#", "tie_word_embeddings": false"#, "not tied"),
            (r#", "scale_attn_by_inverse_layer_idx": true"#, "not scaled"),
        ] {
            let error = format!("{:#}", config(change).unwrap_err());
            assert!(error.contains(expected) && error.contains("config.json"), "{error}");
        }
    }
}
