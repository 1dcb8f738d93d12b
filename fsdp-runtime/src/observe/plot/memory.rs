//! The picture of a sharded model's memory over time.

use std::time::Duration;

use super::chart::{Figure, Layer, Line, Panel};
use super::marks::{Band, Moment, Point};
use crate::param_group::memory::{Memory, MemoryEvent, MemoryForecast, MemoryPeak, MemoryTimeline};
use crate::param_group::mib::mib;

/// Kinds of memory from the bottom of the picture up: those that change least come first.
pub(super) const KINDS: [&str; 7] =
    ["shards", "replicated", "optimizer", "gathered", "gradients", "activations", "averages"];
/// Colours of the strip of units.
const FORWARD: &str = "#999999";
const BACKWARD: &str = "#444444";
/// Most units in the strip. Of more, neighbours of one pass are drawn as one.
const MAX_BANDS: usize = 400;
/// Number of holders below a picture.
const NAMED_HOLDERS: usize = 5;
/// Most characters in a line below a picture.
const NOTE_WIDTH: usize = 110;

impl MemoryTimeline {
    /// Draws the memory on the device over time, by kind, as SVG. A second panel has the memory on
    /// the host, if there is any. Needs the feature `plot`.
    ///
    /// A line in each panel has the total of `forecast`. Vertical lines are the ends of steps, and the
    /// strip below the axis has the forward and backward of units. The largest holders of memory at
    /// the peak are named below.
    pub fn to_svg(&self, title: &str, forecast: Option<&MemoryForecast>) -> String {
        self.figure(title, forecast, self.notes()).to_svg()
    }

    /// Returns the figure, with lines of text below it.
    pub(super) fn figure(
        &self,
        title: &str,
        forecast: Option<&MemoryForecast>,
        notes: Vec<String>,
    ) -> Figure {
        let on_device = forecast.map(MemoryForecast::total);
        let on_host = forecast.map(|forecast| forecast.host.total());
        let mut panels = vec![self.panel("device", &self.device(), &self.device_peak(), on_device)];
        if self.uses_host() {
            panels.push(self.panel("host", &self.host(), &self.host_peak(), on_host));
        }
        Figure { title: title.into(), panels, notes }
    }

    /// Returns whether a panel has the memory on the host.
    pub(super) fn uses_host(&self) -> bool {
        self.host_peak().bytes > 0
    }

    /// Returns what the picture does not show.
    fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if let Some(failure) = &self.failure {
            notes.extend(wrapped(&format!("ended with an error: {failure}")));
        }
        let peaks = [("device", self.device_peak()), ("host", self.host_peak())];
        for (place, MemoryPeak { bytes, holders, .. }) in peaks {
            if bytes > 0 {
                notes.push(format!("largest holders of the {:.2} MiB on the {place}:", mib(bytes)));
                let named = holders.iter().take(NAMED_HOLDERS);
                notes.extend(named.map(|holder| format!("    {holder}")));
            }
        }
        if self.dropped > 0 {
            notes.push(format!("{} older changes had no room and are left out", self.dropped));
        }
        notes
    }

    /// Returns the panel of one place's memory, in milliseconds and MiB.
    fn panel(
        &self,
        place: &str,
        levels: &[(Duration, Memory)],
        peak: &MemoryPeak,
        forecast: Option<usize>,
    ) -> Panel {
        let bytes = |memory: &Memory, kind: &str| {
            memory.kinds().find(|(name, _)| *name == kind).map_or(0, |(_, usage)| usage.now)
        };
        let layers = KINDS.iter().enumerate().map(|(color, kind)| Layer {
            label: (*kind).into(),
            color,
            heights: levels.iter().map(|(_, memory)| mib(bytes(memory, kind))).collect(),
        });
        let forecast = forecast.map(|bytes| Line { label: "forecast".into(), y: mib(bytes) });
        let panel = Panel {
            x_label: "time (ms)".into(),
            y_label: format!("memory on the {place} (MiB)"),
            x: levels.iter().map(|(time, _)| milliseconds(*time)).collect(),
            x_end: milliseconds(self.duration),
            layers: layers.filter(|layer| layer.heights.iter().any(|y| *y > 0.0)).collect(),
            lines: forecast.into_iter().collect(),
            moments: self.moments(),
            bands: self.bands(),
            point: Some(Point {
                x: milliseconds(peak.time),
                y: mib(peak.bytes),
                label: format!("peak {:.2} MiB", mib(peak.bytes)),
            }),
        };
        panel.thinned()
    }

    /// Returns a vertical line for the end of each step.
    fn moments(&self) -> Vec<Moment> {
        let steps = self.marks.iter().filter_map(|mark| match &mark.event {
            MemoryEvent::Step { number } => Some((mark.time, *number)),
            _ => None,
        });
        let moment =
            |(time, number)| Moment { x: milliseconds(time), label: format!("step {number}") };
        steps.map(moment).collect()
    }

    /// Returns the forward and backward of units, each from its begin to the next mark.
    fn bands(&self) -> Vec<Band> {
        let ends = self.marks.iter().skip(1).map(|mark| mark.time).chain([self.duration]);
        let bands = self.marks.iter().zip(ends).filter_map(|(mark, end)| {
            let (kind, color, unit) = match &mark.event {
                MemoryEvent::Forward { unit } => ("forward", FORWARD, unit),
                MemoryEvent::Backward { unit } => ("backward", BACKWARD, unit),
                MemoryEvent::Step { .. } => return None,
            };
            let title = if unit.is_empty() { "the outermost unit" } else { unit };
            let (from, to) = (milliseconds(mark.time), milliseconds(end));
            Some(Band { kind: kind.into(), color, from, to, title: format!("{kind} {title}") })
        });
        let bands: Vec<Band> = bands.collect();
        if bands.len() <= MAX_BANDS { bands } else { merged(bands) }
    }
}

/// Joins neighbours of one pass.
fn merged(bands: Vec<Band>) -> Vec<Band> {
    let mut joined: Vec<Band> = Vec::new();
    for band in bands {
        match joined.last_mut() {
            Some(last) if last.kind == band.kind && last.to >= band.from => last.to = band.to,
            _ => joined.push(Band { title: band.kind.clone(), ..band }),
        }
    }
    joined
}

/// Converts a time to milliseconds.
pub(super) fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Breaks a text into lines.
fn wrapped(text: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let last = lines.last_mut().expect("there is a line");
        if !last.is_empty() && last.chars().count() + word.chars().count() >= NOTE_WIDTH {
            lines.push(format!("    {word}"));
        } else {
            *last = if last.is_empty() { word.to_string() } else { format!("{last} {word}") };
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::param_group::memory::{MemoryHandle, MemoryKind, MemoryTracker};

    fn timeline(offloaded: bool) -> MemoryTimeline {
        let tracker = std::sync::Arc::new(MemoryTracker::new(offloaded));
        tracker.take(MemoryKind::Shards, 3 << 20, 0);
        let handle = MemoryHandle::new(tracker.clone(), [String::new(), "a<b".into()].into_iter());
        handle.start_timeline(100);
        tracker.mark_forward(0);
        tracker.mark_forward(1);
        tracker.mark_backward(1);
        tracker.take(MemoryKind::Gradients, 2 << 20, 1);
        tracker.give_back(MemoryKind::Gradients, 2 << 20, 1);
        tracker.mark_step();
        handle.timeline().unwrap()
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
        let peak = timeline.device_peak();
        let panel = timeline.panel("device", &timeline.device(), &peak, Some(9 << 20));
        let labels: Vec<_> = panel.layers.iter().map(|layer| layer.label.as_str()).collect();
        assert_eq!(labels, ["shards", "gradients"]);
        let colors: Vec<_> = panel.layers.iter().map(|layer| layer.color).collect();
        assert_eq!(colors, [0, 4], "a kind has its own colour, whichever others there are");
        assert_eq!(panel.layers[0].heights, [3.0, 3.0, 3.0]);
        assert_eq!(panel.layers[1].heights, [0.0, 2.0, 0.0]);
        assert_eq!(panel.lines[0].y, 9.0);
        assert!(panel.x.is_sorted() && *panel.x.last().unwrap() <= panel.x_end);
        let point = panel.point.unwrap();
        assert_eq!((point.y, point.label.as_str()), (5.0, "peak 5.00 MiB"));
        let titles: Vec<_> = panel.bands.iter().map(|band| band.title.as_str()).collect();
        assert_eq!(titles, ["forward the outermost unit", "forward a<b", "backward a<b"]);
        assert!(panel.bands.windows(2).all(|pair| pair[0].to == pair[1].from));
        assert_eq!((panel.moments.len(), panel.moments[0].label.as_str()), (1, "step 1"));
    }

    #[test]
    fn the_largest_holders_are_named() {
        let svg = timeline(false).to_svg("title", None);
        for text in ["largest holders of the 5.00 MiB", "shards of the outermost unit, 3.00 MiB"] {
            assert!(svg.contains(text), "{text}: {svg}");
        }
        assert!(svg.contains("gradients of `a&lt;b`, 2.00 MiB"), "{svg}");
        let failure = Some("no memory ".repeat(40));
        let failed = MemoryTimeline { failure, ..timeline(false) };
        assert!(failed.notes()[0].starts_with("ended with an error: no memory"));
        assert!(failed.notes().iter().all(|note| note.chars().count() <= NOTE_WIDTH + 10));
    }

    #[test]
    fn host_memory_has_a_panel_of_its_own() {
        let svg = |offloaded| timeline(offloaded).to_svg("title", None);
        assert!(!svg(false).contains("memory on the host"));
        let offloaded = svg(true);
        assert!(offloaded.contains("memory on the host") && offloaded.contains("title"));
    }

    #[test]
    fn many_units_are_joined_by_pass() {
        let band = |kind: &str, at: f64| Band {
            kind: kind.into(),
            color: FORWARD,
            from: at,
            to: at + 1.0,
            title: "unit".into(),
        };
        let bands = vec![
            band("forward", 0.0),
            band("forward", 1.0),
            band("backward", 2.0),
            band("forward", 4.0),
            band("forward", 6.0),
        ];
        let spans: Vec<_> = merged(bands).iter().map(|band| (band.from, band.to)).collect();
        assert_eq!(spans, [(0.0, 2.0), (2.0, 3.0), (4.0, 5.0), (6.0, 7.0)]);
    }
}
