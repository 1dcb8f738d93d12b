//! `test_fully_shard_ignore_params`: parameters left alone.

use burn::module::ParamId;
use burn::optim::SgdConfig;
use fsdp_runtime::prelude::*;

use super::mlp::{Mlp, input, loss, on};

#[test]
fn ddp_like_ignored_params_stay_whole_and_keep_their_own_gradients() {
    let ranks = on(2, |worker| {
        let model = Mlp::new(2, worker.device());
        let id = model.blocks[1].up.weight.id;
        let whole = model.blocks[1].up.weight.dims();
        let options = FsdpOptions::new().seed(3).ignored_params([id]);
        let mut model = fully_shard(model, worker, options)?;
        assert_eq!(model.blocks[1].up.weight.base().dims(), whole);
        // PyTorch's state dict has them too.
        let state = model.unsharded_state(Recipient::All)?;
        assert_eq!(state["blocks.1.up.weight"].shape().as_slice(), whole);
        let x = input(worker.rank().index(), 0, 4, worker.device());
        let gradients = model.backward(loss(model.forward(x)))?;
        let own = gradients.get::<2>(id).expect("its own gradient");
        assert_eq!(own.dims(), whole);
        let before = model.blocks[1].up.weight.val().into_data();
        model = SgdConfig::new().init().step(0.1, model, gradients);
        assert_ne!(before.as_bytes(), model.blocks[1].up.weight.val().into_data().as_bytes());
        Ok(own.into_data().iter::<f32>().map(f32::to_bits).collect::<Vec<_>>())
    });
    assert_ne!(ranks[0], ranks[1], "each rank's own, not reduced");
}

#[test]
fn an_id_of_no_parameter_is_an_error() {
    let errors = on(2, |worker| {
        let options = FsdpOptions::new().ignored_params([ParamId::new()]);
        let model = Mlp::new(1, worker.device());
        Ok(fully_shard(model, worker, options).map(|_| ()).unwrap_err().to_string())
    });
    assert!(errors[0].contains("ignored_params"), "{}", errors[0]);
}
