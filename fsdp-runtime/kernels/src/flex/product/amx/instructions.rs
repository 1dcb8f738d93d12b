//! The tile instructions of AMX, for blocks of 32 × 32 sums.

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::marker::PhantomData;
use std::sync::OnceLock;

/// Name of the environment variable that turns off products by AMX: `0`.
const AMX: &str = "FSDP_AMX";

/// Rows of a tile, and pairs of elements of a row.
pub(super) const LANES: usize = 16;
/// Rows, or columns, of a block: those of two tiles.
pub(super) const BLOCK: usize = 2 * LANES;
/// Elements of a row of a tile.
pub(super) const DEPTH: usize = 2 * LANES;

/// Pairs of bf16 elements: what a register holds.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Tile(pub(super) [[u32; LANES]; LANES]);

/// Sums of a block.
#[repr(C, align(64))]
pub(super) struct Sums(pub(super) [[f32; BLOCK]; BLOCK]);

/// Returns whether the processor and the operating system have AMX with bf16, and the environment does not turn it
/// off.
pub(in super::super) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| !std::env::var(AMX).is_ok_and(|value| value == "0") && request())
}

/// Asks the operating system for the registers of AMX, for all threads of the process. Returns whether they can be
/// used.
fn request() -> bool {
    const REQUEST_PERMISSION: usize = 0x1023;
    const TILE_DATA: usize = 18;
    const TILE: u32 = 1 << 24;
    const BF16: u32 = 1 << 22;
    // The packing of factors uses AVX-512.
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && __cpuid_count(7, 0).edx & (TILE | BF16) == TILE | BF16
        // SAFETY: the call changes nothing but what the process may use.
        && unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) } == 0
}

/// The shapes of registers.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    first_row: u8,
    reserved: [u8; 14],
    bytes: [u16; 16],
    rows: [u8; 16],
}

/// The registers of a thread, set up until this is dropped.
pub(super) struct Registers(PhantomData<*const ()>);

impl Registers {
    /// Sets up the registers of the calling thread for [`Tile`]s.
    ///
    /// # Safety
    ///
    /// [`is_available`] returned true.
    pub(super) unsafe fn new() -> Self {
        const USED: usize = 8;
        let mut shapes =
            Shapes { palette: 1, first_row: 0, reserved: [0; 14], bytes: [0; 16], rows: [0; 16] };
        shapes.bytes[..USED].fill(4 * LANES as u16);
        shapes.rows[..USED].fill(LANES as u8);
        // SAFETY: the caller promises that the instruction exists. It reads the 64 bytes of the shapes.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const shapes, options(nostack, readonly)) };
        Self(PhantomData)
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: the instruction exists, as `new` has run. The compiler does not use these registers.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// Loads both tiles of the first, or second, factor, of the plane at an offset.
macro_rules! load {
    (a, $plane:literal) => {
        load!("4", "5", "a", $plane)
    };
    (b, $plane:literal) => {
        load!("6", "7", "b", $plane)
    };
    ($first:literal, $second:literal, $factor:literal, $plane:literal) => {
        concat!(
            "tileloadd tmm",
            $first,
            ", [{",
            $factor,
            "} + {row} + ",
            $plane,
            " * 2048]\n",
            "tileloadd tmm",
            $second,
            ", [{",
            $factor,
            "} + {row} + ",
            $plane,
            " * 2048 + 1024]\n",
        )
    };
}

/// Adds the products of the tiles that are loaded to the sums.
macro_rules! add {
    () => {
        "tdpbf16ps tmm0, tmm4, tmm6
        tdpbf16ps tmm1, tmm4, tmm7
        tdpbf16ps tmm2, tmm5, tmm6
        tdpbf16ps tmm3, tmm5, tmm7
        "
    };
}

/// Runs instructions once for every step, between those that set the sums to zero and those that store them.
macro_rules! for_each_step {
    ($a:expr, $b:expr, $steps:expr, $sums:expr, $planes:literal, [$($instructions:expr),+]) => {
        asm!(
            "test {adds:l}, {adds:l}",
            "jz 3f",
            "tileloadd tmm0, [{sums} + {stride}]",
            "tileloadd tmm1, [{sums} + {stride} + 64]",
            "tileloadd tmm2, [{second} + {stride}]",
            "tileloadd tmm3, [{second} + {stride} + 64]",
            "jmp 2f",
            "3:",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "2:",
            $($instructions,)+
            concat!("add {a}, ", $planes, " * 2048"),
            concat!("add {b}, ", $planes, " * 2048"),
            "dec {steps}",
            "jnz 2b",
            "tilestored [{sums} + {stride}], tmm0",
            "tilestored [{sums} + {stride} + 64], tmm1",
            "tilestored [{second} + {stride}], tmm2",
            "tilestored [{second} + {stride} + 64], tmm3",
            a = inout(reg) $a => _,
            b = inout(reg) $b => _,
            steps = inout(reg) $steps => _,
            sums = in(reg) $sums.0,
            second = in(reg) $sums.0.wrapping_add(LANES * $sums.1),
            stride = in(reg) size_of::<f32>() * $sums.1,
            adds = in(reg) usize::from($sums.2),
            row = in(reg) 4 * LANES,
            out("tmm0") _,
            out("tmm1") _,
            out("tmm2") _,
            out("tmm3") _,
            out("tmm4") _,
            out("tmm5") _,
            out("tmm6") _,
            out("tmm7") _,
            options(nostack),
        )
    };
}

/// Writes the sums of a block to rows that begin every `stride` elements, or adds its terms to them. A step of a factor
/// has `PLANES` times two tiles: those of the first 16 rows, or columns, and of the others.
///
/// The sum of the planes is an element. All products of two planes are added. Of the products of three planes, those
/// are added that exceed 2⁻²⁴ of the whole.
///
/// # Safety
///
/// The rows lie in memory that nothing else uses. They are initialised if `adds` is true.
#[inline(never)]
pub(super) unsafe fn multiply<const PLANES: usize>(
    _: &Registers,
    [a, b]: [&[Tile]; 2],
    (sums, stride): (*mut f32, usize),
    adds: bool,
) {
    const { assert!(size_of::<Tile>() == 1024) };
    assert!(a.len() == b.len() && a.len().is_multiple_of(2 * PLANES), "steps of both factors");
    let steps = a.len() / (2 * PLANES);
    assert!(steps > 0, "a step");
    let (a, b, sums) = (a.as_ptr(), b.as_ptr(), (sums, stride, adds));
    // SAFETY: the registers are set up. The instructions read the tiles of every step, and write the sums,
    // as the caller allows.
    unsafe {
        match PLANES {
            1 => for_each_step!(a, b, steps, sums, 1, [load!(a, 0), load!(b, 0), add!()]),
            2 => for_each_step!(
                a,
                b,
                steps,
                sums,
                2,
                [
                    load!(b, 0),
                    load!(a, 1),
                    add!(),
                    load!(a, 0),
                    add!(),
                    load!(b, 1),
                    add!(),
                    load!(a, 1),
                    add!()
                ]
            ),
            3 => for_each_step!(
                a,
                b,
                steps,
                sums,
                3,
                [
                    load!(b, 0),
                    load!(a, 2),
                    add!(),
                    load!(a, 1),
                    add!(),
                    load!(a, 0),
                    add!(),
                    load!(b, 2),
                    add!(),
                    load!(b, 1),
                    add!(),
                    load!(a, 1),
                    add!()
                ]
            ),
            _ => unreachable!("elements of up to three planes"),
        }
    }
}
