//! The arguments of `fsdp plan`, and the model, the cluster and the options that they name.

use std::path::{Path, PathBuf};

use burn::tensor::FloatDType;
use clap::ValueEnum;
use fsdp_runtime::options::{
    ActivationCheckpointing, MixedPrecisionPolicy, OffloadPolicy, ShardingStrategy, StoragePolicy,
    StorageType,
};
use fsdp_runtime::plan::{Accelerator, Batch, Cluster, Link, ModelShape, StepPlan, Transformer};
use fsdp_runtime::{FsdpOptions, Mesh, Rank, WorldSize};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Name of a model, such as llama3-8b or gpt2-xl, or a folder with config.json and safetensors
    /// files
    #[arg(required_unless_present = "list")]
    model: Option<String>,
    /// Numbers of ranks, separated by commas
    #[arg(short, long, value_delimiter = ',', default_value = "8", value_parser = ranks)]
    pub(super) world: Vec<WorldSize>,
    /// Device of each rank
    #[arg(long, default_value = "h100")]
    device: String,
    /// Devices in a machine
    #[arg(long, default_value = "8", value_parser = clap::value_parser!(u32).range(1..))]
    per_machine: u32,
    /// Link between the devices of a machine, in place of that of the device's usual machine
    #[arg(long)]
    inside: Option<String>,
    /// Link of each device to other machines, in place of that of the device's usual machine
    #[arg(long)]
    between: Option<String>,
    /// Share of the device's peak that matrix products reach, above 0 and at most 1
    #[arg(long, value_parser = efficiency)]
    efficiency: Option<f64>,
    /// Measured milliseconds of a step on the first number of ranks, from which the efficiency is
    /// calculated
    #[arg(long, value_parser = positive, conflicts_with = "efficiency")]
    pub(super) measured: Option<f64>,
    /// Samples of a micro-batch on each rank
    #[arg(short, long, default_value = "1", value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
    /// Micro-batches of a step
    #[arg(long, default_value = "1", value_parser = clap::value_parser!(u32).range(1..))]
    micro_batches: u32,
    /// Tokens of a sample
    #[arg(short, long, default_value = "4096", value_parser = clap::value_parser!(u32).range(1..))]
    length: u32,
    /// Sharding strategy
    #[arg(long, default_value = "FULL_SHARD")]
    pub(super) strategy: ShardingStrategy,
    /// Ranks that share one copy of the parameters under a hybrid strategy; by default those of a
    /// machine
    #[arg(long)]
    shard_size: Option<usize>,
    /// Ranks that have a part of each matrix, and share a batch; a divisor of the heads of keys and values
    #[arg(long = "tp", value_name = "N", default_value = "1", value_parser = ranks, conflicts_with = "search")]
    tensor_parallel: WorldSize,
    /// Ranks that have a part of each row, and share a batch
    #[arg(long = "cp", value_name = "N", default_value = "1", value_parser = ranks, conflicts_with = "search")]
    context_parallel: WorldSize,
    /// Splits positions over the tensor parallel ranks outside of split layers
    #[arg(long)]
    sequence_parallel: bool,
    /// What backward computes again
    #[arg(long, value_enum, default_value_t = Recompute::None)]
    pub(super) recompute: Recompute,
    /// What is stored in host memory
    #[arg(long, value_enum, default_value_t = Offload::None)]
    offload: Offload,
    /// Type in which parameters are gathered and computed with
    #[arg(long, value_enum, default_value_t = Precision::Bf16)]
    precision: Precision,
    /// Type in which gradients are sent
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    reduce: Precision,
    /// Trains LoRA adapters of this rank on the matrices of each layer, and nothing else
    #[arg(long, value_name = "RANK", value_parser = clap::value_parser!(u32).range(1..))]
    lora: Option<u32>,
    /// Form in which the frozen parameters are stored
    #[arg(long, value_name = "TYPE", value_enum, requires = "lora", default_value_t = Stored::F32)]
    quantize: Stored,
    /// Computes the loss without the logits in memory
    #[arg(long)]
    pub(super) fused_loss: bool,
    /// Searches for the fastest settings that fit, for the batch of a step
    #[arg(long)]
    pub(super) search: bool,
    /// Prints JSON
    #[arg(long)]
    pub(super) json: bool,
    /// Writes a page with the schedule, the memory over time and the scaling
    #[arg(long, value_name = "FILE")]
    pub(super) html: Option<PathBuf>,
    /// Lists the models, the devices and the links that have names
    #[arg(long)]
    pub(super) list: bool,
}

#[derive(Clone, Copy, ValueEnum)]
pub(super) enum Recompute {
    /// Nothing
    None,
    /// Every second matrix product; for comparisons with other frameworks
    Selective,
    /// Each layer from its inputs
    Units,
}

#[derive(Clone, Copy, ValueEnum)]
enum Offload {
    /// Nothing
    None,
    /// Parameters, gradients and optimizer state, with a copy of the shards on the device
    Optimizer,
    /// Parameters, gradients and optimizer state
    Params,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Precision {
    Bf16,
    F32,
}

/// Form in which frozen parameters are stored.
#[derive(Clone, Copy, ValueEnum)]
enum Stored {
    F32,
    Bf16,
    Int8,
    Nf4,
}

impl Stored {
    const fn storage(self) -> StorageType {
        match self {
            Self::F32 => StorageType::F32,
            Self::Bf16 => StorageType::Bf16,
            Self::Int8 => StorageType::INT8,
            Self::Nf4 => StorageType::NF4,
        }
    }
}

fn ranks(text: &str) -> Result<WorldSize, String> {
    let number = text.parse().map_err(|_| format!("`{text}` is no number of ranks"))?;
    WorldSize::new(number).map_err(|error| error.to_string())
}

fn positive(text: &str) -> Result<f64, String> {
    let number: f64 = text.parse().map_err(|_| format!("`{text}` is no number"))?;
    let is_valid = number.is_finite() && number > 0.0;
    if is_valid { Ok(number) } else { Err("use a number above 0".into()) }
}

fn efficiency(text: &str) -> Result<f64, String> {
    positive(text).and_then(|it| if it <= 1.0 { Ok(it) } else { Err("use at most 1".into()) })
}

impl Args {
    /// Returns the shapes of the model.
    pub(super) fn shape(&self) -> Result<ModelShape, String> {
        let shape = self.base_shape()?;
        Ok(match self.lora {
            Some(rank) => shape.with_lora(rank as usize),
            None => shape,
        })
    }

    fn base_shape(&self) -> Result<ModelShape, String> {
        let model = self.model.as_deref().unwrap_or_default();
        let folder = Path::new(model);
        if folder.is_dir() {
            return ModelShape::from_folder(folder).map_err(|error| error.to_string());
        }
        let named = Transformer::named(model).map(|sizes| sizes.shape(model));
        named.map_err(|error| format!("{error}; or name a folder with config.json"))
    }

    /// Returns the machines.
    pub(super) fn cluster(&self) -> Result<Cluster, String> {
        let error = |error: fsdp_runtime::plan::UnknownPreset| error.to_string();
        let mut cluster = Cluster::preset(&self.device).map_err(error)?;
        cluster.per_machine = self.per_machine as usize;
        if let Some(link) = &self.inside {
            cluster.inside = Link::preset(link).map_err(error)?;
        }
        if let Some(link) = &self.between {
            cluster.between = Link::preset(link).map_err(error)?;
        }
        if let Some(efficiency) = self.efficiency {
            cluster.accelerator.efficiency = efficiency;
        }
        Ok(cluster)
    }

    /// Returns the batch of a rank in a step.
    pub(super) fn batch(&self) -> Batch {
        Batch::new(self.batch as usize, self.length as usize)
            .with_micro_batches(self.micro_batches as usize)
    }

    /// Returns the options of the model.
    pub(super) fn options(&self) -> FsdpOptions {
        let dtype = |precision| match precision {
            Precision::Bf16 => FloatDType::BF16,
            Precision::F32 => FloatDType::F32,
        };
        let precision = MixedPrecisionPolicy::new()
            .with_param_dtype(dtype(self.precision))
            .with_reduce_dtype(dtype(self.reduce));
        let options = FsdpOptions::new()
            .with_strategy(self.strategy)
            .with_tensor_parallel(self.tensor_parallel.size())
            .with_sequence_parallel(self.sequence_parallel)
            .with_context_parallel(self.context_parallel.size())
            .with_mixed_precision(precision)
            .with_offload(match self.offload {
                Offload::None => OffloadPolicy::None,
                Offload::Optimizer => OffloadPolicy::OptimizerOnly,
                Offload::Params => OffloadPolicy::Params { pin_memory: true },
            })
            .with_activation_checkpointing(match self.recompute {
                Recompute::Units => ActivationCheckpointing::All,
                _ => ActivationCheckpointing::None,
            });
        let options = match (self.lora, self.quantize.storage()) {
            (Some(_), storage) => options.with_storage(StoragePolicy::new().with_frozen(storage)),
            (None, _) => options,
        };
        match self.strategy.is_hybrid() {
            true => {
                let of_machine = self.per_machine as usize / self.tensor_parallel.size();
                options.with_shard_size(self.shard_size.unwrap_or(of_machine.max(1)))
            }
            false => options,
        }
    }

    /// Plans the step of the first of `world` ranks.
    pub(super) fn plan(&self, shape: &ModelShape, world: WorldSize) -> Result<StepPlan, String> {
        let mesh = Mesh::new(Rank::ZERO, world);
        let plan = StepPlan::of_shape(shape, mesh, &self.options()).map_err(|it| it.to_string())?;
        let plan = plan.with_fused_loss(self.fused_loss);
        Ok(match self.recompute {
            Recompute::Selective => plan.with_selective_recomputation(),
            _ => plan,
        })
    }
}

/// Returns the names of all presets, with their figures and sources.
pub(super) fn presets() -> String {
    let mut lines = vec!["models".to_string()];
    for name in Transformer::names() {
        let shape = Transformer::named(name).map(|sizes| sizes.shape(name));
        let params = shape.map_or(0, |shape| shape.num_params());
        lines.push(format!("  {name:<14}{:>9.2} B parameters", params as f64 / 1e9));
    }
    lines.push("devices".into());
    for device in Accelerator::presets() {
        lines.push(format!(
            "  {:<14}{:>9.0} TFLOP/s bf16 {:>5.0} GB {:>6.0} GB/s  {}",
            device.name,
            device.half_flops / 1e12,
            device.memory as f64 / 1e9,
            device.memory_bandwidth / 1e9,
            device.source,
        ));
    }
    lines.push("links".into());
    for link in Link::presets() {
        let (name, source) = (link.name, link.source);
        lines.push(format!("  {name:<14}{:>9.1} GB/s  {source}", link.bandwidth / 1e9));
    }
    lines.join("\n")
}
