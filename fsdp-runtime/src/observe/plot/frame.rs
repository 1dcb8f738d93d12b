//! The axes of a panel, and what texts and lines look like.

/// Size of letters, in pixels.
pub(super) const TEXT_SIZE: u32 = 12;
/// Colour of lines and dots.
pub(super) const INK: &str = "#000000";

/// Position of a panel's axes in the figure, in pixels, and their ends, in the panel's units.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frame {
    pub(super) left: f64,
    pub(super) right: f64,
    pub(super) top: f64,
    pub(super) bottom: f64,
    pub(super) x_end: f64,
    pub(super) y_end: f64,
}

impl Frame {
    /// Converts a point in the panel's units to pixels of the figure.
    pub(super) fn place(&self, (x, y): (f64, f64)) -> (f64, f64) {
        let across = self.left + (self.right - self.left) * x / self.x_end;
        (across, self.bottom - (self.bottom - self.top) * y / self.y_end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_are_placed_from_the_lower_left() {
        let frame =
            Frame { left: 10.0, right: 110.0, top: 5.0, bottom: 55.0, x_end: 4.0, y_end: 2.0 };
        assert_eq!(frame.place((0.0, 0.0)), (10.0, 55.0));
        assert_eq!(frame.place((4.0, 2.0)), (110.0, 5.0));
        assert_eq!(frame.place((1.0, 0.5)), (35.0, 42.5));
    }
}
