//! Text of an SVG picture (<https://www.w3.org/TR/SVG11/>).

use std::fmt::Write;

/// A picture that is being drawn. A later shape covers those before it.
#[derive(Debug)]
pub(super) struct Svg(String);

/// Part of a text that lies at the given point.
#[derive(Clone, Copy, Debug)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

impl Svg {
    /// Starts a white picture of a size in pixels.
    pub(super) fn new(width: f64, height: f64) -> Self {
        let mut svg = Self(String::new());
        svg.push(format_args!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\">"
        ));
        svg.push(format_args!("<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>"));
        svg
    }

    /// Draws a filled polygon.
    pub(super) fn area(&mut self, corners: impl Iterator<Item = (f64, f64)>, color: &str) {
        let corners: Vec<String> = corners.map(|(x, y)| format!("{},{}", px(x), px(y))).collect();
        self.push(format_args!("<polygon fill=\"{color}\" points=\"{}\"/>", corners.join(" ")));
    }

    /// Draws a straight line of a width in pixels.
    pub(super) fn line(&mut self, from: (f64, f64), to: (f64, f64), color: &str, width: u32) {
        self.push(format_args!(
            "<line x1=\"{}\" y1=\"{}\" x2=\"{}\" y2=\"{}\" stroke=\"{color}\" stroke-width=\"{width}\"/>",
            px(from.0),
            px(from.1),
            px(to.0),
            px(to.1)
        ));
    }

    /// Draws a dashed vertical line, one pixel wide.
    pub(super) fn dashes(&mut self, x: f64, (top, bottom): (f64, f64), color: &str) {
        let (x, top, bottom) = (px(x), px(top), px(bottom));
        self.push(format_args!(
            "<line x1=\"{x}\" y1=\"{top}\" x2=\"{x}\" y2=\"{bottom}\" stroke=\"{color}\" \
             stroke-dasharray=\"4 3\"/>"
        ));
    }

    /// Draws a dot with a radius of 3 pixels.
    pub(super) fn dot(&mut self, (x, y): (f64, f64), color: &str) {
        let (x, y) = (px(x), px(y));
        self.push(format_args!("<circle cx=\"{x}\" cy=\"{y}\" r=\"3\" fill=\"{color}\"/>"));
    }

    /// Draws a filled rectangle from the upper left to the lower right corner. A browser shows `title`
    /// under the mouse.
    pub(super) fn bar(&mut self, from: (f64, f64), to: (f64, f64), color: &str, title: &str) {
        let (x, y) = (px(from.0), px(from.1));
        let (width, height) = (px(to.0 - from.0), px(to.1 - from.1));
        self.push(format_args!(
            "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"{color}\">\
             <title>{}</title></rect>",
            escaped(title)
        ));
    }

    /// Draws a line of text, whose letters are `size` pixels high. `at` is on its base line.
    pub(super) fn text(&mut self, at: (f64, f64), anchor: Anchor, size: u32, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let (x, y) = (px(at.0), px(at.1));
        self.push(format_args!(
            "<text x=\"{x}\" y=\"{y}\" font-size=\"{size}\" text-anchor=\"{anchor}\">{}</text>",
            escaped(text)
        ));
    }

    /// Ends the picture and returns its text.
    pub(super) fn finish(mut self) -> String {
        self.0.push_str("</svg>\n");
        self.0
    }

    fn push(&mut self, element: std::fmt::Arguments<'_>) {
        // Writing to a `String` cannot fail.
        let _ = writeln!(self.0, "{element}");
    }
}

/// Rounds to a tenth of a pixel, which keeps pictures small.
fn px(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

/// Replaces the characters that have a meaning in XML.
pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_elements_in_order() {
        let mut svg = Svg::new(20.0, 10.0);
        svg.area([(0.0, 1.0), (2.06, 3.0)].into_iter(), "#123456");
        svg.line((1.0, 2.0), (3.0, 4.0), "#000000", 2);
        svg.text((5.0, 6.0), Anchor::End, 12, "a < b & c");
        let expected = "\
<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"20\" height=\"10\" viewBox=\"0 0 20 10\" font-family=\"sans-serif\">
<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>
<polygon fill=\"#123456\" points=\"0,1 2.1,3\"/>
<line x1=\"1\" y1=\"2\" x2=\"3\" y2=\"4\" stroke=\"#000000\" stroke-width=\"2\"/>
<text x=\"5\" y=\"6\" font-size=\"12\" text-anchor=\"end\">a &lt; b &amp; c</text>
</svg>
";
        assert_eq!(svg.finish(), expected);
    }
}
