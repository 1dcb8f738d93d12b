//! Weights from elsewhere: a safetensors file in its framework's own names and layouts.
//!
//! The file is memory-mapped, and each rank copies only the elements of its fragments. Everything is
//! checked before anything is changed.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::path::{Path, PathBuf};

use burn::module::{ModuleMapper, Param, ParamId};
use burn::tensor::{Tensor, TensorData};
use memmap2::Mmap;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::error::{Error, LoadError};
use crate::fully_shard::Fsdp;
use crate::group::{Entry, Held};
use crate::param::{Place, Sharded};
use crate::unit::{FsdpModule, Walk};

/// What may differ between a file and the model.
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct LoadOptions {
    base_prefix: Option<String>,
    missing: Vec<String>,
    unexpected: Vec<String>,
}

impl LoadOptions {
    /// The file holds the model's keys, no more and no less.
    pub fn new() -> Self {
        Self::default()
    }

    /// A first segment that keys may have in the model and lack in the file, or the other way
    /// round: `bert` where the file holds the bare encoder.
    pub fn base_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.base_prefix = Some(prefix.into());
        self
    }

    /// Keys of the model that begin so may be missing, and keep their values: a new head.
    pub fn allow_missing(mut self, prefix: impl Into<String>) -> Self {
        self.missing.push(prefix.into());
        self
    }

    /// Keys of the file that begin so are passed over: the head of another task.
    pub fn allow_unexpected(mut self, prefix: impl Into<String>) -> Self {
        self.unexpected.push(prefix.into());
        self
    }
}

/// What a load found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// How many parameters were loaded.
    pub loaded: usize,
    /// Keys of the model that the file lacks, as allowed.
    pub missing: Vec<String>,
    /// Keys of the file that were passed over, as allowed.
    pub unexpected: Vec<String>,
}

impl<M: FsdpModule> Fsdp<M> {
    /// Loads parameters from a safetensors file, or from `model.safetensors` in a folder, by their
    /// keys: each field's `#[fsdp(key = "..")]` or name. The model is unchanged on an error.
    ///
    /// # Errors
    ///
    /// [`LoadError`]: the file cannot be read, is no safetensors file, or does not fit, with all
    /// keys that are missing, unexpected or misshapen.
    pub fn load_safetensors(
        &mut self,
        path: impl AsRef<Path>,
        options: &LoadOptions,
    ) -> Result<LoadReport, Error> {
        let path = path.as_ref();
        let path = if path.is_dir() { path.join("model.safetensors") } else { path.to_path_buf() };
        let map = map(&path)?;
        let file = SafeTensors::deserialize(&map).map_err(|error| LoadError::Format {
            file: path.display().to_string(),
            reason: format!("{error}; it may be truncated"),
        })?;
        let (sources, report) = self.fit(&path, &file, options)?;
        let mut values: HashMap<Place, Vec<f32>> = HashMap::new();
        for (place, source) in sources {
            let entry = &self.engine.units()[place.unit].entries[place.entry];
            values.insert(place, source.read(entry));
        }
        let mut ids = Ids::default();
        self.module.walk(&mut ids);
        let module = self.module.clone().map(&mut Fill { values, ids: ids.0 });
        self.module = module;
        Ok(report)
    }

    /// Finds each parameter's tensor in the file, or all the reasons why that cannot be.
    fn fit<'a>(
        &self,
        path: &Path,
        file: &'a SafeTensors<'_>,
        options: &LoadOptions,
    ) -> Result<(Vec<(Place, Source<'a>)>, LoadReport), LoadError> {
        let allowed = |prefixes: &[String], key: &str| {
            prefixes.iter().any(|prefix| key.starts_with(prefix.as_str()))
        };
        let mut rest: BTreeSet<&str> = file.names().into_iter().collect();
        let (mut sources, mut misshapen) = (Vec::new(), Vec::new());
        let (mut missing, mut report) = (Vec::new(), LoadReport::default());
        for (&place, key) in self.keys.iter() {
            let entry = &self.engine.units()[place.unit].entries[place.entry];
            let name = candidates(&key.name, options)
                .into_iter()
                .find(|name| rest.contains(name.as_str()));
            let tied = matches!(entry.held, Held::TiedTo(_));
            let Some(name) = name else {
                if allowed(&options.missing, &key.name) || tied {
                    report.missing.push(key.name.clone());
                } else {
                    missing.push(key.name.clone());
                }
                continue;
            };
            rest.remove(name.as_str());
            let view = file.tensor(&name).expect("the name is from the file's own list");
            match Source::new(view, entry, key.transposed) {
                Err(difference) => misshapen.push(format!("{name}: {difference}")),
                // The place that owns a tied weight is loaded; this one follows.
                Ok(_) if tied => {}
                Ok(source) => sources.push((place, source)),
            }
        }
        // Units come in layout order; names read better sorted.
        for names in [&mut missing, &mut misshapen, &mut report.missing] {
            names.sort();
        }
        let (passed, unexpected): (Vec<&str>, Vec<&str>) =
            rest.into_iter().partition(|key| allowed(&options.unexpected, key));
        if !(missing.is_empty() && unexpected.is_empty() && misshapen.is_empty()) {
            let unexpected = unexpected.into_iter().map(str::to_string).collect();
            return Err(LoadError::Mismatch {
                file: path.display().to_string(),
                missing,
                unexpected,
                misshapen,
            });
        }
        report.loaded = sources.len();
        report.unexpected = passed.into_iter().map(str::to_string).collect();
        Ok((sources, report))
    }
}

/// The names a key may have in the file.
fn candidates(key: &str, options: &LoadOptions) -> Vec<String> {
    let mut names = vec![key.to_string()];
    if let Some(prefix) = &options.base_prefix {
        match key.strip_prefix(prefix.as_str()).and_then(|rest| rest.strip_prefix('.')) {
            Some(bare) => names.push(bare.to_string()),
            None => names.push(format!("{prefix}.{key}")),
        }
    }
    names
}

fn map(path: &PathBuf) -> Result<Mmap, LoadError> {
    let io = |error: std::io::Error| LoadError::Io {
        file: path.display().to_string(),
        reason: error.to_string(),
    };
    let file = File::open(path).map_err(io)?;
    // SAFETY: the map is read only while this function's caller loads. That nobody truncates the
    // file meanwhile is the user's part, as with every memory-mapped reader.
    unsafe { Mmap::map(&file) }.map_err(io)
}

/// A tensor of the file that fits a parameter.
struct Source<'a> {
    view: TensorView<'a>,
    transposed: bool,
}

impl<'a> Source<'a> {
    fn new(view: TensorView<'a>, entry: &Entry, transposed: bool) -> Result<Self, String> {
        let mut expected = entry.shape.clone();
        if transposed {
            expected.reverse();
        }
        if view.shape() != expected {
            return Err(format!("{:?} in the file, {expected:?} in the model", view.shape()));
        }
        if !matches!(view.dtype(), Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F64) {
            return Err(format!("{:?} in the file, a float in the model", view.dtype()));
        }
        Ok(Self { view, transposed })
    }

    /// The elements that this rank holds.
    fn read(&self, entry: &Entry) -> Vec<f32> {
        let bytes = self.view.data();
        let width = entry.shape.last().copied().unwrap_or(1);
        let height = entry.numel() / width.max(1);
        let at = |index: usize| match self.transposed {
            false => index,
            true => (index % width) * height + index / width,
        };
        macro_rules! elements {
            ($ty:ty, $to:expr) => {{
                let element = |index: usize| {
                    let start = at(index) * size_of::<$ty>();
                    let mut word = [0; size_of::<$ty>()];
                    word.copy_from_slice(&bytes[start..start + size_of::<$ty>()]);
                    $to(<$ty>::from_le_bytes(word))
                };
                entry.range().map(element).collect()
            }};
        }
        match self.view.dtype() {
            Dtype::F64 => elements!(f64, |x| x as f32),
            Dtype::F16 => elements!(half::f16, half::f16::to_f32),
            Dtype::BF16 => elements!(half::bf16, half::bf16::to_f32),
            _ => elements!(f32, |x| x),
        }
    }
}

/// The place of each parameter that holds its own values.
#[derive(Default)]
struct Ids(HashMap<ParamId, Place>);

impl Walk for Ids {
    fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(sharded) = Sharded::of(param) {
            // A tied clone comes after its owner, with the same id.
            self.0.entry(param.id).or_insert(sharded.place);
        }
    }
}

struct Fill {
    values: HashMap<Place, Vec<f32>>,
    ids: HashMap<ParamId, Place>,
}

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(values) = self.ids.remove(&param.id).and_then(|place| self.values.remove(&place))
        else {
            return param;
        };
        let (id, base, mapper) = param.consume();
        // A rank that holds nothing of the parameter keeps its placeholder.
        if values.is_empty() {
            return Param::from_mapped_value(id, base, mapper);
        }
        let data = TensorData::new(values, base.shape());
        let tracked = base.is_require_grad();
        let base = Tensor::from_data(data, &base.device()).set_require_grad(tracked);
        Param::from_mapped_value(id, base, mapper)
    }
}
