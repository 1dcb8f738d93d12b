//! Loading adapters in PEFT's format.

use std::path::Path;

use super::super::load_values::{ParamTarget, load_values};
use super::super::matching::{MatchedTensor, WantedTensor, match_tensors};
use super::super::options::LoadOptions;
use super::super::source::Source;
use super::config::PeftConfig;
use super::plan::{AdapterFiles, PeftTensor};
use super::{WEIGHTS, WEIGHTS_BIN};
use crate::checkpoint::load_report::LoadReport;
use crate::checkpoint::ranks::Ranks;
use crate::checkpoint::state::StateMut;
use crate::error::{Error, LoadError};
use crate::fully_shard::Fsdp;
use crate::module::FsdpModule;

impl<M: FsdpModule> StateMut<'_, M> {
    /// Loads LoRA adapters, and the modules that were saved with them, from a folder that
    /// Hugging Face's PEFT or [`State::save_adapters`](crate::checkpoint::State::save_adapters) has
    /// written. The base model keeps its values.
    ///
    /// The model has adapters already, as from
    /// [`LoraConfig::from_peft`](crate::lora::LoraConfig::from_peft). The file must have the tensors of
    /// its adapters and of its modules that are trained in full, and no other. Each rank reads only
    /// the elements that it stores. Every rank calls it. On an error the model is unchanged on all
    /// ranks.
    ///
    /// # Errors
    ///
    /// [`LoadError`] where a file cannot be read, where rank or alpha differ, and where the tensors
    /// do not fit the model. [`CollectiveError`](crate::errors::CollectiveError) where another rank has
    /// such an error.
    pub fn load_adapters(&mut self, folder: impl AsRef<Path>) -> Result<LoadReport, Error> {
        let matched = match_adapters(self.model, folder.as_ref());
        let (matched, report) = Ranks::from(&*self.model).agree("the load of adapters", matched)?;
        load_values(self.model, matched);
        Ok(report)
    }
}

/// Matches the tensors in PEFT's file to a model's parameters.
fn match_adapters<M: FsdpModule>(
    model: &Fsdp<M>,
    folder: &Path,
) -> Result<(Vec<(ParamTarget, MatchedTensor)>, LoadReport), LoadError> {
    let config = PeftConfig::read(folder)?;
    let names = [WEIGHTS, WEIGHTS_BIN].map(|name| folder.join(name));
    let file = names.iter().find(|file| file.is_file()).unwrap_or(&names[0]);
    let plan = AdapterFiles::new(model)
        .map_err(|reason| LoadError::Adapters { file: file.display().to_string(), reason })?;
    config.check(&plan)?;
    let source = Source::open(file)?;
    let wanted = plan.tensors.iter().map(|(name, tensor)| {
        let PeftTensor { target, spec, transposed } = *tensor;
        let wanted = match target {
            ParamTarget::Sharded(_) => WantedTensor::of_param(spec, name, transposed),
            ParamTarget::PerRank(_) => WantedTensor::full(name, &spec.shape, transposed),
        };
        (target, wanted)
    });
    match_tensors(&source, wanted, &LoadOptions::new())
}
