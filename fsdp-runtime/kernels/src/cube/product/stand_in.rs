//! A stand-in for cuBLASLt on CubeCL's CPU device: it does what a call says, in host memory and in f64.

use std::cell::Cell;

use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::bytes::Bytes;
use half::{bf16, f16};

use super::Buffers;
use super::call::{Call, Epilogue};

thread_local! {
    static IS_ON: Cell<bool> = const { Cell::new(false) };
    static CALLS: Cell<usize> = const { Cell::new(0) };
}

/// Runs `f` with products of this thread by the stand-in. Also returns the number of calls.
pub(super) fn on<R>(f: impl FnOnce() -> R) -> (R, usize) {
    IS_ON.set(true);
    CALLS.set(0);
    let result = f();
    IS_ON.set(false);
    (result, CALLS.get())
}

pub(super) fn is_on() -> bool {
    IS_ON.get()
}

/// Runs a call.
pub(super) fn issue(call: &Call, buffers: &Buffers) -> bool {
    CALLS.set(CALLS.get() + 1);
    let [factor, target] = call.dtypes;
    let [a, b] = [&buffers.a, &buffers.b].map(|tensor| numbers(tensor, factor));
    let mut d = numbers(&buffers.target, target);
    let bias = buffers.bias.as_ref().map(|bias| numbers(bias, target));
    let mut before = buffers.before.as_ref().map(|before| numbers(before, target));
    let mut sums = buffers.sums.as_ref().map(|sums| numbers(sums, target));
    let [m, n, k] = call.dims;
    for (number, matrix) in
        (0..call.calls).flat_map(|number| (0..call.batch).map(move |matrix| (number, matrix)))
    {
        let first = |at: usize| number * call.call_strides[at] + matrix * call.batch_strides[at];
        let element = |of: &[f64], at: usize, row: usize, column: usize| {
            let [row, column] = if call.transposed[at] { [column, row] } else { [row, column] };
            assert!(row < call.stored(at)[0] && row < call.leading[at]);
            of[first(at) + column * call.leading[at] + row]
        };
        for (row, sum) in sums.iter_mut().flatten().enumerate() {
            *sum = (0..k).map(|at| element(&a, 0, row, at)).sum();
        }
        for (row, column) in (0..m).flat_map(|row| (0..n).map(move |column| (row, column))) {
            let to = first(2) + column * call.leading[2] + row;
            let products = (0..k).map(|at| element(&a, 0, row, at) * element(&b, 1, at, column));
            let mut sum = products.sum::<f64>() + if call.adds { d[to] } else { 0.0 };
            if matches!(call.epilogue, Epilogue::Bias | Epilogue::BiasAndGelu) {
                sum += bias.as_ref().expect("a bias for the epilogue")[row];
            }
            d[to] = sum;
            if let Some(before) = &mut before {
                before[column * m + row] = sum;
                let inner = 0.797_884_560_802_865_4 * (sum + 0.044715 * sum.powi(3));
                d[to] = 0.5 * sum * (1.0 + inner.tanh());
            }
        }
    }
    write(&buffers.target, &d);
    for (tensor, numbers) in [(&buffers.before, before), (&buffers.sums, sums)] {
        if let (Some(tensor), Some(numbers)) = (tensor, numbers) {
            write(tensor, &numbers);
        }
    }
    true
}

/// Returns the numbers of a tensor's buffer.
fn numbers(tensor: &CubeTensor, dtype: DType) -> Vec<f64> {
    assert_eq!(tensor.dtype, dtype);
    let bytes = tensor.client.read_one(tensor.handle.clone()).expect("the buffer");
    match dtype {
        DType::F32 => {
            bytemuck::pod_collect_to_vec::<u8, f32>(&bytes).into_iter().map(f64::from).collect()
        }
        DType::BF16 => halves(&bytes, |bits| bf16::from_bits(bits).to_f64()),
        _ => halves(&bytes, |bits| f16::from_bits(bits).to_f64()),
    }
}

fn halves(bytes: &[u8], number: impl Fn(u16) -> f64) -> Vec<f64> {
    bytemuck::pod_collect_to_vec::<u8, u16>(bytes).into_iter().map(number).collect()
}

/// Overwrites a tensor's buffer.
fn write(tensor: &CubeTensor, numbers: &[f64]) {
    let bytes: Vec<u8> = match tensor.dtype {
        DType::F32 => numbers.iter().flat_map(|&x| (x as f32).to_ne_bytes()).collect(),
        DType::BF16 => numbers.iter().flat_map(|&x| bf16::from_f64(x).to_ne_bytes()).collect(),
        _ => numbers.iter().flat_map(|&x| f16::from_f64(x).to_ne_bytes()).collect(),
    };
    tensor.client.write(&tensor.handle, Bytes::from_bytes_vec(bytes));
}
