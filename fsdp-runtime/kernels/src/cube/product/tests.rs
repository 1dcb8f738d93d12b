//! Calls against Burn's products on Flex, over layouts, dtypes and epilogues.

use burn::backend::{Flex, TensorMetadata};
use burn::tensor::{DType, Shape, Slice, TensorData};
use burn_cubecl::{CubeBackend, CubeDevice};

use super::stand_in;
use crate::tensor::Float;
use crate::{Kernels, LinearActivation, cast, to_data};

/// How a factor lies in memory.
#[derive(Clone, Copy, Debug)]
enum Layout {
    Rows,
    Columns,
    /// Rows of a wider matrix.
    Slice,
    /// Heads of positions: dimension 1 is that before the last in memory.
    Heads,
}

/// Returns pseudo-random multiples of 1/16 up to 1 in magnitude, whose products and sums are exact.
fn numbers(shape: &[usize], seed: usize) -> TensorData {
    let count: usize = shape.iter().product();
    let number = |at: usize| (((at + seed) * 7919 + at / 13) % 33) as f32 / 16.0 - 1.0;
    TensorData::new((0..count).map(number).collect::<Vec<_>>(), Shape::from(shape.to_vec()))
}

/// Returns a factor of this shape and layout.
fn factor<B: Kernels>(
    device: &B::Device,
    shape: &[usize],
    layout: Layout,
    dtype: DType,
    seed: usize,
) -> Float<B> {
    let dims = shape.len();
    let mut stored = shape.to_vec();
    match layout {
        Layout::Rows => {}
        Layout::Columns => stored.swap(dims - 2, dims - 1),
        // A multiple of the alignment of CubeCL's buffers after the last row, so that Burn makes a view.
        Layout::Slice => stored[dims - 2] += 512,
        Layout::Heads => stored.swap(dims - 3, dims - 2),
    }
    let tensor = cast::<B>(B::float_from_data(numbers(&stored, seed), device), dtype);
    match layout {
        Layout::Rows => tensor,
        Layout::Columns => B::float_transpose(tensor),
        Layout::Slice => {
            let slices: Vec<Slice> = shape.iter().map(|&len| (0..len).into()).collect();
            B::float_slice(tensor, &slices)
        }
        Layout::Heads => B::float_swap_dims(tensor, dims - 3, dims - 2),
    }
}

/// A product of factors of these shapes and layouts.
#[derive(Clone, Copy, Debug)]
struct Case {
    batch: &'static [usize],
    /// Rows, columns and the length of sums.
    dims: [usize; 3],
    layouts: [Layout; 2],
    dtypes: [DType; 2],
}

impl Case {
    fn factors<B: Kernels>(&self, device: &B::Device) -> [Float<B>; 2] {
        let [rows, columns, inner] = self.dims;
        let shape = |last: [usize; 2]| [self.batch, &last].concat();
        [
            factor::<B>(device, &shape([rows, inner]), self.layouts[0], self.dtypes[0], 1),
            factor::<B>(device, &shape([inner, columns]), self.layouts[1], self.dtypes[0], 2),
        ]
    }
}

fn values<B: Kernels>(tensor: Float<B>) -> Vec<f32> {
    to_data::<B>(cast::<B>(tensor, DType::F32)).try_to_vec().expect("numbers in f32")
}

/// Returns the results of `f` on Flex, and on CubeCL's CPU device by a given number of calls.
fn check(case: &Case, calls: usize, flex: Vec<Vec<f32>>, cube: (Vec<Vec<f32>>, usize)) {
    assert_eq!(cube.1, calls, "{case:?}");
    for (at, (expected, found)) in flex.iter().zip(&cube.0).enumerate() {
        assert_eq!(expected.len(), found.len(), "{case:?}, result {at}");
        let largest = expected.iter().fold(0f32, |largest, x| largest.max(x.abs()));
        let step = if case.dtypes[1] == DType::F32 { 1e-6 } else { 1e-2 };
        let apart = expected.iter().zip(found).map(|(x, y)| (x - y).abs()).fold(0f32, f32::max);
        assert!(apart <= step * largest, "{case:?}, result {at}: {apart} of {largest}");
    }
    assert_eq!(flex.len(), cube.0.len(), "{case:?}");
}

const BOTH: [Layout; 2] = [Layout::Rows; 2];

#[test]
fn every_layout_is_one_call() {
    use Layout::{Columns, Heads, Rows, Slice};
    let cube = CubeDevice::Cpu(Default::default());
    let mut cases = Vec::new();
    for layouts in
        [[Rows, Rows], [Rows, Columns], [Columns, Rows], [Columns, Columns], [Slice, Rows]]
    {
        for dims in [[5, 7, 3], [16, 8, 24], [1, 9, 4], [6, 1, 5], [3, 4, 1], [1, 1, 1]] {
            cases.push((&[][..], dims, layouts));
        }
        cases.push((&[3][..], [4, 5, 6], layouts));
        cases.push((&[2, 3][..], [4, 5, 6], layouts));
    }
    cases.push((&[2, 3], [4, 5, 6], [Heads, Rows]));
    cases.push((&[1, 3], [4, 5, 6], [Heads, Heads]));
    for (batch, dims, layouts) in cases {
        for dtypes in [[DType::F32; 2], [DType::F16, DType::F32], [DType::F16; 2]] {
            let case = Case { batch, dims, layouts, dtypes };
            let flex = Flex::product(case.factors::<Flex>(&Default::default()), dtypes[1]);
            let run = || CubeBackend::product(case.factors::<CubeBackend>(&cube), dtypes[1]);
            let (product, calls) = stand_in::on(run);
            let shape = product.shape();
            assert_eq!((flex.shape(), product.dtype), (shape, dtypes[1]), "{case:?}");
            let found = vec![values::<CubeBackend>(product)];
            check(&case, 1, vec![values::<Flex>(flex)], (found, calls));
        }
    }
}

#[test]
fn a_sum_takes_a_product_in_place() {
    let cube = CubeDevice::Cpu(Default::default());
    for dtypes in [[DType::F32; 2], [DType::F16, DType::F32]] {
        let case = Case { batch: &[], dims: [6, 10, 4], layouts: BOTH, dtypes };
        fn run<B: Kernels>(case: &Case, device: &B::Device) -> Vec<Vec<f32>> {
            let target = factor::<B>(device, &[6, 10], Layout::Rows, case.dtypes[1], 3);
            vec![values::<B>(B::add_product(target, case.factors::<B>(device)))]
        }
        let flex = run::<Flex>(&case, &Default::default());
        check(&case, 1, flex, stand_in::on(|| run::<CubeBackend>(&case, &cube)));
    }
}

#[test]
fn a_shared_sum_is_left_as_it_was() {
    let cube = CubeDevice::Cpu(Default::default());
    let dtypes = [DType::F32; 2];
    let case = Case { batch: &[], dims: [6, 10, 4], layouts: BOTH, dtypes };
    let target = || factor::<CubeBackend>(&cube, &[6, 10], Layout::Rows, DType::F32, 3);
    let shared = target();
    let add = || CubeBackend::add_product(shared.clone(), case.factors::<CubeBackend>(&cube));
    let (sum, _) = stand_in::on(add);
    assert_eq!(values::<CubeBackend>(shared), values::<CubeBackend>(target()));
    assert_ne!(values::<CubeBackend>(sum), values::<CubeBackend>(target()));
}

#[test]
fn every_epilogue_is_exact() {
    let cube = CubeDevice::Cpu(Default::default());
    for activation in [
        LinearActivation::Identity,
        LinearActivation::Gelu,
        LinearActivation::GeluTanh,
        LinearActivation::Relu,
        LinearActivation::Silu,
    ] {
        // The library has no second target for rows of 10 elements.
        for (columns, has_bias) in [(16, true), (10, true), (16, false)] {
            let dtypes = [DType::F32; 2];
            let case = Case { batch: &[], dims: [6, columns, 4], layouts: BOTH, dtypes };
            let run = |_: ()| {
                fn of<B: Kernels>(
                    case: &Case,
                    device: &B::Device,
                    has_bias: bool,
                    activation: LinearActivation,
                ) -> Vec<Vec<f32>> {
                    let bias = factor::<B>(device, &[1, case.dims[1]], Layout::Rows, DType::F32, 5);
                    let bias = B::float_reshape(bias, Shape::from([case.dims[1]]));
                    let bias = Some(bias).filter(|_| has_bias);
                    let factors = case.factors::<B>(device);
                    let (output, sums) = B::biased_product(factors, bias, activation);
                    std::iter::once(output).chain(sums).map(values::<B>).collect()
                }
                [
                    of::<Flex>(&case, &Default::default(), has_bias, activation),
                    of::<CubeBackend>(&case, &cube, has_bias, activation),
                ]
            };
            let ([flex, found], calls) = stand_in::on(|| run(()));
            check(&case, 1, flex, (found, calls));
        }
    }
}

#[test]
fn gradients_of_weight_and_bias_are_one_call() {
    let cube = CubeDevice::Cpu(Default::default());
    for dtypes in [[DType::F32; 2], [DType::F16, DType::F32]] {
        let case = Case { batch: &[], dims: [12, 9, 5], layouts: BOTH, dtypes };
        fn run<B: Kernels>(case: &Case, device: &B::Device) -> Vec<Vec<f32>> {
            let [rows, columns, inner] = case.dims;
            let input = factor::<B>(device, &[inner, rows], Layout::Rows, case.dtypes[0], 1);
            let grad = factor::<B>(device, &[inner, columns], Layout::Rows, case.dtypes[0], 2);
            B::affine_gradients(input, grad, case.dtypes[1]).map(values::<B>).to_vec()
        }
        let flex = run::<Flex>(&case, &Default::default());
        check(&case, 1, flex, stand_in::on(|| run::<CubeBackend>(&case, &cube)));
    }
}
