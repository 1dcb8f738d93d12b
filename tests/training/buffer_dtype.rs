//! Under mixed precision, float tensors in fields that are no parameters are cast inside of a forward,
//! and stay as they are outside of it.

use std::sync::Mutex;

use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PositionalEncoding};
use burn::nn::{PositionalEncodingConfig, RotaryEncoding, RotaryEncodingConfig};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use fsdp_runtime::Error;
use fsdp_runtime::errors::ScheduleError;
use fsdp_runtime::options::FsdpConfig;
use fsdp_runtime::prelude::*;

use crate::support::ranks::launch_options;
use crate::support::{of_rank_0, on_ranks};

const WIDTH: usize = 4;

const BF16: MixedPrecisionPolicy = MixedPrecisionPolicy::new()
    .with_param_dtype(FloatDType::BF16)
    .with_output_dtype(FloatDType::F32);

/// Tables of a rotary encoding, and the number of a position.
#[derive(Module, FsdpModule, Debug)]
struct Tables {
    cosine: Tensor<2>,
    sines: Vec<Tensor<2>>,
    number: Tensor<1, Int>,
}

impl Tables {
    fn new(device: &Device) -> Self {
        let number = Tensor::arange(0..WIDTH as i64, device);
        Self { cosine: table(device), sines: vec![table(device)], number }
    }

    /// Returns the dtypes of both float tables.
    fn dtypes(&self) -> [DType; 2] {
        assert_eq!(self.number.dtype(), DType::I32, "integers stay as they are");
        [self.cosine.dtype(), self.sines[0].dtype()]
    }
}

fn table(device: &Device) -> Tensor<2> {
    Tensor::full([1, WIDTH], 0.3, device)
}

fn linear(device: &Device) -> Linear {
    LinearConfig::new(WIDTH, WIDTH).init(device)
}

#[derive(Module, Debug)]
#[fsdp_unit]
struct Block {
    linear: Linear,
    own: Option<Tensor<2>>,
}

/// The dtypes of tables that a forward saw: in the block's field, and behind its two references.
type Seen = (Option<DType>, [DType; 2], DType);

/// What the forwards of blocks on rank 0 saw, in tests that run one after the other.
static SEEN: Mutex<Vec<Seen>> = Mutex::new(Vec::new());

#[fsdp_unit]
impl Block {
    fn forward(&self, x: Tensor<2>, tables: &Tables, rope: &RotaryEncoding) -> Tensor<2> {
        let own = self.own.as_ref().map(Tensor::dtype);
        let seen = (own, tables.dtypes(), rope.freq_complex.dtype());
        SEEN.lock().unwrap().push(seen);
        let x = self.linear.forward(x);
        let x = self.own.iter().fold(x, |x, own| x.clone() + own.clone().cast(x.dtype()));
        x.clone() * tables.cosine.clone().cast(x.dtype())
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Model {
    linear: Linear,
    blocks: Vec<Block>,
    tables: Tables,
    rope: RotaryEncoding,
}

#[fsdp_unit]
impl Model {
    fn new(device: &Device) -> Self {
        let block = |own: bool| Block { linear: linear(device), own: own.then(|| table(device)) };
        Self {
            linear: linear(device),
            blocks: vec![block(true), block(false)],
            tables: Tables::new(device),
            rope: RotaryEncodingConfig::new(WIDTH, WIDTH).init(device),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<1> {
        let block = |x, block: &Block| block.forward(x, &self.tables, &self.rope);
        self.blocks.iter().fold(self.linear.forward(x), block).mean()
    }

    fn forward_with(&self, x: Tensor<2>, tables: &Tables) -> Tensor<1> {
        let block = |x, block: &Block| block.forward(x, tables, &self.rope);
        self.blocks.iter().fold(self.linear.forward(x), block).mean()
    }
}

/// Runs `run` on two ranks with the sharded model, and returns what the blocks' forwards saw.
fn seen(
    options: FsdpOptions,
    run: impl Fn(&Fsdp<Model>, &Device) -> Result<(), Error> + Send + Sync + 'static,
) -> Vec<Seen> {
    SEEN.lock().unwrap().clear();
    on_ranks(2, move |worker| {
        let device = worker.device();
        let model = fully_shard(Model::new(device), worker, options.clone().with_seed(1))?;
        run(&model, device)?;
        // Outside of a forward nothing is cast, and nothing that is cast is saved.
        assert_eq!(model.tables.dtypes(), [DType::F32; 2]);
        assert_eq!(model.blocks[0].own.as_ref().map(Tensor::dtype), Some(DType::F32));
        let state = model.state().full(Recipient::All)?;
        assert!(state.values().all(|data| data.dtype() == DType::F32), "the state");
        Ok(())
    });
    let mut seen = std::mem::take(&mut *SEEN.lock().unwrap());
    seen.dedup();
    assert!(!seen.is_empty());
    seen
}

fn step(model: &Fsdp<Model>, device: &Device) -> Result<(), Error> {
    model.backward(model.forward(Tensor::ones([2, WIDTH], device))).map(|_| ())
}

/// What the two blocks see, if `own` is the dtype of the first one's table, and the others are in
/// `tables` and `rope`. Both ranks see the same, in any order.
fn assert_seen(found: &[Seen], own: DType, tables: [DType; 2], rope: DType) {
    for expected in [(Some(own), tables, rope), (None, tables, rope)] {
        assert!(found.contains(&expected), "{found:?}");
    }
    let is_expected = |(found_own, found_tables, found_rope): &Seen| {
        found_own.is_none_or(|found| found == own) && *found_tables == tables && *found_rope == rope
    };
    assert!(found.iter().all(is_expected), "{found:?}");
}

const HALF: [DType; 2] = [DType::BF16; 2];
const FULL: [DType; 2] = [DType::F32; 2];

#[test]
fn tables_have_the_dtype_of_the_parameters_inside_of_a_forward() {
    assert_seen(&seen(FsdpOptions::new(), step), DType::F32, FULL, DType::F32);
    let half = FsdpOptions::new().with_mixed_precision(BF16);
    assert_seen(&seen(half.clone(), step), DType::BF16, HALF, DType::F32);
    let recomputed = half.clone().with_activation_checkpointing(ActivationCheckpointing::All);
    assert_seen(&seen(recomputed, step), DType::BF16, HALF, DType::F32);
    // The units that a wrap policy merges have the dtype of the unit around them.
    let merged = half.clone().with_wrap(WrapPolicy::NoWrap);
    assert_seen(&seen(merged, step), DType::BF16, HALF, DType::F32);
    let evaluated = seen(half, |model, device| {
        model.valid().forward(Tensor::ones([2, WIDTH], &device.clone().inner()));
        Ok(())
    });
    assert_seen(&evaluated, DType::BF16, HALF, DType::F32);
}

#[test]
fn a_table_has_the_dtype_of_its_unit_and_in_an_argument_that_of_the_called_unit() {
    let half_blocks = FsdpOptions::new().with_mixed_precision_for(unit_types![Block], BF16);
    assert_seen(&seen(half_blocks, step), DType::BF16, HALF, DType::F32);
    let full_blocks = FsdpOptions::new().with_mixed_precision(BF16).with_mixed_precision_for(
        unit_types![Block],
        MixedPrecisionPolicy::new().with_param_dtype(FloatDType::F32),
    );
    assert_seen(&seen(full_blocks, step), DType::F32, FULL, DType::F32);
}

#[test]
fn the_dtype_of_tables_can_be_set_for_all_by_type_and_by_path() {
    let half = FsdpOptions::new().with_mixed_precision(BF16);
    let f32 = FloatDType::F32;
    let all = half.clone().with_buffer_dtype(f32);
    assert_seen(&seen(all, step), DType::F32, FULL, DType::F32);
    let of_type = half.clone().with_buffer_dtype_for::<Tables>(f32);
    assert_seen(&seen(of_type, step), DType::BF16, FULL, DType::F32);
    let at = half.clone().with_buffer_dtype_at(["tables"], f32);
    assert_seen(&seen(at, step), DType::BF16, FULL, DType::F32);
    let at = half.clone().with_buffer_dtype_at(["blocks.0.own"], f32);
    assert_seen(&seen(at, step), DType::F32, HALF, DType::F32);
    let without_policy = FsdpOptions::new().with_buffer_dtype(FloatDType::BF16);
    assert_seen(&seen(without_policy, step), DType::BF16, HALF, DType::F32);
    let rope = half.with_buffer_dtype_for::<RotaryEncoding>(FloatDType::BF16);
    assert_seen(&seen(rope, step), DType::BF16, HALF, DType::BF16);
}

#[test]
fn tables_that_are_no_part_of_the_model_are_cast_where_they_enter_it() {
    let half = FsdpOptions::new().with_mixed_precision(BF16);
    let found = seen(half, |model, device| {
        let tables = Tables::new(device);
        let loss = model.forward_with(Tensor::ones([2, WIDTH], device), &tables);
        assert_eq!(tables.dtypes(), FULL, "the caller's own");
        model.backward(loss).map(|_| ())
    });
    assert_seen(&found, DType::BF16, HALF, DType::F32);
}

/// A unit inside of the model that the program calls itself is the outermost one then.
#[test]
fn a_unit_that_is_called_alone_sees_its_tables_cast() {
    let half = FsdpOptions::new().with_mixed_precision(BF16);
    let only_first = half.with_buffer_dtype_at(["blocks.1"], FloatDType::F32);
    let found = seen(only_first, |model, device| {
        let x = Tensor::ones([2, WIDTH], device);
        let y = model.blocks[0].forward(x, &model.tables, &model.rope);
        model.backward(y.mean()).map(|_| ())
    });
    assert_eq!(found, [(Some(DType::BF16), HALF, DType::F32)]);
}

#[test]
fn a_configuration_names_types_of_modules() {
    let config = FsdpConfig::new()
        .with_buffer_dtype(Some(FloatDType::BF16))
        .with_buffer_dtype_for(vec![("Tables".into(), FloatDType::F32)]);
    let options = config.init::<Model>().unwrap();
    assert_seen(&seen(options, step), DType::BF16, FULL, DType::F32);
    let misspelt =
        FsdpConfig::new().with_buffer_dtype_for(vec![("Tabels".into(), FloatDType::F32)]);
    let error = misspelt.init::<Model>().unwrap_err().to_string();
    for part in ["`buffer_dtype_for` is `Tabels`", "use a module of `Model`", "Block", "Tables"] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_path_without_a_table_and_a_dtype_without_support_are_refused() {
    let refused = |options: FsdpOptions| {
        of_rank_0(2, move |worker| {
            let model = Model::new(worker.device());
            let error = fully_shard(model, worker, options.clone()).map(|_| ()).unwrap_err();
            Ok(error.to_string())
        })
    };
    let error = refused(FsdpOptions::new().with_buffer_dtype_at(["tabels"], FloatDType::F32));
    for part in ["`buffer_dtype_at` is `tabels`", "`tables.cosine`", "`blocks.0.own`"] {
        assert!(error.contains(part), "{error}");
    }
    let error = refused(FsdpOptions::new().with_buffer_dtype(FloatDType::F64));
    assert!(error.contains("`buffer_dtype` is F64") && error.contains("BF16"), "{error}");
}

#[derive(Module, Debug)]
#[fsdp_unit]
struct Normed {
    linear: Linear,
    norm: BatchNorm,
}

#[fsdp_unit]
impl Normed {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.norm.forward(self.linear.forward(x))
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Statistics {
    linear: Linear,
    position: PositionalEncoding,
    normed: Normed,
}

#[fsdp_unit]
impl Statistics {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.normed.forward(self.position.forward(self.linear.forward(x)))
    }
}

/// The outermost forward runs on a clone of the module, whose statistics are those of the module.
#[test]
fn running_statistics_stay_in_f32_and_are_updated() {
    of_rank_0(2, |worker| {
        let device = worker.device();
        let model = Statistics {
            linear: linear(device),
            position: PositionalEncodingConfig::new(WIDTH).init(device),
            normed: Normed { linear: linear(device), norm: BatchNormConfig::new(3).init(device) },
        };
        let full = MixedPrecisionPolicy::new();
        let options = FsdpOptions::new()
            .with_seed(1)
            .with_mixed_precision(BF16)
            .with_mixed_precision_for(unit_types![Normed], full);
        let model = fully_shard(model, worker, options)?;
        let mean = || model.normed.norm.running_mean.value_sync();
        let before = mean().into_data();
        let loss = model.forward(Tensor::ones([2, 3, WIDTH], device)).mean();
        model.backward(loss)?;
        assert_eq!(mean().dtype(), DType::F32);
        assert_ne!(mean().into_data(), before, "the statistics of the model itself");
        assert_eq!(model.position.sinusoids.dtype(), DType::F32);
        Ok(())
    });
}

#[derive(Module, Debug)]
#[fsdp_unit]
struct Mixed {
    linear: Linear,
    table: Tensor<2>,
}

#[fsdp_unit]
impl Mixed {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.linear.forward(x).matmul(self.table.clone())
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Outer {
    linear: Linear,
    mixed: Mixed,
}

#[fsdp_unit]
impl Outer {
    fn forward(&self, x: Tensor<2>) -> Tensor<1> {
        self.mixed.forward(self.linear.forward(x)).mean()
    }
}

#[test]
fn a_mismatch_that_is_left_is_an_error_that_names_unit_dtypes_and_setting() {
    let run = |options: FsdpOptions| {
        let ranks = launch(launch_options(2), move |worker| {
            let device = worker.device();
            let table = Tensor::ones([WIDTH, WIDTH], device);
            let mixed = Mixed { linear: linear(device), table };
            let model =
                fully_shard(Outer { linear: linear(device), mixed }, &worker, options.clone())?;
            model.backward(model.forward(Tensor::ones([2, WIDTH], device))).map(|_| ())
        });
        ranks.map(|_| ())
    };
    let half = FsdpOptions::new().with_mixed_precision(BF16);
    run(half.clone()).expect("the table is cast");
    let error = run(half.with_buffer_dtype_at(["mixed.table"], FloatDType::F32)).unwrap_err();
    let expected = ScheduleError::DtypeMismatch {
        unit: "`mixed`".into(),
        operation: "matmul".into(),
        left: "BF16".into(),
        right: "F32".into(),
    };
    assert_eq!(error.source.downcast_ref::<Error>(), Some(&expected.into()), "{error}");
    for part in ["`mixed`", "BF16", "F32", "`buffer_dtype`", "RotaryEncoding"] {
        assert!(error.to_string().contains(part), "{error}");
    }
}
