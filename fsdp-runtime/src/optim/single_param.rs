//! One parameter as a module of its own, for an optimizer that steps modules.

use burn::module::{Devices, Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Device, Tensor};

/// A module that contains only one parameter, under the path that it has in the model. Optimizers
/// select their parameter groups by path.
#[derive(Clone, Debug)]
pub(super) struct SingleParam<const D: usize> {
    pub(super) path: Vec<String>,
    pub(super) param: Param<Tensor<D>>,
}

impl<const D: usize> SingleParam<D> {
    fn map_param(self, map: impl FnOnce(Param<Tensor<D>>) -> Param<Tensor<D>>) -> Self {
        Self { param: map(self.param), ..self }
    }
}

impl<const D: usize> Module for SingleParam<D> {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.param.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        self.map_param(|param| param.fork(device))
    }

    fn to_device(self, device: &Device) -> Self {
        self.map_param(|param| param.to_device(device))
    }

    fn train(self) -> Self {
        self.map_param(Module::train)
    }

    fn valid(&self) -> Self {
        Self { path: self.path.clone(), param: self.param.valid() }
    }

    fn materialize(self) -> Self {
        self.map_param(Module::materialize)
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        self.path.iter().for_each(|name| visitor.enter_module(name, ""));
        visitor.visit_float(&self.param);
        self.path.iter().rev().for_each(|name| visitor.exit_module(name, ""));
    }

    fn map<T: ModuleMapper>(self, mapper: &mut T) -> Self {
        let Self { path, param } = self;
        path.iter().for_each(|name| mapper.enter_module(name, ""));
        let param = mapper.map_float(param);
        path.iter().rev().for_each(|name| mapper.exit_module(name, ""));
        Self { path, param }
    }
}
