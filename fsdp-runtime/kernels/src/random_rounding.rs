//! Rounding of f32 to bf16 at random, so that the mean of the results is the element.
//!
//! An element lies between two values of bf16, or is one. A *draw* of sixteen uniform random bits is
//! added to the sixteen bits that bf16 cuts off. The sum carries, and the result is the value further
//! from zero, with the probability `bits / 65,536`: the distance from the value nearer to zero, in
//! units of the last place. A value of bf16 is never changed.
//!
//! A block of the random generator has 128 bits and gives the draws of eight elements.

use crate::philox::LANES;

/// Number of elements whose draws come from `LANES` blocks of the generator.
///
/// The elements are ordered by the half of a word, then by the word, then by the block: element
/// `64 h + 16 w + l` has half `h` of word `w` of block `l`, the lower half first.
pub(super) const BATCH: usize = LANES * 8;

/// Key and counter of the random bits of a rounding, and the position of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RandomRounding {
    /// Key of the random generator (Philox4x32-7).
    pub key: [u32; 2],
    /// Upper half of the generator's 128-bit counter. The lower half counts blocks.
    pub counter: [u32; 2],
    /// Position of the tensor's first element in the parameter, or in the rank's part of it.
    pub first: usize,
    /// Which part of a parameter that is the positions are in; `None` if they are those of the whole parameter.
    pub part: Option<RoundedPart>,
}

/// A part of each of the rows of a parameter, which has a part of the columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoundedPart {
    /// Number of elements of a row of the part.
    pub len: usize,
    /// Number of parts of a row.
    pub parts: usize,
    /// Number of this part.
    pub part: usize,
}

impl RandomRounding {
    /// Returns the position of the tensor's element `at` in the whole parameter, which decides its draw, and how many
    /// elements from there on are neighbours in the parameter as in the tensor; `None` if all are.
    #[cfg_attr(not(feature = "flex"), allow(dead_code, reason = "CubeCL's kernel has the formula"))]
    pub(super) fn position(&self, at: usize) -> (usize, Option<usize>) {
        let at = self.first + at;
        match self.part {
            None => (at, None),
            Some(RoundedPart { len, parts, part }) => {
                let (row, column) = (at / len, at % len);
                ((row * parts + part) * len + column, Some(len - column))
            }
        }
    }
}
