//! Settings of sharding: strategy, precision, offload and recomputation.

use anyhow::{Result, ensure};
use burn::tensor::FloatDType;
use fsdp_runtime::optim::GradScalerConfig;
use fsdp_runtime::prelude::*;

use crate::model::Block;

/// Settings of sharding, from the arguments.
#[derive(Clone, Debug)]
pub struct Sharding {
    /// Options of the configuration file, or the defaults. The other fields override them.
    pub file_options: FsdpOptions,
    /// Sharding strategy.
    pub strategy: ShardingStrategy,
    /// Number of ranks that have a part of each matrix of a block.
    pub tensor_parallel: usize,
    /// Number of ranks that have a part of each sample.
    pub context_parallel: usize,
    /// Whether these pass keys and values on, in place of gathering them. If not, the options of the file say it.
    pub context_ring: bool,
    /// Whether gathered parameters are freed between forward and backward, if the strategy does so.
    pub reshard_after_forward: bool,
    /// Whether parameters, gradients and optimizer state are stored in host memory.
    pub cpu_offload: bool,
    /// Data type of gathered parameters and of the computation.
    pub precision: Precision,
    /// Which activations of a block are kept for backward.
    pub activations: ActivationPolicy,
}

/// Data type in which parameters are gathered and the model computes. Shards, gradients and
/// optimizer state are f32 in any case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Precision {
    /// `f32`.
    Full,
    /// `bf16`.
    Bf16,
    /// `f16`, with dynamic loss scaling.
    Fp16 {
        /// Loss scale of the first update.
        init_scale: f32,
        /// Loss scale below which the run ends with an error.
        min_scale: f32,
    },
}

/// Which activations of a block are kept from forward to backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivationPolicy {
    /// All that backward needs.
    KeepAll,
    /// Only the block's input, on the device. Backward recomputes the others.
    Recompute,
    /// Only the block's input, in host memory. Backward recomputes the others.
    RecomputeFromHost,
}

impl Sharding {
    /// Returns the options to shard the model with.
    pub fn options(&self) -> FsdpOptions {
        let options = self.file_options.clone().with_strategy(self.strategy);
        let mut options = options
            .with_tensor_parallel(self.tensor_parallel)
            .with_context_parallel(self.context_parallel);
        if self.context_ring {
            options = options.with_context_exchange(ContextExchange::Ring);
        }
        if !self.reshard_after_forward {
            options = options.with_reshard_after_forward(ReshardAfterForward::Never);
        }
        if self.precision != Precision::Full {
            // The loss is computed in f32.
            let policy = MixedPrecisionPolicy::new()
                .with_param_dtype(self.precision.dtype())
                .with_output_dtype(FloatDType::F32);
            options = options.with_mixed_precision(policy);
        }
        if self.activations != ActivationPolicy::KeepAll {
            options = options
                .with_activation_checkpointing(ActivationCheckpointing::Units(unit_types![Block]))
                .with_offload_activations(self.activations == ActivationPolicy::RecomputeFromHost);
        }
        if self.cpu_offload {
            options = options.with_offload(OffloadPolicy::Params { pin_memory: true });
        }
        options
    }

    /// Returns the number of ranks that take different samples, of `ranks` ranks. It is at least 1:
    /// [`fully_shard`] reports numbers of ranks that do not divide.
    pub fn batch_ranks(&self, ranks: usize) -> usize {
        (ranks / (self.tensor_parallel * self.context_parallel)).max(1)
    }

    /// Returns the number of blocks that a sample is cut in.
    pub const fn blocks(&self) -> usize {
        if self.context_parallel == 1 { 1 } else { 2 * self.context_parallel }
    }
}

impl Precision {
    /// Returns the data type of gathered parameters and of the computation.
    pub const fn dtype(self) -> FloatDType {
        match self {
            Self::Full => FloatDType::F32,
            Self::Bf16 => FloatDType::BF16,
            Self::Fp16 { .. } => FloatDType::F16,
        }
    }

    /// Returns the loss scaler for float16, whose gradients would underflow without it.
    ///
    /// # Errors
    ///
    /// If the initial scale is out of range.
    pub fn scaler(self) -> Result<Option<GradScaler>> {
        let Self::Fp16 { init_scale, .. } = self else { return Ok(None) };
        Ok(Some(GradScalerConfig::new().with_init_scale(init_scale).init()?))
    }

    /// Checks the loss scale after an overflow.
    ///
    /// # Errors
    ///
    /// If the scale is below the minimum: gradients overflow at every scale.
    pub fn check_scale(self, scaler: Option<&GradScaler>, updates: usize) -> Result<()> {
        if let (Self::Fp16 { min_scale, .. }, Some(scaler)) = (self, scaler) {
            ensure!(
                scaler.loss_scale() >= min_scale,
                "gradients overflow after {updates} updates even at a loss scale of {min_scale}, the \
                 least that --min-loss-scale allows: the loss has exploded; a lower --lr may help"
            );
        }
        Ok(())
    }
}
