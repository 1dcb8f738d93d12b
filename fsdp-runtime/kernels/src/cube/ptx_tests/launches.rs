//! Calls of the functions that launch kernels, such that every kernel is launched in every dtype,
//! with every option, and with vectors of every width.

mod optimizers;

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use burn_std::Metadata;
use cubecl::client::Client;

use super::server::{Launched, Ptx, client};
use super::{DTYPES, kernel_name};
use crate::StorageType;
use crate::attention::{Block, BlockOps, KeyRanges, Segments};
use crate::cube::attention::RowKernels;
use crate::cube::buffer_slice::BufferSlice;
use crate::cube::copy::fill;
use crate::cube::cross_entropy::RowLosses;
use crate::cube::decode::decode_into;
use crate::ignore_poison::IgnorePoison;
use crate::norm::Norm;
use crate::{
    AttentionRule, AttentionTensors, Kernels, LinearActivation, LossRule, MaskPart, MaskSource,
    NormalizationGrads, NormalizationRule, NormalizationTensors, Places, RandomRounding, RankMean,
    RotaryRule, RotaryTensors, RoundedPart,
};

/// Number of elements of a tensor: enough for the largest cubes of threads, and no multiple of a
/// vector's length.
const NUMEL: usize = 4 * (1 << 12) + 3;
/// Offsets of tensors in their buffers, in elements. They allow vectors of 8 and more elements, 4,
/// 2 and 1.
const OFFSETS: [usize; 4] = [0, 4, 2, 1];
/// Number of tensors, one more than share a launch: 16 or, of other kernels, 8.
const SEVERAL: usize = 17;

/// A device that compiles kernels for GPUs of one compute capability.
pub(super) struct Gpu {
    client: Client,
    launched: Arc<Mutex<Launched>>,
}

impl Gpu {
    pub(super) fn new(arch: u32) -> Self {
        let (client, launched) = client(arch);
        Self { client, launched }
    }

    /// Launches every kernel, and returns the name, the ID and the PTX of each that was compiled.
    pub(super) fn launch_all(&self) -> Vec<(String, String, Ptx)> {
        for from in DTYPES {
            for to in DTYPES {
                self.copies(from, to);
            }
            self.means(from);
            self.norms(from);
            self.masks(from);
            self.gelus(from);
            self.linears(from);
            self.normalizations(from);
            self.rotations(from);
            self.swiglus(from);
            self.tables(from);
            self.softmaxes(from);
            self.attentions(from);
            self.losses(from);
            self.matrix_attentions(from);
            self.fills(from);
            self.decodes(from);
            self.encodes(from);
        }
        self.roundings();
        self.adam_steps();
        self.sgd_steps();
        let ptx = std::mem::take(&mut self.launched.lock().ignore_poison().ptx);
        let named = |(id, ptx)| (kernel_name(&id), format!("{id:?}"), ptx);
        ptx.into_iter().map(named).collect()
    }

    /// Runs `f` and checks that it launches the kernel `expected`, and no other kernel but
    /// `others`.
    fn launch<T>(&self, expected: &str, others: &[&str], f: impl FnOnce() -> T) -> T {
        self.launched.lock().ignore_poison().recent.clear();
        let result = f();
        self.client.flush().expect("the server runs nothing that could fail");
        let launched = self.launched.lock().ignore_poison();
        let names: HashSet<String> = launched.recent.iter().map(kernel_name).collect();
        assert!(names.contains(expected), "{expected} was not launched, but {names:?}");
        let is_known = |name: &String| name == expected || others.contains(&name.as_str());
        assert!(names.iter().all(is_known), "beside {expected} were launched {names:?}");
        result
    }

    fn tensor(&self, numel: usize, dtype: DType) -> CubeTensor {
        self.tensor_at(0, numel, dtype)
    }

    /// Returns a tensor that begins at element `offset` of its buffer.
    fn tensor_at(&self, offset: usize, numel: usize, dtype: DType) -> CubeTensor {
        let handle = self.client.empty((offset + numel) * dtype.size());
        let handle = handle.offset_start((offset * dtype.size()) as u64);
        // The driver would be loaded only if a kernel's client were taken from this device.
        let device = CubeDevice::Cuda(Default::default());
        CubeTensor::new_contiguous(self.client.clone(), device, Shape::from([numel]), handle, dtype)
    }

    /// Returns lists of tensors: one for each offset, with a tensor that begins there, and one with
    /// several tensors.
    fn lists(&self, dtype: DType) -> Vec<Vec<CubeTensor>> {
        let at = |offset| vec![self.tensor_at(offset, NUMEL, dtype)];
        let several = (0..SEVERAL).map(|_| self.tensor(NUMEL, dtype)).collect();
        OFFSETS.into_iter().map(at).chain([several]).collect()
    }

    fn copies(&self, from: DType, to: DType) {
        for tensors in self.lists(from) {
            let step = NUMEL + 13;
            let buffer = self.tensor(tensors.len() * step, to);
            let parts = tensors.into_iter().enumerate();
            let parts: Vec<_> = parts.map(|(index, tensor)| (tensor, index * step)).collect();
            let ranges: Vec<_> = parts.iter().map(|(_, at)| (*at, Shape::from([NUMEL]))).collect();
            let buffer = self.launch("pack_kernel", &[], || CubeBackend::pack(parts, buffer));
            for divisor in [None, Some(3.0)] {
                self.launch("unpack_kernel", &[], || {
                    CubeBackend::unpack(buffer.clone(), ranges.clone(), from, divisor)
                });
            }
        }
        for (offset, divisor) in OFFSETS.into_iter().flat_map(|at| [(at, None), (at, Some(3.0))]) {
            let tensor = self.tensor_at(offset, NUMEL, from);
            self.launch("pack_kernel", &[], || CubeBackend::cast(tensor, to, divisor));
        }
    }

    fn fills(&self, dtype: DType) {
        for offset in OFFSETS {
            let target = BufferSlice::of(&self.tensor_at(offset, NUMEL, dtype));
            self.launch("fill_kernel", &[], || fill(&self.client, &target, NUMEL, 1.0));
        }
    }

    fn decodes(&self, dtype: DType) {
        let plain = StorageType::Nf4 { block: 64, double_quant: false };
        for storage in [StorageType::INT8, StorageType::NF4, plain] {
            let codes = self.tensor(storage.stored_len(NUMEL), DType::F32);
            for offset in OFFSETS {
                let target = BufferSlice::of(&self.tensor_at(offset, NUMEL, dtype));
                let codes = BufferSlice::of(&codes);
                self.launch("decode_kernel", &[], || {
                    decode_into(&self.client, &codes, storage, &target, NUMEL);
                });
            }
            self.launch("decode_kernel", &[], || {
                CubeBackend::decode(codes, storage, Shape::from([NUMEL]), dtype)
            });
        }
    }

    fn encodes(&self, dtype: DType) {
        for offset in OFFSETS {
            let tensor = self.tensor_at(offset, NUMEL, dtype);
            self.launch("encode_kernel", &[], || CubeBackend::encode_int8(tensor, 64..NUMEL, 64));
        }
    }

    fn means(&self, dtype: DType) {
        for tensors in self.lists(dtype) {
            // The mean of one tensor in f32 is the tensor itself.
            let least = if tensors.len() == 1 && dtype == DType::F32 { 2 } else { 1 };
            for divisor in [least, tensors.len().max(least)] {
                let mean = || RankMean {
                    parts: tensors.iter().map(|tensor| (tensor.clone(), 0)).collect(),
                    divisor,
                    shape: Shape::from([NUMEL]),
                };
                self.launch("mean_kernel", &[], || CubeBackend::rank_means(vec![mean()]));
            }
        }
        // Several means over two parts share a launch.
        let mean = |_| RankMean {
            parts: (0..2).map(|_| (self.tensor(NUMEL, dtype), 0)).collect(),
            divisor: 2,
            shape: Shape::from([NUMEL]),
        };
        let means = (0..SEVERAL).map(mean).collect();
        self.launch("mean_kernel", &[], || CubeBackend::rank_means(means));
    }

    fn norms(&self, dtype: DType) {
        for norm in [Norm::One, Norm::Two, Norm::Inf, Norm::P(2.5)] {
            for tensors in self.lists(dtype) {
                let parts: Vec<_> =
                    tensors.iter().map(|tensor| (tensor.clone(), 0..NUMEL)).collect();
                self.launch("sums_kernel", &["fold_kernel"], || CubeBackend::sums(&parts, norm));
                drop(parts);
                let others = ["fold_kernel", "pack_kernel"];
                self.launch("sums_kernel", &others, || CubeBackend::unscale(tensors, 0.5, norm));
            }
        }
    }

    fn masks(&self, dtype: DType) {
        let source = MaskSource { key: [1, 2], counter: [3, 4], prob: 0.1 };
        for offset in OFFSETS {
            let tensor = self.tensor_at(offset, NUMEL, dtype);
            self.launch("dropout_kernel", &[], || CubeBackend::dropout(tensor, &source));
        }
        let columns = Places::blocks(100, [20..40, 60..80]);
        let part = MaskPart::new([Places::all(2), Places::all(1), columns, Places::all(3)]);
        let tensor = self.tensor_at(0, part.numel(), dtype);
        let launch = || CubeBackend::dropout_part(tensor, &source, &part);
        self.launch("dropout_part_kernel", &[], launch);
    }

    fn roundings(&self) {
        let rounding = RandomRounding { key: [1, 2], counter: [3, 4], first: 0, part: None };
        for offset in OFFSETS {
            let tensor = self.tensor_at(offset, NUMEL, DType::F32);
            self.launch("round_kernel", &[], || CubeBackend::round_at_random(tensor, &rounding));
        }
        let part = Some(RoundedPart { len: 3, parts: 2, part: 1 });
        let rounding = RandomRounding { part, ..rounding };
        let tensor = self.tensor_at(0, NUMEL, DType::F32);
        let launch = || CubeBackend::round_at_random(tensor, &rounding);
        self.launch("round_part_kernel", &[], launch);
    }

    fn gelus(&self, dtype: DType) {
        for offset in OFFSETS {
            let tensor = self.tensor_at(offset, NUMEL, dtype);
            let grad = self.tensor_at(offset, NUMEL, dtype);
            self.launch("gelu_kernel", &[], || CubeBackend::gelu(tensor.clone()));
            self.launch("gelu_backward_kernel", &[], || CubeBackend::gelu_backward(tensor, grad));
        }
    }

    /// Calls `f` with a function that makes matrices, for rows of several lengths and for tensors at each
    /// of the offsets. Rows have a team of the fewest and of the most threads.
    fn rows(&self, dtype: DType, f: impl Fn(&dyn Fn(usize) -> CubeTensor, usize)) {
        for (offset, len) in OFFSETS.into_iter().flat_map(|at| [8, 768].map(|len| (at, len))) {
            let matrix = |rows: usize| {
                let tensor = self.tensor_at(offset, rows * len, dtype);
                burn_cubecl::ops::reshape(tensor, Shape::from([rows, len]))
            };
            f(&matrix, len);
        }
    }

    fn normalizations(&self, dtype: DType) {
        self.rows(dtype, |matrix, len| {
            let param = || burn_cubecl::ops::reshape(matrix(1), Shape::from([len]));
            for (centered, bias, residual) in [
                (true, false, false),
                (true, true, true),
                (false, false, false),
                (false, false, true),
            ] {
                let rule = NormalizationRule { centered, epsilon: 1e-5 };
                let second = || residual.then(|| matrix(5));
                let tensors = || NormalizationTensors {
                    input: matrix(5),
                    residual: second(),
                    gamma: param(),
                    beta: bias.then(param),
                };
                self.launch("normalize_kernel", &[], || CubeBackend::normalize(tensors(), &rule));
                let tensors = || NormalizationGrads {
                    input: matrix(5),
                    gamma: param(),
                    grad: matrix(5),
                    sum_grad: second(),
                };
                let mut kernels =
                    ["normalize_backward_kernel", "param_sums_kernel", "column_sums_kernel"];
                for _ in 0..kernels.len() {
                    self.launch(kernels[0], &kernels[1..], || {
                        CubeBackend::normalize_backward(tensors(), &rule)
                    });
                    kernels.rotate_left(1);
                }
            }
        });
    }

    fn linears(&self, dtype: DType) {
        use LinearActivation::{Gelu, GeluTanh, Identity, Relu, Silu};
        self.rows(dtype, |matrix, len| {
            let bias = burn_cubecl::ops::reshape(matrix(1), Shape::from([len]));
            self.launch("biased_kernel", &[], || {
                CubeBackend::biased(matrix(5), Some(bias.clone()), Identity)
            });
            for activation in [Gelu, GeluTanh, Relu, Silu] {
                for bias in [None, Some(bias.clone())] {
                    self.launch("biased_kernel", &[], || {
                        CubeBackend::biased(matrix(5), bias.clone(), activation)
                    });
                    self.launch("biased_backward_kernel", &[], || {
                        CubeBackend::biased_backward(matrix(5), bias, matrix(5), activation)
                    });
                }
            }
        });
    }

    fn swiglus(&self, dtype: DType) {
        for offset in OFFSETS {
            let tensor = || self.tensor_at(offset, NUMEL, dtype);
            self.launch("swiglu_kernel", &[], || CubeBackend::swiglu(tensor(), tensor()));
            self.launch("swiglu_backward_kernel", &[], || {
                CubeBackend::swiglu_backward(tensor(), tensor(), tensor())
            });
        }
    }

    fn tables(&self, dtype: DType) {
        let others = ["table_links_kernel", "fill_kernel"];
        for offset in OFFSETS {
            let grads = self.tensor_at(offset, 5 * 64, dtype);
            let grads = burn_cubecl::ops::reshape(grads, Shape::from([5, 64]));
            let ids = self.tensor(5, DType::F32);
            self.launch("table_sum_kernel", &others, || {
                CubeBackend::table_gradient(grads, ids, Shape::from([7, 64]))
            });
        }
    }

    fn rotations(&self, dtype: DType) {
        for (offset, with_positions) in OFFSETS.into_iter().flat_map(|at| [(at, true), (at, false)])
        {
            for interleaved in [true, false] {
                let reshaped =
                    |tensor, shape: &[usize]| burn_cubecl::ops::reshape(tensor, Shape::from(shape));
                let input = self.tensor_at(offset, 2 * 3 * 5 * 64, dtype);
                let positions = || reshaped(self.tensor(2 * 5, DType::F32), &[2, 5]);
                let tensors = RotaryTensors {
                    input: reshaped(input, &[2, 3, 5, 64]),
                    table: reshaped(self.tensor(7 * 64, DType::F32), &[7, 64]),
                    positions: with_positions.then(positions),
                };
                let rule = RotaryRule { interleaved, start: 1, inverse: false };
                self.launch("rotate_kernel", &[], || CubeBackend::rotate(tensors, &rule));
            }
        }
    }

    fn softmaxes(&self, dtype: DType) {
        self.rows(dtype, |matrix, _| {
            self.launch("softmax_kernel", &[], || CubeBackend::softmax(matrix(5)));
            self.launch("softmax_backward_kernel", &[], || {
                CubeBackend::softmax_backward(matrix(5), matrix(5))
            });
        });
    }

    fn attentions(&self, dtype: DType) {
        self.rows(dtype, |matrix, keys| {
            let offset = matrix(1).handle.offset_start.unwrap_or(0) as usize;
            let rows = |dtype: DType| {
                let tensor = self.tensor_at(offset / dtype.size(), 10 * keys, dtype);
                burn_cubecl::ops::reshape(tensor, Shape::from([1, 2, 5, keys]))
            };
            self.launch("add_rows_kernel", &["pack_kernel"], || {
                RowKernels.add(rows(DType::F32), rows(dtype), 0)
            });
            // All options for rows of one kind, and the longest kernel for the others.
            let one = keys == 768 && offset == 0;
            for (causal, window, is_masked, is_packed) in [
                (true, Some(3), true, false),
                (true, None, false, false),
                (false, None, true, false),
                (false, None, false, false),
                (true, None, true, true),
            ] {
                if !(one || causal && is_masked) {
                    continue;
                }
                let dropout = MaskSource { key: [1, 2], counter: [3, 4], prob: 0.1 };
                let dropout = is_masked.then_some(dropout);
                let segments = Segments::new(&vec![0; keys], keys).ok().filter(|_| is_packed);
                let rule =
                    AttentionRule { causal, window, segments, scale: 0.1, dropout, places: None };
                let bias = is_masked.then(|| matrix(1));
                // Packed rows have as many queries as keys.
                let all_queries = if is_packed { keys } else { 5 };
                let block = Block::<CubeBackend> {
                    ranges: KeyRanges::new(&rule, [all_queries, keys]),
                    bias: bias.as_ref(),
                    batch: 1,
                    heads: [2, 2],
                    queries: 0..5,
                    keys: 0..keys,
                };
                let others = ["fill_kernel", "dropout_kernel", "pack_kernel"];
                let [_, statistics] = self.launch("attention_weights_kernel", &others, || {
                    RowKernels.weights(rows(dtype), &block)
                });
                self.launch("attention_slopes_kernel", &others, || {
                    RowKernels.slopes([rows(dtype), rows(dtype)], [&statistics; 2], &block)
                });
            }
        });
    }

    fn losses(&self, dtype: DType) {
        self.rows(dtype, |matrix, classes| {
            for (smoothing, gradients) in [(0.0, true), (0.1, true), (0.1, false)] {
                let rule = LossRule {
                    embedding: true,
                    ignored: None,
                    smoothing,
                    mean: gradients,
                    chunk: 5,
                    gradients: [gradients; 3],
                };
                // Rows that vectors divide, and padded rows.
                for (has_bias, len) in [(false, classes), (true, classes), (true, classes - 1)] {
                    let bias = has_bias.then(|| self.tensor(len, dtype));
                    let targets = self.tensor(5, DType::F32);
                    let others = ["pack_kernel", "loss_kernel"];
                    self.launch("row_losses_kernel", &others, || {
                        let mut logits = matrix(5);
                        logits.meta = Box::new(Metadata::new([5, len], [classes, 1]));
                        let losses = RowLosses::new(targets, bias, &rule);
                        losses.compute(logits, 0);
                        losses.finish()
                    });
                }
            }
        });
    }

    fn matrix_attentions(&self, dtype: DType) {
        if dtype == DType::F32 {
            return;
        }
        let length = 70;
        for width in [16, 64, 80, 96, 128] {
            let heads = |heads: usize, interleaved: bool| {
                let tensor = self.tensor(heads * length * width, dtype);
                let shape = |dims: [usize; 4]| burn_cubecl::ops::reshape(tensor, Shape::from(dims));
                match interleaved {
                    true => CubeBackend::float_swap_dims(shape([1, length, heads, width]), 1, 2),
                    false => shape([1, heads, length, width]),
                }
            };
            let segments = Segments::new(&vec![0; length], length).ok();
            let dropout = Some(MaskSource { key: [1, 2], counter: [3, 4], prob: 0.1 });
            for (causal, window, segments, is_masked, dropout, interleaved) in [
                (false, None, None, true, None, true),
                (true, None, None, false, None, true),
                (true, None, None, false, None, false),
                (true, Some(3), segments.clone(), true, None, false),
                (true, Some(3), segments, true, None, true),
                (false, None, None, true, dropout, false),
            ] {
                let rule =
                    AttentionRule { causal, window, segments, scale: 0.1, dropout, places: None };
                let bias = || {
                    burn_cubecl::ops::reshape(self.tensor(length, dtype), Shape::from([1, length]))
                };
                let tensors = AttentionTensors {
                    query: heads(4, interleaved),
                    key: heads(2, interleaved),
                    value: heads(2, interleaved),
                    bias: is_masked.then(bias),
                };
                let results = self.launch("flash_forward_kernel", &["flash_mask_kernel"], || {
                    CubeBackend::tiled_attention(&tensors, &rule)
                });
                let kernels = [
                    "flash_means_kernel",
                    "flash_query_grads_kernel",
                    "flash_key_grads_kernel",
                    "flash_mask_kernel",
                ];
                for kernel in &kernels[..3] {
                    self.launch(kernel, &kernels, || {
                        let grad = heads(4, false);
                        CubeBackend::tiled_attention_backward(&tensors, &results, &grad, &rule)
                    });
                }
            }
        }
    }
}
