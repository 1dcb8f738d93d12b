//! Plans of large models: published figures, and the time that a plan takes.

use burn::tensor::FloatDType;
use fsdp_runtime::options::{ActivationCheckpointing, MixedPrecisionPolicy, ShardingStrategy};
use fsdp_runtime::plan::{Batch, Cluster, Collective, Estimate, ModelShape, StepPlan, Transformer};
use fsdp_runtime::{FsdpOptions, Mesh, Rank, WorldSize};

/// A published step of torchtitan, with FSDP2 and tensor parallel ranks.
struct Published {
    model: &'static str,
    world: usize,
    samples: usize,
    length: usize,
    /// Activation checkpointing: `none`, `selective` or `full`.
    recompute: &'static str,
    /// Tokens of one GPU in a second.
    tokens: f64,
    /// Tensor parallel ranks, which share `samples`; torchtitan splits the positions too.
    tensor: usize,
}

/// <https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md>,
/// tables 1 and 3. The first row calibrates the efficiency.
const H100: [Published; 2] = [
    row("llama3-8b", 8, 2, 8192, "selective", 5762.0),
    row("llama3-8b", 128, 2, 8192, "selective", 5605.0),
];

/// The same tables with `torch.compile`, and the rows in bf16 without asynchronous exchanges of
/// <https://github.com/pytorch/torchtitan/blob/main/benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md>. The
/// first row calibrates the efficiency.
const COMPILED: [Published; 4] = [
    row("llama3-8b", 8, 2, 8192, "selective", 6667.0),
    row("llama3-8b", 128, 2, 8192, "selective", 6514.0),
    row("llama3-8b", 64, 12, 8192, "selective", 4378.0).with_tensor(8),
    row("llama3-70b", 256, 16, 8192, "full", 597.3).with_tensor(8),
];

/// torchtitan's `docs/performance.md` at commit 0413364, on 64 A100 of 80 GB. The first row
/// calibrates the efficiency.
const A100: [Published; 6] = [
    row("llama2-13b", 64, 2, 4096, "none", 2162.0),
    row("llama2-13b", 64, 2, 4096, "selective", 1904.0),
    row("llama2-70b", 64, 1, 4096, "selective", 355.0),
    row("llama2-70b", 64, 2, 4096, "full", 353.0),
    row("llama3-8b", 64, 1, 8192, "selective", 2973.0),
    row("llama3-70b", 64, 1, 8192, "full", 331.0),
];

const fn row(
    model: &'static str,
    world: usize,
    samples: usize,
    length: usize,
    recompute: &'static str,
    tokens: f64,
) -> Published {
    Published { model, world, samples, length, recompute, tokens, tensor: 1 }
}

fn shape(name: &str) -> ModelShape {
    Transformer::named(name).unwrap().shape(name)
}

fn mesh(world: usize) -> Mesh {
    Mesh::new(Rank::ZERO, WorldSize::new(world).unwrap())
}

/// The precision of torchtitan: bf16, with reductions in f32.
fn options() -> FsdpOptions {
    let precision = MixedPrecisionPolicy::new()
        .with_param_dtype(FloatDType::BF16)
        .with_reduce_dtype(FloatDType::F32);
    FsdpOptions::new().with_mixed_precision(precision)
}

impl Published {
    const fn with_tensor(self, ranks: usize) -> Self {
        Self { tensor: ranks, ..self }
    }

    fn plan(&self) -> StepPlan {
        let options = options().with_tensor_parallel(self.tensor).with_sequence_parallel(true);
        let options = match self.recompute {
            "full" => options.with_activation_checkpointing(ActivationCheckpointing::All),
            _ => options,
        };
        let plan = StepPlan::of_shape(&shape(self.model), mesh(self.world), &options).unwrap();
        if self.recompute == "selective" { plan.with_selective_recomputation() } else { plan }
    }

    fn batch(&self) -> Batch {
        Batch::new(self.samples, self.length)
    }

    /// Returns `cluster` with the efficiency that gives the published step.
    fn calibrated(&self, cluster: &Cluster) -> Cluster {
        let seconds = (self.batch().tokens() / self.tensor) as f64 / self.tokens;
        self.plan().calibrated(self.batch(), cluster, seconds)
    }

    fn estimate(&self, cluster: &Cluster) -> Estimate {
        self.plan().estimate(self.batch(), cluster)
    }

    /// Returns the row of the page's table.
    fn line(&self, device: &str, estimate: &Estimate) -> String {
        let error = 100.0 * (estimate.tokens_per_second / self.tokens - 1.0);
        // Without the sign of an error that rounds to 0.
        let error = (10.0 * error).round() / 10.0 + 0.0;
        let ranks = match self.tensor {
            1 => self.world.to_string(),
            tensor => format!("{}, TP {tensor}", self.world),
        };
        format!(
            "| {device} | {} | {ranks} | {} × {} | {} | {:.0} | {:.0} | {error:+.1} % | {:.1} % |",
            self.model,
            self.samples,
            self.length,
            self.recompute,
            self.tokens,
            estimate.tokens_per_second,
            100.0 * estimate.utilization,
        )
    }
}

/// The first row of each source calibrates; the others must come out without it. The page of the
/// guide has these rows.
#[test]
fn published_figures() {
    let page = include_str!("../docs/plan.md");
    let mut missing = Vec::new();
    let sets = [("h100-96", &H100[..]), ("h100-96, compiled", &COMPILED), ("a100", &A100)];
    for (device, rows) in sets {
        let (name, _) = device.split_once(',').unwrap_or((device, ""));
        let cluster = rows[0].calibrated(&Cluster::preset(name).unwrap());
        let preset = Cluster::preset(name).unwrap().accelerator.efficiency;
        let calibrated = cluster.accelerator.efficiency;
        println!("{device}: efficiency {calibrated:.3}, preset {preset:.3}");
        let is_preset = (calibrated - preset).abs() < 0.02;
        assert!(is_preset || device != name, "{device}: the preset is not the calibration");
        for row in rows {
            let estimate = row.estimate(&cluster);
            let line = row.line(device, &estimate);
            println!("{line}");
            let error = estimate.tokens_per_second / row.tokens - 1.0;
            assert!(error.abs() < 0.15, "{line}");
            if !page.contains(&line) {
                missing.push(line);
            }
        }
        let error = rows[0].estimate(&cluster).tokens_per_second / rows[0].tokens - 1.0;
        assert!(error.abs() < 1e-3, "the first row calibrates: {error}");
    }
    assert!(missing.is_empty(), "docs/plan.md lacks:\n{}", missing.join("\n"));
}

/// The largest plan has as many collectives as a small one, and its bytes are those of its shapes.
#[test]
fn a_plan_of_a_large_world() {
    let shape = shape("llama3-405b");
    let plan = StepPlan::of_shape(&shape, mesh(16_384), &options()).unwrap();
    let counts = plan.counts(1);
    let units = shape.units.len();
    assert_eq!((counts.all_gathers, counts.reduce_scatters), (2 * units - 2, units));
    let collectives = plan.collectives(1, 8);
    let gathered: usize = collectives
        .iter()
        .filter(|it| it.operation.name() == "all_gather" && it.unit == "model.layers.5")
        .map(|it| it.bytes)
        .sum();
    // Vectors are replicated, and not gathered.
    let matrices = shape.units[6].params.iter().filter(|it| it.shape.len() > 1);
    let layer: usize = matrices.map(|it| it.numel()).sum();
    let padding = gathered as f64 / (2 * 2 * layer) as f64 - 1.0;
    assert!((0.0..0.001).contains(&padding), "twice in bf16: {padding}");
    let estimate = plan.estimate(Batch::new(1, 8192), &Cluster::preset("h100").unwrap());
    assert!(estimate.step > 0.0 && estimate.exposed > 0.0 && estimate.exposed < estimate.step);
    // One rank waits for nothing.
    let alone = StepPlan::of_shape(&self::shape("gpt3-125m"), mesh(1), &options()).unwrap();
    let alone = alone.estimate(Batch::new(1, 128), &Cluster::preset("h100").unwrap());
    assert_eq!(format!("{:.1}", alone.exposed), "0.0", "not -0.0");
}

/// Strategies, micro-batches and recomputation change the estimate as they must.
#[test]
fn settings_change_the_estimate() {
    let shape = shape("llama3-8b");
    let cluster = Cluster::preset("h100").unwrap();
    let estimate = |options: &FsdpOptions, batch: Batch| {
        StepPlan::of_shape(&shape, mesh(64), options).unwrap().estimate(batch, &cluster)
    };
    let batch = Batch::new(1, 8192);
    let full = estimate(&options(), batch);
    let grad_op = estimate(&options().with_strategy(ShardingStrategy::ShardGradOp), batch);
    assert!(grad_op.memory.total() > full.memory.total());
    assert!(grad_op.communication < full.communication);
    let hybrid = options().with_strategy(ShardingStrategy::HybridShard).with_shard_size(8);
    let hybrid = estimate(&hybrid, batch);
    assert!(hybrid.memory.shards > 7 * full.memory.shards);
    let recomputed = options().with_activation_checkpointing(ActivationCheckpointing::All);
    let recomputed = estimate(&recomputed, batch);
    assert!(recomputed.memory.activations < full.memory.activations / 3);
    let ratio = recomputed.compute / full.compute;
    assert!((1.3..1.35).contains(&ratio), "a forward more, but for the outermost unit: {ratio}");
    let twice = estimate(&options(), batch.with_micro_batches(2));
    let ratio = (twice.step - twice.optimizer) / (full.step - full.optimizer);
    assert!((1.8..2.2).contains(&ratio), "{ratio}");
    let params = fsdp_runtime::options::OffloadPolicy::Params { pin_memory: true };
    let offloaded = estimate(&options().with_offload(params), batch);
    assert!(offloaded.memory.total() < full.memory.total() && offloaded.step > full.step);
    assert!(offloaded.memory.host.optimizer > 0);
}

/// The rows of a simulated step do not overlap, and waits lie where a collective runs.
#[test]
fn spans_follow_each_other() {
    let plan = StepPlan::of_shape(&shape("gpt3-1.3b"), mesh(16), &options()).unwrap();
    let estimate = plan.estimate(Batch::new(1, 256), &Cluster::preset("l4").unwrap());
    use fsdp_runtime::plan::{Row, SpanKind};
    for row in [Row::Compute, Row::Communication] {
        let spans: Vec<_> = estimate.spans.iter().filter(|span| span.row == row).collect();
        assert!(spans.len() > 50);
        for pair in spans.windows(2) {
            assert!(pair[0].end <= pair[1].begin + 1e-12, "{pair:?}");
        }
    }
    assert!(estimate.exposed > 0.0, "small batches on slow links wait");
    let busy = |time: f64| {
        let running = |span: &&fsdp_runtime::plan::Span| span.begin < time && time < span.end;
        estimate.spans.iter().filter(|span| span.row == Row::Communication).any(|it| running(&it))
    };
    for wait in estimate.spans.iter().filter(|span| span.kind == SpanKind::Wait) {
        let middle = f64::midpoint(wait.begin, wait.end);
        assert!(wait.end - wait.begin < 1e-9 || busy(middle), "{wait:?}");
    }
}

/// Each layer has two sums over the tensor parallel ranks in forward, in the recomputation and in backward.
#[test]
fn split_matrices_and_rows_are_planned() {
    let name = shape("llama3-70b");
    let plan = |options: FsdpOptions| StepPlan::of_shape(&name, mesh(64), &options).unwrap();
    let recomputed = || options().with_activation_checkpointing(ActivationCheckpointing::All);
    let (whole, split) = (plan(recomputed()), plan(recomputed().with_tensor_parallel(8)));
    let parts = plan(recomputed().with_tensor_parallel(8).with_sequence_parallel(true));
    let batch = Batch::new(1, 8192);
    assert!(whole.activation_collectives(batch, 8).is_empty());
    let sums = split.activation_collectives(batch, 8);
    // The embedding and the head have one each.
    assert_eq!(sums.len(), 80 * 6 + 2);
    assert!(sums.iter().all(|it| (it.ranks, it.bytes) == (8, 8192 * 8192 * 2)));
    assert!(sums.iter().all(|it| it.between.bytes == 0), "within a machine");
    let halves = parts.activation_collectives(batch, 8);
    let moved = |all: &[Collective]| all.iter().map(|it| it.inside.bytes).sum::<usize>();
    assert_eq!((halves.len(), moved(&halves)), (2 * sums.len(), moved(&sums)));

    let cluster = Cluster::preset("h100").unwrap();
    let [whole, split, parts] = [whole, split, parts].map(|plan| plan.estimate(batch, &cluster));
    // Shards of 1/64 in any case, and gather buffers of an eighth.
    let ratio = |a: usize, b: usize| a as f64 / b as f64;
    assert!((ratio(split.memory.shards, whole.memory.shards) - 1.0).abs() < 0.01);
    assert!((ratio(split.memory.gathered, whole.memory.gathered) - 0.125).abs() < 0.01);
    assert!(parts.peak_activations() < split.peak_activations() / 2);

    let context = plan(options().with_context_parallel(4));
    let of_context = context.activation_collectives(batch, 8);
    // A gather in both passes, and the sum of gradients: 8 heads of 128, keys and values.
    assert_eq!(of_context.len(), 80 * 3);
    assert!(of_context.iter().all(|it| (it.ranks, it.bytes) == (4, 8192 * 2 * 1024 * 2)));
    let error = |options| StepPlan::of_shape(&name, mesh(64), &options).unwrap_err().to_string();
    let text = error(options().with_tensor_parallel(16));
    assert!(text.contains("use a divisor of 8, the heads of keys and values"), "{text}");
}
