//! Codes of parameters that are stored in 8 or 4 bits: their values, and their records
//! ([`StorageType`](crate::StorageType)) as slices of words in host memory.
//!
//! Records are made on the host, when a parameter is stored. They are read by a kernel of each
//! backend ([`Kernels::decode`](crate::Kernels::decode)), and here where no device is
//! involved.
//!
//! The first scale of a record is that of its block, or of a group of scales. A record whose first
//! word is NaN has only NaN values.

mod decode;
mod encode;
mod stored_data;
mod tables;

#[cfg(feature = "flex")]
pub(super) use self::decode::scale;
pub use self::encode::encode;
pub use self::encode::needs_matrix;
pub use self::stored_data::{decoded_elements, stored_data, widened_elements, words_data};
#[cfg(feature = "cube")]
pub(super) use self::tables::DYNAMIC;
pub(super) use self::tables::{INT8_FACTOR, NF4};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StorageType;

    /// Returns the elements of a matrix. They and their products with the blocks' factors are exact.
    fn elements(numel: usize, block: usize) -> Vec<f32> {
        let element = |at: usize| {
            let number = ((at * 7919 + 12345) % 2003) as f32 - 1001.0;
            let factor = (at / block * 37 % 61 + 4) as f32 / 16.0;
            number / 1024.0 * factor
        };
        (0..numel).map(element).collect()
    }

    /// Returns the sum of the elements' bits, and their sum multiplied by positions.
    fn sums(elements: &[f32]) -> (u64, u64) {
        let mut sums = (0u64, 0u64);
        for (at, element) in elements.iter().enumerate() {
            let bits = u64::from(element.to_bits());
            sums.0 = sums.0.wrapping_add(bits);
            sums.1 = sums.1.wrapping_add(bits.wrapping_mul(at as u64 + 1));
        }
        sums
    }

    fn bytes_of(words: &[u32]) -> &[u8] {
        bytemuck::cast_slice(words)
    }

    /// The sums are those of the functions `quantize_4bit`, `dequantize_4bit`, `quantize_blockwise`,
    /// `dequantize_blockwise`, `int8_vectorwise_quant` and `int8_vectorwise_dequant` of bitsandbytes
    /// (`backends/default/ops.py`, commit 0155ecc), run by PyTorch 2.11 on the same elements. Under
    /// double quantisation `compress_statistics` is on; 8-bit rows are the blocks.
    #[test]
    fn values_are_those_of_bitsandbytes() {
        let plain = |block| StorageType::Nf4 { block, double_quant: false };
        let double = |block| StorageType::Nf4 { block, double_quant: true };
        for (storage, expected) in [
            (plain(64), (39_395_582_640_698, 379_902_992_068_757_541)),
            (double(64), (39_395_592_049_036, 379_903_039_692_298_010)),
            (StorageType::INT8, (40_999_543_006_330, 395_419_217_653_861_918)),
            (plain(256), (157_306_648_218_825, 6_062_522_287_877_314_046)),
            (double(256), (157_307_361_102_667, 6_062_547_120_379_659_540)),
            (StorageType::Int8 { block: 256 }, (163_848_252_950_789, 6_314_810_765_538_380_789)),
        ] {
            let numel = storage.block() * 301 + 21;
            let words = encode(&elements(numel, storage.block()), &(0..numel), storage);
            assert_eq!(words.len(), storage.stored_len(numel), "{storage}");
            let found = decoded_elements(bytes_of(&words), storage, numel);
            assert_eq!(sums(&found), expected, "{storage}");
        }
    }

    /// The bytes are those that bitsandbytes packs.
    #[test]
    fn records_are_scales_and_codes() {
        let elements = elements(64 * 301 + 21, 64);
        let range = 0..elements.len();
        let plain = StorageType::Nf4 { block: 64, double_quant: false };
        let words = encode(&elements, &range, plain);
        assert_eq!(f32::from_bits(words[0]), 0.243_164_06);
        assert_eq!(bytes_of(&words[1..3]), [17, 0, 255, 238, 220, 203, 169, 118]);
        assert_eq!(f32::from_bits(words[9]), 2.474_914_6);
        let words = encode(&elements, &range, StorageType::INT8);
        assert_eq!(bytes_of(&words[1..2]), [-86i8, -98, -110, -122].map(i8::cast_unsigned));
        let words = encode(&elements, &range, StorageType::NF4);
        assert_eq!(f32::from_bits(words[0]), 1.851_512_7);
        assert_eq!(bytes_of(&words[2..3]), [1, 199, 31, 230]);
        assert_eq!(bytes_of(&words[6..8]), [17, 0, 255, 238, 220, 203, 169, 118]);
    }

    #[test]
    fn the_codes_of_a_part_are_those_of_the_whole() {
        for storage in [StorageType::INT8, StorageType::NF4, StorageType::Int8 { block: 512 }] {
            let elements = elements(20 * 1024 + 77, storage.block());
            let whole = encode(&elements, &(0..elements.len()), storage);
            for range in [1024..5 * 1024, 20 * 1024..elements.len(), 0..1024] {
                let own = match needs_matrix(storage) {
                    true => &elements[..],
                    false => &elements[range.clone()],
                };
                let part = encode(own, &range, storage);
                assert_eq!(part, whole[storage.stored_range(&range)], "{storage}, {range:?}");
            }
        }
    }

    #[test]
    fn blocks_without_a_scale_are_zeros_and_those_with_nan_show_it() {
        let storage = StorageType::Nf4 { block: 64, double_quant: false };
        for storage in [storage, StorageType::INT8] {
            let mut elements = vec![0.0; 256];
            elements[70] = 1e-40;
            elements[130] = f32::NAN;
            elements[200] = f32::INFINITY;
            let words = encode(&elements, &(0..256), storage);
            let found = decoded_elements(bytes_of(&words), storage, 256);
            assert!(found[..128].iter().all(|it| *it == 0.0), "{storage}: {:?}", &found[..128]);
            assert!(found[128..192].iter().all(|it| it.is_nan()), "{storage}");
            assert!(found[192..].iter().all(|it| !it.is_finite()), "{storage}");
        }
    }
}
