//! Adapters in the files of PEFT, whatever their names.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors, serialize};
use serde_json::Value;

/// Files of PEFT.
const WEIGHTS: &str = "adapter_model.safetensors";
const CONFIG: &str = "adapter_config.json";
/// First segments of every name in PEFT's file.
const PREFIX: &str = "base_model.model.";

/// Factors of an adapter, in PEFT's orientation.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Adapter {
    /// `lora_A`, `[rank, inputs]`.
    pub(super) a: Matrix,
    /// `lora_B`, `[outputs, rank]`.
    pub(super) b: Matrix,
}

/// Matrix in row-major order.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Matrix {
    pub(super) columns: usize,
    pub(super) elements: Vec<f32>,
}

impl Matrix {
    pub(super) fn rows(&self) -> impl ExactSizeIterator<Item = &[f32]> {
        self.elements.chunks_exact(self.columns)
    }
}

impl Adapter {
    pub(super) fn rank(&self) -> usize {
        self.b.columns
    }

    /// Returns the adapter of a layer made of several, side by side; `None` if none of these has an
    /// adapter.
    pub(super) fn merged(parts: Vec<Option<Self>>) -> Option<Self> {
        let first = parts.iter().flatten().next()?;
        let (inputs, outputs) = (first.a.columns, first.b.rows().len());
        let rank = parts.iter().flatten().map(Self::rank).sum();
        let a = parts.iter().flatten().flat_map(|part| &part.a.elements).copied().collect();
        let mut b = Vec::with_capacity(parts.len() * outputs * rank);
        let mut before = 0;
        for part in &parts {
            let width = part.as_ref().map_or(0, Self::rank);
            for row in 0..outputs {
                let start = b.len();
                b.resize(start + rank, 0.0);
                if let Some(part) = part {
                    let row = &part.b.elements[row * width..(row + 1) * width];
                    b[start + before..start + before + width].copy_from_slice(row);
                }
            }
            before += width;
        }
        Some(Self {
            a: Matrix { columns: inputs, elements: a },
            b: Matrix { columns: rank, elements: b },
        })
    }
}

/// Factors of the products of two factors, as PEFT's configuration has them.
pub(super) struct Scales<'a> {
    /// That of modules without a pattern.
    pub(super) base: f64,
    alpha: f64,
    /// Whether alpha is divided by the root of the rank.
    rank_stabilised: bool,
    patterns: &'a Value,
}

impl<'a> Scales<'a> {
    pub(super) fn new(config: &'a Value) -> Result<Self> {
        let number = |key: &str| {
            let number = config[key].as_f64().filter(|number| *number > 0.0);
            number.with_context(|| format!("{CONFIG}: `{key}` is {}, not above 0", config[key]))
        };
        let (rank, alpha) = (number("r")?, number("lora_alpha")?);
        let rank_stabilised = config["use_rslora"] == true;
        let patterns = &config["alpha_pattern"];
        let scales = Self { base: 0.0, alpha, rank_stabilised, patterns };
        Ok(Self { base: alpha / scales.divisor(rank), ..scales })
    }

    /// Returns what the alpha of an adapter with this rank is divided by.
    fn divisor(&self, rank: f64) -> f64 {
        if self.rank_stabilised { rank.sqrt() } else { rank }
    }

    /// Returns the scale of a module whose adapter has this rank.
    pub(super) fn of(&self, module: &str, rank: usize) -> Result<f64> {
        let mut alpha = self.alpha;
        for (pattern, value) in self.patterns.as_object().into_iter().flatten() {
            let is_name = |c: char| c.is_ascii_alphanumeric() || "._".contains(c);
            ensure!(
                pattern.chars().all(is_name),
                "{CONFIG}: `alpha_pattern` has the regular expression {pattern}; names are supported"
            );
            if is_named(module, pattern) {
                alpha = value.as_f64().with_context(|| format!("{CONFIG}: alpha of {pattern}"))?;
                break;
            }
        }
        Ok(alpha / self.divisor(rank as f64))
    }
}

/// Returns whether a module has a name, which is the last segments of its own.
pub(super) fn is_named(module: &str, name: &str) -> bool {
    let before = module.strip_suffix(name);
    before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// Reads the adapters in a folder, by the names of their modules, and their configuration.
pub(super) fn read(folder: &Path) -> Result<(BTreeMap<String, Adapter>, Value)> {
    let context = |name: &str| format!("cannot read {}", folder.join(name).display());
    let config = std::fs::read(folder.join(CONFIG)).with_context(|| context(CONFIG))?;
    let config: Value = serde_json::from_slice(&config).with_context(|| context(CONFIG))?;
    ensure!(config.is_object(), "{}: it is no JSON object", context(CONFIG));
    let bytes = std::fs::read(folder.join(WEIGHTS)).with_context(|| context(WEIGHTS))?;
    let file = SafeTensors::deserialize(&bytes).with_context(|| context(WEIGHTS))?;
    let [mut first, mut second] = [BTreeMap::new(), BTreeMap::new()];
    for (name, tensor) in file.tensors() {
        let module = name.strip_prefix(PREFIX).unwrap_or(&name);
        let (module, factors) = match module.rsplit_once(".lora_") {
            Some((module, "A.weight")) => (module, &mut first),
            Some((module, "B.weight")) => (module, &mut second),
            _ => bail!("{}: {name} is no factor of a linear layer's adapter", context(WEIGHTS)),
        };
        let matrix = matrix(&tensor).with_context(|| format!("{}: {name}", context(WEIGHTS)))?;
        factors.insert(module.to_string(), matrix);
    }
    let mut adapters = BTreeMap::new();
    for (module, a) in first {
        let b = second.remove(&module).filter(|b| b.columns == a.rows().len());
        let b =
            b.with_context(|| format!("{}: {module}: no lora_B of its rank", context(WEIGHTS)))?;
        adapters.insert(module, Adapter { a, b });
    }
    if let Some(module) = second.keys().next() {
        bail!("{}: {module} has no lora_A", context(WEIGHTS));
    }
    Ok((adapters, config))
}

/// Returns a tensor in f32.
fn matrix(tensor: &TensorView<'_>) -> Result<Matrix> {
    let &[rows, columns] = tensor.shape() else { bail!("the shape {:?}", tensor.shape()) };
    ensure!(rows > 0 && columns > 0, "the shape {:?}", tensor.shape());
    let two = |bytes: &[u8]| [bytes[0], bytes[1]];
    let bytes = tensor.data();
    let elements = match tensor.dtype() {
        Dtype::F32 => bytes
            .chunks_exact(4)
            .map(|it| f32::from_le_bytes([it[0], it[1], it[2], it[3]]))
            .collect(),
        Dtype::F16 => bytes.chunks_exact(2).map(|it| f16::from_le_bytes(two(it)).into()).collect(),
        Dtype::BF16 => {
            bytes.chunks_exact(2).map(|it| bf16::from_le_bytes(two(it)).into()).collect()
        }
        dtype => bail!("{dtype:?}, where f32, f16 and bf16 are known"),
    };
    Ok(Matrix { columns, elements })
}

/// Writes adapters, by the names of their modules, and their configuration. Files are renamed to their
/// names when they are complete.
pub(super) fn write(
    folder: &Path,
    adapters: &BTreeMap<String, Adapter>,
    config: &Value,
) -> Result<()> {
    let mut tensors = Vec::new();
    for (module, Adapter { a, b }) in adapters {
        for (factor, matrix) in [("lora_A", a), ("lora_B", b)] {
            let bytes: Vec<u8> = matrix.elements.iter().flat_map(|it| it.to_le_bytes()).collect();
            let shape = vec![matrix.rows().len(), matrix.columns];
            tensors.push((format!("{PREFIX}{module}.{factor}.weight"), shape, bytes));
        }
    }
    let views = tensors
        .iter()
        .map(|(name, shape, bytes)| Ok((name, TensorView::new(Dtype::F32, shape.clone(), bytes)?)));
    let weights = serialize(views.collect::<Result<Vec<_>>>()?, None)?;
    let config = format!("{config:#}\n").into_bytes();
    let files = [(WEIGHTS, weights), (CONFIG, config)];
    let part = |name: &str| folder.join(format!("{name}.part"));
    for (name, contents) in &files {
        std::fs::write(part(name), contents)
            .with_context(|| format!("cannot write {}", part(name).display()))?;
    }
    for (name, _) in &files {
        let path = folder.join(name);
        std::fs::rename(part(name), &path)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}
