//! Checks of collectives on codes of 8 and 4 bits.

use super::*;
use fsdp_kernels::codes;

use crate::backend::encoded;
use crate::layout::{MatrixForm, StorageType};

/// All-gathers matrices in codes, and decodes them into a gather buffer.
pub(super) fn all_gather_codes<B: Tested>(group: &AnyProcessGroup) {
    let plain = StorageType::Nf4 { block: 64, double_quant: false };
    let world = WorldSize::new(group.size()).unwrap();
    let rank = world.ranks().nth(index(group)).unwrap();
    for storage in [StorageType::INT8, StorageType::NF4, plain] {
        let numels = [7919, 5, 100_003];
        let form = MatrixForm { dtype: DType::F32, storage, codes: None, record: 1 };
        let layout = UnitLayout::stored_as(numels.map(|numel| (form, numel)), world);
        let [FlatRange { layout: flat, .. }] = layout.ranges() else { panic!("one type") };
        let words = storage.stored_len(flat.padded_len());
        let [received, target] = [words, flat.padded_len()].map(buffer::<B>);
        let shard = |matrix: usize| {
            let range = layout.shard_of(matrix, rank);
            let full = tensor::<B>(values(matrix, 0..numels[matrix]));
            let at = storage.stored_len(layout.segment(matrix).start + range.start);
            let shape = Shape::from([storage.stored_len(range.len())]);
            let is_held = !range.is_empty();
            is_held.then(|| (at, encoded::<B>(full, range, storage, shape, &B::device())))
        };
        let shards = (0..numels.len()).filter_map(shard).collect();
        received.release();
        target.release();
        let op = op("all_gather", "codes").of(words);
        group.all_gather(&op, &B::device(), shards, words / group.size(), &received).unwrap();
        target.decode(received.view(0, &[words]), storage);
        for (matrix, &numel) in numels.iter().enumerate() {
            let full = target.view(layout.segment(matrix).start, &[numel]);
            assert!(elements::<B>(&full) == decoded(matrix, numel, storage), "{storage}: {numel}");
        }
    }
}

/// Returns a matrix that has been encoded and decoded on the host.
fn decoded(matrix: usize, numel: usize, storage: StorageType) -> Vec<f32> {
    let codes = codes::encode(&values(matrix, 0..numel), &(0..numel), storage);
    codes::decoded_elements(bytemuck::cast_slice(&codes), storage, numel)
}

/// Gathers the codes of a part of a gradient with every rank as the receiver once, as reductions in
/// codes do.
pub(super) fn gather_codes<B: Tested>(group: &AnyProcessGroup) {
    let (at, storage) = (index(group), StorageType::INT8);
    for to in 0..group.size() {
        let range = to * 640..to * 640 + 600;
        let full = tensor::<B>(values(at, 0..group.size() * 640));
        let shape = Shape::from([storage.stored_len(range.len())]);
        let mine = encoded::<B>(full, range.clone(), storage, shape, &B::device());
        let op = op("gather", "codes");
        let all = on::<B>(group).gather(&op, &B::device(), to, Some(mine)).unwrap();
        assert_eq!(all.len(), if at == to { group.size() } else { 0 });
        for (rank, codes) in all.into_iter().enumerate() {
            let shape = Shape::from([range.len()]);
            let found = B::decode(codes.unwrap(), storage, shape, DType::F32);
            let part = values(rank, range.clone());
            let codes = codes::encode(&part, &(0..part.len()), storage);
            let codes = bytemuck::cast_slice(&codes);
            let expected = codes::decoded_elements(codes, storage, part.len());
            assert!(elements::<B>(&found) == expected, "rank {rank} to rank {to}");
        }
    }
}
