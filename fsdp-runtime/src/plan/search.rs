//! The search for settings under which a model fits and trains fast.

use serde::Serialize;

use super::cluster::{Accelerator, Cluster};
use super::estimate::Estimate;
use super::step::StepPlan;
use super::work::{Batch, Recomputation};
use crate::error::ShardError;
use crate::layout::{Mesh, MeshError, Rank, WorldSize};
use crate::options::{ActivationCheckpointing, FsdpOptions, OffloadPolicy, ShardingStrategy};
use crate::param_group::plan::shape::ModelShape;

/// A question for a [`search`]: a model and the batch of a step, on a number of devices.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Question<'a> {
    /// The model.
    pub shape: &'a ModelShape,
    /// Number of ranks.
    pub world: usize,
    /// Samples of a step on each rank.
    pub samples: usize,
    /// Tokens of a sample.
    pub length: usize,
    /// Options of every candidate, but for those that the search chooses.
    pub options: FsdpOptions,
    /// Whether the loss is computed without the logits in memory.
    pub fused_loss: bool,
}

impl<'a> Question<'a> {
    /// Asks for the settings of a model on `world` ranks, with `samples` samples of `length` tokens
    /// on each rank and step.
    pub fn new(shape: &'a ModelShape, world: usize, samples: usize, length: usize) -> Self {
        let options = FsdpOptions::new();
        Self { shape, world, samples, length, options, fused_loss: false }
    }
}

/// Settings that a [`search`] has tried, with what they take.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Candidate {
    /// Sharding strategy.
    pub strategy: ShardingStrategy,
    /// Ranks that share one copy of the parameters.
    pub shard_size: usize,
    /// Samples of a micro-batch.
    pub micro_batch: usize,
    /// Micro-batches of a step.
    pub micro_batches: usize,
    /// How much is recomputed.
    pub recomputation: Recomputation,
    /// What is stored in host memory.
    pub offload: OffloadPolicy,
    /// Time and memory.
    pub estimate: Estimate,
    /// Why the settings are better or worse than others.
    pub reasons: Vec<String>,
}

/// What the least expensive other device would need for the model.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Cheaper {
    /// Name of the device.
    pub device: &'static str,
    /// Bytes that the settings with the least memory need on it.
    pub needed: usize,
    /// Bytes that training may use on it.
    pub usable: usize,
    /// Tokens of one rank in a second under the best settings that fit, if any do.
    pub tokens_per_second: Option<f64>,
    /// US dollars for a billion tokens under these settings.
    pub dollars_per_billion_tokens: Option<f64>,
}

/// Result of a [`search`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Found {
    /// Settings that fit, the fastest first.
    pub best: Vec<Candidate>,
    /// Settings with the least memory, whether they fit or not.
    pub smallest: Candidate,
    /// Number of settings that were tried, and of those that fit.
    pub tried: (usize, usize),
    /// The next cheaper device, unless there is none.
    pub cheaper: Option<Cheaper>,
}

/// Finds the fastest settings under which a model fits on a cluster, at most `most` of them, each
/// with another combination of strategy, recomputation and offload.
///
/// # Errors
///
/// Returns the errors of [`StepPlan::of_shape`].
pub fn search(
    question: &Question<'_>,
    cluster: &Cluster,
    most: usize,
) -> Result<Found, ShardError> {
    let all = candidates(question, cluster)?;
    let smallest = all.iter().min_by_key(|it| it.estimate.memory.total()).cloned();
    let smallest = smallest.expect("a search tries at least one candidate");
    let tried = (all.len(), all.iter().filter(|it| it.estimate.fits()).count());
    let mut fitting: Vec<Candidate> = all.iter().filter(|it| it.estimate.fits()).cloned().collect();
    fitting.sort_by(|a, b| a.estimate.step.total_cmp(&b.estimate.step));
    let mut best: Vec<Candidate> = Vec::new();
    for candidate in fitting {
        if best.len() < most && best.iter().all(|other| !candidate.is_like(other)) {
            best.push(candidate);
        }
    }
    let fastest = best.first().cloned();
    for candidate in &mut best {
        candidate.reasons = reasons(candidate, fastest.as_ref(), &all, cluster);
    }
    Ok(Found { best, smallest, tried, cheaper: cheaper(question, cluster)? })
}

impl Candidate {
    /// Returns whether both differ in the micro-batch only.
    fn is_like(&self, other: &Self) -> bool {
        let key = |it: &Self| (it.strategy, it.shard_size, it.recomputation, it.offload);
        key(self) == key(other)
    }
}

/// Returns the shard sizes to try with a strategy.
fn shard_sizes(strategy: ShardingStrategy, world: usize, per_machine: usize) -> Vec<usize> {
    if !strategy.is_hybrid() {
        return vec![world];
    }
    let sizes = [per_machine, 2 * per_machine, 4 * per_machine, 8 * per_machine];
    let fits = |size: &usize| *size > 1 && *size < world && world.is_multiple_of(*size);
    sizes.into_iter().filter(fits).collect()
}

/// Returns all candidates, with their estimates.
fn candidates(question: &Question<'_>, cluster: &Cluster) -> Result<Vec<Candidate>, ShardError> {
    let world = WorldSize::new(question.world)?;
    if question.samples == 0 {
        return Err(MeshError::EmptyWorld.into());
    }
    let mut found = Vec::new();
    let params = OffloadPolicy::Params { pin_memory: true };
    for (strategy, _) in ShardingStrategy::ALL {
        for shard_size in shard_sizes(strategy, question.world, cluster.per_machine) {
            for recomputation in [Recomputation::None, Recomputation::Units] {
                for offload in [OffloadPolicy::None, OffloadPolicy::OptimizerOnly, params] {
                    let settings = Settings { strategy, shard_size, recomputation, offload };
                    found.extend(settings.candidates(question, (world, cluster))?);
                }
            }
        }
    }
    Ok(found)
}

/// Settings apart from the micro-batch.
struct Settings {
    strategy: ShardingStrategy,
    shard_size: usize,
    recomputation: Recomputation,
    offload: OffloadPolicy,
}

impl Settings {
    /// Returns a candidate for each micro-batch: the samples of a step divided by 1, 2, 4 ..
    fn candidates(
        &self,
        question: &Question<'_>,
        (world, cluster): (WorldSize, &Cluster),
    ) -> Result<Vec<Candidate>, ShardError> {
        let recomputes = match self.recomputation {
            Recomputation::Units => ActivationCheckpointing::All,
            _ => ActivationCheckpointing::None,
        };
        let options = question.options.clone().with_strategy(self.strategy);
        let options = options.with_offload(self.offload).with_activation_checkpointing(recomputes);
        let options = match self.strategy.is_hybrid() {
            true => options.with_shard_size(self.shard_size),
            false => options,
        };
        let plan = StepPlan::of_shape(question.shape, Mesh::new(Rank::ZERO, world), &options)?;
        let plan = plan.with_fused_loss(question.fused_loss);
        let mut found = Vec::new();
        let mut micro_batches = 1;
        while question.samples.is_multiple_of(micro_batches) && micro_batches <= question.samples {
            let micro_batch = question.samples / micro_batches;
            let batch = Batch::new(micro_batch, question.length).with_micro_batches(micro_batches);
            let estimate = plan.estimate(batch, cluster);
            let fits = estimate.fits();
            found.push(Candidate {
                strategy: self.strategy,
                shard_size: self.shard_size,
                micro_batch,
                micro_batches,
                recomputation: self.recomputation,
                offload: self.offload,
                estimate,
                reasons: Vec::new(),
            });
            // Smaller micro-batches are slower and take less memory.
            if fits {
                break;
            }
            micro_batches *= 2;
        }
        Ok(found)
    }
}

fn gib(bytes: usize) -> f64 {
    bytes as f64 / (1u64 << 30) as f64
}

/// Returns why a candidate is as fast as it is, and what it would take to do without its costs.
fn reasons(
    candidate: &Candidate,
    fastest: Option<&Candidate>,
    all: &[Candidate],
    cluster: &Cluster,
) -> Vec<String> {
    let estimate = &candidate.estimate;
    let mut reasons = Vec::new();
    let free = estimate.usable.saturating_sub(estimate.memory.total());
    reasons.push(format!("{:.1} GiB stay free", gib(free)));
    if estimate.exposed > 0.05 * estimate.step {
        let share = 100.0 * estimate.exposed / estimate.step;
        reasons.push(format!("{share:.0} % of the step waits for communication"));
    }
    if candidate.recomputation == Recomputation::Units {
        let share = 100.0 * estimate.recompute / estimate.step;
        let without = all.iter().filter(|other| {
            other.recomputation == Recomputation::None
                && other.strategy == candidate.strategy
                && other.shard_size == candidate.shard_size
                && other.offload == candidate.offload
        });
        let least = without.map(|other| other.estimate.memory.total()).min().unwrap_or(0);
        reasons.push(format!(
            "recomputation takes {share:.0} % of the step; without it a rank needs {:.1} GiB of {:.1}",
            gib(least),
            gib(cluster.usable())
        ));
    }
    if candidate.offload != OffloadPolicy::None {
        reasons.push(format!("{:.1} GiB lie in host memory", gib(estimate.memory.host.total())));
    }
    if candidate.micro_batches > 1 {
        reasons.push(format!("{} micro-batches take turns in memory", candidate.micro_batches));
    }
    if let Some(fastest) = fastest
        && fastest.estimate.step < estimate.step
    {
        let more = 100.0 * (estimate.step / fastest.estimate.step - 1.0);
        reasons.push(format!("{more:.0} % slower than the first"));
    }
    reasons
}

/// Returns what the next cheaper device would need.
fn cheaper(question: &Question<'_>, cluster: &Cluster) -> Result<Option<Cheaper>, ShardError> {
    let price = cluster.accelerator.dollars_per_hour;
    let below = Accelerator::presets().iter().filter(|it| it.dollars_per_hour < price);
    let next = below.max_by(|a, b| a.dollars_per_hour.total_cmp(&b.dollars_per_hour));
    let Some(device) = next else { return Ok(None) };
    let Ok(other) = Cluster::preset(device.name) else { return Ok(None) };
    let other = Cluster { per_machine: cluster.per_machine, ..other };
    let all = candidates(question, &other)?;
    let needed = all.iter().map(|it| it.estimate.memory.total()).min().unwrap_or(0);
    let fitting = all.iter().filter(|it| it.estimate.fits());
    let best = fitting.min_by(|a, b| a.estimate.step.total_cmp(&b.estimate.step));
    Ok(Some(Cheaper {
        device: device.name,
        needed,
        usable: other.usable(),
        tokens_per_second: best.map(|it| it.estimate.tokens_per_second),
        dollars_per_billion_tokens: best.map(|it| it.estimate.dollars_per_billion_tokens),
    }))
}

#[cfg(test)]
mod tests {
    use super::super::Transformer;
    use super::*;

    #[test]
    fn the_best_settings_fit_and_are_sorted() {
        let shape = Transformer::named("llama3-8b").unwrap().shape("llama3-8b");
        let cluster = Cluster::preset("h100").unwrap();
        let found = search(&Question::new(&shape, 16, 4, 8192), &cluster, 4).unwrap();
        assert!(!found.best.is_empty() && found.best.len() <= 4);
        let steps: Vec<f64> = found.best.iter().map(|it| it.estimate.step).collect();
        assert!(steps.is_sorted(), "{steps:?}");
        for candidate in &found.best {
            assert!(candidate.estimate.memory.total() <= cluster.usable());
            assert_eq!(candidate.micro_batch * candidate.micro_batches, 4);
            assert!(!candidate.reasons.is_empty());
        }
        assert!(found.tried.1 < found.tried.0, "some settings do not fit: {:?}", found.tried);
        assert_eq!(found.cheaper.unwrap().device, "a100");
    }

    #[test]
    fn a_model_that_fits_nowhere_has_no_best_settings() {
        let shape = Transformer::named("llama3-405b").unwrap().shape("llama3-405b");
        let cluster = Cluster::preset("l4").unwrap();
        let found = search(&Question::new(&shape, 1, 1, 8192), &cluster, 3).unwrap();
        assert!(found.best.is_empty());
        assert!(found.smallest.estimate.memory.total() > found.smallest.estimate.usable);
    }
}
