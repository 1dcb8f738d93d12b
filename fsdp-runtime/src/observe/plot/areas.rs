//! A figure of stacked areas over time, for other rooms.

use super::chart::{Figure, Layer, Line, Panel};

/// Draws areas that are stacked on each other over time, as SVG.
///
/// `moments` are in milliseconds, and each layer has a label and its own height at each of them, in
/// GiB. `capacity` is a horizontal line.
pub(crate) fn stacked_areas(
    title: &str,
    moments: Vec<f64>,
    layers: Vec<(&str, Vec<f64>)>,
    capacity: f64,
) -> String {
    let layers = layers.into_iter().enumerate();
    let layers =
        layers.map(|(color, (label, heights))| Layer { label: label.into(), color, heights });
    let panel = Panel {
        x_label: "time (ms)".into(),
        y_label: "memory on the device (GiB)".into(),
        x_end: moments.last().copied().unwrap_or(0.0),
        x: moments,
        layers: layers.filter(|layer| layer.heights.iter().any(|y| *y > 0.0)).collect(),
        lines: vec![Line { label: "capacity".into(), y: capacity }],
        moments: Vec::new(),
        bands: Vec::new(),
        point: None,
    };
    Figure { title: title.into(), panels: vec![panel.thinned()], notes: Vec::new() }.to_svg()
}
