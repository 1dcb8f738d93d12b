//! A list under `#[fsdp(unit)]` is recognised by its type: each element is a unit, also where the
//! field's type is an alias.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use fsdp_runtime::Error;
use fsdp_runtime::prelude::*;

const WIDTH: usize = 8;

/// A module of another crate, whose structure FSDP does not know.
#[derive(Module, Debug)]
struct Foreign {
    inner: Linear,
}

impl Foreign {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.inner.forward(x)
    }
}

type Linears = Vec<Linear>;
type Foreigns = Vec<Foreign>;
type Two = [Foreign; 2];
type One = Foreign;

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Model {
    #[fsdp(unit)]
    linears: Linears,
    #[fsdp(unit, leaf)]
    foreigns: Foreigns,
    #[fsdp(unit, leaf)]
    two: Two,
    #[fsdp(unit, leaf)]
    one: One,
    head: Linear,
}

#[fsdp_unit(field_units)]
impl Model {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.linears.iter().fold(x, |x, layer| layer.forward(x));
        let x = self.foreigns.iter().chain(&self.two).fold(x, |x, layer| layer.forward(x));
        self.head.forward(self.one.forward(x))
    }
}

impl Model {
    fn new(device: &Device) -> Self {
        let linear = || LinearConfig::new(WIDTH, WIDTH).init(device);
        let foreign = || Foreign { inner: linear() };
        Self {
            linears: vec![linear(), linear()],
            foreigns: vec![foreign(), foreign(), foreign()],
            two: [foreign(), foreign()],
            one: foreign(),
            head: linear(),
        }
    }
}

#[test]
fn each_element_of_an_aliased_list_is_a_unit() {
    let paths = launch(LaunchOptions::new(1).with_device(Device::flex()), |worker| {
        let device = worker.device();
        let net = fully_shard(Model::new(device), &worker, FsdpOptions::new())?;
        let loss = net.forward(Tensor::ones([2, WIDTH], device)).mean();
        net.backward(loss)?;
        assert_eq!(net.stats().counts().single_gathers, 0, "every unit is gathered as one");
        Ok::<_, Error>(
            net.stats().wrapping().units.into_iter().map(|unit| unit.path).collect::<Vec<_>>(),
        )
    })
    .expect("the run succeeds");
    let mut paths = paths.into_iter().next().expect("one rank");
    paths.sort();
    let mut expected = [
        "",
        "foreigns.0",
        "foreigns.1",
        "foreigns.2",
        "linears.0",
        "linears.1",
        "one",
        "two.0",
        "two.1",
    ];
    expected.sort();
    assert_eq!(paths, expected);
}
