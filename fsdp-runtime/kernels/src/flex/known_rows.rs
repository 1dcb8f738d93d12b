//! Tensors that are zero but for some rows: the gradients of large tables, of which a batch looks up few rows.
//!
//! The operating system gives their memory, page by page when it is written. No zeros are written, and pages of rows
//! that nobody looked up take no memory. Kernels can ask for the rows, and read no others.

use std::collections::BTreeMap;
use std::io;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::{Element, Shape};
use burn_std::{AccessError, AccessPolicy, AllocationController, AllocationProperty, Bytes};
use bytemuck::Pod;
use memmap2::{MmapMut, MmapOptions};

/// Rows of a matrix outside which all elements are zero.
#[derive(Debug)]
pub(super) struct KnownRows {
    /// Elements of a row.
    pub(super) width: usize,
    /// Numbers of the rows, in ascending order.
    pub(super) numbers: Vec<usize>,
}

/// The rows of each tensor, by the address of its memory.
static KNOWN: Mutex<BTreeMap<usize, Arc<KnownRows>>> = Mutex::new(BTreeMap::new());

fn known() -> MutexGuard<'static, BTreeMap<usize, Arc<KnownRows>>> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the rows of a tensor outside which all its elements are zero, if they are known and it has the first element
/// of its memory.
pub(super) fn known_rows(tensor: &FlexTensor) -> Option<Arc<KnownRows>> {
    let (0, _) = tensor.layout().contiguous_offsets()? else { return None };
    known().get(&tensor.bytes().as_ptr().addr()).cloned()
}

/// Returns whether zeros take more time than mapping the memory of a table of which `rows` rows were looked up.
pub(super) fn is_faster<E>(rows: usize, [of_table, width]: [usize; 2]) -> bool {
    /// Bytes of the least table.
    const LEAST: usize = 1 << 20;
    of_table * width * size_of::<E>() >= LEAST && 8 * rows <= of_table
}

/// Returns a matrix of zeros but for the rows of these numbers, which `write` writes. The numbers may repeat.
///
/// # Errors
///
/// If the operating system does not map memory.
pub(super) fn with_rows<E: Element + Pod>(
    [rows, width]: [usize; 2],
    mut numbers: Vec<usize>,
    write: impl FnOnce(&mut [E]),
) -> io::Result<FlexTensor> {
    let len = rows * width * size_of::<E>();
    let mut memory = MmapOptions::new().len(len).map_anon()?;
    // Huge pages would be cleared whole. A system that does not know the advice has none.
    #[cfg(target_os = "linux")]
    let _ = memory.advise(memmap2::Advice::NoHugePage);
    write(bytemuck::cast_slice_mut(&mut memory));
    numbers.sort_unstable();
    numbers.dedup();
    let address = memory.as_ptr().addr();
    known().insert(address, Arc::new(KnownRows { width, numbers }));
    let mapping = Box::new(Mapping { memory, is_known: true });
    // SAFETY: the mapping has as many bytes, which are initialised.
    let bytes = unsafe { Bytes::from_controller(mapping, len) };
    Ok(FlexTensor::new(bytes, Layout::contiguous(Shape::from([rows, width])), E::dtype()))
}

/// Memory of a tensor, whose rows are known until it is written.
struct Mapping {
    memory: MmapMut,
    is_known: bool,
}

impl Mapping {
    fn forget_rows(&mut self) {
        if std::mem::take(&mut self.is_known) {
            known().remove(&self.memory.as_ptr().addr());
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.forget_rows();
    }
}

impl AllocationController for Mapping {
    fn alloc_align(&self) -> usize {
        // What the allocator of Burn's bytes promises. Pages begin at larger multiples.
        align_of::<u128>()
    }

    fn property(&self) -> AllocationProperty {
        AllocationProperty::Other
    }

    unsafe fn memory_mut(
        &mut self,
        _: AccessPolicy,
    ) -> Result<&mut [MaybeUninit<u8>], AccessError> {
        self.forget_rows();
        let bytes: &mut [u8] = &mut self.memory;
        // SAFETY: `MaybeUninit<u8>` has the layout of u8, and the caller writes initialised bytes only.
        Ok(unsafe { &mut *(std::ptr::from_mut(bytes) as *mut [MaybeUninit<u8>]) })
    }

    fn memory(&self, _: AccessPolicy) -> Result<&[MaybeUninit<u8>], AccessError> {
        let bytes: &[u8] = &self.memory;
        // SAFETY: `MaybeUninit<u8>` has the layout of u8.
        Ok(unsafe { &*(std::ptr::from_ref(bytes) as *const [MaybeUninit<u8>]) })
    }
}

/// Returns the elements from `start` on that rows of some of the tensors have, as ranges of the row's elements and the
/// tensors that have it, in ascending order. Returns `None` if the widths differ.
pub(super) fn rows_of_all(
    tensors: &[Arc<KnownRows>],
    start: usize,
    numel: usize,
) -> Option<Vec<(Range<usize>, Vec<bool>)>> {
    let width = tensors.first()?.width;
    if tensors.iter().any(|rows| rows.width != width) {
        return None;
    }
    let first = start / width;
    let end = (start + numel).div_ceil(width);
    let within = |rows: &KnownRows| {
        let at = |number| rows.numbers.partition_point(|&row| row < number);
        rows.numbers[at(first)..at(end)].to_vec()
    };
    let mut numbers: Vec<usize> = tensors.iter().flat_map(|rows| within(rows)).collect();
    numbers.sort_unstable();
    numbers.dedup();
    let row = |number: usize| {
        let of_row = (number * width).max(start)..((number + 1) * width).min(start + numel);
        let has = tensors.iter().map(|rows| rows.numbers.binary_search(&number).is_ok());
        (of_row.start - start..of_row.end - start, has.collect())
    };
    Some(numbers.into_iter().map(row).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(numbers: &[usize]) -> FlexTensor {
        with_rows([300, 4], numbers.to_vec(), |elements: &mut [f32]| {
            for &number in numbers {
                elements[number * 4..][..4].fill(number as f32);
            }
        })
        .expect("a mapping")
    }

    #[test]
    fn rows_are_known_until_the_memory_is_written_or_freed() {
        let mut table = tensor(&[7, 2, 7]);
        let elements = table.as_slice::<f32>().expect("f32");
        assert!(elements.iter().enumerate().all(|(at, &element)| {
            element == if [2, 7].contains(&(at / 4)) { (at / 4) as f32 } else { 0.0 }
        }));
        assert_eq!(known_rows(&table).expect("known").numbers, [2, 7]);
        assert!(known_rows(&table.reshape(Shape::from([1200]))).is_some(), "the same memory");
        assert!(known_rows(&table.narrow(0, 1, 5)).is_none(), "a part");
        let address = table.bytes().as_ptr().addr();
        let copy = table.clone();
        table.storage_mut::<f32>()[0] = 1.0;
        assert!(known_rows(&table).is_none(), "a copy that was written");
        assert_eq!(known_rows(&copy).expect("unchanged").numbers, [2, 7]);
        let mut only = copy;
        only.storage_mut::<f32>()[0] = 1.0;
        assert_eq!(only.bytes().as_ptr().addr(), address);
        assert!(known_rows(&only).is_none(), "written");
        let other = tensor(&[3]);
        let address = other.bytes().as_ptr().addr();
        drop(other);
        assert!(!known().contains_key(&address), "freed");
    }

    #[test]
    fn rows_of_all_tensors_are_cut_at_the_ends() {
        let rows =
            [tensor(&[2, 7]), tensor(&[3, 7, 9])].map(|table| known_rows(&table).expect("known"));
        let found = rows_of_all(&rows, 9, 23).expect("of one width");
        let expected =
            [(0..3, vec![true, false]), (3..7, vec![false, true]), (19..23, vec![true, true])];
        assert_eq!(found, expected);
        assert_eq!(rows_of_all(&rows, 16, 4).expect("of one width"), []);
    }
}
