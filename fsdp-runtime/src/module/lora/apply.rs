//! The choice of the layers that get adapters, and of the parameters that are trained in full.

use std::collections::{BTreeMap, BTreeSet};

use super::attach::Attach;
use super::config::LoraConfig;
use super::pattern::{Blocks, Scale, Scales, excluded_pattern, target_pattern};
use super::survey::{LinearLayer, Survey};
use crate::error::LoraError;
use crate::module::{FsdpModule, ModulePath};

/// PEFT's name of every linear layer but the output layer.
const ALL_LINEAR: &str = "all-linear";
/// Names of the output layers of the language models of transformers, which [`ALL_LINEAR`] leaves out.
const OUTPUT_LAYERS: [&str; 5] =
    ["lm_head", "lm_head.decoder", "cls.predictions.decoder", "embed_out", "output_layer"];

impl LoraConfig {
    /// Attaches adapters to a model that is not sharded yet, and freezes all other parameters but
    /// those of the modules to save.
    ///
    /// Linear layers are [`nn::Linear`](crate::nn::Linear) and [`burn::nn::Linear`] in fields that
    /// sharding knows: not those in a field under `#[fsdp(leaf)]`, and not those whose matrix is tied to
    /// another module's.
    ///
    /// # Errors
    ///
    /// [`LoraError`] for a rank of 0, an alpha that is not above 0, a dropout outside of `[0, 1)`, a
    /// dropout of a layer of Burn, a name, a pattern, a number of a block or a unit type that matches
    /// nothing, and a model with adapters.
    pub fn apply<M: FsdpModule>(&self, model: M) -> Result<M, LoraError> {
        let scales = Scales::new(self)?;
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(LoraError::Dropout { prob: self.dropout });
        }
        let survey = Survey::of(&model)?;
        let trained = self.trained(&survey)?;
        let layers = self.layers(&survey, &trained)?;
        let adapted = self.adapted(&scales, &layers)?;
        let LoraConfig { dropout, rank_stabilised, .. } = *self;
        let path = ModulePath::default();
        Ok(model.map_params(&mut Attach { adapted, trained, dropout, rank_stabilised, path }))
    }

    /// Returns the paths of the parameters that are trained in full.
    fn trained(&self, survey: &Survey) -> Result<BTreeSet<String>, LoraError> {
        let params = survey.params_in_all(&self.modules_to_save);
        params.map_err(|(modules, candidates)| LoraError::ModulesToSave { modules, candidates })
    }

    /// Returns the layers that get an adapter.
    fn layers<'a>(
        &self,
        survey: &'a Survey,
        trained: &BTreeSet<String>,
    ) -> Result<Vec<&'a LinearLayer>, LoraError> {
        let excluded = survey.params_in_all(&self.excluded_modules);
        let excluded = excluded
            .map_err(|(modules, candidates)| LoraError::ExcludedModules { modules, candidates })?;
        let pattern = excluded_pattern(self)?;
        let is_excluded =
            |layer: &LinearLayer| pattern.as_ref().is_some_and(|regex| layer.matches(regex));
        if let (Some(pattern), false) =
            (&self.excluded_pattern, pattern.is_none() || survey.layers.iter().any(is_excluded))
        {
            let (modules, candidates) = (vec![pattern.clone()], survey.layer_labels());
            return Err(LoraError::ExcludedModules { modules, candidates });
        }
        let all_linear =
            matches!(&self.target_modules[..], [name] if name.to_lowercase() == ALL_LINEAR);
        let is_output = |layer: &LinearLayer| OUTPUT_LAYERS.iter().any(|name| layer.is_named(name));
        let is_left_out = |layer: &LinearLayer| {
            let weight = layer.weight();
            let named = trained.contains(&weight) || excluded.contains(&weight);
            named || is_excluded(layer) || (all_linear && is_output(layer))
        };
        let layers = survey.layers.iter().filter(|layer| !is_left_out(layer));
        let layers: Vec<&LinearLayer> = layers.collect();
        let in_targets = |layer: &&LinearLayer| {
            self.target_units.is_empty() || self.target_units.iter().any(|&unit| layer.is_in(unit))
        };
        let in_units: Vec<&LinearLayer> = layers.iter().copied().filter(in_targets).collect();
        let named: &[String] = if all_linear { &[] } else { &self.target_modules };

        let units = self.target_units.iter();
        let units = units.filter(|unit| !layers.iter().any(|layer| layer.is_in(**unit)));
        let names = named.iter().filter(|name| !in_units.iter().any(|layer| layer.is_named(name)));
        let mut unmatched: Vec<String> =
            units.map(|unit| unit.name().to_string()).chain(names.cloned()).collect();
        if layers.is_empty() && unmatched.is_empty() {
            unmatched.push(ALL_LINEAR.into());
        }
        if !unmatched.is_empty() {
            let candidates = survey.layer_labels();
            return Err(LoraError::Targets { targets: unmatched, candidates });
        }
        let pattern = target_pattern(self)?;
        let is_named = |layer: &&LinearLayer| {
            (named.is_empty() || named.iter().any(|name| layer.is_named(name)))
                && pattern.as_ref().is_none_or(|regex| layer.matches(regex))
        };
        let targets: Vec<&LinearLayer> = in_units.into_iter().filter(is_named).collect();
        if targets.is_empty() {
            let (targets, candidates) = (self.target_pattern.clone(), survey.layer_labels());
            return Err(LoraError::Targets { targets: Vec::from_iter(targets), candidates });
        }
        self.in_blocks(targets)
    }

    /// Returns the layers that lie in the blocks with adapters.
    fn in_blocks<'a>(
        &self,
        layers: Vec<&'a LinearLayer>,
    ) -> Result<Vec<&'a LinearLayer>, LoraError> {
        let Some(blocks) = Blocks::new(self)? else { return Ok(layers) };
        let number = |layer: &&LinearLayer| blocks.number(&layer.names.both());
        let found: BTreeSet<usize> = layers.iter().filter_map(number).collect();
        let found: Vec<usize> = found.into_iter().collect();
        let missing = blocks.missing(&found);
        if !missing.is_empty() {
            return Err(LoraError::LayersToTransform { missing, found });
        }
        Ok(layers.into_iter().filter(|layer| blocks.contain(&layer.names.both())).collect())
    }

    /// Returns the paths of the matrices that get an adapter, each with the adapter's sizes.
    fn adapted(
        &self,
        scales: &Scales,
        layers: &[&LinearLayer],
    ) -> Result<BTreeMap<String, Scale>, LoraError> {
        let labels = |layers: &mut dyn Iterator<Item = &&LinearLayer>| -> Vec<String> {
            let labels: BTreeSet<_> = layers.map(|layer| layer.names.label()).collect();
            labels.into_iter().collect()
        };
        if self.dropout > 0.0 && layers.iter().any(|layer| !layer.applies_adapters) {
            let layers = labels(&mut layers.iter().filter(|layer| !layer.applies_adapters));
            return Err(LoraError::DropoutLayers { layers });
        }
        let names: Vec<[&str; 2]> = layers.iter().map(|layer| layer.names.both()).collect();
        if let Some((setting, pattern)) = scales.unmatched(&names) {
            let candidates = labels(&mut layers.iter());
            return Err(LoraError::UnmatchedPattern { setting, pattern, candidates });
        }
        let scaled = layers.iter().zip(names);
        Ok(scaled.map(|(layer, names)| (layer.weight(), scales.of(&names))).collect())
    }
}
