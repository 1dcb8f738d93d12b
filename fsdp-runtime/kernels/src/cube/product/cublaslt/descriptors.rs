//! Descriptors of calls and layouts of matrices.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;

use burn::tensor::DType;
use cudarc::driver::DriverError;

use super::library::{CublasLtError, Library, Opaque, Status};
use crate::cube::product::call::{Call, Epilogue};

// Numbers of cublasLt.h.
const COMPUTE_F32: c_uint = 68;
const COMPUTE_TF32: c_uint = 77;
const DESC_TRANSPOSED: [c_uint; 2] = [3, 4];
const DESC_EPILOGUE: c_uint = 7;
pub(super) const DESC_BIAS: c_uint = 8;
pub(super) const DESC_AUXILIARY: c_uint = 11;
const DESC_AUXILIARY_LEADING: c_uint = 12;
const DESC_BIAS_DTYPE: c_uint = 26;
const LAYOUT_BATCH: c_uint = 5;
const LAYOUT_BATCH_STRIDE: c_uint = 6;
const PREFERENCE_WORKSPACE: c_uint = 1;
const PREFERENCE_REDUCTION: c_uint = 3;
/// Parts of a sum are added in the type in which products are, not in that of D, which may be bf16.
const REDUCTION_IN_COMPUTE_TYPE: c_uint = 2;
/// Of A, B, C and D.
const PREFERENCE_ALIGNMENT: [c_uint; 4] = [5, 6, 7, 8];
const EPILOGUE_BIAS: c_uint = 4;
const EPILOGUE_GELU_AUX_BIAS: c_uint = 164;
const EPILOGUE_BGRADA: c_uint = 256;

/// Statuses of a call that the library does not take: an invalid value, and what is not supported.
const NOT_TAKEN: [Status; 2] = [7, NOT_SUPPORTED];
pub(super) const NOT_SUPPORTED: Status = 15;

/// Runs the first of some algorithms that the library takes, from number `first` on, and returns its number.
///
/// # Errors
///
/// If an algorithm fails for another reason, or if the library takes none.
pub(super) fn first_taken<A>(
    algorithms: &[A],
    first: usize,
    run: impl Fn(&A) -> Result<(), CublasLtError>,
) -> Result<usize, CublasLtError> {
    let is_refusal = |error: &CublasLtError| matches!(error, CublasLtError::Call { status, .. } if NOT_TAKEN.contains(status));
    let mut number = first;
    loop {
        match run(&algorithms[number]) {
            Err(error) if is_refusal(&error) && number + 1 < algorithms.len() => number += 1,
            done => return done.map(|()| number),
        }
    }
}

/// Converts the status of a call.
pub(super) fn checked(call: &'static str, status: Status) -> Result<(), CublasLtError> {
    if status == 0 { Ok(()) } else { Err(CublasLtError::Call { call, status }) }
}

/// Converts an error of the driver.
pub(super) fn refused(call: &'static str) -> impl Fn(DriverError) -> CublasLtError {
    move |error| CublasLtError::Call { call, status: error.0 as Status }
}

/// Returns the library's number of a dtype, `cudaDataType_t`.
fn number(dtype: DType) -> c_uint {
    match dtype {
        DType::BF16 => 14,
        DType::F16 => 2,
        _ => 0,
    }
}

impl Library {
    /// Creates the descriptor of a call, but for the addresses of the bias and the second target.
    pub(super) fn descriptor(&self, call: &Call, tf32: bool) -> Result<Opaque, CublasLtError> {
        let fast = tf32 && call.dtypes[0] == DType::F32;
        let compute = if fast { COMPUTE_TF32 } else { COMPUTE_F32 };
        let mut desc = null_mut();
        // SAFETY: the function writes a descriptor.
        let status =
            unsafe { (self.cublasLtMatmulDescCreate)(&raw mut desc, compute, number(DType::F32)) };
        checked("cublasLtMatmulDescCreate", status)?;
        for (key, transposed) in DESC_TRANSPOSED.into_iter().zip(call.transposed) {
            self.describe(desc, key, &c_int::from(transposed))?;
        }
        if call.epilogue != Epilogue::None {
            self.describe(desc, DESC_BIAS_DTYPE, &number(call.dtypes[1]))?;
        }
        match call.epilogue {
            Epilogue::None => {}
            Epilogue::Bias => self.describe(desc, DESC_EPILOGUE, &EPILOGUE_BIAS)?,
            Epilogue::SumsOfA => self.describe(desc, DESC_EPILOGUE, &EPILOGUE_BGRADA)?,
            Epilogue::BiasAndGelu => {
                self.describe(desc, DESC_EPILOGUE, &EPILOGUE_GELU_AUX_BIAS)?;
                self.describe(desc, DESC_AUXILIARY_LEADING, &(call.dims[0] as i64))?;
            }
        }
        Ok(desc)
    }

    /// Sets an attribute of a descriptor.
    pub(super) fn describe<T>(
        &self,
        desc: Opaque,
        key: c_uint,
        value: &T,
    ) -> Result<(), CublasLtError> {
        let set = self.cublasLtMatmulDescSetAttribute;
        attribute(set, "cublasLtMatmulDescSetAttribute", desc, key, value)
    }

    /// Creates the layout of matrix `at` of A, B and D.
    pub(super) fn layout(&self, call: &Call, at: usize) -> Result<Opaque, CublasLtError> {
        let [rows, columns] = call.stored(at);
        let dtype = number(call.dtypes[usize::from(at == 2)]);
        let mut layout = null_mut();
        // SAFETY: the function writes a layout.
        let status = unsafe {
            (self.cublasLtMatrixLayoutCreate)(
                &raw mut layout,
                dtype,
                rows as u64,
                columns as u64,
                call.leading[at] as i64,
            )
        };
        checked("cublasLtMatrixLayoutCreate", status)?;
        let set = self.cublasLtMatrixLayoutSetAttribute;
        let name = "cublasLtMatrixLayoutSetAttribute";
        attribute(set, name, layout, LAYOUT_BATCH, &(call.batch as i32))?;
        attribute(set, name, layout, LAYOUT_BATCH_STRIDE, &(call.batch_strides[at] as i64))?;
        Ok(layout)
    }

    /// Creates the preference of algorithms that need at most so many bytes of scratch memory, given the
    /// alignments of A, B and all other buffers in bytes.
    pub(super) fn preference(
        &self,
        workspace: usize,
        [a, b, d]: [u32; 3],
    ) -> Result<Opaque, CublasLtError> {
        let mut preference = null_mut();
        // SAFETY: the function writes a preference.
        let status = unsafe { (self.cublasLtMatmulPreferenceCreate)(&raw mut preference) };
        checked("cublasLtMatmulPreferenceCreate", status)?;
        let set = self.cublasLtMatmulPreferenceSetAttribute;
        let name = "cublasLtMatmulPreferenceSetAttribute";
        attribute(set, name, preference, PREFERENCE_WORKSPACE, &workspace)?;
        attribute(set, name, preference, PREFERENCE_REDUCTION, &REDUCTION_IN_COMPUTE_TYPE)?;
        for (key, bytes) in PREFERENCE_ALIGNMENT.into_iter().zip([a, b, d, d]) {
            attribute(set, name, preference, key, &bytes)?;
        }
        Ok(preference)
    }
}

/// Sets an attribute of a descriptor, a layout or a preference.
fn attribute<T>(
    set: unsafe extern "C" fn(Opaque, c_uint, *const c_void, usize) -> Status,
    name: &'static str,
    of: Opaque,
    key: c_uint,
    value: &T,
) -> Result<(), CublasLtError> {
    // SAFETY: the object was created by the library; the value is live and has the size that is passed.
    checked(name, unsafe { set(of, key, std::ptr::from_ref(value).cast(), size_of::<T>()) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cube::product::cublaslt::library::library;

    fn call(epilogue: Epilogue, dtypes: [DType; 2], transposed: [bool; 2]) -> Call {
        Call {
            dims: [16, 8, 24],
            transposed,
            leading: [if transposed[0] { 24 } else { 16 }, if transposed[1] { 8 } else { 24 }, 16],
            batch: 1,
            batch_strides: [0; 3],
            calls: 1,
            call_strides: [0; 3],
            dtypes,
            adds: false,
            epilogue,
        }
    }

    #[test]
    fn the_library_takes_every_attribute() {
        let library = match library() {
            Ok(library) => library,
            Err(error) => {
                println!("skipped: {error}");
                return;
            }
        };
        library.preference(32 << 20, [16, 8, 2]).expect("a preference");
        for epilogue in [Epilogue::None, Epilogue::Bias, Epilogue::BiasAndGelu, Epilogue::SumsOfA] {
            for dtypes in [[DType::F32; 2], [DType::BF16; 2], [DType::BF16, DType::F32]] {
                for transposed in [[false; 2], [true, false], [false, true], [true; 2]] {
                    let call = call(epilogue, dtypes, transposed);
                    let desc = library.descriptor(&call, true).expect("a descriptor");
                    for key in [DESC_BIAS, DESC_AUXILIARY] {
                        library.describe(desc, key, &256u64).expect("an address");
                    }
                    (0..3).for_each(|at| {
                        library.layout(&call, at).expect("a layout");
                    });
                }
            }
        }
    }

    #[test]
    fn an_algorithm_that_is_refused_is_followed_by_the_next() {
        let call = |&status: &Status| checked("call", status);
        let run = |statuses: &[Status], first| first_taken(statuses, first, call);
        assert_eq!(run(&[0, 0], 0), Ok(0));
        assert_eq!(run(&[NOT_SUPPORTED, 7, 0, 0], 0), Ok(2));
        assert_eq!(run(&[7, 0, 0], 1), Ok(1));
        let failed = |status| Err(CublasLtError::Call { call: "call", status });
        assert_eq!(run(&[NOT_SUPPORTED, 13, 0], 0), failed(13), "a failure is none of the sizes");
        assert_eq!(run(&[NOT_SUPPORTED, 7], 0), failed(7));
    }

    #[test]
    fn a_status_names_its_call() {
        assert_eq!(checked("cublasLtMatmul", 0), Ok(()));
        let error = checked("cublasLtMatmul", 15).unwrap_err();
        assert_eq!(error.to_string(), "cublasLtMatmul returned status 15");
    }
}
