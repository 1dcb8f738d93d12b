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
    /// Samples of a step for each rank. Ranks that have parts of the same matrices or of the same samples
    /// take those of all of them.
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
    /// Ranks that share one copy of the parameters, or of this rank's parts of them.
    pub shard_size: usize,
    /// Ranks that have the parts of the same matrices, with sequence parallel; 1 for none.
    pub tensor_parallel: usize,
    /// Ranks that have the parts of the same samples; 1 for none.
    pub context_parallel: usize,
    /// Samples of a micro-batch.
    pub micro_batch: usize,
    /// Micro-batches of a step.
    pub micro_batches: usize,
    /// How much is recomputed.
    pub recomputation: Recomputation,
    /// What is stored in host memory.
    pub offload: OffloadPolicy,
    /// Time and memory, without what happens when.
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
/// with another combination of strategy, tensor and context parallel ranks, recomputation and offload.
///
/// Tensor parallel ranks are on one machine. Numbers of ranks that do not divide the model's matrices,
/// or the length of a sample, are not tried.
///
/// # Errors
///
/// Returns the errors of [`StepPlan::of_shape`].
pub fn search(
    question: &Question<'_>,
    cluster: &Cluster,
    most: usize,
) -> Result<Found, ShardError> {
    let (tried, all) = candidates(question, cluster)?;
    let smallest = all.iter().min_by_key(|it| it.estimate.memory.total());
    let smallest = smallest.expect("a search tries at least one candidate");
    let smallest = Settings::of(smallest).candidate(question, cluster, smallest.micro_batches)?;
    let tried = (tried, all.iter().filter(|it| it.estimate.fits()).count());
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
        key(self) == key(other) && self.parts() == other.parts()
    }

    /// Returns the numbers of tensor and of context parallel ranks.
    fn parts(&self) -> [usize; 2] {
        [self.tensor_parallel, self.context_parallel]
    }
}

/// Returns the numbers of tensor and of context parallel ranks to try: powers of two, of which the first are on
/// one machine. A rank has two blocks of a sample.
fn parts(question: &Question<'_>, per_machine: usize) -> Vec<[usize; 2]> {
    let powers = || [1, 2, 4, 8].into_iter();
    let pairs = powers().flat_map(|tensor| powers().map(move |context| [tensor, context]));
    let fits = |&[tensor, context]: &[usize; 2]| {
        tensor <= per_machine
            && question.world.is_multiple_of(tensor * context)
            && (context == 1 || question.length.is_multiple_of(2 * context))
    };
    pairs.filter(fits).collect()
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

/// Returns the number of settings that were tried, and of each combination the candidate with the largest
/// micro-batch that fits, or the smallest one if none fits. The time of one that does not fit is not that of
/// all its micro-batches.
fn candidates(
    question: &Question<'_>,
    cluster: &Cluster,
) -> Result<(usize, Vec<Candidate>), ShardError> {
    WorldSize::new(question.world)?;
    if question.samples == 0 {
        return Err(MeshError::EmptyWorld.into());
    }
    let (mut tried, mut found) = (0, Vec::new());
    for parts in parts(question, cluster.per_machine) {
        let is_split = parts != [1, 1];
        for settings in Settings::all(question.world, cluster.per_machine, parts) {
            match settings.largest(question, cluster) {
                Ok((count, candidate)) => {
                    tried += count;
                    found.push(candidate);
                }
                // The ranks do not divide a matrix.
                Err(_) if is_split => break,
                Err(error) => return Err(error),
            }
        }
    }
    Ok((tried, found))
}

/// Most micro-batches of which a simulation shows the memory of any number of them.
const OF_MEMORY: usize = 2;

/// Settings apart from the micro-batch.
struct Settings {
    strategy: ShardingStrategy,
    shard_size: usize,
    /// Numbers of tensor and of context parallel ranks.
    parts: [usize; 2],
    recomputation: Recomputation,
    offload: OffloadPolicy,
}

impl Settings {
    /// Returns all settings with these numbers of tensor and of context parallel ranks. With parts of a
    /// model or of a sample nothing is offloaded, and parameters are resharded.
    fn all(world: usize, per_machine: usize, parts: [usize; 2]) -> Vec<Self> {
        use ShardingStrategy::{FullShard, HybridShard};
        let [tensor, _] = parts;
        let params = OffloadPolicy::Params { pin_memory: true };
        let mut offloads = vec![OffloadPolicy::None];
        let mut strategies = vec![FullShard, HybridShard];
        if parts == [1, 1] {
            offloads.extend([OffloadPolicy::OptimizerOnly, params]);
            strategies = ShardingStrategy::ALL.into_iter().map(|(strategy, _)| strategy).collect();
        }
        let mut all = Vec::new();
        for strategy in strategies {
            for shard_size in shard_sizes(strategy, world / tensor, per_machine / tensor) {
                for recomputation in [Recomputation::None, Recomputation::Units] {
                    for &offload in &offloads {
                        all.push(Self { strategy, shard_size, parts, recomputation, offload });
                    }
                }
            }
        }
        all
    }

    /// Returns those of a candidate.
    fn of(candidate: &Candidate) -> Self {
        let Candidate { strategy, shard_size, recomputation, offload, .. } = *candidate;
        Self { strategy, shard_size, parts: candidate.parts(), recomputation, offload }
    }

    fn plan(&self, question: &Question<'_>) -> Result<StepPlan, ShardError> {
        let recomputes = match self.recomputation {
            Recomputation::Units => ActivationCheckpointing::All,
            _ => ActivationCheckpointing::None,
        };
        let [tensor, context] = self.parts;
        let options = question.options.clone();
        let options = options
            .with_strategy(self.strategy)
            .with_tensor_parallel(tensor)
            .with_sequence_parallel(tensor > 1)
            .with_context_parallel(context)
            .with_offload(self.offload)
            .with_activation_checkpointing(recomputes);
        let options = match self.strategy.is_hybrid() {
            true => options.with_shard_size(self.shard_size),
            false => options,
        };
        let mesh = Mesh::new(Rank::ZERO, WorldSize::new(question.world)?);
        let plan = StepPlan::of_shape(question.shape, mesh, &options)?;
        Ok(plan.with_fused_loss(question.fused_loss))
    }

    /// Returns the samples of a step that a rank and those with other parts take.
    fn samples(&self, question: &Question<'_>) -> usize {
        question.samples * self.parts.iter().product::<usize>()
    }

    /// Returns the candidate with the samples of a step divided by 1, 2, 4 .. of which the first fits, or
    /// else the last. Smaller micro-batches are slower and take less memory. Also returns how many were tried.
    fn largest(
        &self,
        question: &Question<'_>,
        cluster: &Cluster,
    ) -> Result<(usize, Candidate), ShardError> {
        let (plan, samples) = (self.plan(question)?, self.samples(question));
        let (mut tried, mut micro_batches) = (0, 1);
        loop {
            let simulated = micro_batches.min(OF_MEMORY);
            let batch = Batch::new(samples / micro_batches, question.length);
            let mut estimate = plan.estimate(batch.with_micro_batches(simulated), cluster);
            tried += 1;
            if estimate.fits() {
                if simulated < micro_batches {
                    estimate = plan.estimate(batch.with_micro_batches(micro_batches), cluster);
                }
                return Ok((tried, self.with(question, micro_batches, estimate)));
            }
            if !samples.is_multiple_of(2 * micro_batches) {
                return Ok((tried, self.with(question, micro_batches, estimate)));
            }
            micro_batches *= 2;
        }
    }

    /// Returns the candidate with this number of micro-batches.
    fn candidate(
        &self,
        question: &Question<'_>,
        cluster: &Cluster,
        micro_batches: usize,
    ) -> Result<Candidate, ShardError> {
        let batch = Batch::new(self.samples(question) / micro_batches, question.length);
        let batch = batch.with_micro_batches(micro_batches);
        let estimate = self.plan(question)?.estimate(batch, cluster);
        Ok(self.with(question, micro_batches, estimate))
    }

    fn with(&self, question: &Question<'_>, micro_batches: usize, estimate: Estimate) -> Candidate {
        let [tensor_parallel, context_parallel] = self.parts;
        Candidate {
            strategy: self.strategy,
            shard_size: self.shard_size,
            tensor_parallel,
            context_parallel,
            micro_batch: self.samples(question) / micro_batches,
            micro_batches,
            recomputation: self.recomputation,
            offload: self.offload,
            estimate: Estimate { spans: Vec::new(), moments: Vec::new(), ..estimate },
            reasons: Vec::new(),
        }
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
                && other.parts() == candidate.parts()
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
    let (_, all) = candidates(question, &other)?;
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
            let samples = 4 * candidate.tensor_parallel * candidate.context_parallel;
            assert_eq!(candidate.micro_batch * candidate.micro_batches, samples);
            assert!(!candidate.reasons.is_empty());
        }
        assert!(found.tried.1 < found.tried.0, "some settings do not fit: {:?}", found.tried);
        assert_eq!(found.cheaper.unwrap().device, "a100");
    }

    #[test]
    fn ranks_split_a_model_and_its_samples_where_that_is_faster() {
        let shape = Transformer::named("llama3-8b").unwrap().shape("llama3-8b");
        let cluster = Cluster::preset("h100").unwrap();
        // A whole sample on each rank would need more memory than there is.
        let question = Question::new(&shape, 64, 1, 131_072);
        let found = search(&question, &cluster, 5).unwrap();
        let best = found.best.first().expect("parts of samples fit");
        assert!(best.tensor_parallel * best.context_parallel > 1, "{best:?}");
        assert!(best.tensor_parallel <= cluster.per_machine);
        let ranks = best.tensor_parallel * best.context_parallel;
        assert_eq!(best.micro_batch * best.micro_batches, ranks, "a sample for each rank");
    }

    #[test]
    fn numbers_of_ranks_that_divide_no_matrix_are_not_tried() {
        // 25 heads of 64.
        let shape = Transformer::named("gpt2-xl").unwrap().shape("gpt2-xl");
        let cluster = Cluster::preset("h100").unwrap();
        let found = search(&Question::new(&shape, 8, 4, 1024), &cluster, 5).unwrap();
        assert!(!found.best.is_empty());
        assert!(found.best.iter().all(|it| it.tensor_parallel == 1), "{:?}", found.best);
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
