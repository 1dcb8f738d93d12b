//! The match of a file's tensors and a model's parameters, and the list of all differences.

use std::collections::BTreeSet;
use std::ops::Range;

use burn::tensor::{Shape, TensorData};
use fsdp_kernels::codes::{needs_matrix, stored_data};
use safetensors::Dtype;

use super::mapped::MappedTensor;
use super::options::LoadOptions;
use super::source::Source;
use crate::checkpoint::filter::is_factor;
use crate::checkpoint::load_report::LoadReport;
use crate::error::LoadError;
use crate::layout::{StorageType, TensorSplit};
use crate::param_group::{ParamSpec, Placement};

/// Elements of two copies that are read and compared at once.
const COMPARED: usize = 1 << 16;

/// Elements of a parameter that this rank needs from a file.
#[derive(Clone, Debug)]
pub(super) struct WantedTensor {
    /// Name of the tensor in the file.
    name: String,
    /// Whether the file has the transpose of the parameter.
    transposed: bool,
    /// Full shape in the model; of a split parameter, that of this rank's part.
    shape: Vec<usize>,
    /// The part of the parameter that this rank has among its tensor parallel ranks, if not the whole.
    split: Option<TensorSplit>,
    /// Range of the flattened parameter's elements that this rank stores.
    range: Range<usize>,
    /// Form in which this rank stores these elements.
    storage: StorageType,
    /// Shape in which this rank stores these elements.
    base_shape: Vec<usize>,
    /// Whether the parameter is tied to another, which is loaded in its stead. A file may have it
    /// or not.
    tied: bool,
    /// Name in the file of the parameter that this one is tied to, where copies are compared.
    copy_of: Option<String>,
    /// Whether the filter of the load selects the parameter.
    selected: bool,
}

impl WantedTensor {
    /// Returns the elements that this rank needs for a parameter called `name` in the file.
    pub(super) fn of_param(spec: &ParamSpec, name: &str, transposed: bool) -> Self {
        Self {
            name: name.to_string(),
            transposed,
            shape: spec.shape.clone(),
            split: spec.split,
            range: spec.range(),
            storage: spec.storage,
            base_shape: spec.base_shape(),
            tied: matches!(spec.placement, Placement::TiedTo(_)),
            copy_of: None,
            selected: true,
        }
    }

    /// Returns a description by which this rank needs all elements of a tensor called `name` in the
    /// file.
    pub(super) fn full(name: &str, shape: &[usize], transposed: bool) -> Self {
        Self {
            name: name.to_string(),
            transposed,
            shape: shape.to_vec(),
            split: None,
            range: 0..shape.iter().product(),
            storage: StorageType::F32,
            base_shape: shape.to_vec(),
            tied: false,
            copy_of: None,
            selected: true,
        }
    }

    /// Returns the description of a tied parameter whose copy in the file, if there is one, must equal the
    /// tensor called `name`: that of the parameter `owner`.
    pub(super) fn copy_of(self, name: &str, owner: &ParamSpec) -> Self {
        Self { copy_of: Some(name.to_string()), range: owner.range(), ..self }
    }

    /// Returns the description with whether the filter of the load selects the parameter.
    pub(super) fn selected(self, selected: bool) -> Self {
        Self { selected, ..self }
    }
}

/// A tensor of a file that fits a parameter, with the elements that this rank needs of it.
#[derive(Debug)]
pub(super) struct MatchedTensor {
    tensor: MappedTensor,
    wanted: WantedTensor,
}

/// Finds each wanted tensor in the file. `T` identifies the parameter to the caller.
///
/// # Errors
///
/// [`LoadError::Mismatch`] with all keys that are missing, unexpected or of the wrong shape or
/// dtype, beyond what `options` allows. [`LoadError::TiedCopies`] for two copies of a tied parameter that
/// differ.
pub(super) fn match_tensors<T>(
    source: &Source,
    wanted: impl IntoIterator<Item = (T, WantedTensor)>,
    options: &LoadOptions,
) -> Result<(Vec<(T, MatchedTensor)>, LoadReport), LoadError> {
    let allowed = |prefixes: &[String], key: &str| {
        prefixes.iter().any(|prefix| key.starts_with(prefix.as_str()))
    };
    let mut unused: BTreeSet<&str> = source.tensors.keys().map(String::as_str).collect();
    let (mut matched, mut misshapen) = (Vec::new(), Vec::new());
    let (mut missing, mut report) = (Vec::new(), LoadReport::default());
    let mut copies = Vec::new();
    for (to, wanted) in wanted {
        let candidates = options.candidates(&wanted.name);
        if !wanted.selected {
            let held = candidates.into_iter().find(|name| unused.remove(name.as_str()));
            report.filtered.extend(held);
            continue;
        }
        let Some(name) = candidates.iter().find(|name| unused.contains(name.as_str())) else {
            let new = options.new_adapters && is_factor(&wanted.name);
            if new || allowed(&options.missing, &wanted.name) || wanted.tied {
                report.missing.push(wanted.name);
            } else {
                missing.push(wanted.name);
            }
            continue;
        };
        unused.remove(name.as_str());
        let tensor = &source.tensors[name];
        match difference(tensor, &wanted, source.file_of(name)) {
            Some(difference) => misshapen.push(format!("{name}: {difference}")),
            // The owner of the tied parameter is loaded.
            None if wanted.tied => copies.push(MatchedTensor { tensor: tensor.clone(), wanted }),
            None => matched.push((to, MatchedTensor { tensor: tensor.clone(), wanted })),
        }
    }
    let (ignored, unexpected): (Vec<&str>, Vec<&str>) = unused.into_iter().partition(|key| {
        options.lenient || allowed(&options.unexpected, key) || is_batch_count(source, key)
    });
    if options.lenient {
        report.missing.append(&mut missing);
        report.misshapen.append(&mut misshapen);
    }
    let reported = [&mut report.missing, &mut report.misshapen, &mut report.filtered];
    // Sorted names are easier to read than the layout order.
    for names in reported.into_iter().chain([&mut missing, &mut misshapen]) {
        names.sort();
    }
    if !(missing.is_empty() && unexpected.is_empty() && misshapen.is_empty()) {
        return Err(LoadError::Mismatch {
            file: source.label.clone(),
            missing,
            unexpected: unexpected.into_iter().map(str::to_string).collect(),
            misshapen,
        });
    }
    check_copies(source, &copies, matched.iter().map(|(_, tensor)| tensor))?;
    report.loaded = matched.len();
    report.unexpected = ignored.into_iter().map(str::to_string).collect();
    Ok((matched, report))
}

/// Checks that copies of tied parameters are equal, as far as this rank stores them.
fn check_copies<'a>(
    source: &Source,
    copies: &[MatchedTensor],
    matched: impl Iterator<Item = &'a MatchedTensor> + Clone,
) -> Result<(), LoadError> {
    for copy in copies {
        let Some(owner) = &copy.wanted.copy_of else { continue };
        let Some(first) = matched.clone().find(|tensor| tensor.wanted.name == *owner) else {
            continue;
        };
        if let Some(element) = first.difference(copy) {
            return Err(LoadError::TiedCopies {
                file: source.label.clone(),
                first: first.wanted.name.clone(),
                second: copy.wanted.name.clone(),
                element,
            });
        }
    }
    Ok(())
}

/// Returns whether a tensor is PyTorch's count of the batches in a running mean, which Burn does
/// not keep.
fn is_batch_count(source: &Source, key: &str) -> bool {
    key.strip_suffix("num_batches_tracked")
        .is_some_and(|norm| source.tensors.contains_key(&format!("{norm}running_mean")))
}

/// Describes how the shape or dtype of a tensor differs from the wanted one, if it does.
fn difference(tensor: &MappedTensor, wanted: &WantedTensor, file: &str) -> Option<String> {
    let mut expected = match wanted.split {
        Some(split) => split.whole_shape(&wanted.shape),
        None => wanted.shape.clone(),
    };
    if wanted.transposed {
        expected.reverse();
    }
    if tensor.shape != expected {
        return Some(format!("{:?} in {file}, {expected:?} in the model", tensor.shape));
    }
    let float = matches!(tensor.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F64);
    (!float).then(|| format!("{:?} in {file}, a float in the model", tensor.dtype))
}

impl MatchedTensor {
    /// Returns the shape in which this rank stores the elements.
    pub(super) fn base_shape(&self) -> Shape {
        self.wanted.base_shape.clone().into()
    }

    /// Returns whether this rank stores no element of the parameter.
    pub(super) fn is_empty(&self) -> bool {
        self.wanted.range.is_empty()
    }

    /// Reads the elements that this rank stores, in the form in which it stores them.
    ///
    /// Codes whose scales are quantised depend on the whole parameter, which is read and dropped.
    pub(super) fn data(&self) -> TensorData {
        let WantedTensor { shape, range, storage, base_shape, .. } = &self.wanted;
        let elements = match needs_matrix(*storage) {
            true => self.read(0..shape.iter().product()),
            false => self.read(range.clone()),
        };
        stored_data(elements, range, *storage, base_shape.clone())
    }

    /// Returns the first element of this rank's that differs in a copy of the tensor.
    fn difference(&self, copy: &Self) -> Option<usize> {
        let range = &self.wanted.range;
        range.clone().step_by(COMPARED).find_map(|start| {
            let part = start..range.end.min(start + COMPARED);
            let (first, second) = (self.read(part.clone()), copy.read(part));
            let differ = |(a, b): (&f32, &f32)| a.to_bits() != b.to_bits();
            first.iter().zip(&second).position(differ).map(|at| start + at)
        })
    }

    /// Reads elements of the flattened parameter, converted to f32.
    fn read(&self, range: Range<usize>) -> Vec<f32> {
        let mut elements = Vec::with_capacity(range.len());
        let ranges = match &self.wanted.split {
            Some(split) => split.runs(&self.wanted.shape, range),
            None => vec![range],
        };
        macro_rules! read {
            ($ty:ty, $to:expr) => {
                self.tensor.runs(self.wanted.transposed, &ranges, |run| {
                    elements.extend((0..run.count).map(|index| {
                        let start = index * run.step;
                        let mut word = [0; size_of::<$ty>()];
                        word.copy_from_slice(&run.bytes[start..start + size_of::<$ty>()]);
                        $to(<$ty>::from_le_bytes(word))
                    }));
                })
            };
        }
        match self.tensor.dtype {
            Dtype::F64 => read!(f64, |x| x as f32),
            Dtype::F16 => read!(half::f16, half::f16::to_f32),
            Dtype::BF16 => read!(half::bf16, half::bf16::to_f32),
            _ => read!(f32, |x| x),
        }
        elements
    }
}
