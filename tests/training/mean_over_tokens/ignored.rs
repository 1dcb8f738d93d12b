//! Gradients of ignored parameters, which are not reduced, have the weights of the others.

use burn::tensor::Tensor;
use fsdp_runtime::prelude::*;

use super::{ROWS, sum};
use crate::support::compare::{Within, assert_close};
use crate::support::{Net, on_ranks};

#[test]
fn ignored_parameters_have_the_gradient_of_the_own_sum_times_ranks_over_all_weights() {
    on_ranks(2, |worker| {
        let net = Net::new(1, 0.0, worker.device());
        let id = net.head.weight.id;
        let options = FsdpOptions::new().with_seed(7).with_ignored_params([id]);
        let net = fully_shard(net, worker, options)?;
        let rank = worker.rank().index();
        let counted = [[5, 1], [2, 6]][rank];
        let part = |at: usize| sum(&net, (2 * rank + at) * ROWS, &counted[at..=at]);
        let own = |gradients: burn::optim::GradientsParams| {
            let gradient: Tensor<2> = gradients.get(id).expect("its own gradient");
            gradient.into_data().iter::<f32>().collect::<Vec<_>>()
        };
        // Under `backward` they are those of the rank's own loss.
        let (first, second) = (own(net.backward(part(0).0)?), own(net.backward(part(1).0)?));
        let expected = first.iter().zip(&second).map(|(a, b)| (a + b) * 2.0 / 14.0);
        let expected: Vec<f32> = expected.collect();
        let (loss, weight) = part(0);
        net.accumulate_sum(loss, weight)?;
        let (loss, weight) = part(1);
        let found = own(net.backward_sum(loss, weight)?);
        assert_close(&found, &expected, Within::Absolute(1e-6), "ignored");
        assert!(expected.iter().any(|element| element.abs() > 1e-3));
        Ok(())
    });
}
