//! Which parameters are initialised where weights are broadcast, deferred or loaded from a file.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use burn::module::{Module, Param, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use fsdp_runtime::Error;
use fsdp_runtime::errors::{LoadError, ScheduleError};
use fsdp_runtime::prelude::*;
use fsdp_runtime::pretrained::{LoadOptions, SavePretrained, from_pretrained};

use super::pretrained::{read, save};
use crate::support::compare::assert_same_state;
use crate::support::{self, Net, on_ranks};

#[derive(Module, Debug)]
#[fsdp_unit(root)]
pub(super) struct Counted {
    pub(super) body: Linear,
    pub(super) head: Linear,
}

#[fsdp_unit]
impl Counted {
    pub(super) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.head.forward(x.clone()) + self.body.forward(x)
    }
}

/// Returns a model that counts how often its weights are initialised.
fn counted(device: &Device, count: &Arc<AtomicUsize>) -> Counted {
    let linear = |count: Arc<AtomicUsize>| {
        let weight = Param::uninitialized(
            ParamId::new(),
            move |device: &Device, tracked| {
                count.fetch_add(1, SeqCst);
                Tensor::<2>::full([16, 24], 0.5, device).set_require_grad(tracked)
            },
            device.clone(),
            true,
            [16, 24].into(),
        );
        Linear { weight, ..LinearConfig::new(16, 24).init(device) }
    };
    Counted { body: linear(count.clone()), head: linear(count.clone()) }
}

#[test]
fn rank_0_alone_initialises_where_its_weights_are_broadcast() {
    for (options, expected) in [
        (FsdpOptions::new(), [2, 0, 0]),
        (FsdpOptions::new().with_cpu_ram_efficient_loading(false), [2, 2, 2]),
        (FsdpOptions::new().with_seed(1).with_sync_module_states(false), [2, 2, 2]),
        (FsdpOptions::new().with_deferred_init(true), [0, 0, 0]),
    ] {
        let described = format!("{options:?}");
        let counts = on_ranks(3, move |worker| {
            let count = Arc::new(AtomicUsize::new(0));
            let model = fully_shard(counted(worker.device(), &count), worker, options.clone())?;
            // Parameters train on every rank, whichever rank initialised them.
            if described.contains("deferred_init: false") {
                let state = model.state().full(Recipient::All)?;
                assert_eq!(state["head.weight"].iter::<f32>().collect::<Vec<_>>(), [0.5; 16 * 24]);
                let input = Tensor::ones([2, 16], worker.device());
                let loss = model.forward(input).powf_scalar(2.0).mean();
                let gradients = model.backward(loss)?;
                assert!(gradients.len() >= 3, "a rank may have no shard of a matrix");
            }
            Ok(count.load(SeqCst))
        });
        assert_eq!(counts, expected);
    }
}

#[test]
fn only_parameters_that_a_file_lacks_are_initialised() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_path_buf();
    let states = on_ranks(2, move |worker| {
        let count = Arc::new(AtomicUsize::new(0));
        let model = fully_shard(counted(worker.device(), &count), worker, FsdpOptions::new())?;
        model.state().save_pretrained(&path, &SavePretrained::new())?;

        count.store(0, SeqCst);
        let options = FsdpOptions::new;
        let fresh = counted(worker.device(), &count);
        let (loaded, report) =
            from_pretrained(fresh, worker, options(), &path, &LoadOptions::new())?;
        assert_eq!((count.load(SeqCst), report.loaded), (0, 4));
        let (saved, found) =
            (model.state().full(Recipient::All)?, loaded.state().full(Recipient::All)?);
        assert_same_state(&found, &saved, "loaded");
        // A model that was loaded trains as any other.
        let loss = loaded.forward(Tensor::ones([2, 16], worker.device())).mean();
        assert!(loaded.backward(loss)?.len() >= 3, "a rank may have no shard of a matrix");

        // The file holds the body alone, so that rank 0 initialises the head.
        let file = path.join("model.safetensors");
        if worker.is_rank_zero() {
            let mut tensors = read(&file);
            tensors.retain(|name, _| name.starts_with("body."));
            let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
                let view = safetensors::tensor::TensorView::new(*dtype, shape.clone(), bytes);
                (name, view.unwrap())
            });
            safetensors::serialize_to_file(views, None, &file).unwrap();
        }
        worker.barrier()?;
        let fresh = counted(worker.device(), &count);
        let error = from_pretrained(fresh, worker, options(), &path, &LoadOptions::new());
        assert!(matches!(error, Err(Error::Load(LoadError::Mismatch { .. }))));
        let lenient = LoadOptions::new().with_allowed_missing("head.");
        let fresh = counted(worker.device(), &count);
        let (loaded, report) = from_pretrained(fresh, worker, options(), &path, &lenient)?;
        assert_eq!(report.missing, ["head.bias", "head.weight"]);
        assert_eq!(count.load(SeqCst), usize::from(worker.is_rank_zero()));
        loaded.state().full(Recipient::All)
    });
    for state in states {
        assert_eq!(state["head.weight"].iter::<f32>().collect::<Vec<_>>(), [0.5; 16 * 24]);
    }
}

#[test]
fn a_deferred_model_must_be_loaded_before_it_is_used() {
    let folder = tempfile::tempdir().unwrap();
    let state = save(2, folder.path(), &SavePretrained::new());
    let path = folder.path().to_path_buf();
    let ranks = on_ranks(2, move |worker| {
        let device = worker.device();
        let options = FsdpOptions::new().with_deferred_init(true);
        let mut net = fully_shard(Net::new(2, 0.0, device), worker, options)?;
        let not_loaded = |error: Error| {
            let Error::Schedule(ScheduleError::NotLoaded { path }) = error else {
                panic!("{error}")
            };
            path
        };
        let out = path.join("out");
        let options = SavePretrained::new();
        assert_eq!(
            not_loaded(net.state().save_pretrained(&out, &options).unwrap_err()),
            "head.weight"
        );
        not_loaded(net.state().save_burnpack(out.join("x")).unwrap_err());
        not_loaded(net.state().full(Recipient::All).unwrap_err());
        let input = || support::batch(0, 0..2, device).0;
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            net.forward(input());
        }));
        not_loaded(*panic.unwrap_err().downcast::<Error>().unwrap());

        net.state_mut().load_safetensors(&path, &LoadOptions::new())?;
        net.forward(input());
        net.state().full(Recipient::All)
    });
    assert_same_state(&ranks[0], &state, "loaded");
}
