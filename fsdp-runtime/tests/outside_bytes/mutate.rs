//! Changes of inputs at random.

use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};

/// Numbers at which readers of lengths and offsets go wrong.
const NUMBERS: [u64; 12] = [
    0,
    1,
    7,
    0x7f,
    0xff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    u64::MAX - 1,
    u64::MAX,
];

/// The source of changed inputs, which depends on its seed alone.
pub struct Mutator {
    random: StdRng,
    inputs: Vec<Vec<u8>>,
    words: &'static [&'static [u8]],
}

impl Mutator {
    pub fn new(seed: u64, inputs: Vec<Vec<u8>>, words: &'static [&'static [u8]]) -> Self {
        Self { random: StdRng::seed_from_u64(seed), inputs, words }
    }

    /// Returns input number `at`: the seeds as they are, then changes of them.
    pub fn next(&mut self, at: u64, largest: usize) -> Vec<u8> {
        if let Some(seed) = usize::try_from(at).ok().and_then(|at| self.inputs.get(at)) {
            return seed.clone();
        }
        let mut input = self.inputs.choose(&mut self.random).expect("a seed").clone();
        // Few changes leave most of the input valid, so that they reach deep into the reader.
        for _ in 0..1 << self.random.random_range(0..4) {
            self.change(&mut input);
        }
        input.truncate(largest);
        input
    }

    /// Changes an input once.
    fn change(&mut self, input: &mut Vec<u8>) {
        let random = &mut self.random;
        let at = random.random_range(0..=input.len());
        let length = random.random_range(0..=(input.len() - at).min(32));
        match random.random_range(0..9) {
            0 => {
                if let Some(byte) = input.get_mut(at) {
                    *byte ^= 1 << random.random_range(0..8);
                }
            }
            1 => {
                if let Some(byte) = input.get_mut(at) {
                    *byte = random.random();
                }
            }
            2 => drop(input.drain(at..at + length)),
            3 => {
                let part = input[at..at + length].to_vec();
                let to = random.random_range(0..=input.len());
                input.splice(to..to, part);
            }
            4 => {
                // A number in binary, in the place of another.
                let width = [1, 2, 4, 8][random.random_range(0..4)];
                let number = NUMBERS.choose(random).expect("a number").to_le_bytes();
                let end = (at + width).min(input.len());
                input.splice(at..end, number[..width].iter().copied());
            }
            5 => {
                // A number in decimal, in the place of another.
                let digits = |byte: &u8| byte.is_ascii_digit();
                let Some(start) = input.iter().skip(at).position(digits) else { return };
                let start = at + start;
                let length = input[start..].iter().take_while(|byte| digits(byte)).count();
                let number = NUMBERS.choose(random).expect("a number").to_string();
                input.splice(start..start + length, number.into_bytes());
            }
            6 => {
                if let Some(word) = self.words.choose(random) {
                    input.splice(at..at, word.iter().copied());
                }
            }
            7 => {
                // The end of another seed.
                let other = self.inputs.choose(random).expect("a seed");
                let from = random.random_range(0..=other.len());
                input.truncate(at);
                input.extend_from_slice(&other[from..]);
            }
            _ => input.truncate(at.max(input.len() / 2)),
        }
    }
}
