//! The division of an attention into tiles, and the devices and tensors that the kernels take.

use std::sync::OnceLock;

use burn::tensor::DType;
use cubecl::client::Client;
use cubecl::features::MmaConfig;
use cubecl::ir::{ElemType, FloatKind};

use super::fragments::{CHUNK, Fragments, TILE};
use crate::cube::device::{compute_capability, on_cpu, rounds_in_integers};
use crate::cube::tensors::element;

/// Largest width of a query, a key and a value.
const MAX_WIDTH: usize = 128;
/// Number of planes of a cube, with matrix instructions.
const PLANES: usize = 4;

/// How a launch divides an attention into tiles of its score matrix.
///
/// A cube takes `planes · strips · 16` rows, whose tile of a factor or of sums is in registers, and visits the
/// columns in tiles of `columns`, which it copies to shared memory. Rows are queries and columns are keys; in
/// the kernel of the gradients of keys and values it is the other way round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Plan {
    pub(super) fragments: Fragments,
    /// Number of planes of a cube.
    pub(super) planes: usize,
    /// Number of tiles of 16 rows of each plane.
    pub(super) strips: usize,
    /// Number of columns of a tile: a multiple of 16.
    pub(super) columns: usize,
    /// Number of elements of a query, a key and a value: a multiple of 16.
    pub(super) width: usize,
    /// Whether some queries see fewer keys than all because of the first of them, or the last.
    pub(super) bounded: [bool; 2],
    /// Whether bf16 is rounded with integer operations.
    pub(super) integers: bool,
}

impl Plan {
    /// Returns the number of threads of a cube.
    pub(super) const fn threads(&self) -> usize {
        self.planes * self.fragments.lanes()
    }

    /// Returns the number of rows of a plane.
    pub(super) const fn plane_rows(&self) -> usize {
        self.strips * TILE
    }

    /// Returns the number of rows of a cube.
    pub(super) const fn rows(&self) -> usize {
        self.planes * self.plane_rows()
    }

    /// Returns the number of tiles of a factor beside each other in a row of elements.
    pub(super) const fn steps(&self) -> usize {
        self.width / TILE
    }

    /// Returns the number of tiles of sums beside each other in a row of elements.
    pub(super) const fn width_tiles(&self) -> usize {
        self.width / CHUNK
    }

    /// Returns the number of tiles of sums beside each other in a row of scores.
    pub(super) const fn score_tiles(&self) -> usize {
        self.columns / CHUNK
    }

    /// Returns the number of chunks of a row of elements.
    pub(super) const fn chunks(&self) -> usize {
        self.width / CHUNK
    }

    /// Returns the number of chunks from one row to the next in shared memory.
    pub(super) const fn stride(&self) -> usize {
        stride(self.width)
    }

    /// Returns the number of threads that read the chunks of a row together: a power of two.
    pub(super) const fn lanes_of_row(&self) -> usize {
        match self.fragments {
            Fragments::Matrix => 1 << self.chunks().trailing_zeros(),
            Fragments::Scalar => 1,
        }
    }

    /// Returns the number of rows whose chunks the threads of a cube take at once. It is 0 if one thread takes all.
    pub(super) const fn rows_at_once(&self) -> usize {
        self.threads() / self.chunks()
    }

    /// Returns the number of chunks of a tile of `len` rows that each thread takes.
    pub(super) const fn chunks_of_thread(&self, len: usize) -> usize {
        match self.rows_at_once() {
            0 => len * self.chunks(),
            rows => len.div_ceil(rows),
        }
    }

    /// Returns the division with tiles whose keys have whole words of the dropout mask.
    pub(super) fn with_whole_words(self, pass: Pass) -> Self {
        match self.fragments {
            Fragments::Matrix if pass == Pass::Forward && self.width <= 64 => {
                Self { strips: 1, columns: 64, ..self }
            }
            Fragments::Matrix if !self.columns.is_multiple_of(32) => Self { columns: 32, ..self },
            Fragments::Matrix => self,
            Fragments::Scalar => Self { columns: 32, ..self },
        }
    }

    /// Returns whether loops over a thread's elements are unrolled.
    pub(super) const fn unrolls(&self) -> bool {
        self.fragments.unrolls()
    }
}

/// Returns the number of chunks from one row of this width to the next in shared memory. It is odd, so that
/// neighbouring rows begin in different banks.
pub(super) const fn stride(width: usize) -> usize {
    width / CHUNK + 1
}

/// Pass of an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pass {
    Forward,
    /// Gradients of queries.
    QueryGrads,
    /// Gradients of keys and values. Rows are keys.
    KeyGrads,
}

/// Returns the division of an attention on tensors of this dtype and width. Returns `None` if the kernels do not
/// take them on this device.
pub(super) fn plan(
    client: &Client,
    dtype: DType,
    width: usize,
    pass: Pass,
    setting: Setting,
) -> Option<Plan> {
    if setting == Setting::Off || width == 0 || width > MAX_WIDTH || !width.is_multiple_of(TILE) {
        return None;
    }
    let fragments = if takes_matrices(client, dtype) {
        Fragments::Matrix
    } else if setting == Setting::Scalar && on_cpu(client) {
        Fragments::Scalar
    } else {
        return None;
    };
    let integers = rounds_in_integers(client, dtype);
    let capability = compute_capability(client).unwrap_or_default();
    Some(Plan { integers, ..division(fragments, width, pass, capability) })
}

/// Returns the division for a width on a GPU of this compute capability. Registers and shared memory of each are bounded
/// by the tests that assemble the kernels.
fn division(fragments: Fragments, width: usize, pass: Pass, capability: u32) -> Plan {
    let [planes, strips, columns] = match (fragments, pass) {
        (Fragments::Matrix, Pass::Forward) => match width {
            48 | 64 => [PLANES, 2, 48],
            80 | 96 => [PLANES, 1, 48],
            _ => [PLANES, 1, 64],
        },
        (Fragments::Matrix, Pass::QueryGrads | Pass::KeyGrads) if width <= 64 => [PLANES, 1, 64],
        // The assembler needs more registers there for the same kernel.
        (Fragments::Matrix, Pass::KeyGrads) if width > 96 && capability >= 100 => [PLANES, 1, 16],
        (Fragments::Matrix, Pass::QueryGrads | Pass::KeyGrads) => [PLANES, 1, 32],
        // Several strips, and tiles that divide few lengths.
        (Fragments::Scalar, _) => [1, 2, 48],
    };
    Plan { fragments, planes, strips, columns, width, bounded: [false; 2], integers: false }
}

/// Value of the environment variable `FSDP_ATTENTION_KERNEL`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Setting {
    /// Devices with matrix instructions use the kernels: the default.
    Matrix,
    /// CubeCL's CPU device uses them as well, without matrix instructions: `scalar`, for tests.
    Scalar,
    /// No device uses them: `0`.
    Off,
}

impl Setting {
    /// Returns the setting of this process.
    pub(super) fn get() -> Self {
        static SETTING: OnceLock<Setting> = OnceLock::new();
        *SETTING.get_or_init(|| match std::env::var("FSDP_ATTENTION_KERNEL").as_deref() {
            Ok("0") => Self::Off,
            Ok("scalar") => Self::Scalar,
            _ => Self::Matrix,
        })
    }
}

/// Returns whether the device has the matrix instructions that the kernels use.
fn takes_matrices(client: &Client, dtype: DType) -> bool {
    if !matches!(dtype, DType::BF16 | DType::F16) {
        return false;
    }
    let properties = client.properties();
    let factor = element(dtype);
    let product = MmaConfig {
        a_type: factor,
        b_type: factor,
        cd_type: ElemType::Float(FloatKind::F32),
        m: 16,
        n: 8,
        k: 16,
    };
    let matmul = &properties.features.matmul;
    let hardware = &properties.hardware;
    let is_plane = |size: u32| size as usize == Fragments::Matrix.lanes();
    is_plane(hardware.plane_size_min)
        && is_plane(hardware.plane_size_max)
        && matmul.mma.contains(&product)
        && matmul.ldmatrix.contains(&factor)
}
