//! A page with the pictures of plans: schedule, memory over time, and scaling.

use std::fmt::Write;

use super::estimate::{Estimate, Row, Span, SpanKind};
use super::step::StepPlan;
use crate::observe::plot::stacked_areas;

/// Width of a picture, in pixels.
const WIDTH: f64 = 1000.0;
/// Space to the left of the bars, in pixels.
const LEFT: f64 = 110.0;
/// Height of a row of bars, in pixels.
const ROW: f64 = 44.0;
/// Narrowest bar that is drawn on its own, in pixels. Narrower ones join the bar before them.
const NARROWEST: f64 = 0.4;
const GIB: f64 = (1u64 << 30) as f64;

/// A plan on a page, with the number of its ranks.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Shown<'a> {
    /// The plan.
    pub plan: &'a StepPlan,
    /// Its estimate.
    pub estimate: &'a Estimate,
}

impl<'a> Shown<'a> {
    /// Shows a plan with its estimate.
    pub const fn new(plan: &'a StepPlan, estimate: &'a Estimate) -> Self {
        Self { plan, estimate }
    }
}

/// Returns a page in HTML that needs no network: a table of the plans, the schedule and the memory
/// over time of the first one, and tokens per second over the numbers of ranks. Needs the feature
/// `plot`.
pub fn html(title: &str, plans: &[Shown<'_>]) -> String {
    let title = escaped(title);
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title>\n\
         <style>body{{font-family:sans-serif;margin:2em;max-width:1040px}}\
         table{{border-collapse:collapse}}td,th{{padding:.3em .8em;text-align:right;\
         border-bottom:1px solid #ddd}}svg{{max-width:100%}}</style></head>\n\
         <body><h1>{title}</h1>\n"
    );
    page.push_str(&table(plans));
    if let Some(first) = plans.first() {
        let ranks = first.plan.mesh().all_ranks();
        let _ = write!(page, "<h2>Schedule of a step on {ranks} ranks</h2>\n{}", gantt(first));
        let _ = write!(page, "<h2>Memory of a rank over time</h2>\n{}", memory(first));
    }
    if plans.len() > 1 {
        let _ = write!(page, "<h2>Scaling</h2>\n{}", scaling(plans));
    }
    page.push_str("</body></html>\n");
    page
}

/// Replaces the characters that have a meaning in HTML.
fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    text.replace('"', "&quot;")
}

fn table(plans: &[Shown<'_>]) -> String {
    let mut table = String::from(
        "<table><tr><th>ranks</th><th>step (ms)</th><th>tokens/s a rank</th><th>MFU</th>\
         <th>exposed</th><th>memory (GiB)</th><th>usable (GiB)</th></tr>\n",
    );
    for Shown { plan, estimate } in plans {
        let _ = writeln!(
            table,
            "<tr><td>{}</td><td>{:.1}</td><td>{:.0}</td><td>{:.1} %</td><td>{:.1} %</td>\
             <td>{:.1}</td><td>{:.1}</td></tr>",
            plan.mesh().all_ranks(),
            estimate.step * 1e3,
            estimate.tokens_per_second,
            estimate.utilization * 100.0,
            estimate.exposed / estimate.step * 100.0,
            estimate.memory.total() as f64 / GIB,
            estimate.usable as f64 / GIB,
        );
    }
    table + "</table>\n"
}

/// Returns the colour of a kind of span.
const fn color(kind: SpanKind) -> &'static str {
    match kind {
        SpanKind::Forward => "#0072b2",
        SpanKind::Recompute => "#56b4e9",
        SpanKind::Backward => "#009e73",
        SpanKind::Optimizer => "#cc79a7",
        SpanKind::Wait => "#d55e00",
        SpanKind::Collective(super::collective::Operation::AllGather) => "#e69f00",
        SpanKind::Collective(super::collective::Operation::ReduceScatter) => "#f0e442",
        SpanKind::Collective(_) => "#999999",
        SpanKind::Copy => "#000000",
    }
}

/// Joins spans that are too narrow to be seen with the one of their kind before them.
fn joined(spans: &[Span], pixels: f64) -> Vec<Span> {
    let mut joined: Vec<Span> = Vec::new();
    for row in [Row::Compute, Row::Communication] {
        for span in spans.iter().filter(|span| span.row == row) {
            let is_narrow = (span.end - span.begin) * pixels < NARROWEST;
            match joined.last_mut() {
                Some(last)
                    if last.row == row
                        && is_narrow
                        && last.kind == span.kind
                        && (span.begin - last.end) * pixels < NARROWEST =>
                {
                    last.end = span.end;
                }
                _ => joined.push(*span),
            }
        }
    }
    joined
}

/// Draws the rows of a step.
fn gantt(shown: &Shown<'_>) -> String {
    let Estimate { spans, step, .. } = shown.estimate;
    let pixels = (WIDTH - LEFT) / step.max(f64::MIN_POSITIVE);
    let height = 2.0 * ROW + 70.0;
    let mut svg = format!(
        "<svg id=\"schedule\" xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" \
         height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" font-size=\"12\">\n"
    );
    for (at, name) in ["compute", "communication"].iter().enumerate() {
        let y = ROW * (at as f64 + 0.6);
        let _ = writeln!(svg, "<text x=\"0\" y=\"{y}\">{name}</text>");
    }
    let units: Vec<&str> = shown.plan.units().collect();
    let mut kinds: Vec<SpanKind> = Vec::new();
    for span in joined(spans, pixels) {
        if !kinds.contains(&span.kind) {
            kinds.push(span.kind);
        }
        let y = if span.row == Row::Compute { 4.0 } else { ROW + 4.0 };
        let path = span.unit.map_or("", |unit| units[unit]);
        let milliseconds = (span.end - span.begin) * 1e3;
        let _ = writeln!(
            svg,
            "<rect x=\"{:.2}\" y=\"{y}\" width=\"{:.2}\" height=\"{}\" fill=\"{}\"><title>{} {} \
             {milliseconds:.3} ms</title></rect>",
            LEFT + span.begin * pixels,
            ((span.end - span.begin) * pixels).max(NARROWEST),
            ROW - 8.0,
            color(span.kind),
            span.kind.name(),
            escaped(path),
        );
    }
    time_axis(&mut svg, *step, 2.0 * ROW + 4.0);
    for (at, kind) in kinds.iter().enumerate() {
        let (x, y) = (LEFT + 110.0 * at as f64, 2.0 * ROW + 44.0);
        let _ = writeln!(
            svg,
            "<rect x=\"{x}\" y=\"{y}\" width=\"12\" height=\"12\" fill=\"{}\"/>\
             <text x=\"{}\" y=\"{}\">{}</text>",
            color(*kind),
            x + 16.0,
            y + 11.0,
            kind.name(),
        );
    }
    svg + "</svg>\n"
}

/// Draws the axis of a step's time below the rows.
fn time_axis(svg: &mut String, step: f64, y: f64) {
    for tick in 0..=5 {
        let share = f64::from(tick) / 5.0;
        let x = LEFT + share * (WIDTH - LEFT);
        let anchor = if tick == 5 { "end" } else { "start" };
        let _ = writeln!(
            svg,
            "<line x1=\"{x}\" y1=\"0\" x2=\"{x}\" y2=\"{y}\" stroke=\"#ddd\"/>\
             <text x=\"{x}\" y=\"{}\" text-anchor=\"{anchor}\">{:.1} ms</text>",
            y + 16.0,
            share * step * 1e3,
        );
    }
}

/// Draws the memory of a rank over time, by kind.
fn memory(shown: &Shown<'_>) -> String {
    let Estimate { memory, moments, usable, .. } = shown.estimate;
    let constant = |bytes: usize| vec![bytes as f64 / GIB; moments.len()];
    let layers = vec![
        ("shards", constant(memory.shards)),
        ("replicated", constant(memory.replicated)),
        ("optimizer", constant(memory.optimizer)),
        ("gathered", constant(memory.gathered)),
        ("gradients", moments.iter().map(|it| it.gradients as f64 / GIB).collect()),
        ("activations", moments.iter().map(|it| it.activations as f64 / GIB).collect()),
    ];
    let times = moments.iter().map(|moment| moment.time * 1e3).collect();
    stacked_areas("", times, layers, *usable as f64 / GIB)
}

/// Draws tokens per second of all ranks over the number of ranks, on logarithmic axes, beside the
/// line of no loss.
fn scaling(plans: &[Shown<'_>]) -> String {
    let ranks = |shown: &Shown<'_>| shown.plan.mesh().all_ranks().size() as f64;
    let points = plans.iter().map(|it| (ranks(it), ranks(it) * it.estimate.tokens_per_second));
    let points: Vec<(f64, f64)> = points.collect();
    let (first, rate) = points[0];
    let ideal: Vec<_> = points.iter().map(|(x, _)| (*x, rate / first * x)).collect();
    let all = || points.iter().chain(&ideal);
    let bounds = |of: fn(&(f64, f64)) -> f64| {
        let logs = all().map(|point| of(point).max(f64::MIN_POSITIVE).ln());
        let (low, high) =
            logs.fold((f64::MAX, f64::MIN), |(low, high), it| (low.min(it), high.max(it)));
        if high > low { (low, high) } else { (low, low + 1.0) }
    };
    let (x_bounds, y_bounds) = (bounds(|point| point.0), bounds(|point| point.1));
    let height = 360.0;
    let place = |(x, y): &(f64, f64)| {
        let part = |value: f64, (low, high): (f64, f64)| (value.ln() - low) / (high - low);
        let x = LEFT + part(*x, x_bounds) * (WIDTH - LEFT - 40.0);
        (x, height - 40.0 - part(*y, y_bounds) * (height - 70.0))
    };
    let mut svg = format!(
        "<svg id=\"scaling\" xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" \
         height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" font-size=\"12\">\n"
    );
    for (line, stroke) in [(&ideal, "#999999"), (&points, "#0072b2")] {
        let corners: Vec<String> =
            line.iter().map(place).map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = writeln!(
            svg,
            "<polyline fill=\"none\" stroke=\"{stroke}\" stroke-width=\"2\" points=\"{}\"/>",
            corners.join(" ")
        );
    }
    for point in &points {
        let (x, y) = place(point);
        let _ = writeln!(
            svg,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"#0072b2\"/>\
             <text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{} ranks</text>\
             <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{:.3e} tokens/s</text>",
            height - 12.0,
            point.0,
            y - 10.0,
            point.1,
        );
    }
    svg + "</svg>\n<p>Blue: tokens per second of all ranks. Grey: the first point times the ranks.</p>\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{Mesh, Rank, WorldSize};
    use crate::options::FsdpOptions;
    use crate::plan::{Batch, Cluster, Transformer};

    #[test]
    fn a_page_has_all_pictures_and_no_links() {
        let shape = Transformer::named("gpt2").unwrap().shape("gpt2");
        let cluster = Cluster::preset("a100").unwrap();
        let planned = |world| {
            let mesh = Mesh::new(Rank::ZERO, WorldSize::new(world).unwrap());
            let plan = StepPlan::of_shape(&shape, mesh, &FsdpOptions::new()).unwrap();
            let estimate = plan.estimate(Batch::new(4, 1024), &cluster);
            (plan, estimate)
        };
        let plans = [planned(8), planned(64)];
        let shown: Vec<_> = plans.iter().map(|(plan, it)| Shown::new(plan, it)).collect();
        let page = html("gpt2 <on> a100", &shown);
        for part in ["id=\"schedule\"", "id=\"scaling\"", "h.11", "capacity", "&lt;on&gt;"] {
            assert!(page.contains(part), "{part}");
        }
        assert!(page.matches("<rect").count() > 50, "bars of units");
        for wrong in ["NaN", "inf", "src=", "href=", "<script"] {
            assert!(!page.contains(wrong), "{wrong}");
        }
    }
}
