//! Figures of stacked areas and lines over time, with axes and a legend.

use super::frame::{Frame, INK, TEXT_SIZE};
use super::marks::{Band, Moment, Point};
use super::svg::{Anchor, Svg};

/// Width of a figure, and height of each of its panels, in pixels.
const WIDTH: f64 = 800.0;
const PANEL_HEIGHT: f64 = 340.0;
/// Height of a figure's title, in pixels.
const TITLE_HEIGHT: f64 = 32.0;
/// Space around the axes of a panel, in pixels.
const MARGIN: Margin = Margin { left: 56.0, top: 40.0, bottom: 58.0 };
/// Width of a panel's legend, in pixels.
const LEGEND_WIDTH: f64 = 130.0;
/// Height of a legend's line, in pixels.
const LEGEND_LINE: f64 = 20.0;
/// Height of a line of notes, in pixels.
const NOTE_LINE: f64 = 18.0;
/// Size of the title's letters, in pixels.
const TITLE_SIZE: u32 = 16;
/// Colour of the grid.
const GRID: &str = "#dddddd";
/// Most moments that a panel draws; the others are left out.
const MAX_MOMENTS: usize = 600;
/// Number of intervals on an axis, at most.
const MAX_INTERVALS: f64 = 6.0;
/// Height of a panel's y axis, as a multiple of the highest point.
const HEADROOM: f64 = 1.1;
/// Colours of layers: Okabe and Ito's, which most readers with a
/// colour vision deficiency tell apart.
const COLORS: [&str; 7] =
    ["#0072b2", "#56b4e9", "#009e73", "#f0e442", "#e69f00", "#d55e00", "#cc79a7"];

struct Margin {
    left: f64,
    top: f64,
    bottom: f64,
}

/// A title, panels one below the other, and lines of text below them.
#[derive(Clone, Debug)]
pub(super) struct Figure {
    pub(super) title: String,
    pub(super) panels: Vec<Panel>,
    pub(super) notes: Vec<String>,
}

/// Axes with stacked areas and lines, drawn as steps: a height is constant from its moment to the
/// next one.
#[derive(Clone, Debug)]
pub(super) struct Panel {
    pub(super) x_label: String,
    pub(super) y_label: String,
    /// Moments, in ascending order.
    pub(super) x: Vec<f64>,
    /// Right end of the x axis, at or after the last moment.
    pub(super) x_end: f64,
    /// Areas from the bottom up.
    pub(super) layers: Vec<Layer>,
    pub(super) lines: Vec<Line>,
    /// Vertical lines, in ascending order.
    pub(super) moments: Vec<Moment>,
    /// Parts of the strip below the x axis.
    pub(super) bands: Vec<Band>,
    /// A point with a label.
    pub(super) point: Option<Point>,
}

/// An area of a [`Panel`].
#[derive(Clone, Debug)]
pub(super) struct Layer {
    pub(super) label: String,
    /// Colour, as an index. Layers of one meaning have the same one in every panel.
    pub(super) color: usize,
    /// Height of the area itself at each moment of the panel.
    pub(super) heights: Vec<f64>,
}

/// A horizontal line of a [`Panel`].
#[derive(Clone, Debug)]
pub(super) struct Line {
    pub(super) label: String,
    pub(super) y: f64,
}

impl Figure {
    /// Draws the figure as SVG.
    pub(super) fn to_svg(&self) -> String {
        let below = TITLE_HEIGHT + PANEL_HEIGHT * self.panels.len() as f64;
        let of_notes = match self.notes.len() {
            0 => 0.0,
            lines => NOTE_LINE * (lines as f64 + 0.5),
        };
        let mut svg = Svg::new(WIDTH, below + of_notes);
        svg.text((MARGIN.left, TITLE_HEIGHT - 8.0), Anchor::Start, TITLE_SIZE, &self.title);
        for (index, panel) in self.panels.iter().enumerate() {
            panel.draw(&mut svg, TITLE_HEIGHT + PANEL_HEIGHT * index as f64);
        }
        for (index, note) in self.notes.iter().enumerate() {
            let at = (MARGIN.left, below + NOTE_LINE * (index as f64 + 0.75));
            svg.text(at, Anchor::Start, TEXT_SIZE, note);
        }
        svg.finish()
    }

    /// Returns the axes of each panel, in pixels of the figure.
    pub(super) fn frames(&self) -> Vec<Frame> {
        let tops = (0..).map(|index| TITLE_HEIGHT + PANEL_HEIGHT * f64::from(index));
        self.panels.iter().zip(tops).map(|(panel, top)| panel.frame(top, &panel.tops())).collect()
    }
}

impl Panel {
    /// Draws the panel below `top`.
    fn draw(&self, svg: &mut Svg, top: f64) {
        let tops = self.tops();
        let frame = self.frame(top, &tops);
        self.draw_grid(svg, &frame);
        // A layer covers the areas above it down to the axis, so the uppermost comes first.
        for (layer, tops) in self.layers.iter().zip(&tops).rev() {
            let outline = steps(&self.x, tops, frame.x_end);
            let ends = outline.last().into_iter().chain(outline.first());
            let floor: Vec<_> = ends.map(|(x, _)| (*x, 0.0)).collect();
            svg.area(outline.iter().chain(&floor).map(|corner| frame.place(*corner)), color(layer));
        }
        for line in &self.lines {
            svg.line(frame.place((0.0, line.y)), frame.place((frame.x_end, line.y)), INK, 2);
        }
        self.draw_axes(svg, &frame);
        Moment::draw_all(&self.moments, svg, &frame);
        Band::draw_all(&self.bands, svg, &frame);
        if let Some(point) = &self.point {
            point.draw(svg, &frame);
        }
        self.draw_legend(svg, &frame);
    }

    /// Returns the axes of the panel below `top`, whose layers have these upper edges.
    fn frame(&self, top: f64, tops: &[Vec<f64>]) -> Frame {
        let heights = tops.iter().flatten().copied().chain(self.lines.iter().map(|line| line.y));
        let highest = heights.fold(0.0, f64::max);
        Frame {
            left: MARGIN.left,
            right: WIDTH - LEGEND_WIDTH,
            top: top + MARGIN.top,
            bottom: top + PANEL_HEIGHT - MARGIN.bottom,
            x_end: if self.x_end > 0.0 { self.x_end } else { 1.0 },
            y_end: if highest > 0.0 { highest * HEADROOM } else { 1.0 },
        }
    }

    /// Draws a horizontal line at each tick of the y axis.
    fn draw_grid(&self, svg: &mut Svg, frame: &Frame) {
        for y in ticks(frame.y_end).skip(1) {
            svg.line(frame.place((0.0, y)), frame.place((frame.x_end, y)), GRID, 1);
        }
    }

    /// Draws both axes with ticks, numbers and labels.
    fn draw_axes(&self, svg: &mut Svg, frame: &Frame) {
        svg.line((frame.left, frame.top), (frame.left, frame.bottom), INK, 1);
        svg.line((frame.left, frame.bottom), (frame.right, frame.bottom), INK, 1);
        for y in ticks(frame.y_end) {
            let (left, at) = frame.place((0.0, y));
            svg.text((left - 6.0, at + 4.0), Anchor::End, TEXT_SIZE, &number(y));
        }
        for x in ticks(frame.x_end) {
            let (at, bottom) = frame.place((x, 0.0));
            svg.line((at, bottom), (at, bottom + 4.0), INK, 1);
            svg.text((at, bottom + 28.0), Anchor::Middle, TEXT_SIZE, &number(x));
        }
        let middle = (frame.left + frame.right) / 2.0;
        svg.text((middle, frame.bottom + 46.0), Anchor::Middle, TEXT_SIZE, &self.x_label);
        svg.text((frame.left, frame.top - 20.0), Anchor::Start, TEXT_SIZE, &self.y_label);
    }

    /// Draws the legend in the order of the areas, the uppermost first, then the lines, and the kinds of
    /// bands.
    fn draw_legend(&self, svg: &mut Svg, frame: &Frame) {
        let left = frame.right + 16.0;
        let rows = (0..).map(|row| frame.top + LEGEND_LINE * f64::from(row));
        let layers = self.layers.iter().rev().map(|layer| (&layer.label, Some(color(layer))));
        let lines = self.lines.iter().map(|line| (&line.label, None));
        let bands = Band::kinds(&self.bands).into_iter();
        let bands = bands.map(|(label, color)| (label, Some(color)));
        for (top, (label, color)) in rows.zip(layers.chain(lines).chain(bands)) {
            let (right, bottom) = (left + 12.0, top + 12.0);
            match color {
                Some(color) => {
                    let corners = [(left, top), (right, top), (right, bottom), (left, bottom)];
                    svg.area(corners.into_iter(), color);
                }
                None => svg.line((left, top + 6.0), (right, top + 6.0), INK, 2),
            }
            svg.text((right + 6.0, bottom - 1.0), Anchor::Start, TEXT_SIZE, label);
        }
    }

    /// Returns the upper edge of each layer at each moment: its height and those of the layers
    /// below.
    fn tops(&self) -> Vec<Vec<f64>> {
        let mut below = vec![0.0; self.x.len()];
        let stacked = self.layers.iter().map(|layer| {
            below.iter_mut().zip(&layer.heights).for_each(|(top, height)| *top += height);
            below.clone()
        });
        stacked.collect()
    }

    /// Leaves out moments beyond [`MAX_MOMENTS`]: of neighbouring moments, the one with the highest
    /// total stays, so that peaks stay in the picture.
    pub(super) fn thinned(mut self) -> Self {
        let each = self.x.len().div_ceil(MAX_MOMENTS);
        if each < 2 {
            return self;
        }
        let tops = self.tops();
        let total = |at: usize| tops.last().map_or(0.0, |tops| tops[at]);
        let moments: Vec<usize> = (0..self.x.len()).collect();
        let highest = |part: &[usize]| {
            part.iter().copied().max_by(|a, b| total(*a).total_cmp(&total(*b))).unwrap_or(part[0])
        };
        let kept: Vec<usize> = moments.chunks(each).map(highest).collect();
        let keep = |values: &[f64]| kept.iter().map(|at| values[*at]).collect();
        for layer in &mut self.layers {
            layer.heights = keep(&layer.heights);
        }
        self.x = keep(&self.x);
        self
    }
}

/// Returns the corners of a step function, which holds each value until the next moment.
fn steps(x: &[f64], y: &[f64], x_end: f64) -> Vec<(f64, f64)> {
    let mut corners: Vec<(f64, f64)> = Vec::new();
    for (x, y) in x.iter().zip(y) {
        match corners.last() {
            Some((_, before)) if before == y => continue,
            Some((_, before)) => corners.push((*x, *before)),
            None => {}
        }
        corners.push((*x, *y));
    }
    if let Some((_, last)) = corners.last() {
        corners.push((x_end, *last));
    }
    corners
}

/// Returns the colour of a layer.
fn color(layer: &Layer) -> &'static str {
    COLORS[layer.color % COLORS.len()]
}

/// Returns round numbers from 0 to `end`: multiples of 1, 2 or 5 times a power of ten.
fn ticks(end: f64) -> impl Iterator<Item = f64> {
    let least = end / MAX_INTERVALS;
    let power = 10f64.powf(least.log10().floor());
    let step = [1.0, 2.0, 5.0].map(|factor| factor * power).into_iter().find(|step| *step >= least);
    let step = step.unwrap_or(10.0 * power);
    let count = (end / step).floor() as u32;
    (0..=count).map(move |at| f64::from(at) * step)
}

/// Formats a tick's number, without the digits that rounding left behind.
fn number(value: f64) -> String {
    let text = format!("{value:.6}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(label: &str, heights: &[f64]) -> Layer {
        Layer { label: label.into(), color: label.len(), heights: heights.to_vec() }
    }

    fn panel(x: &[f64], layers: Vec<Layer>) -> Panel {
        Panel {
            x_label: "time".into(),
            y_label: "MiB".into(),
            x: x.to_vec(),
            x_end: 10.0,
            layers,
            lines: vec![Line { label: "forecast".into(), y: 8.0 }],
            moments: Vec::new(),
            bands: Vec::new(),
            point: None,
        }
    }

    #[test]
    fn ticks_are_round_numbers_up_to_the_end() {
        assert_eq!(ticks(10.0).collect::<Vec<_>>(), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(ticks(0.45).map(number).collect::<Vec<_>>(), ["0", "0.1", "0.2", "0.3", "0.4"]);
        assert_eq!(
            ticks(2999.0).map(number).collect::<Vec<_>>().join(" "),
            "0 500 1000 1500 2000 2500"
        );
    }

    #[test]
    fn a_figure_has_an_area_for_each_layer_and_every_text() {
        let layers = vec![layer("lower", &[1.0, 2.0, 2.0]), layer("upper", &[3.0, 0.0, 5.0])];
        let panel = panel(&[0.0, 4.0, 6.0], layers);
        let figure = Figure {
            title: "a < b".into(),
            panels: vec![panel.clone(), panel],
            notes: vec!["a note".into()],
        };
        let svg = figure.to_svg();
        // In each panel an area for each layer, and as many in the legend.
        assert_eq!(svg.matches("<polygon").count(), 2 * (2 + 2));
        for text in ["a &lt; b", "a note", "lower", "upper", "forecast", "time", "MiB"] {
            assert!(svg.contains(text), "{text}: {svg}");
        }
        assert_eq!(svg.matches("<svg").count(), 1);
        assert!(svg.trim_end().ends_with("</svg>"));
        assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
    }

    #[test]
    fn layers_lie_on_top_of_each_other() {
        let layers = vec![layer("lower", &[1.0, 2.0]), layer("upper", &[3.0, 0.5])];
        assert_eq!(panel(&[0.0, 1.0], layers).tops(), [[1.0, 2.0], [4.0, 2.5]]);
    }

    #[test]
    fn a_value_holds_until_the_next_moment() {
        let corners = steps(&[0.0, 2.0, 3.0, 5.0], &[1.0, 1.0, 4.0, 0.0], 7.0);
        let expected = [(0.0, 1.0), (3.0, 1.0), (3.0, 4.0), (5.0, 4.0), (5.0, 0.0), (7.0, 0.0)];
        assert_eq!(corners, expected);
        assert_eq!(steps(&[], &[], 7.0), []);
    }

    #[test]
    fn thinning_keeps_the_peak() {
        let count = 5 * MAX_MOMENTS + 1;
        let x: Vec<f64> = (0..count).map(|at| at as f64).collect();
        let mut heights = vec![1.0; count];
        heights[777] = 50.0;
        let thinned = panel(&x, vec![layer("only", &heights)]).thinned();
        assert!(thinned.x.len() <= MAX_MOMENTS && thinned.x.is_sorted());
        assert_eq!(thinned.x.len(), thinned.layers[0].heights.len());
        let peak = thinned.layers[0].heights.iter().position(|height| *height == 50.0).unwrap();
        assert_eq!(thinned.x[peak], 777.0);
    }

    #[test]
    fn an_empty_panel_is_drawn() {
        let panel = Panel { x_end: 0.0, lines: Vec::new(), ..panel(&[], Vec::new()) };
        let figure = Figure { title: String::new(), panels: vec![panel], notes: Vec::new() };
        let svg = figure.to_svg();
        assert!(svg.contains("<svg") && !svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }
}
