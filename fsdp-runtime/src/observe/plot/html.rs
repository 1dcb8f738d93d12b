//! The page of a sharded model's memory over time: the picture, tables, and the values under the mouse.

use std::fmt::Write;

use serde_json::{Value, json};

use super::memory::{KINDS, milliseconds};
use super::svg::escaped;
use crate::param_group::memory::{Memory, MemoryForecast, MemoryPeak, MemoryTimeline};
use crate::param_group::mib::mib;

/// Number of holders in a table.
const LISTED_HOLDERS: usize = 20;
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

impl MemoryTimeline {
    /// Returns a page with the picture of [`to_svg`](Self::to_svg), the values at the position of the
    /// mouse, and tables of kinds and of the largest holders. Needs the feature `plot`.
    ///
    /// The page is one file, and uses no network.
    pub fn to_html(&self, title: &str, forecast: Option<&MemoryForecast>) -> String {
        let figure = self.figure(title, forecast, Vec::new());
        let frames = figure.frames().into_iter().map(|frame| {
            json!({
                "left": frame.left, "right": frame.right, "top": frame.top, "bottom": frame.bottom,
                "end": frame.x_end,
            })
        });
        let places = [self.device(), self.host()];
        let levels = places.iter().map(|levels| levels_of(levels));
        let data = json!({
            "kinds": KINDS,
            "frames": frames.collect::<Vec<_>>(),
            "levels": levels.collect::<Vec<_>>(),
        });
        // `</script>` in a text would end the element.
        let data = data.to_string().replace('<', "\\u003c");
        let (title, picture, tables) = (escaped(title), figure.to_svg(), self.tables(forecast));
        format!(
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n\
             <div id=\"picture\">\n{picture}<div id=\"values\" hidden></div>\n</div>\n{tables}\
             <script type=\"application/json\" id=\"data\">{data}</script>\n\
             <script>\n{SCRIPT}</script>\n</body>\n</html>\n"
        )
    }

    /// Returns the tables below the picture.
    fn tables(&self, forecast: Option<&MemoryForecast>) -> String {
        let mut page = String::new();
        if let Some(failure) = &self.failure {
            push(
                &mut page,
                format_args!("<p class=\"error\">Ended with an error: {}</p>", escaped(failure)),
            );
        }
        if self.dropped > 0 {
            push(
                &mut page,
                format_args!("<p>{} older changes had no room and are left out.</p>", self.dropped),
            );
        }
        let on_device = forecast.map(|forecast| forecast.kinds().collect());
        kinds(&mut page, "device", self.device_after, on_device);
        holders(&mut page, "device", &self.device_peak());
        if self.uses_host() {
            let on_host = forecast.map(|forecast| forecast.host.kinds().collect());
            kinds(&mut page, "host", self.host_after, on_host);
            holders(&mut page, "host", &self.host_peak());
        }
        page
    }
}

/// Returns the moments of one place in milliseconds, and the bytes of each kind.
fn levels_of(levels: &[(std::time::Duration, Memory)]) -> Vec<Value> {
    let row = |(time, memory): &(std::time::Duration, Memory)| {
        let bytes = KINDS.map(|kind| {
            memory.kinds().find(|(name, _)| *name == kind).map_or(0, |(_, usage)| usage.now)
        });
        json!([milliseconds(*time), bytes])
    };
    levels.iter().map(row).collect()
}

/// Adds the table of the kinds in one place, in MiB.
fn kinds(page: &mut String, place: &str, memory: Memory, forecast: Option<Vec<(&str, usize)>>) {
    push(page, format_args!("<h2>MiB on the {place}</h2>\n<table>"));
    let head = if forecast.is_some() { "<th>forecast, at most</th>" } else { "" };
    push(page, format_args!("<tr><th></th><th>at the end</th><th>peak</th>{head}</tr>"));
    for (name, usage) in memory.kinds() {
        let (now, peak) = (mib(usage.now), mib(usage.peak));
        let forecast = forecast.as_ref().map_or(String::new(), |kinds| {
            let bytes = kinds.iter().find(|(kind, _)| *kind == name).map_or(0, |(_, bytes)| *bytes);
            format!("<td>{:.2}</td>", mib(bytes))
        });
        push(
            page,
            format_args!("<tr><th>{name}</th><td>{now:.2}</td><td>{peak:.2}</td>{forecast}</tr>"),
        );
    }
    push(page, format_args!("</table>"));
}

/// Adds the table of the largest holders at a peak, in MiB.
fn holders(page: &mut String, place: &str, peak: &MemoryPeak) {
    let (bytes, time) = (mib(peak.bytes), milliseconds(peak.time));
    push(
        page,
        format_args!(
            "<h2>Largest holders of the {bytes:.2} MiB on the {place} at {time:.1} ms</h2>\n<table>"
        ),
    );
    for holder in peak.holders.iter().take(LISTED_HOLDERS) {
        let (name, bytes) = (escaped(&holder.name()), mib(holder.bytes));
        push(page, format_args!("<tr><th>{name}</th><td>{bytes:.2}</td></tr>"));
    }
    push(page, format_args!("</table>"));
}

fn push(page: &mut String, line: std::fmt::Arguments<'_>) {
    // Writing to a `String` cannot fail.
    let _ = writeln!(page, "{line}");
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::param_group::memory::{MemoryHandle, MemoryKind, MemoryTracker};

    #[test]
    fn the_page_is_one_file_and_escapes_what_it_is_given() {
        let tracker = Arc::new(MemoryTracker::new(false));
        let handle = MemoryHandle::new(tracker.clone(), ["</script><b>".to_string()].into_iter());
        handle.start_timeline(10);
        tracker.take(MemoryKind::Shards, 3 << 20, 0);
        let mut timeline = handle.timeline().unwrap();
        timeline.failure = Some("a & b".into());
        let page = timeline.to_html("</script>", None);
        assert_eq!(page.matches("</script>").count(), 2, "{page}");
        for text in ["shards of `&lt;/script&gt;&lt;b&gt;`", "a &amp; b", "<td>3.00</td>"] {
            assert!(page.contains(text), "{text}: {page}");
        }
        let namespace = "http://www.w3.org/2000/svg";
        assert!(!page.replace(namespace, "").contains("http"), "no address on the network");
        assert!(!page.contains(" src=") && !page.contains("<link"), "{page}");
    }
}
