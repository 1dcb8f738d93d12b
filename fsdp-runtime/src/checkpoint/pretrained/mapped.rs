//! Tensors in memory-mapped files: a tensor's elements lie in one or several rectangular blocks.

use std::borrow::Cow;
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::slice::from_ref;
use std::sync::Arc;

use memmap2::Mmap;
use safetensors::Dtype;

use crate::error::LoadError;

/// A memory-mapped file. Clones share the map.
#[derive(Clone, Debug)]
pub(super) struct MappedFile(Arc<Contents>);

/// The bytes of a file.
#[derive(Debug)]
enum Contents {
    Map(Mmap),
    /// Bytes that come from no file, for the harness that feeds readers with random bytes.
    Memory(Vec<u8>),
}

impl MappedFile {
    /// Maps the file at `path`.
    pub(super) fn open(path: &Path) -> Result<Self, LoadError> {
        let io = |error: std::io::Error| LoadError::Io {
            file: path.display().to_string(),
            reason: error.to_string(),
        };
        let file = File::open(path).map_err(io)?;
        // SAFETY: the map is only read. The user must not truncate the file while it is loaded, as
        // with every memory-mapped reader.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Ok(Self(Arc::new(Contents::Map(map))))
    }

    /// Returns `bytes` in the place of a file.
    pub(super) fn in_memory(bytes: Vec<u8>) -> Self {
        Self(Arc::new(Contents::Memory(bytes)))
    }

    /// Returns the memory pages of a byte range to the system, so that pages already read do not
    /// add up.
    fn release(&self, range: &Range<usize>) {
        #[cfg(unix)]
        if let Contents::Map(map) = &*self.0 {
            // SAFETY: the map is shared and read-only, so that a page that was dropped is read from
            // the file again with equal bytes. A failure only costs memory.
            let _ = unsafe {
                let advice = memmap2::UncheckedAdvice::DontNeed;
                map.unchecked_advise_range(advice, range.start, range.len())
            };
        }
        #[cfg(not(unix))]
        let _ = range;
    }
}

impl AsRef<[u8]> for MappedFile {
    fn as_ref(&self) -> &[u8] {
        match &*self.0 {
            Contents::Map(map) => map,
            Contents::Memory(bytes) => bytes,
        }
    }
}

/// A rectangular part of a tensor, in one file.
#[derive(Clone, Debug)]
struct Block {
    file: MappedFile,
    /// Position of the part in the tensor, one index per dimension.
    offsets: Vec<usize>,
    /// Shape of the part.
    sizes: Vec<usize>,
    /// Distances of neighbours in each dimension, in elements.
    strides: Vec<usize>,
    /// Range of the file's bytes from the first element to the end of the last one.
    range: Range<usize>,
}

/// A tensor in memory-mapped files.
///
/// The blocks are disjoint, and together hold every element: constructors check this.
#[derive(Clone, Debug)]
pub(super) struct MappedTensor {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    blocks: Vec<Block>,
}

/// Elements of a tensor at equal distances.
#[derive(Debug)]
pub(super) struct Run<'a> {
    /// Bytes from the first element to the end of the last one.
    pub(super) bytes: &'a [u8],
    /// Distance of two elements in bytes.
    pub(super) step: usize,
    /// Number of elements.
    pub(super) count: usize,
}

impl MappedTensor {
    /// Returns a tensor whose elements lie in row-major order in `range` of a file; `None` if the
    /// range has another size than the tensor, or does not lie in the file.
    pub(super) fn contiguous(
        file: &MappedFile,
        dtype: Dtype,
        shape: Vec<usize>,
        range: Range<usize>,
    ) -> Option<Self> {
        let bits = elements(&shape)?.checked_mul(dtype.bitsize())?;
        file.as_ref().get(range.clone())?;
        if range.len().checked_mul(8)? != bits {
            return None;
        }
        let strides = row_major(&shape);
        let offsets = vec![0; shape.len()];
        let block = Block { file: file.clone(), offsets, sizes: shape.clone(), strides, range };
        Some(Self { dtype, shape, blocks: vec![block] })
    }

    /// Returns a tensor with the shape of one in a file, whose elements no one may read.
    pub(super) fn unreadable(shape: Vec<usize>) -> Self {
        Self { dtype: Dtype::U8, shape, blocks: Vec::new() }
    }

    /// Returns a strided view of `storage`, a range of the file's bytes. `offset` is in elements.
    ///
    /// # Errors
    ///
    /// A description of the fault, where the view does not lie in the storage, or repeats its
    /// elements so that the tensor is larger than the storage.
    pub(super) fn strided(
        file: &MappedFile,
        dtype: Dtype,
        storage: &Range<usize>,
        offset: usize,
        shape: Vec<usize>,
        strides: Vec<usize>,
    ) -> Result<Self, String> {
        if strides.len() != shape.len() {
            return Err(format!("{} strides for {} dimensions", strides.len(), shape.len()));
        }
        let size = dtype.bitsize() / 8;
        let outside = || format!("a view of shape {shape:?} exceeds its storage of {storage:?}");
        let reach = |elements: usize| {
            let start = offset.checked_mul(size)?.checked_add(storage.start)?;
            let end = elements.checked_mul(size)?.checked_add(start)?;
            (end <= storage.end && storage.end <= file.as_ref().len()).then_some(start..end)
        };
        let count = elements(&shape).filter(|&count| count <= storage.len() / size);
        let count = count.ok_or_else(outside)?;
        let last = shape.iter().zip(&strides).try_fold(0usize, |last, (&length, &stride)| {
            last.checked_add(length.saturating_sub(1).checked_mul(stride)?)
        });
        let span = if count == 0 { Some(0) } else { last.and_then(|last| last.checked_add(1)) };
        let range = span.and_then(reach).ok_or_else(outside)?;
        let offsets = vec![0; shape.len()];
        let block = Block { file: file.clone(), offsets, sizes: shape.clone(), strides, range };
        Ok(Self { dtype, shape, blocks: vec![block] })
    }

    /// Returns a tensor of several parts, each with its position.
    ///
    /// # Errors
    ///
    /// A description of the fault, where the parts have other dtypes or do not make up the tensor.
    pub(super) fn assembled(
        dtype: Dtype,
        shape: Vec<usize>,
        parts: Vec<(Vec<usize>, MappedTensor)>,
    ) -> Result<Self, String> {
        let mut blocks: Vec<Block> = Vec::with_capacity(parts.len());
        let mut held = 0usize;
        for (offsets, part) in parts {
            let inside = offsets.len() == shape.len()
                && part.shape.len() == shape.len()
                && offsets.iter().zip(&part.shape).zip(&shape).all(
                    |((&offset, &size), &length)| {
                        offset.checked_add(size).is_some_and(|end| end <= length)
                    },
                );
            if !inside || part.dtype != dtype {
                return Err(format!(
                    "a part of shape {:?} and dtype {:?} at {offsets:?} is none of a tensor of \
                     shape {shape:?} and dtype {dtype:?}",
                    part.shape, part.dtype
                ));
            }
            held = held.saturating_add(elements(&part.shape).unwrap_or(usize::MAX));
            blocks.extend(
                part.blocks.into_iter().map(|block| Block { offsets: offsets.clone(), ..block }),
            );
        }
        blocks.retain(|block| !block.sizes.contains(&0));
        if elements(&shape) != Some(held) {
            return Err(format!("its parts hold {held} elements of a tensor of shape {shape:?}"));
        }
        let overlap = |a: &Block, b: &Block| {
            (0..shape.len()).all(|dim| {
                a.offsets[dim] < b.offsets[dim] + b.sizes[dim]
                    && b.offsets[dim] < a.offsets[dim] + a.sizes[dim]
            })
        };
        let overlaps = (0..blocks.len())
            .any(|one| blocks[..one].iter().any(|other| overlap(&blocks[one], other)));
        match overlaps {
            true => Err("its parts overlap".into()),
            false => Ok(Self { dtype, shape, blocks }),
        }
    }

    /// Calls `read` for all elements of `ranges` of the flattened tensor, or of its flattened
    /// transpose, in order. Afterwards the pages that were read are returned to the system.
    pub(super) fn runs<'a>(
        &'a self,
        transposed: bool,
        ranges: &[Range<usize>],
        mut read: impl FnMut(Run<'a>),
    ) {
        // A tensor that no one may read has elements, but no blocks.
        if self.blocks.is_empty() {
            return;
        }
        let size = self.dtype.bitsize() / 8;
        let view = View::new(self, transposed);
        let last = view.shape.len() - 1;
        let (mut used, mut at) = (vec![false; view.blocks.len()], vec![0; view.shape.len()]);
        let mut current = 0;
        for range in ranges {
            let mut index = range.start;
            while index < range.end {
                let mut rest = index;
                for dim in (0..view.shape.len()).rev() {
                    at[dim] = rest % view.shape[dim];
                    rest /= view.shape[dim];
                }
                if !view.blocks[current].contains(&at) {
                    let found = view.blocks.iter().position(|block| block.contains(&at));
                    current = found.expect("the blocks hold every element");
                }
                let block = &view.blocks[current];
                used[current] = true;
                let count =
                    (block.offsets[last] + block.sizes[last] - at[last]).min(range.end - index);
                let first: usize = (0..at.len())
                    .map(|dim| (at[dim] - block.offsets[dim]) * block.strides[dim])
                    .sum();
                let stored = &self.blocks[current];
                let (start, step) = (stored.range.start + first * size, block.strides[last] * size);
                let bytes = &stored.file.as_ref()[start..start + (count - 1) * step + size];
                read(Run { bytes, step, count });
                index += count;
            }
        }
        for (block, _) in self.blocks.iter().zip(used).filter(|(_, used)| *used) {
            block.file.release(&block.range);
        }
    }

    /// Returns the size of all elements in bytes.
    pub(super) fn bytes(&self) -> u64 {
        let bits = elements(&self.shape).unwrap_or(0).saturating_mul(self.dtype.bitsize());
        (bits / 8) as u64
    }

    /// Returns the elements in row-major order, little-endian.
    pub(super) fn row_major_bytes(&self) -> Cow<'_, [u8]> {
        let count = elements(&self.shape).unwrap_or(0);
        if let [block] = &self.blocks[..]
            && block.sizes == self.shape
            && (block.strides == row_major(&self.shape) || count == 0)
        {
            return Cow::Borrowed(&block.file.as_ref()[block.range.clone()]);
        }
        let size = self.dtype.bitsize() / 8;
        let mut bytes = Vec::with_capacity(count * size);
        self.runs(false, from_ref(&(0..count)), |run| {
            for index in 0..run.count {
                bytes.extend_from_slice(&run.bytes[index * run.step..][..size]);
            }
        });
        Cow::Owned(bytes)
    }

    /// Returns the tensor's memory pages to the system. A later read loads them from the file
    /// again.
    pub(super) fn release(&self) {
        self.blocks.iter().for_each(|block| block.file.release(&block.range));
    }
}

/// A block in the coordinates of a [`View`].
struct ViewedBlock {
    offsets: Vec<usize>,
    sizes: Vec<usize>,
    strides: Vec<usize>,
}

impl ViewedBlock {
    fn contains(&self, at: &[usize]) -> bool {
        at.iter()
            .zip(&self.offsets)
            .zip(&self.sizes)
            .all(|((&at, &offset), &size)| (offset..offset + size).contains(&at))
    }
}

/// A tensor or its transpose, with at least one dimension.
struct View {
    shape: Vec<usize>,
    blocks: Vec<ViewedBlock>,
}

impl View {
    fn new(tensor: &MappedTensor, transposed: bool) -> Self {
        let one_row = |block: &Block| {
            !transposed && block.sizes == tensor.shape && block.strides == row_major(&tensor.shape)
        };
        if tensor.blocks.iter().all(one_row) {
            // One long run in place of one for each row.
            let count = elements(&tensor.shape).unwrap_or(0);
            let block = ViewedBlock { offsets: vec![0], sizes: vec![count], strides: vec![1] };
            return Self { shape: vec![count], blocks: vec![block] };
        }
        let viewed = |values: &[usize], scalar: usize| match values {
            [] => vec![scalar],
            _ if transposed => values.iter().rev().copied().collect(),
            _ => values.to_vec(),
        };
        let block = |block: &Block| ViewedBlock {
            offsets: viewed(&block.offsets, 0),
            sizes: viewed(&block.sizes, 1),
            strides: viewed(&block.strides, 1),
        };
        Self { shape: viewed(&tensor.shape, 1), blocks: tensor.blocks.iter().map(block).collect() }
    }
}

/// Returns the number of elements of a shape, if it is a number.
pub(super) fn elements(shape: &[usize]) -> Option<usize> {
    if shape.contains(&0) {
        return Some(0);
    }
    shape.iter().try_fold(1usize, |product, &length| product.checked_mul(length))
}

/// Returns the strides of a row-major tensor.
fn row_major(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1usize; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim].saturating_mul(shape[dim]);
    }
    strides
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the bytes 0 to 23 as a file.
    fn file() -> MappedFile {
        MappedFile::in_memory((0..24).collect())
    }

    fn bytes(tensor: &MappedTensor, transposed: bool, range: Range<usize>) -> Vec<u8> {
        let mut found = Vec::new();
        tensor.runs(transposed, from_ref(&range), |run| {
            found.extend((0..run.count).map(|index| run.bytes[index * run.step]));
        });
        found
    }

    #[test]
    fn runs_of_a_row_major_tensor_and_its_transpose() {
        let tensor = MappedTensor::contiguous(&file(), Dtype::U8, vec![2, 3], 4..10).unwrap();
        assert_eq!(bytes(&tensor, false, 0..6), [4, 5, 6, 7, 8, 9]);
        assert_eq!(bytes(&tensor, true, 0..6), [4, 7, 5, 8, 6, 9]);
        assert_eq!(bytes(&tensor, true, 1..4), [7, 5, 8]);
        assert!(MappedTensor::contiguous(&file(), Dtype::U8, vec![2, 3], 4..11).is_none());
        assert!(MappedTensor::contiguous(&file(), Dtype::U8, vec![2, 3], 20..26).is_none());
        let scalar = MappedTensor::contiguous(&file(), Dtype::U8, vec![], 7..8).unwrap();
        assert_eq!(bytes(&scalar, true, 0..1), [7]);
    }

    #[test]
    fn views_are_read_through_their_strides() {
        let view = |offset, shape: &[usize], strides: &[usize]| {
            let storage = 10..22;
            MappedTensor::strided(
                &file(),
                Dtype::U8,
                &storage,
                offset,
                shape.into(),
                strides.into(),
            )
        };
        let columns = view(1, &[3, 2], &[1, 4]).unwrap();
        assert_eq!(bytes(&columns, false, 0..6), [11, 15, 12, 16, 13, 17]);
        assert_eq!(columns.row_major_bytes().as_ref(), [11, 15, 12, 16, 13, 17]);
        let repeated = view(0, &[2, 2], &[0, 1]).unwrap();
        assert_eq!(bytes(&repeated, false, 0..4), [10, 11, 10, 11]);
        assert!(view(0, &[3, 4], &[4, 1]).is_ok());
        assert!(view(0, &[4, 4], &[0, 1]).is_err(), "more elements than the storage has");
        for wrong in [view(1, &[3, 4], &[4, 1]), view(0, &[2], &[usize::MAX]), view(0, &[2], &[])] {
            wrong.unwrap_err();
        }
        assert!(view(usize::MAX, &[1], &[1]).is_err());
        assert!(view(0, &[usize::MAX, 4], &[0, 0]).is_err(), "more elements than a number holds");
    }

    #[test]
    fn parts_make_up_a_tensor_or_are_refused() {
        let part = |at: [usize; 2], shape: [usize; 2], start: usize| {
            let count = shape[0] * shape[1];
            let part =
                MappedTensor::contiguous(&file(), Dtype::U8, shape.into(), start..start + count);
            (at.to_vec(), part.unwrap())
        };
        let whole = |parts| MappedTensor::assembled(Dtype::U8, vec![3, 3], parts);
        // Rows 0 and 1 as columns 0..1 and 1..3, then row 2.
        let parts =
            vec![part([2, 0], [1, 3], 0), part([0, 0], [2, 1], 10), part([0, 1], [2, 2], 20)];
        let tensor = whole(parts.clone()).unwrap();
        assert_eq!(bytes(&tensor, false, 0..9), [10, 20, 21, 11, 22, 23, 0, 1, 2]);
        assert_eq!(bytes(&tensor, true, 0..9), [10, 11, 0, 20, 22, 1, 21, 23, 2]);
        assert_eq!(bytes(&tensor, false, 4..7), [22, 23, 0]);
        for (wrong, expected) in [
            (parts[..2].to_vec(), "5 elements"),
            (vec![part([0, 0], [2, 3], 0), part([1, 0], [1, 3], 0)], "overlap"),
            (vec![part([1, 0], [3, 3], 0)], "none of a tensor"),
        ] {
            let error = whole(wrong).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
