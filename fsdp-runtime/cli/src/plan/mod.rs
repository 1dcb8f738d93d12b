//! `fsdp plan`: memory, communication and time of a training step, before a device is rented.

mod args;

use std::process::ExitCode;

use fsdp_runtime::plan::{
    Batch, Candidate, Cluster, Collective, Estimate, Found, ModelShape, Operation, Question, Shown,
    StepPlan, html, search,
};
use serde_json::{Value, json};

pub(crate) use self::args::Args;
use crate::console;

/// Prints the plan. Exits with 1 on an error.
pub(crate) fn run(args: &Args) -> ExitCode {
    let done = match (args.list, args.search) {
        (true, _) => Ok(args::presets()),
        (_, true) => run_search(args),
        _ => run_plans(args),
    };
    match done {
        Ok(text) => {
            console::out(text);
            ExitCode::SUCCESS
        }
        Err(error) => {
            console::err(error);
            ExitCode::FAILURE
        }
    }
}

fn gib(bytes: usize) -> f64 {
    bytes as f64 / (1u64 << 30) as f64
}

/// Plans each number of ranks.
fn run_plans(args: &Args) -> Result<String, String> {
    let (shape, mut cluster, batch) = (args.shape()?, args.cluster()?, args.batch());
    let mut plans = Vec::new();
    for (at, &world) in args.world.iter().enumerate() {
        let plan = args.plan(&shape, world)?;
        if let (0, Some(measured)) = (at, args.measured) {
            cluster = plan.calibrated(batch, &cluster, measured / 1e3);
        }
        let estimate = plan.estimate(batch, &cluster);
        plans.push((plan, estimate));
    }
    if let Some(file) = &args.html {
        let shown: Vec<_> = plans.iter().map(|(plan, it)| Shown::new(plan, it)).collect();
        let title = format!("{} on {}", shape.name, cluster.accelerator.name);
        std::fs::write(file, html(&title, &shown))
            .map_err(|error| format!("{}: {error}", file.display()))?;
    }
    match args.json {
        true => Ok(to_json(&shape, &plans, (batch, &cluster))),
        false => Ok(to_text(&shape, &plans, (batch, &cluster))),
    }
}

fn to_json(
    shape: &ModelShape,
    plans: &[(StepPlan, Estimate)],
    (batch, cluster): (Batch, &Cluster),
) -> String {
    let plan = |(plan, estimate): &(StepPlan, Estimate)| {
        let collectives = all_collectives(plan, batch, cluster);
        let memory: serde_json::Map<String, Value> =
            estimate.memory.kinds().map(|(kind, bytes)| (kind.into(), json!(bytes))).collect();
        let host: serde_json::Map<String, Value> =
            estimate.memory.host.kinds().map(|(kind, bytes)| (kind.into(), json!(bytes))).collect();
        json!({
            "world": plan.mesh().all_ranks().size(),
            "tensor_parallel": plan.mesh().tensor_size().size(),
            "context_parallel": plan.mesh().context_size().size(),
            "shard_size": plan.mesh().shard_size().size(),
            "step_seconds": estimate.step,
            "compute_seconds": estimate.compute,
            "recompute_seconds": estimate.recompute,
            "optimizer_seconds": estimate.optimizer,
            "communication_seconds": estimate.communication,
            "exposed_seconds": estimate.exposed,
            "tokens_per_second_per_rank": estimate.tokens_per_second,
            "mfu": estimate.utilization,
            "dollars_per_billion_tokens": estimate.dollars_per_billion_tokens,
            "fits": estimate.fits(),
            "usable_bytes": estimate.usable,
            "memory_bytes": memory,
            "host_memory_bytes": host,
            "collectives": collectives.len(),
            "traffic": traffic(&collectives),
        })
    };
    let all = json!({
        "model": shape.name,
        "parameters": shape.num_params(),
        "units": shape.units.len(),
        "batch": batch,
        "cluster": cluster,
        "plans": plans.iter().map(plan).collect::<Vec<_>>(),
    });
    format!("{all:#}")
}

/// Returns the collectives of a step on parameters, gradients and activations.
fn all_collectives(plan: &StepPlan, batch: Batch, cluster: &Cluster) -> Vec<Collective> {
    let mut collectives = plan.collectives(batch.micro_batches, cluster.per_machine);
    collectives.extend(plan.activation_collectives(batch, cluster.per_machine));
    collectives
}

/// Returns what a rank receives in a step, by operation.
fn traffic(collectives: &[Collective]) -> Value {
    let mut traffic = serde_json::Map::new();
    for operation in [Operation::AllGather, Operation::ReduceScatter, Operation::AllReduce] {
        let of_kind = || collectives.iter().filter(|it| it.operation == operation);
        let sum = |of: fn(&Collective) -> usize| of_kind().map(of).sum::<usize>();
        let received = json!({
            "collectives": of_kind().count(),
            "full_bytes": sum(|it| it.bytes),
            "bytes_inside": sum(|it| it.inside.bytes),
            "messages_inside": sum(|it| it.inside.messages),
            "bytes_between": sum(|it| it.between.bytes),
            "messages_between": sum(|it| it.between.messages),
        });
        traffic.insert(operation.name().into(), received);
    }
    Value::Object(traffic)
}

fn to_text(
    shape: &ModelShape,
    plans: &[(StepPlan, Estimate)],
    (batch, cluster): (Batch, &Cluster),
) -> String {
    let device = &cluster.accelerator;
    let mut lines = vec![
        format!(
            "{}: {:.2} B parameters in {} units; {} x {} tokens a rank, {} micro-batches a step",
            shape.name,
            shape.num_params() as f64 / 1e9,
            shape.units.len(),
            batch.samples,
            batch.length,
            batch.micro_batches
        ),
        format!(
            "{}: {} a machine, {:.1} GiB usable, {:.0} % of {:.0} TFLOP/s; {} inside, {} between",
            device.name,
            cluster.per_machine,
            gib(cluster.usable()),
            100.0 * device.efficiency,
            device.half_flops / 1e12,
            cluster.inside.name,
            cluster.between.name
        ),
        String::new(),
        format!(
            "{:>7}{:>11}{:>9}{:>12}{:>8}{:>9}{:>11}{:>12}{:>8}",
            "ranks", "step ms", "exposed", "tok/s/rank", "MFU", "GiB", "sent GiB", "$/1e9 tok", ""
        ),
    ];
    for (plan, estimate) in plans {
        let collectives = all_collectives(plan, batch, cluster);
        let moved: usize = collectives.iter().map(|it| it.inside.bytes + it.between.bytes).sum();
        lines.push(format!(
            "{:>7}{:>11.1}{:>8.1}%{:>12.0}{:>7.1}%{:>9.1}{:>11.2}{:>12.0}{:>8}",
            plan.mesh().all_ranks().size(),
            estimate.step * 1e3,
            100.0 * estimate.exposed / estimate.step,
            estimate.tokens_per_second,
            100.0 * estimate.utilization,
            gib(estimate.memory.total()),
            gib(moved),
            estimate.dollars_per_billion_tokens,
            if estimate.fits() { "fits" } else { "no room" },
        ));
    }
    lines.push(String::new());
    lines.push(kinds(plans));
    lines.join("\n")
}

/// Returns a table of the memory by kind, in GiB.
fn kinds(plans: &[(StepPlan, Estimate)]) -> String {
    let head = plans.iter().map(|(plan, _)| format!("{:>10}", plan.mesh().all_ranks().size()));
    let mut lines = vec![format!("{:<14}{}", "GiB per rank", head.collect::<String>())];
    let Some((_, first)) = plans.first() else { return String::new() };
    for (at, (kind, _)) in first.memory.kinds().enumerate() {
        let bytes = |(_, it): &(StepPlan, Estimate)| it.memory.kinds().nth(at).map_or(0, |it| it.1);
        let row: String = plans.iter().map(|plan| format!("{:>10.2}", gib(bytes(plan)))).collect();
        lines.push(format!("{kind:<14}{row}"));
    }
    if plans.iter().any(|(_, estimate)| estimate.memory.host.total() > 0) {
        let host =
            |(_, it): &(StepPlan, Estimate)| format!("{:>10.2}", gib(it.memory.host.total()));
        lines.push(format!("{:<14}{}", "on the host", plans.iter().map(host).collect::<String>()));
    }
    lines.join("\n")
}

/// Searches for settings, for each number of ranks.
fn run_search(args: &Args) -> Result<String, String> {
    let (shape, cluster, batch) = (args.shape()?, args.cluster()?, args.batch());
    let samples = batch.samples * batch.micro_batches;
    let mut texts = Vec::new();
    for &world in &args.world {
        let mut question = Question::new(&shape, world.size(), samples, batch.length);
        question.options = args.options();
        question.fused_loss = args.fused_loss;
        let found = search(&question, &cluster, 5).map_err(|error| error.to_string())?;
        texts.push(match args.json {
            true => format!("{:#}", found_as_json(&found, world.size())),
            false => found_as_text(&found, world.size(), &cluster),
        });
    }
    Ok(match args.json {
        true => format!("[{}]", texts.join(",\n")),
        false => texts.join("\n\n"),
    })
}

fn settings(candidate: &Candidate) -> String {
    let parts = [("tensor", candidate.tensor_parallel), ("context", candidate.context_parallel)];
    let parts = parts.into_iter().filter(|(_, ranks)| *ranks > 1);
    let parts: String = parts.map(|(axis, ranks)| format!(", {axis} parallel {ranks}")).collect();
    format!(
        "{} of {}{parts}, {} x {} samples, recompute {}, offload {}",
        candidate.strategy,
        candidate.shard_size,
        candidate.micro_batches,
        candidate.micro_batch,
        candidate.recomputation.name(),
        offload(candidate),
    )
}

fn offload(candidate: &Candidate) -> &'static str {
    use fsdp_runtime::options::OffloadPolicy::{None, OptimizerOnly};
    match candidate.offload {
        None => "none",
        OptimizerOnly => "optimizer",
        _ => "params",
    }
}

fn found_as_json(found: &Found, world: usize) -> Value {
    let candidate = |it: &Candidate| {
        json!({
            "strategy": it.strategy,
            "shard_size": it.shard_size,
            "tensor_parallel": it.tensor_parallel,
            "context_parallel": it.context_parallel,
            "micro_batch": it.micro_batch,
            "micro_batches": it.micro_batches,
            "recompute": it.recomputation,
            "offload": offload(it),
            "step_seconds": it.estimate.step,
            "tokens_per_second_per_rank": it.estimate.tokens_per_second,
            "mfu": it.estimate.utilization,
            "memory_bytes": it.estimate.memory.total(),
            "reasons": it.reasons,
        })
    };
    json!({
        "world": world,
        "best": found.best.iter().map(candidate).collect::<Vec<_>>(),
        "smallest": candidate(&found.smallest),
        "tried": found.tried.0,
        "fit": found.tried.1,
        "cheaper": found.cheaper,
    })
}

fn found_as_text(found: &Found, world: usize, cluster: &Cluster) -> String {
    let (tried, fit) = found.tried;
    let name = cluster.accelerator.name;
    let mut lines = vec![format!("{world} x {name}: {fit} of {tried} settings fit")];
    for (at, candidate) in found.best.iter().enumerate() {
        let estimate = &candidate.estimate;
        lines.push(format!(
            "{}. {:.0} tok/s/rank, {:.1} % MFU, {:.1} GiB: {}",
            at + 1,
            estimate.tokens_per_second,
            100.0 * estimate.utilization,
            gib(estimate.memory.total()),
            settings(candidate)
        ));
        lines.extend(candidate.reasons.iter().map(|reason| format!("     {reason}")));
    }
    if found.best.is_empty() {
        lines.push(format!(
            "nothing fits: {} needs {:.1} GiB of {:.1}",
            settings(&found.smallest),
            gib(found.smallest.estimate.memory.total()),
            gib(found.smallest.estimate.usable)
        ));
    }
    if let Some(cheaper) = &found.cheaper {
        let (needed, usable) = (gib(cheaper.needed), gib(cheaper.usable));
        lines.push(match (cheaper.tokens_per_second, cheaper.dollars_per_billion_tokens) {
            (Some(rate), Some(dollars)) => format!(
                "next cheaper device, {}: fits, {rate:.0} tok/s/rank, {dollars:.0} $ for 1e9 tokens",
                cheaper.device
            ),
            _ => format!(
                "next cheaper device, {}: needs at least {needed:.1} GiB of {usable:.1}; use more \
                 ranks or smaller samples",
                cheaper.device
            ),
        });
    }
    lines.join("\n")
}
