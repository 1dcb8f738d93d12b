//! The table of `--plan`, which a program prints in place of training.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use fsdp_runtime::plan::{Batch, Cluster, Estimate, Shown, StepPlan, html};
use fsdp_runtime::{Mesh, Rank, WorldSize};

/// What to plan.
#[derive(Args, Clone, Debug)]
pub struct PlanArgs {
    /// Print the memory, the communication and the time of a step on these numbers of ranks, such as
    /// 8,64, in place of training
    #[arg(long, value_name = "RANKS", value_delimiter = ',', num_args = 1)]
    plan: Vec<usize>,

    /// Device of each rank in the plan: a100, h100, h200, b200, l4 or rtx4090, eight to a machine
    #[arg(long, value_name = "NAME", default_value = "h100", requires = "plan")]
    plan_device: String,

    /// File to write the plan to as a page, with the schedule and the memory over time
    #[arg(long, value_name = "FILE", requires = "plan")]
    plan_html: Option<PathBuf>,
}

impl PlanArgs {
    /// Returns whether a plan is asked for.
    pub fn is_on(&self) -> bool {
        !self.plan.is_empty()
    }

    /// Returns the table of a model, given the plan of each mesh. Writes the page that is asked for.
    ///
    /// # Errors
    ///
    /// If the device is not known, the model cannot be sharded, or the page cannot be written.
    pub fn text(
        &self,
        title: &str,
        batch: Batch,
        plan: impl Fn(Mesh) -> Result<StepPlan>,
    ) -> Result<String> {
        let cluster = Cluster::preset(&self.plan_device).context("--plan-device")?;
        let mut plans: Vec<(StepPlan, Estimate)> = Vec::new();
        for &ranks in &self.plan {
            let plan = plan(Mesh::new(Rank::ZERO, WorldSize::new(ranks).context("--plan")?))?;
            let estimate = plan.estimate(batch, &cluster);
            plans.push((plan, estimate));
        }
        if let Some(file) = &self.plan_html {
            let shown: Vec<_> = plans.iter().map(|(plan, it)| Shown::new(plan, it)).collect();
            fs::write(file, html(title, &shown)).context("--plan-html")?;
        }
        let sharing = plans.first().map_or(1, |(plan, _)| {
            plan.mesh().tensor_size().size() * plan.mesh().context_size().size()
        });
        let whose = if sharing == 1 { "a rank" } else { "a group of ranks that share them" };
        Ok(format!(
            "{title} on {}: {} samples of {} tokens {whose}\n\n{}",
            cluster.accelerator.name,
            batch.samples * batch.micro_batches,
            batch.length,
            table(&plans)
        ))
    }
}

/// Returns a row for each number of ranks.
fn table(plans: &[(StepPlan, Estimate)]) -> String {
    let mut lines = vec![format!(
        "{:>6}{:>12}{:>10}{:>14}{:>12}",
        "ranks", "step ms", "exposed", "tokens/s/rank", "GiB a rank"
    )];
    lines.extend(plans.iter().map(|(plan, estimate)| {
        format!(
            "{:>6}{:>12.2}{:>9.1}%{:>14.0}{:>12.3}",
            plan.mesh().all_ranks(),
            estimate.step * 1e3,
            100.0 * estimate.exposed / estimate.step,
            estimate.tokens_per_second,
            estimate.memory.total() as f64 / f64::from(1 << 30),
        )
    }));
    lines.join("\n")
}

/// Checks a table of `--plan 2,8`: a row for each number of ranks, of which the larger holds less.
#[cfg(test)]
pub fn check_table(text: &str, title: &str) {
    let (first, rows) = text.split_once("GiB a rank\n").unwrap();
    assert!(first.starts_with(&format!("{title} on ")), "{text}");
    let numbers = |row: &str| -> Vec<f64> {
        row.split_whitespace().map(|it| it.trim_end_matches('%').parse().unwrap()).collect()
    };
    let rows: Vec<_> = rows.lines().map(numbers).collect();
    let [two, eight] = &rows[..] else { panic!("{text}") };
    assert_eq!((two[0], eight[0]), (2.0, 8.0), "{text}");
    assert!(two.iter().chain(eight).all(|&number| number > 0.0), "{text}");
    assert!(eight[4] < two[4], "{text}");
}
