//! PyTorch's network for MNIST, in plain Burn, with annotations for sharding.
//!
//! `#[fsdp(unit)]` marks a layer whose parameters may be gathered on their own; which layers are is
//! a matter of the wrap policy. Without the annotations the same code trains the network unsharded.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::{log_softmax, relu};
use burn::tensor::module::max_pool2d;
use burn::tensor::ops::MaxPoolOptions;
use burn::tensor::{Device, Int, Tensor};
use fsdp_runtime::nn::{Dropout, DropoutConfig};
use fsdp_runtime::prelude::*;

/// Number of classes: the digits 0 to 9.
pub const CLASSES: usize = 10;

/// Two convolutions and two linear layers, as in PyTorch's tutorial: 1,199,882 parameters, nearly
/// all of them in `fc1`.
#[derive(Module, Debug)]
#[fsdp_unit(root)]
pub struct Net {
    #[fsdp(unit)]
    conv1: Conv2d,
    #[fsdp(unit)]
    conv2: Conv2d,
    dropout1: Dropout,
    dropout2: Dropout,
    #[fsdp(unit)]
    fc1: Linear,
    #[fsdp(unit)]
    fc2: Linear,
}

impl Net {
    /// Builds the network. Burn's default initialisation is PyTorch's: uniform in ±1/√fan_in.
    pub fn new(device: &Device) -> Self {
        Self {
            conv1: Conv2dConfig::new([1, 32], [3, 3]).init(device),
            conv2: Conv2dConfig::new([32, 64], [3, 3]).init(device),
            dropout1: DropoutConfig::new(0.25).init(),
            dropout2: DropoutConfig::new(0.5).init(),
            fc1: LinearConfig::new(9216, 128).init(device),
            fc2: LinearConfig::new(128, CLASSES).init(device),
        }
    }

    /// Turns dropout off: its masks depend on the rank, so that the losses of several ranks would
    /// differ from those of one.
    #[cfg(test)]
    pub fn without_dropout(mut self) -> Self {
        (self.dropout1.prob, self.dropout2.prob) = (0.0, 0.0);
        self
    }
}

#[fsdp_unit(field_units)]
impl Net {
    /// Computes the log-probability of each class.
    ///
    /// # Shapes
    ///
    /// - `x`: `[images, 1, 28, 28]`
    /// - output: `[images, 10]`
    pub fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let x = relu(self.conv1.forward(x));
        let x = relu(self.conv2.forward(x));
        let x = max_pool2d(x, MaxPoolOptions::new([2, 2]));
        let x = self.dropout1.forward(x);
        let x: Tensor<2> = x.flatten(1, 3);
        let x = relu(self.fc1.forward(x));
        let x = self.dropout2.forward(x);
        log_softmax(self.fc2.forward(x), 1)
    }
}

/// Computes the negative log-likelihood of the targets, summed over the images: PyTorch's
/// `nll_loss(.., reduction='sum')`.
///
/// # Shapes
///
/// - `log_probabilities`: `[images, classes]`
/// - `targets`: `[images]`, from 0 to below `classes`
/// - output: `[1]`
pub fn nll_loss_sum(log_probabilities: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
    log_probabilities.gather(1, targets.unsqueeze_dim(1)).sum().neg()
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;

    use super::*;

    #[test]
    fn the_network_has_pytorchs_parameters() {
        let device = Device::flex();
        let net = Net::new(&device);
        let convolutions = (32 * 9 + 32) + (64 * 32 * 9 + 64);
        assert_eq!(net.num_params(), convolutions + (9216 * 128 + 128) + (128 * 10 + 10));
        assert_eq!(net.num_params(), 1_199_882);
        let output = net.forward(Tensor::ones([3, 1, 28, 28], &device));
        assert_eq!(output.dims(), [3, CLASSES]);
        let sums: Vec<f32> = output.exp().sum_dim(1).into_data().try_into_vec_as().unwrap();
        assert_eq!(sums.len(), 3);
        assert!(sums.iter().all(|sum| (sum - 1.0).abs() < 1e-5), "{sums:?}");
    }

    #[test]
    fn training_without_dropout_has_the_output_of_a_test() {
        let device = Device::flex().autodiff();
        let net = Net::new(&device);
        let images = Tensor::ones([2, 1, 28, 28], &device);
        let tested = net.valid().forward(images.clone().inner()).into_data();
        let dropped = net.forward(images.clone()).into_data();
        assert_ne!(dropped.as_bytes(), tested.as_bytes());
        let trained = net.without_dropout().forward(images).into_data();
        assert_eq!(trained.as_bytes(), tested.as_bytes());
    }

    #[test]
    fn the_loss_adds_up_the_targets_log_probabilities() {
        let device = Device::flex();
        let rows = TensorData::new(vec![-0.5f32, -1.0, -2.0, -3.0, -0.25, -4.0], [2, 3]);
        let targets = Tensor::from_data(TensorData::new(vec![2i32, 1], [2]), &device);
        let loss = nll_loss_sum(Tensor::from_data(rows, &device), targets);
        assert_eq!(loss.into_scalar::<f32>(), 2.25);
    }
}
