//! Rotary position encoding: its rule and its tensors.

/// Which elements of a row are pairs, and by which angles they are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RotaryRule {
    /// Whether pair `i` consists of elements `2i` and `2i + 1`. Otherwise it consists of elements `i` and
    /// `i + width / 2`.
    pub interleaved: bool,
    /// Position of the first row of each head, without a tensor of positions.
    pub start: usize,
    /// Whether angles are negative, as in the gradient.
    pub inverse: bool,
}

/// Tensors of a rotary position encoding.
#[derive(Clone, Debug)]
pub struct RotaryTensors<T> {
    /// Rows to be rotated, `[batch, heads, length, width]`, with at least one element.
    pub input: T,
    /// Cosines, then sines, of the angles of each position, `[positions, width]`, in f32.
    pub table: T,
    /// Position of each row, `[batch, length]`, in f32. Without it, row `i` of a head has position
    /// `start + i`.
    pub positions: Option<T>,
}

impl<T> RotaryTensors<T> {
    /// Returns the input, the table and, if there are any, the positions.
    pub fn into_vec(self) -> Vec<T> {
        [self.input, self.table].into_iter().chain(self.positions).collect()
    }

    /// Returns the tensors that [`into_vec`](Self::into_vec) returned, or `None` for fewer than two.
    pub fn from_vec(tensors: Vec<T>) -> Option<Self> {
        let mut tensors = tensors.into_iter();
        let (input, table) = (tensors.next()?, tensors.next()?);
        Some(Self { input, table, positions: tensors.next() })
    }
}
