//! Which tensor of a file goes where, or all the reasons why that cannot be.

use std::collections::BTreeSet;
use std::ops::Range;

use burn::tensor::Shape;
use safetensors::Dtype;

use super::source::{Source, Stored};
use super::{LoadError, LoadOptions, LoadReport};
use crate::param_group::{ParamSpec, Placement};

/// What the model wants of a file.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    /// The tensor's name.
    pub(super) name: String,
    /// Whether it lies transposed in the file.
    pub(super) transposed: bool,
    /// Its full shape in the model.
    pub(super) shape: Vec<usize>,
    /// The elements this rank holds.
    pub(super) range: Range<usize>,
    /// The shape it holds them in.
    pub(super) base_shape: Vec<usize>,
    /// Another place holds it: the file may have it or not.
    pub(super) tied: bool,
}

impl Wanted {
    /// The part of a parameter that this rank holds, under a name.
    pub(super) fn of(entry: &ParamSpec, name: &str, transposed: bool) -> Self {
        Self {
            name: name.to_string(),
            transposed,
            shape: entry.shape.clone(),
            range: entry.range(),
            base_shape: entry.base_shape(),
            tied: matches!(entry.held, Placement::TiedTo(_)),
        }
    }

    /// All of something, under a name.
    pub(super) fn whole(name: &str, shape: &[usize], transposed: bool) -> Self {
        Self {
            name: name.to_string(),
            transposed,
            shape: shape.to_vec(),
            range: 0..shape.iter().product(),
            base_shape: shape.to_vec(),
            tied: false,
        }
    }
}

/// A tensor that fits, and the part of it that this rank holds.
#[derive(Debug)]
pub(super) struct Part {
    stored: Stored,
    wanted: Wanted,
}

/// Finds each wanted tensor in the file.
pub(super) fn fit<T>(
    source: &Source,
    wanted: impl IntoIterator<Item = (T, Wanted)>,
    options: &LoadOptions,
) -> Result<(Vec<(T, Part)>, LoadReport), LoadError> {
    let allowed = |prefixes: &[String], key: &str| {
        prefixes.iter().any(|prefix| key.starts_with(prefix.as_str()))
    };
    let mut rest: BTreeSet<&str> = source.tensors.keys().map(String::as_str).collect();
    let (mut parts, mut misshapen) = (Vec::new(), Vec::new());
    let (mut missing, mut report) = (Vec::new(), LoadReport::default());
    for (to, wanted) in wanted {
        let candidates = options.candidates(&wanted.name);
        let Some(name) = candidates.iter().find(|name| rest.contains(name.as_str())) else {
            if allowed(&options.missing, &wanted.name) || wanted.tied {
                report.missing.push(wanted.name);
            } else {
                missing.push(wanted.name);
            }
            continue;
        };
        rest.remove(name.as_str());
        let stored = &source.tensors[name];
        match differs(stored, &wanted) {
            Some(difference) => misshapen.push(format!("{name}: {difference}")),
            // The place that owns a tied weight is loaded; this one follows.
            None if wanted.tied => {}
            None => parts.push((to, Part { stored: stored.clone(), wanted })),
        }
    }
    // Units come in layout order; names read better sorted.
    for names in [&mut missing, &mut misshapen, &mut report.missing] {
        names.sort();
    }
    let (passed, unexpected): (Vec<&str>, Vec<&str>) = rest
        .into_iter()
        .partition(|key| allowed(&options.unexpected, key) || counts_batches(source, key));
    if !(missing.is_empty() && unexpected.is_empty() && misshapen.is_empty()) {
        return Err(LoadError::Mismatch {
            file: source.label.clone(),
            missing,
            unexpected: unexpected.into_iter().map(str::to_string).collect(),
            misshapen,
        });
    }
    report.loaded = parts.len();
    report.unexpected = passed.into_iter().map(str::to_string).collect();
    Ok((parts, report))
}

/// Whether it is how many batches PyTorch took a running mean of, which Burn does not count.
fn counts_batches(source: &Source, key: &str) -> bool {
    key.strip_suffix("num_batches_tracked")
        .is_some_and(|norm| source.tensors.contains_key(&format!("{norm}running_mean")))
}

/// How a tensor of the file cannot be the one wanted.
fn differs(stored: &Stored, wanted: &Wanted) -> Option<String> {
    let mut expected = wanted.shape.clone();
    if wanted.transposed {
        expected.reverse();
    }
    if stored.shape != expected {
        return Some(format!("{:?} in the file, {expected:?} in the model", stored.shape));
    }
    let float = matches!(stored.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F64);
    (!float).then(|| format!("{:?} in the file, a float in the model", stored.dtype))
}

impl Part {
    /// The shape in which this rank holds its elements.
    pub(super) fn base_shape(&self) -> Shape {
        self.wanted.base_shape.clone().into()
    }

    /// Whether this rank holds nothing of the parameter.
    pub(super) fn is_empty(&self) -> bool {
        self.wanted.range.is_empty()
    }

    /// The elements that this rank holds.
    pub(super) fn read(&self) -> Vec<f32> {
        let bytes = self.stored.bytes();
        let Wanted { shape, range, transposed, .. } = &self.wanted;
        let width = shape.last().copied().unwrap_or(1).max(1);
        let height = shape.iter().product::<usize>() / width;
        let at = |index: usize| match transposed {
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
                range.clone().map(element).collect()
            }};
        }
        let elements = match self.stored.dtype {
            Dtype::F64 => elements!(f64, |x| x as f32),
            Dtype::F16 => elements!(half::f16, half::f16::to_f32),
            Dtype::BF16 => elements!(half::bf16, half::bf16::to_f32),
            _ => elements!(f32, |x| x),
        };
        self.stored.release();
        elements
    }
}
