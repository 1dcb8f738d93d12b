//! Saving adapters in PEFT's format.

use std::path::Path;

use super::super::file_names::is_plain;
use super::super::load_values::ParamTarget;
use super::super::local_values::LocalValues;
use super::super::merged_adapters::MergedAdapters;
use super::super::safetensors_file::{NewFile, TensorHeader, save_error, small_file};
use super::super::save::{Values, write_file};
use super::super::weights_files::{TensorToWrite, WeightsFile};
use super::config::config_text;
use super::options::SaveAdapters;
use super::plan::{AdapterFiles, PeftTensor};
use super::{CONFIG, WEIGHTS};
use crate::checkpoint::ranks::Ranks;
use crate::checkpoint::state::State;
use crate::error::{Error, SaveError};
use crate::fully_shard::Fsdp;
use crate::module::FsdpModule;

impl<M: FsdpModule> State<'_, M> {
    /// Writes the LoRA adapters, without the base model, to a folder that Hugging Face's PEFT
    /// loads: `adapter_model.safetensors`, `adapter_config.json`, and the additional files of
    /// `options`.
    ///
    /// Modules whose parameters are trained in full, such as a new head, are written as PEFT's
    /// `modules_to_save`. On a device without autodiff no parameter counts as trained. The names of
    /// modules are those of [`save_pretrained`](Self::save_pretrained), so that a base model of
    /// transformers takes the adapters.
    ///
    /// Every rank calls it. Parameters are gathered to rank 0 one at a time. The files are renamed
    /// to their names when all are complete.
    ///
    /// # Errors
    ///
    /// [`SaveError`] on the rank that found it, [`CollectiveError`](crate::errors::CollectiveError) on the
    /// others.
    pub fn save_adapters(
        &self,
        folder: impl AsRef<Path>,
        options: &SaveAdapters,
    ) -> Result<(), Error> {
        let (folder, ranks) = (folder.as_ref(), Ranks::from(self.model));
        let planned = plan_file(self.model, folder, options, ranks.leads());
        let (file, config) = ranks.agree("the plan of a save", planned)?;
        let (local, adapters) = (LocalValues::of(self.model), MergedAdapters::default());
        let values = Values { local, adapters };
        let out =
            ranks.leads().then(|| NewFile::safetensors(&folder.join(WEIGHTS), &file.headers()));
        let written = write_file(self.model, &values, &file, out, &options.files)?;
        let published = written.map_or(Ok(()), |file| publish(folder, file, config, options));
        ranks.agree("a save", published)
    }
}

/// Returns the file of tensors to write and the text of the configuration. Rank 0 creates the
/// folder.
fn plan_file<M: FsdpModule>(
    model: &Fsdp<M>,
    folder: &Path,
    options: &SaveAdapters,
    leads: bool,
) -> Result<(WeightsFile<ParamTarget>, Vec<u8>), SaveError> {
    for (name, _) in &options.files.files {
        let reason = match name.as_str() {
            _ if !is_plain(name) => "it must lie in the folder itself",
            CONFIG => "it is the configuration of the adapters",
            _ if name.ends_with(".safetensors") => "it is a file of weights",
            _ => continue,
        };
        return Err(SaveError::FileName { name: name.clone(), reason });
    }
    let plan = AdapterFiles::new(model).map_err(|reason| SaveError::Adapters { reason })?;
    let config = config_text(&plan, options);
    let dtype = options.files.dtype.safetensors();
    let to_write = |(name, PeftTensor { target, spec, transposed }): (String, PeftTensor<'_>)| {
        let mut shape = spec.whole_shape();
        let transpose = match shape[..] {
            [rows, columns] if transposed => Some([rows, columns]),
            _ => None,
        };
        if transpose.is_some() {
            shape.reverse();
        }
        let bytes = (spec.whole_numel() * dtype.bitsize() / 8) as u64;
        TensorToWrite {
            source: target,
            header: TensorHeader { name, shape, dtype, bytes },
            transpose,
        }
    };
    let tensors = plan.tensors.into_iter().map(to_write).collect();
    if leads {
        std::fs::create_dir_all(folder)
            .map_err(|error| save_error(&folder.display().to_string(), &error))?;
    }
    Ok((WeightsFile { name: WEIGHTS.into(), tensors }, config))
}

/// Renames the complete file, and the others, to their names in `folder`.
fn publish(
    folder: &Path,
    weights: Result<NewFile, SaveError>,
    config: Vec<u8>,
    options: &SaveAdapters,
) -> Result<(), SaveError> {
    let mut files = vec![weights?.complete()?, small_file(&folder.join(CONFIG), &config)?];
    for (name, contents) in &options.files.files {
        files.push(small_file(&folder.join(name), contents)?);
    }
    files.into_iter().try_for_each(|file| file.publish())
}
