//! [`ModelBackend`] for CubeCL devices, with and without Burn's feature `fusion`.
//!
//! `burn::backend::Cube` is [`Fusion`] around [`CubeBackend`] if any crate of the build turns the
//! feature on, and else [`CubeBackend`] itself. This crate cannot know which of the two it is. So
//! [`Recorder`] is implemented for both, and [`Cube`] uses its own implementation.
//!
//! Under fusion a custom operation stands in the queue of the thread that registers it, and runs
//! there in order, on that thread's CubeCL stream.

use std::fmt;
use std::marker::PhantomData;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Backend, Cube, TensorMetadata};
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use burn_fusion::custom::{
    CustomOpIr, HandleContainer, Operation, OperationIr, StreamId, TensorIr,
};
use burn_fusion::{
    Client, ExecutionError, Fusion, FusionBackend, FusionHandle, FusionTensor, NoOp, get_client,
};
use fsdp_kernels::Float;

use super::model_backend::{FloatTensor, ModelBackend, dispatch};
use crate::error::IgnorePoison;

/// The way from tensors to buffers and back, as [`ModelBackend`] describes it.
trait Recorder: Backend {
    /// Backend whose tensors are buffers.
    type Inner: Backend<Device = Self::Device>;
    const RECORDS: bool;

    fn lower(tensors: Vec<Float<Self>>) -> Vec<Float<Self::Inner>>;
    fn raise(buffer: Float<Self::Inner>) -> Float<Self>;
    fn drain(device: &Self::Device);
    fn defer(
        inputs: Vec<Float<Self>>,
        outputs: Vec<(Shape, DType)>,
        f: impl FnOnce(Vec<Float<Self::Inner>>) -> Vec<Float<Self::Inner>> + Send + 'static,
    ) -> Vec<Float<Self>>;
}

impl ModelBackend for Cube {
    type Raw = CubeBackend;
    const RECORDS: bool = <Self as Recorder>::RECORDS;

    dispatch!(Cube);

    fn lower(tensors: Vec<Float<Self>>) -> Vec<CubeTensor> {
        let buffers = <Self as Recorder>::lower(tensors);
        #[cfg(test)]
        super::stream_order::wrote(&buffers);
        buffers
    }

    fn raise(buffer: CubeTensor) -> Float<Self> {
        <Self as Recorder>::raise(buffer)
    }

    fn drain(device: &CubeDevice) {
        <Self as Recorder>::drain(device);
    }

    fn defer(
        inputs: Vec<Float<Self>>,
        outputs: Vec<(Shape, DType)>,
        f: impl FnOnce(Vec<CubeTensor>) -> Vec<CubeTensor> + Send + 'static,
    ) -> Vec<Float<Self>> {
        <Self as Recorder>::defer(inputs, outputs, f)
    }
}

impl Recorder for CubeBackend {
    type Inner = Self;
    const RECORDS: bool = false;

    fn lower(tensors: Vec<CubeTensor>) -> Vec<CubeTensor> {
        tensors
    }

    fn raise(buffer: CubeTensor) -> CubeTensor {
        buffer
    }

    fn drain(_: &CubeDevice) {}

    fn defer(
        inputs: Vec<CubeTensor>,
        _: Vec<(Shape, DType)>,
        f: impl FnOnce(Vec<CubeTensor>) -> Vec<CubeTensor> + Send + 'static,
    ) -> Vec<CubeTensor> {
        f(inputs)
    }
}

impl<B: FusionBackend> Recorder for Fusion<B> {
    type Inner = B;
    const RECORDS: bool = true;

    /// Registers an operation that takes the buffers out, and launches the queue. (Burn's own
    /// `resolve_tensor_float` leaves an entry of each tensor in the queue for good.)
    fn lower(tensors: Vec<Float<Self>>) -> Vec<Float<B>> {
        let Some(first) = tensors.first() else { return Vec::new() };
        let client = first.client.clone();
        let taken = Arc::new(Mutex::new(Vec::new()));
        let slot = taken.clone();
        // The queue leaves the error of a failed operation in the outputs of all operations that
        // depend on it. This output exists for that error alone: it is never written.
        let fate = vec![(Shape::from([1]), DType::F32)];
        let mut fate = register::<B>(&client, "fsdp::lower", tensors, fate, move |buffers| {
            *slot.lock().ignore_poison() = buffers;
            Vec::new()
        });
        client.sync(|| ());
        let taken = std::mem::take(&mut *taken.lock().ignore_poison());
        if taken.is_empty() {
            let cause = fate.pop().map_or_else(String::new, error_of::<B>);
            panic!("an operation that these tensors depend on has failed on the device: {cause}");
        }
        taken
    }

    fn raise(buffer: Float<B>) -> Float<Self> {
        let client = get_client::<B>(&buffer.device());
        let (shape, dtype) = (buffer.shape(), buffer.dtype());
        let id = client.register_tensor_handle(B::float_tensor_handle(buffer));
        let output = TensorIr::uninit(id, shape, dtype);
        let operation = OperationIr::Custom(CustomOpIr::new("fsdp::raise", &[], &[output]));
        let no_op = NoOp::<B>::new();
        let mut raised = client.register(StreamId::current(), operation, no_op);
        raised.pop().expect("the operation has one output")
    }

    fn drain(device: &Self::Device) {
        get_client::<B>(device).sync(|| ());
    }

    fn defer(
        inputs: Vec<Float<Self>>,
        outputs: Vec<(Shape, DType)>,
        f: impl FnOnce(Vec<Float<B>>) -> Vec<Float<B>> + Send + 'static,
    ) -> Vec<Float<Self>> {
        let Some(first) = inputs.first() else {
            return f(Vec::new()).into_iter().map(Self::raise).collect();
        };
        let client = first.client.clone();
        register::<B>(&client, "fsdp::kernel", inputs, outputs, f)
    }
}

/// Returns the description of the error that the queue has left in a tensor.
fn error_of<B: FusionBackend>(tensor: Float<Fusion<B>>) -> String {
    let read = pin!(Fusion::<B>::float_into_data(tensor));
    // The queue was launched, so the error is known at once.
    match read.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(Err(error)) => error.to_string(),
        Poll::Ready(Ok(_)) | Poll::Pending => "the queue does not say why".into(),
    }
}

/// Registers an operation on the buffers of `inputs` in the queue of this thread. `f` may return no
/// results; then the outputs are never written.
fn register<B>(
    client: &Client<B::FusionRuntime>,
    name: &'static str,
    inputs: Vec<Float<Fusion<B>>>,
    outputs: Vec<(Shape, DType)>,
    f: impl FnOnce(Vec<Float<B>>) -> Vec<Float<B>> + Send + 'static,
) -> Vec<Float<Fusion<B>>>
where
    B: FusionBackend,
{
    let inputs: Vec<TensorIr> = inputs.into_iter().map(FusionTensor::into_ir).collect();
    let output = |(shape, dtype)| TensorIr::uninit(client.create_empty_handle(), shape, dtype);
    let outputs: Vec<TensorIr> = outputs.into_iter().map(output).collect();
    let ir = OperationIr::Custom(CustomOpIr::new(name, &inputs, &outputs));
    let operation =
        OnBuffers::<B, _> { name, inputs, outputs, f: Mutex::new(Some(f)), backend: PhantomData };
    client.register(StreamId::current(), ir, operation)
}

/// Operation of the queue that runs a function on buffers.
struct OnBuffers<B, F> {
    name: &'static str,
    inputs: Vec<TensorIr>,
    outputs: Vec<TensorIr>,
    /// The function, until it has run.
    f: Mutex<Option<F>>,
    backend: PhantomData<fn() -> B>,
}

impl<B, F> fmt::Debug for OnBuffers<B, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl<B, F> Operation<B::FusionRuntime> for OnBuffers<B, F>
where
    B: FusionBackend,
    F: FnOnce(Vec<Float<B>>) -> Vec<Float<B>> + Send,
{
    fn execute(
        &self,
        handles: &mut HandleContainer<FusionHandle<B::FusionRuntime>>,
    ) -> Result<(), ExecutionError> {
        let Some(f) = self.f.lock().ignore_poison().take() else { return Ok(()) };
        let buffers = self.inputs.iter().map(|it| handles.get_float_tensor::<B>(it));
        let results = f(buffers.collect());
        assert!(
            results.is_empty() || results.len() == self.outputs.len(),
            "{} has as many results as outputs, or none",
            self.name
        );
        for (output, buffer) in self.outputs.iter().zip(results) {
            handles.register_float_tensor::<B>(&output.id, buffer);
        }
        Ok(())
    }
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use cubecl::device::CpuDevice;

    use super::*;
    use crate::backend::shard_backend::ShardBackend;
    use crate::error::panic_message;

    /// Returns the sum of two views of a buffer that holds ones and is poisoned and released after
    /// the sum. `drained` says whether the sum is launched before that.
    fn sum_of_views(drained: bool) -> Vec<f32> {
        let device = CubeDevice::Cpu(CpuDevice);
        let shape = Shape::from([8]);
        let memory = CubeBackend::alloc(&device, 8, DType::F32);
        let ones = CubeBackend::float_ones(shape.clone(), &device, DType::F32.into());
        CubeBackend::write(&memory, vec![(0, ones)]);
        let view = <Cube as ModelBackend>::raise(CubeBackend::view(&memory, 0, shape));
        let sum = Cube::float_add(view.clone(), view);
        if drained {
            <Cube as ModelBackend>::drain(&device);
        }
        CubeBackend::poison(&memory, 8);
        CubeBackend::release(&memory);
        let sum = <Cube as ModelBackend>::lower(vec![sum]).remove(0);
        CubeBackend::to_data(sum).iter().collect()
    }

    #[test]
    fn a_recorded_read_runs_before_the_buffer_is_released() {
        assert_eq!(sum_of_views(true), [2.0; 8]);
    }

    /// The operation that fails runs on another thread under fusion, and later than it is recorded.
    #[test]
    fn a_failed_operation_is_reported_with_its_cause() {
        let device = CubeDevice::Cpu(CpuDevice);
        let ones = || Cube::float_ones(Shape::from([8]), &device, DType::F32.into());
        let failure = catch_unwind(AssertUnwindSafe(|| {
            let failed = Cube::defer_one(ones(), DType::F32, |_| panic!("the 7th drawer is stuck"));
            let dependent = Cube::float_add(failed, ones());
            <Cube as ModelBackend>::lower(vec![ones(), dependent])
        }));
        let cause = panic_message(&*failure.expect_err("nothing was computed"));
        assert!(cause.contains("the 7th drawer is stuck"), "{cause}");

        // The queue goes on with operations that do not depend on it.
        let sum = <Cube as ModelBackend>::lower(vec![Cube::float_add(ones(), ones())]).remove(0);
        assert_eq!(CubeBackend::to_data(sum).iter::<f32>().collect::<Vec<_>>(), [2.0; 8]);
    }

    /// Without a drain the read runs after the release, and shows the poison.
    #[test]
    fn a_late_read_shows_the_poison() {
        let late = sum_of_views(false);
        assert_eq!(late.len(), 8);
        match <Cube as ModelBackend>::RECORDS {
            true => assert!(late.iter().all(|x| x.is_nan()), "{late:?}"),
            false => assert_eq!(late, [2.0; 8]),
        }
    }
}
