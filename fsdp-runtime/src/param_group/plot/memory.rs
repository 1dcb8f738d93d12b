//! The picture of a sharded model's memory over time.

use std::time::Duration;

use super::chart::{Figure, Layer, Line, Panel};
use crate::param_group::forecast::MemoryForecast;
use crate::param_group::memory::{Memory, MemoryTimeline};

/// Kinds of memory from the bottom of the picture up: those that change least come first.
const KINDS: [&str; 7] =
    ["shards", "replicated", "optimizer", "gathered", "gradients", "activations", "averages"];
/// Bytes of a MiB.
const MIB: f64 = (1 << 20) as f64;

impl MemoryTimeline {
    /// Draws the memory on the device over time, by kind, as SVG. A second panel has the memory on
    /// the host, if there is any. Needs the feature `plot`.
    ///
    /// A line in each panel has the total of `forecast`.
    pub fn to_svg(&self, title: &str, forecast: Option<&MemoryForecast>) -> String {
        let on_device = forecast.map(MemoryForecast::total);
        let on_host = forecast.map(|forecast| forecast.host.total());
        let mut panels = vec![panel("device", &self.device(), self.duration, on_device)];
        let host = self.host();
        if host.iter().any(|(_, memory)| memory.total.peak > 0) {
            panels.push(panel("host", &host, self.duration, on_host));
        }
        Figure { title: title.into(), panels }.to_svg()
    }
}

/// Returns the panel of one place's memory, in milliseconds and MiB.
fn panel(
    place: &str,
    levels: &[(Duration, Memory)],
    end: Duration,
    forecast: Option<usize>,
) -> Panel {
    let mib = |bytes: usize| bytes as f64 / MIB;
    let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
    let bytes = |memory: &Memory, kind: &str| {
        memory.kinds().find(|(name, _)| *name == kind).map_or(0, |(_, usage)| usage.now)
    };
    let layers = KINDS.iter().enumerate().map(|(color, kind)| Layer {
        label: (*kind).into(),
        color,
        heights: levels.iter().map(|(_, memory)| mib(bytes(memory, kind))).collect(),
    });
    let panel = Panel {
        x_label: "time (ms)".into(),
        y_label: format!("memory on the {place} (MiB)"),
        x: levels.iter().map(|(time, _)| milliseconds(*time)).collect(),
        x_end: milliseconds(end),
        layers: layers.filter(|layer| layer.heights.iter().any(|y| *y > 0.0)).collect(),
        lines: forecast
            .into_iter()
            .map(|bytes| Line { label: "forecast".into(), y: mib(bytes) })
            .collect(),
    };
    panel.thinned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::param_group::memory::{MemoryKind, MemoryTracker};

    fn timeline(offloaded: bool) -> MemoryTimeline {
        let tracker = MemoryTracker::new(offloaded);
        tracker.take(MemoryKind::Shards, 3 << 20, 0);
        tracker.start_timeline(100);
        tracker.take(MemoryKind::Gradients, 2 << 20, 0);
        tracker.give_back(MemoryKind::Gradients, 2 << 20, 0);
        tracker.timeline(&|_| String::new()).unwrap()
    }

    #[test]
    fn kinds_are_those_of_the_accounting() {
        let mut kinds = KINDS.to_vec();
        let mut counted: Vec<_> = Memory::default().kinds().map(|(name, _)| name).collect();
        counted.retain(|name| *name != "total");
        kinds.sort_unstable();
        counted.sort_unstable();
        assert_eq!(kinds, counted);
    }

    #[test]
    fn a_panel_has_the_kinds_that_are_used_in_mib() {
        let timeline = timeline(false);
        let panel = panel("device", &timeline.device(), timeline.duration, Some(9 << 20));
        let labels: Vec<_> = panel.layers.iter().map(|layer| layer.label.as_str()).collect();
        assert_eq!(labels, ["shards", "gradients"]);
        let colors: Vec<_> = panel.layers.iter().map(|layer| layer.color).collect();
        assert_eq!(colors, [0, 4], "a kind has its own colour, whichever others there are");
        assert_eq!(panel.layers[0].heights, [3.0, 3.0, 3.0]);
        assert_eq!(panel.layers[1].heights, [0.0, 2.0, 0.0]);
        assert_eq!(panel.lines[0].y, 9.0);
        assert!(panel.x.is_sorted() && *panel.x.last().unwrap() <= panel.x_end);
    }

    #[test]
    fn host_memory_has_a_panel_of_its_own() {
        let svg = |offloaded| timeline(offloaded).to_svg("title", None);
        assert!(!svg(false).contains("memory on the host"));
        let offloaded = svg(true);
        assert!(offloaded.contains("memory on the host") && offloaded.contains("title"));
    }
}
