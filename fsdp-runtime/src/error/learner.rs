//! Errors of training with Burn's `Learner`.

use super::text::rank_list;
use crate::layout::{Rank, WorldSize};

/// A training run of Burn's `Learner` that cannot be right on a sharded model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LearnerError {
    /// A checkpointer of Burn's.
    #[error(
        "Burn's checkpointers store the shards of one rank's optimizer; in place of \
         `with_default_checkpointers` or `with_custom_checkpointers`, write \
         `FsdpStrategy::new(&worker).with_checkpoints(CheckpointManager::new(folder, &worker))`"
    )]
    BurnCheckpointer,
    /// An epoch to resume from that was given to Burn's builder.
    #[error(
        "`checkpoint({epoch})` resumes from Burn's checkpoints; in its place, write \
         `FsdpStrategy::with_resume_latest()`, or `FsdpStrategy::with_resume_from(folder)`"
    )]
    BurnCheckpoint {
        /// The epoch that was given to the builder.
        epoch: usize,
    },
    /// An optimizer that clips gradients by norm.
    #[error(
        "the optimizer clips gradients to a norm of {max_norm}, and would compute that norm on each \
         shard; leave out the optimizer's clipping and write \
         `FsdpStrategy::with_max_grad_norm({max_norm})`, which clips by the norm of all gradients"
    )]
    NormClipping {
        /// The largest norm, as text.
        max_norm: String,
    },
    /// A call of `resume_latest` without a folder of checkpoints.
    #[error(
        "`with_resume_latest` looks for checkpoints in the folder of `with_checkpoints(..)`, which is \
         not set; write `.with_checkpoints(CheckpointManager::new(folder, &worker))`, or name the \
         folder of one checkpoint with `with_resume_from(folder)`"
    )]
    NoCheckpoints,
    /// Ranks with different numbers of training batches.
    #[error(
        "training batch {batch} exists on ranks {} only, and not on ranks {}; give every rank equally \
         many batches, as `RankLoader` does with `shuffle` or `equal_lengths`",
        rank_list(with),
        rank_list(without)
    )]
    UnevenBatches {
        /// Number of the batch in its epoch, from 1.
        batch: usize,
        /// Ranks that have the batch.
        with: Vec<Rank>,
        /// Ranks that do not.
        without: Vec<Rank>,
    },
    /// A training batch with different numbers of items on the ranks.
    #[error(
        "training batch {batch} has {items} items on rank {rank} and {expected} on rank 0, and the \
         mean over the ranks would give their items different weights; give every rank batches of \
         the same size, as `RankLoader` does with `equal_lengths(true)` or `drop_last(true)`"
    )]
    UnevenBatchSizes {
        /// Number of the batch in its epoch, from 1.
        batch: usize,
        /// The first rank that differs from rank 0.
        rank: Rank,
        /// Number of items of this rank's batch.
        items: usize,
        /// Number of items of rank 0's batch.
        expected: usize,
    },
    /// A training data loader that does not give each rank its own part of the data.
    #[error(
        "the training data loader is no `RankLoader`, and may give each of the {world} ranks all of \
         the data; write `RankLoader::new(batcher, dataset, &worker).batch_size(..).build()`, or \
         `FsdpStrategy::with_own_data_split()` if the program gives each rank its own part of the data"
    )]
    UnsplitData {
        /// Number of ranks.
        world: WorldSize,
    },
    /// A training strategy of Burn's, which trains each rank for itself.
    #[error(
        "Burn's own training strategies do not train {world} ranks together; write \
         `.with_training_strategy(FsdpStrategy::new(&worker).into())` before `launch`; outside a \
         `Learner`, call `Module::fork` before `fully_shard`"
    )]
    NoStrategy {
        /// Number of ranks.
        world: WorldSize,
    },
    /// A checkpoint within an epoch that is longer than the one of this run.
    #[error(
        "the checkpoint was saved after {position} items of each rank in epoch {epoch}, and the data \
         loader has only {items}; resume with the dataset that the run was started with, or from a \
         checkpoint at the end of an epoch"
    )]
    PositionBeyondData {
        /// The epoch to continue, counted from 1.
        epoch: usize,
        /// Number of items of one rank that the epoch had used.
        position: usize,
        /// Number of items of one rank that the loader has.
        items: usize,
    },
    /// A checkpoint within an epoch whose items had another order than those of this run.
    #[error(
        "the checkpoint was saved within epoch {epoch}, with {saved}, and the data loader now has \
         {found}: items would be used twice, and others never; resume with the dataset and the seed that \
         the run was started with, or from a checkpoint at the end of an epoch"
    )]
    OtherData {
        /// The epoch to continue, counted from 1.
        epoch: usize,
        /// Number of items and their order in the run that saved the checkpoint.
        saved: String,
        /// Number of items and their order now.
        found: String,
    },
    /// Ranks whose training loaders have different datasets or seeds.
    #[error(
        "the training loader of rank {rank} has {found}, and that of rank 0 has {expected}; pass the \
         same dataset and the same seed to `RankLoader` on every rank: it gives each rank its own part"
    )]
    DataMismatch {
        /// The first rank that differs from rank 0.
        rank: Rank,
        /// Number of items and their order on this rank.
        found: String,
        /// Number of items and their order on rank 0.
        expected: String,
    },
    /// An epoch that ended within an accumulation of gradients.
    #[error(
        "epoch {epoch} ended with the gradients of {batches} batches not applied, because the data \
         loader's progress was not complete at its last batch; return all items as processed with the \
         last batch from `DataLoaderIterator::progress`"
    )]
    UnfinishedAccumulation {
        /// The epoch that ended, counted from 1.
        epoch: usize,
        /// Number of batches whose gradients were not applied.
        batches: usize,
    },
    /// A rank without any validation batch.
    #[error(
        "rank {rank} has no validation batch, and other ranks have some; give every rank at least one, \
         as `RankLoader` does"
    )]
    NoValidationBatch {
        /// The rank without a validation batch.
        rank: Rank,
    },
    /// A data loader that failed.
    #[error("the data loader of rank {rank} failed: {reason}")]
    Data {
        /// The rank whose data loader failed.
        rank: Rank,
        /// The error of the dataset.
        reason: String,
    },
    /// The output of a step that the device could not compute.
    #[error("the device of rank {rank} failed to compute the output of a step: {reason}")]
    Output {
        /// The rank whose device failed.
        rank: Rank,
        /// The error of the device.
        reason: String,
    },
    /// A dataset with fewer items than there are ranks, or than they need for one batch each.
    #[error(
        "a dataset of {items} items gives {world} ranks no batch each; use at least {needed} items, or \
         fewer ranks"
    )]
    TooFewItems {
        /// Number of items of the dataset.
        items: usize,
        /// Number of ranks that share the dataset.
        world: WorldSize,
        /// Smallest number of items that gives each rank a batch.
        needed: usize,
    },
    /// Metric values of ranks that differ in number.
    #[error(
        "rank {rank} sent {found} tensors of its output to the metrics, rank 0 sent {expected}; return \
         equally many tensors from `RankOutput::into_host` on every rank"
    )]
    OutputMismatch {
        /// The rank that differs from rank 0.
        rank: Rank,
        /// Number of tensors that this rank sent.
        found: usize,
        /// Number of tensors that rank 0 sent.
        expected: usize,
    },
}
