//! Marks in a panel: vertical lines, a strip below the x axis, a labelled point.

use super::frame::{Frame, INK, TEXT_SIZE};
use super::svg::{Anchor, Svg};

/// Most vertical lines that a panel draws.
const MAX_LINES: usize = 200;
/// Least distance between the middles of two labels, in pixels.
const LABEL_SPACE: f64 = 48.0;
/// Upper and lower edge of the strip below the x axis, in pixels.
const STRIP: (f64, f64) = (4.0, 13.0);
/// Space between two parts of the strip, in pixels, where they are wider than twice that.
const GAP: f64 = 1.0;
/// Colour of vertical lines.
const FAINT: &str = "#666666";

/// A vertical line.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Moment {
    pub(super) x: f64,
    pub(super) label: String,
}

/// A part of the strip below the x axis.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Band {
    /// What the band is an example of, in the legend.
    pub(super) kind: String,
    pub(super) color: &'static str,
    pub(super) from: f64,
    pub(super) to: f64,
    /// What the band is, under the mouse.
    pub(super) title: String,
}

/// A point with a label.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Point {
    pub(super) x: f64,
    pub(super) y: f64,
    pub(super) label: String,
}

impl Moment {
    /// Draws vertical lines with their labels above. Of many lines, every n-th is drawn, and a label where
    /// there is room.
    pub(super) fn draw_all(moments: &[Self], svg: &mut Svg, frame: &Frame) {
        let each = moments.len().div_ceil(MAX_LINES).max(1);
        let mut labelled = f64::NEG_INFINITY;
        for Self { x, label } in moments.iter().step_by(each) {
            let (x, _) = frame.place((*x, 0.0));
            svg.dashes(x, (frame.top, frame.bottom), FAINT);
            if x - labelled >= LABEL_SPACE {
                svg.text((x, frame.top - 4.0), Anchor::Middle, TEXT_SIZE - 2, label);
                labelled = x;
            }
        }
    }
}

impl Band {
    /// Draws the strip below the x axis.
    pub(super) fn draw_all(bands: &[Self], svg: &mut Svg, frame: &Frame) {
        let (top, bottom) = (frame.bottom + STRIP.0, frame.bottom + STRIP.1);
        for Self { color, from, to, title, .. } in bands {
            let ((left, _), (right, _)) = (frame.place((*from, 0.0)), frame.place((*to, 0.0)));
            let gap = if right - left > 2.0 * GAP { GAP } else { 0.0 };
            svg.bar((left, top), (right - gap, bottom), color, title);
        }
    }

    /// Returns the kinds of bands with their colours, each once.
    pub(super) fn kinds(bands: &[Self]) -> Vec<(&String, &'static str)> {
        let mut kinds: Vec<(&String, &'static str)> = Vec::new();
        for Self { kind, color, .. } in bands {
            if !kinds.iter().any(|(known, _)| *known == kind) {
                kinds.push((kind, color));
            }
        }
        kinds
    }
}

impl Point {
    /// Draws the point, with its label on the side where there is more room.
    pub(super) fn draw(&self, svg: &mut Svg, frame: &Frame) {
        let (x, y) = frame.place((self.x, self.y));
        svg.dot((x, y), INK);
        let is_left = self.x < frame.x_end / 2.0;
        let (anchor, shift) = if is_left { (Anchor::Start, 6.0) } else { (Anchor::End, -6.0) };
        svg.text((x + shift, y - 6.0), anchor, TEXT_SIZE, &self.label);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRAME: Frame =
        Frame { left: 0.0, right: 100.0, top: 10.0, bottom: 60.0, x_end: 10.0, y_end: 5.0 };

    #[test]
    fn many_lines_are_thinned_and_labels_do_not_overlap() {
        let drawn = |count: usize| {
            let moments: Vec<_> =
                (0..count).map(|at| Moment { x: at as f64, label: at.to_string() }).collect();
            let mut svg = Svg::new(1.0, 1.0);
            Moment::draw_all(&moments, &mut svg, &FRAME);
            let svg = svg.finish();
            (svg.matches("<line").count(), svg.matches("<text").count())
        };
        // A line each 10 pixels.
        assert_eq!((drawn(0), drawn(12)), ((0, 0), (12, 3)));
        assert_eq!(drawn(1000), (200, 200));
    }

    #[test]
    fn bands_lie_below_the_axis_and_kinds_are_named_once() {
        let band = |kind: &str, from: f64, to: f64| Band {
            kind: kind.into(),
            color: "#111111",
            from,
            to,
            title: format!("{kind} of `a`"),
        };
        let bands =
            [band("forward", 0.0, 2.0), band("backward", 2.0, 2.1), band("forward", 3.0, 4.0)];
        let kinds: Vec<_> = Band::kinds(&bands).iter().map(|(kind, _)| kind.as_str()).collect();
        assert_eq!(kinds, ["forward", "backward"]);
        let mut svg = Svg::new(1.0, 1.0);
        Band::draw_all(&bands, &mut svg, &FRAME);
        let svg = svg.finish();
        let first = "<rect x=\"0\" y=\"64\" width=\"19\" height=\"9\" fill=\"#111111\">";
        assert!(svg.contains(first) && svg.contains("<title>forward of `a`</title>"), "{svg}");
        assert!(svg.contains("width=\"1\""), "a narrow band has no gap: {svg}");
    }

    #[test]
    fn the_label_of_a_point_is_inside() {
        let draw = |x: f64| {
            let mut svg = Svg::new(1.0, 1.0);
            Point { x, y: 2.5, label: "peak".into() }.draw(&mut svg, &FRAME);
            svg.finish()
        };
        assert!(draw(1.0).contains("cx=\"10\" cy=\"35\"") && draw(1.0).contains("\"start\""));
        assert!(draw(9.0).contains("text-anchor=\"end\""));
    }
}
