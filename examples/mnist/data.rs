//! Embedded handwritten digits, and batches of them as tensors.
//!
//! `data/README.md` has the digits' origin, terms and format.

use anyhow::{Result, anyhow, ensure};
use burn::tensor::{Device, Int, Tensor, TensorData};
use miniz_oxide::inflate::decompress_to_vec_with_limit;

/// Compressed digits.
const FILE: &[u8] = include_bytes!("data/digits.gz");
/// Bytes of gzip's header without a file name (RFC 1952).
const GZIP_HEADER: usize = 10;
/// Bytes of gzip's checksum and length (RFC 1952).
const GZIP_TRAILER: usize = 8;
/// Rows of an image, and columns.
pub const SIDE: usize = 28;
/// Pixels of an image.
const PIXELS: usize = SIDE * SIDE;
/// Number of images for training. The images after them are for testing.
const TRAIN: usize = 4000;
/// Number of images for testing.
const TEST: usize = 1000;
/// Mean and standard deviation of MNIST's pixels, as in PyTorch's tutorial.
const PIXEL_MEAN: f32 = 0.1307;
const PIXEL_STD: f32 = 0.3081;

/// Image of a handwritten digit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Digit {
    /// Class: 0 to 9.
    pub label: u8,
    /// Pixels row by row, 0 for the background to 255 for ink.
    pub pixels: [u8; PIXELS],
}

/// Digits of one split. With the feature `train` it is a Burn `Dataset`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Digits(Vec<Digit>);

impl Digits {
    /// Returns the embedded digits: 4000 for training, and 1000 for testing.
    ///
    /// # Errors
    ///
    /// If the embedded file is damaged.
    pub fn embedded() -> Result<(Self, Self)> {
        let deflated = &FILE[GZIP_HEADER..FILE.len() - GZIP_TRAILER];
        let size = (TRAIN + TEST) * (1 + PIXELS);
        let records = decompress_to_vec_with_limit(deflated, size)
            .map_err(|error| anyhow!("the embedded digits are damaged: {error}"))?;
        ensure!(
            records.len() == size,
            "the embedded digits are damaged: {} bytes in place of {size}",
            records.len()
        );
        let (records, _) = records.as_chunks::<{ 1 + PIXELS }>();
        let mut digits: Vec<Digit> = records.iter().map(Digit::new).collect();
        let test = digits.split_off(TRAIN);
        Ok((Self(digits), Self(test)))
    }

    /// Returns the digits.
    pub fn as_slice(&self) -> &[Digit] {
        &self.0
    }
}

impl Digit {
    /// Reads a record: the label, then the pixels.
    fn new(record: &[u8; 1 + PIXELS]) -> Self {
        let mut pixels = [0; PIXELS];
        pixels.copy_from_slice(&record[1..]);
        Self { label: record[0], pixels }
    }
}

#[cfg(feature = "train")]
impl burn::data::dataset::Dataset<Digit> for Digits {
    fn get(&self, index: usize) -> Result<Digit, burn::data::dataset::DatasetError> {
        Ok(self.0[index].clone())
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

/// Images and their classes, as tensors.
#[derive(Clone, Debug)]
pub struct Batch {
    /// Pixels, `[images, 1, 28, 28]`, with MNIST's mean and standard deviation taken out.
    pub images: Tensor<4>,
    /// Classes, `[images]`.
    pub targets: Tensor<1, Int>,
}

impl Batch {
    /// Converts digits to tensors.
    pub fn new<'a>(digits: impl IntoIterator<Item = &'a Digit>, device: &Device) -> Self {
        let (mut pixels, mut labels) = (Vec::new(), Vec::new());
        for digit in digits {
            pixels.extend(digit.pixels.iter().map(|pixel| normalized(*pixel)));
            labels.push(i32::from(digit.label));
        }
        let count = labels.len();
        let images = TensorData::new(pixels, [count, 1, SIDE, SIDE]);
        Self {
            images: Tensor::from_data(images, device),
            targets: Tensor::from_data(TensorData::new(labels, [count]), device),
        }
    }
}

/// Scales a pixel as `ToTensor` and `Normalize((0.1307,), (0.3081,))` do in PyTorch.
fn normalized(pixel: u8) -> f32 {
    (f32::from(pixel) / 255.0 - PIXEL_MEAN) / PIXEL_STD
}

#[cfg(test)]
mod tests {
    use super::*;

    /// CRC-32 of gzip, bit by bit (RFC 1952, section 8).
    fn crc32(bytes: impl Iterator<Item = u8>) -> u32 {
        !bytes.fold(u32::MAX, |crc, byte| {
            (0..8).fold(crc ^ u32::from(byte), |crc, _| {
                if crc & 1 == 1 { (crc >> 1) ^ 0xedb8_8320 } else { crc >> 1 }
            })
        })
    }

    #[test]
    fn the_file_is_whole() {
        let (train, test) = Digits::embedded().unwrap();
        assert_eq!((train.as_slice().len(), test.as_slice().len()), (4000, 1000));
        let all = train.as_slice().iter().chain(test.as_slice());
        let crc = crc32(all.flat_map(|digit| [digit.label].into_iter().chain(digit.pixels)));
        assert_eq!(crc, 1_620_042_453);
        let trailer = FILE.len() - GZIP_TRAILER;
        assert_eq!(FILE[trailer..trailer + 4], crc.to_le_bytes());
    }

    #[test]
    fn every_class_has_as_many_digits_and_no_digit_is_twice() {
        let (train, test) = Digits::embedded().unwrap();
        for (digits, each) in [(&train, 400), (&test, 100)] {
            let mut counts = [0; 10];
            digits.as_slice().iter().for_each(|digit| counts[usize::from(digit.label)] += 1);
            assert_eq!(counts, [each; 10]);
        }
        let all = train.as_slice().iter().chain(test.as_slice());
        let distinct: std::collections::HashSet<_> = all.map(|digit| digit.pixels).collect();
        assert_eq!(distinct.len(), 5000);
    }

    #[test]
    fn a_batch_is_normalized() {
        let (train, _) = Digits::embedded().unwrap();
        let batch = Batch::new(train.as_slice(), &Device::flex());
        assert_eq!(batch.images.dims(), [4000, 1, SIDE, SIDE]);
        let labels: Vec<i32> = batch.targets.slice(0..12).into_data().try_into_vec_as().unwrap();
        assert_eq!(labels, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]);
        let mean = batch.images.clone().mean().into_scalar::<f32>();
        let square = batch.images.powf_scalar(2.0).mean().into_scalar::<f32>();
        assert!(mean.abs() < 0.01 && (square - 1.0).abs() < 0.01, "{mean} {square}");
    }
}
