//! Reading files that Accelerate writes, files with mistakes, and the messages about them.

use burn::tensor::FloatDType;

use super::*;
use crate::LaunchOptions;
use crate::module::{Child, Kind, Node};
use crate::options::MixedPrecisionPolicy;
use crate::options::{BackwardPrefetch, FsdpOptions, OffloadPolicy, ShardingStrategy, WrapPolicy};

/// A file that `accelerate config` writes for FSDP.
const BERT: &str = "\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
";

/// An older file, as in Accelerate's guides: a strategy by number, a null, the older prefetch key.
const OLDER: &str = "\
compute_environment: LOCAL_MACHINE
deepspeed_config: {}
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_POST
  fsdp_min_num_params: 1e8
  fsdp_offload_params: 'true'
  fsdp_sharding_strategy: 2
  fsdp_state_dict_type: FULL_STATE_DICT
machine_rank: 1
main_process_ip: 10.0.0.1
main_process_port: 29501
main_training_function: main
mixed_precision: no
num_machines: 2
num_processes: 8
use_cpu: false
tpu_name: null
";

/// A file with `fsdp_version: 2`.
const FSDP2: &str = "\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: false
  fsdp_offload_params: false
  fsdp_reshard_after_forward: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: [BertLayer, BertEmbeddings]
  fsdp_version: 2
mixed_precision: bf16
num_machines: 1
num_processes: 8
parallelism_config:
  parallelism_config_cp_size: 1
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 4
  parallelism_config_tp_size: 1
";

fn good(text: &str) -> (Config, Vec<Note>) {
    Config::parse(text, "config.yaml").unwrap_or_else(|error| panic!("{error}"))
}

fn bad(text: &str) -> Vec<String> {
    match Config::parse(text, "config.yaml") {
        Err(ConfigError::Invalid { problems, .. }) => {
            problems.iter().map(Problem::to_string).collect()
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_file_of_accelerates_is_read_as_it_is() {
    let (config, notes) = good(BERT);
    assert_eq!(config.num_processes, Some(2));
    assert_eq!(config.mixed_precision, MixedPrecision::No);
    let fsdp = &config.fsdp;
    assert_eq!(fsdp.sharding_strategy, ShardingStrategy::FullShard);
    assert_eq!(fsdp.auto_wrap_policy, Some(AutoWrapPolicy::TransformerBased));
    assert_eq!(fsdp.transformer_layer_cls_to_wrap, ["BertLayer"]);
    assert_eq!(fsdp.backward_prefetch, Some(BackwardPrefetch::Pre));
    assert_eq!(fsdp.forward_prefetch, Some(false));
    assert_eq!(fsdp.state_dict_type, Some(StateDictType::Sharded));
    assert_eq!(fsdp.cpu_ram_efficient_loading, Some(true));
    assert_eq!(fsdp.sync_module_states, Some(true));
    assert!(notes.iter().all(|note| note.off), "{notes:#?}");
    let keys: Vec<&str> = notes.iter().map(|note| note.key.as_str()).collect();
    assert_eq!(
        keys,
        [
            "enable_cpu_affinity",
            "main_training_function",
            "rdzv_backend",
            "same_network",
            "tpu_env",
            "tpu_use_cluster",
            "tpu_use_sudo",
        ]
    );
    let first = "line 5: `enable_cpu_affinity: false` has no effect here: the operating system places \
                 processes";
    assert_eq!(notes[0].to_string(), first);
}

#[test]
fn older_files_are_read() {
    let (config, notes) = good(OLDER);
    assert_eq!((config.num_machines, config.machine_rank), (2, 1));
    assert_eq!(config.main_process_ip.as_deref(), Some("10.0.0.1"));
    assert_eq!(config.main_process_port, Some(29501));
    assert_eq!(config.mixed_precision, MixedPrecision::No);
    assert_eq!(config.fsdp.sharding_strategy, ShardingStrategy::ShardGradOp);
    assert_eq!(config.fsdp.auto_wrap_policy, Some(AutoWrapPolicy::SizeBased));
    assert_eq!(config.fsdp.min_num_params, Some(100_000_000));
    assert_eq!(config.fsdp.backward_prefetch, Some(BackwardPrefetch::Post));
    assert!(config.fsdp.offload_params);
    assert!(notes.iter().all(|note| note.off), "{notes:#?}");
}

#[test]
fn files_of_version_2_are_read() {
    let (config, _) = good(FSDP2);
    assert_eq!(config.mixed_precision, MixedPrecision::Bf16);
    assert_eq!(config.fsdp.sharding_strategy, ShardingStrategy::HybridShardZero2);
    assert_eq!((config.fsdp.replicate, config.fsdp.shard), (Some(2), Some(4)));
    assert_eq!(config.fsdp.transformer_layer_cls_to_wrap, ["BertLayer", "BertEmbeddings"]);
    let strategy = |lines: &str| {
        good(&format!("fsdp_config:\n  fsdp_version: 2\n{lines}")).0.fsdp.sharding_strategy
    };
    assert_eq!(strategy(""), ShardingStrategy::FullShard);
    assert_eq!(strategy("  fsdp_reshard_after_forward: true\n"), ShardingStrategy::FullShard);
    assert_eq!(strategy("  fsdp_reshard_after_forward: no\n"), ShardingStrategy::ShardGradOp);
    assert_eq!(strategy("  fsdp_reshard_after_forward: NO_SHARD\n"), ShardingStrategy::NoShard);
}

#[test]
fn every_mistake_is_reported_at_once_with_its_line() {
    let text = "\
distributed_type: FSPD
fsdp_config:
  fsdp_sharding_strategy: FULL_SHRAD
  fsdp_forward_prefech: true
  fsdp_state_dict_type: SHARDED
  fsdp_offload_params: maybe
  fsdp_min_num_params: many
  num_processes: 2
fsdp_version: 2
num_procesess: 4
num_machines: 0
machine_rank: 2
mixed_precision: int8
mixed_precision: bf16
main_process_port: 70000
completely_different: 1
";
    let expected = [
        "line 1: unknown value `FSPD` for `distributed_type`; did you mean `FSDP`?",
        "line 3: unknown value `FULL_SHRAD` for `fsdp_sharding_strategy`; did you mean `FULL_SHARD`?",
        "line 4: unknown key `fsdp_forward_prefech`; did you mean `fsdp_forward_prefetch`?",
        "line 5: unknown value `SHARDED` for `fsdp_state_dict_type`; expected `FULL_STATE_DICT`, \
         `LOCAL_STATE_DICT` or `SHARDED_STATE_DICT`",
        "line 6: `fsdp_offload_params` is `maybe`; expected true or false",
        "line 7: `fsdp_min_num_params` is `many`; expected a whole number of at least 0",
        "line 8: `num_processes` belongs at the top level",
        "line 9: `fsdp_version` belongs under `fsdp_config`",
        "line 10: unknown key `num_procesess`; did you mean `num_processes`?",
        "line 11: `num_machines` is `0`; expected a whole number of at least 1",
        "line 12: `machine_rank` is `2`; expected less than `num_machines`, which is 1",
        "line 13: unknown value `int8` for `mixed_precision`; expected `no`, `fp16`, `bf16` or `fp8`",
        "line 14: `mixed_precision` is already on line 13",
        "line 15: `main_process_port` is `70000`; expected a port, 1 to 65535",
        "line 16: unknown key `completely_different`",
    ];
    assert_eq!(bad(text), expected);
    let error = Config::parse(text, "config.yaml").unwrap_err().to_string();
    assert!(error.starts_with("config.yaml: 15 problems\n  line 1: "), "{error}");
}

#[test]
fn contradictions_name_both_lines() {
    assert_eq!(
        bad("fsdp_config:\n  fsdp_sharding_strategy: 1\n  fsdp_reshard_after_forward: false\n"),
        ["line 3: `fsdp_reshard_after_forward` is `false`, but `fsdp_sharding_strategy` on line \
             2 is `FULL_SHARD`; remove one of them"]
    );
    let text = "fsdp_config:\n  fsdp_cpu_ram_efficient_loading: true\n  \
                fsdp_sync_module_states: 'false'\n";
    assert!(bad(text)[0].contains("must be broadcast"));
    assert!(bad("num_processes: 3\nnum_machines: 2\n")[0].contains("a multiple of"));
}

#[test]
fn what_other_systems_do_is_refused_with_a_way_out() {
    let text = bad("distributed_type: MULTI_GPU\n");
    assert!(text[0].contains("is not supported") && text[0].contains("NO_SHARD"), "{text:?}");
    assert!(bad("compute_environment: AMAZON_SAGEMAKER\n")[0].contains("LOCAL_MACHINE"));
    let text = bad("parallelism_config:\n  parallelism_config_sp_size: 2\n");
    assert!(text[0].starts_with("line 2:") && text[0].contains("Ulysses"), "{text:?}");
}

#[test]
fn keys_in_use_elsewhere_are_noted_as_such() {
    let text = "\
dynamo_config: {dynamo_backend: INDUCTOR}
main_training_function: train
fsdp_config:
  fsdp_auto_wrap_policy: NO_WRAP
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: false
";
    let (_, notes) = good(text);
    let (places, off): (Vec<Place>, Vec<bool>) =
        notes.iter().map(|note| (note.place, note.off)).unzip();
    assert_eq!(places, [1, 2, 5, 6].map(Place::Line));
    assert_eq!(off, [false; 4]);
    assert!(notes[2].to_string().contains("is not `TRANSFORMER_BASED_WRAP`"), "{}", notes[2]);
}

/// `accelerate launch` reads such keys too; files of its first versions have them.
#[test]
fn keys_of_the_sharding_may_lack_their_prefix() {
    let text = "fsdp_config:\n  min_num_params: 2000\n  offload_params: true\n  \
                sharding_strategy: 2\n  auto_wrap_policy: SIZE_BASED_WRAP\n";
    let (config, notes) = good(text);
    assert_eq!(config.fsdp.sharding_strategy, ShardingStrategy::ShardGradOp);
    assert_eq!(config.fsdp.min_num_params, Some(2000));
    assert!(config.fsdp.offload_params && notes.is_empty());
    let twice = "fsdp_config:\n  offload_params: true\n  fsdp_offload_params: true\n";
    assert_eq!(bad(twice), ["line 3: `fsdp_offload_params` is already on line 2"]);
}

/// The guides of transformers write these two.
#[test]
fn the_spelling_of_the_guides_is_answered_with_the_key() {
    let text = "fsdp_config:\n  fsdp_wrap_policy: SIZE_BASED_WRAP\n  min_num_param: 100\n";
    assert_eq!(
        bad(text),
        [
            "line 2: unknown key `fsdp_wrap_policy`; did you mean `fsdp_auto_wrap_policy`?",
            "line 3: unknown key `min_num_param`; did you mean `fsdp_min_num_params`?",
        ]
    );
    let top = bad("fsdp_wrap_policy: SIZE_BASED_WRAP\nmin_num_param: 100\n");
    assert!(top[0].ends_with("`fsdp_auto_wrap_policy`?"), "{top:?}");
    assert!(top[1].ends_with("`fsdp_min_num_params`?"), "{top:?}");
}

#[test]
fn inputs_of_recomputed_units_are_offloaded_and_modules_are_not_ignored() {
    let (config, _) = good("fsdp_config:\n  fsdp_activation_checkpointing_offload: true\n");
    let options = config.options_for(Some(&BERT_MODEL)).unwrap();
    assert_eq!(options, FsdpOptions::new().with_offload_activations(true));
    assert_eq!(good(&config.to_yaml()).0, config);
    let ignored = bad("fsdp_config:\n  fsdp_ignored_modules: embed.*\n");
    assert!(ignored[0].contains("`FsdpOptions::with_ignored_params`"), "{ignored:?}");
}

#[test]
fn mpirun_is_asked_for_by_its_keys() {
    let text = "mpirun_config:\n  mpirun_hostfile: /etc/hosts.mpi\n  mpirun_ccl: 1\n";
    let (config, notes) = good(text);
    assert_eq!(config.mpirun.unwrap().hostfile, Some("/etc/hosts.mpi".into()));
    assert_eq!((notes[0].place, notes[0].off), (Place::Line(3), true));
    assert_eq!(good("mpirun_config: {}\n").0.mpirun, None);
    assert_eq!(
        bad("mpirun_config:\n  mpirun_hostfle: x\n"),
        ["line 2: unknown key `mpirun_hostfle`; did you mean `mpirun_hostfile`?"]
    );
}

#[test]
fn what_is_no_mapping_is_refused() {
    for text in ["- a\n- b\n", "just words\n", "a: [1\n", "a: *b\n"] {
        let error = Config::parse(text, "config.yaml").unwrap_err();
        assert!(matches!(error, ConfigError::Syntax { .. }), "{text:?}: {error}");
    }
    assert!(bad("fsdp_config: yes\n")[0].contains("indented lines"));
    assert_eq!(good("").0, Config::default());
    let missing = Config::read("/no/such/config.yaml").unwrap_err();
    assert!(missing.to_string().contains("/no/such/config.yaml"), "{missing}");
}

/// A key that `keys.rs` lists as used, but that nothing reads, would be reported as unknown.
#[test]
fn every_listed_key_is_read() {
    for section in [keys::Section::Top, keys::Section::Fsdp] {
        assert!(section.keys().len() > 10);
        for key in section.keys() {
            let text = match section {
                keys::Section::Top => format!("{}: 1\n", key.name),
                keys::Section::Fsdp => format!("fsdp_config:\n  {}: 1\n", key.name),
            };
            let problems = match Config::parse(&text, "config.yaml") {
                Err(ConfigError::Invalid { problems, .. }) => problems,
                Err(error) => panic!("{}: {error}", key.name),
                Ok(_) => Vec::new(),
            };
            let unknown = |problem: &Problem| {
                matches!(
                    problem.kind,
                    ProblemKind::UnknownKey { .. } | ProblemKind::Misplaced { .. }
                )
            };
            assert!(!problems.iter().any(unknown), "{}: {problems:?}", key.name);
        }
    }
}

#[test]
fn every_key_is_documented() {
    let text = include_str!("../../../docs/config.md");
    for section in [keys::Section::Top, keys::Section::Fsdp] {
        assert!(section.keys().len() > 10);
        for key in section.keys() {
            assert!(text.contains(&format!("`{}`", key.name)), "{} is missing", key.name);
        }
    }
}

#[test]
fn what_is_written_is_read_back() {
    for text in [BERT, OLDER, FSDP2, ""] {
        let (config, _) = good(text);
        let (again, notes) = good(&config.to_yaml());
        assert_eq!(again, config, "{}", config.to_yaml());
        assert_eq!(notes, [], "{}", config.to_yaml());
    }
    let mut config = Config::default();
    for hostfile in [None, Some("~/hosts".into())] {
        config.mpirun = Some(MpirunConfig { hostfile });
        assert_eq!(good(&config.to_yaml()).0, config);
    }
    for host in ["no", "it's", "a: b", "10.0.0.1", "# x", "\t\"tab\\", "fe80::1"] {
        config.main_process_ip = Some(host.into());
        let again = Config::parse(&config.to_yaml(), "written").map(|(config, _)| config);
        let again = again.unwrap_or_else(|error| panic!("{host}: {error}")).main_process_ip;
        assert_eq!(again.as_deref(), Some(host.trim()));
    }
}

proptest::proptest! {
    /// The reader does not panic on any text.
    #[test]
    fn any_text_is_read_or_refused(text in "[ a-z_:0-9\\[\\]{}'\"#&*|>,\n-]{0,80}") {
        let _ = Config::parse(&text, "any");
        let _ = Config::parse(&format!("fsdp_config:\n  fsdp_version: {text}"), "any");
    }
}

const fn unit(ty: &'static str, children: &'static [Child]) -> Node {
    Node { ty, kind: Kind::Unit { root: false }, children, ties: &[] }
}

const fn field(node: &'static Node) -> Child {
    Child {
        name: "field",
        key: None,
        transposed: false,
        unit: false,
        group: None,
        split: None,
        node,
    }
}

const LAYER: Node = unit("BertLayer", &[]);
const LAYERS: Node = Node { ty: "Vec", kind: Kind::List, children: &[field(&LAYER)], ties: &[] };
const EMBEDDINGS: Node = unit("BertEmbeddings", &[]);
const BERT_MODEL: Node = unit("Bert", &[field(&EMBEDDINGS), field(&LAYERS), field(&LAYERS)]);

#[test]
fn a_file_becomes_options() {
    let options = good(BERT).0.options_for(Some(&BERT_MODEL)).unwrap();
    let expected = FsdpOptions::new()
        .with_wrap(WrapPolicy::Named(&["BertLayer"]))
        .with_forward_prefetch(false)
        .with_sync_module_states(true);
    assert_eq!(options, expected);
    assert_eq!(Config::default().options_for(Some(&BERT_MODEL)).unwrap(), FsdpOptions::new());

    let text = OLDER.replace("fsdp_offload_params: 'true'", "fsdp_offload_params: 'false'");
    let expected = FsdpOptions::new()
        .with_strategy(ShardingStrategy::ShardGradOp)
        .with_wrap(WrapPolicy::SizeBased { min_num_params: 100_000_000 })
        .with_backward_prefetch(BackwardPrefetch::Post);
    assert_eq!(good(&text).0.options_for(Some(&BERT_MODEL)).unwrap(), expected);

    let text = FSDP2.replace("bf16", "'no'");
    let expected = FsdpOptions::new()
        .with_strategy(ShardingStrategy::HybridShardZero2)
        .with_wrap(WrapPolicy::Named(&["BertLayer", "BertEmbeddings"]))
        .with_cpu_ram_efficient_loading(false)
        .with_shard_size(4);
    assert_eq!(good(&text).0.options_for(Some(&BERT_MODEL)).unwrap(), expected);
    let text = text.replace("  parallelism_config_dp_shard_size: 4\n", "");
    assert_eq!(good(&text).0.options_for(Some(&BERT_MODEL)).unwrap(), expected);
}

#[test]
fn groups_of_ranks_agree_with_the_rest() {
    let text = FSDP2.replace("dp_shard_size: 4", "dp_shard_size: 3");
    assert!(bad(&text)[0].starts_with("line 14: `num_processes` is `8`; expected"), "{text}");
    let text = FSDP2.replace("reshard_after_forward: false", "sharding_strategy: FULL_SHARD");
    let problem = &bad(&text)[0];
    assert!(problem.contains("line 8") && problem.contains("`HYBRID_SHARD`"), "{problem}");
}

#[test]
fn names_of_units_are_checked_against_the_model() {
    let (mut config, _) = good(BERT);
    config.fsdp.transformer_layer_cls_to_wrap =
        ["BertLayr", "BertEmbeddings", "GPT2Block"].map(String::from).to_vec();
    assert_eq!(
        config.options_for(Some(&BERT_MODEL)).unwrap_err().to_string(),
        "config.yaml: 2 problems\n  \
         line 16: `fsdp_transformer_layer_cls_to_wrap` names `BertLayr`, which is no unit of \
         `Bert`; did you mean `BertLayer`?\n  \
         line 16: `fsdp_transformer_layer_cls_to_wrap` names `GPT2Block`, which is no unit of \
         `Bert`; expected `Bert`, `BertEmbeddings` or `BertLayer`"
    );
}

#[test]
fn what_the_runtime_lacks_is_an_error_with_its_line() {
    let text = BERT.replace("mixed_precision: 'no'", "mixed_precision: fp8");
    let error = good(&text).0.options_for(Some(&BERT_MODEL)).unwrap_err().to_string();
    let part = "line 20: `mixed_precision: fp8` is not supported; write `bf16`, `fp16` or `'no'`";
    assert!(error.contains(part), "{error}");
    assert_eq!(good(&text).0.check().unwrap_err().to_string(), error);
    assert!(good(BERT).0.check().is_ok());
}

#[test]
fn precision_and_offload_reach_the_options() {
    let text = BERT
        .replace("fsdp_offload_params: false", "fsdp_offload_params: true")
        .replace("mixed_precision: 'no'", "mixed_precision: bf16");
    let options = good(&text).0.options_for(Some(&BERT_MODEL)).unwrap();
    let policy = MixedPrecisionPolicy::new().with_param_dtype(FloatDType::BF16);
    let expected = good(BERT).0.options_for(Some(&BERT_MODEL)).unwrap();
    let expected = expected
        .with_mixed_precision(policy.with_output_dtype(FloatDType::F32))
        .with_offload(OffloadPolicy::Params { pin_memory: true });
    assert_eq!(options, expected);
    let text = text.replace("downcast_bf16: 'no'", "downcast_bf16: 'yes'");
    let options = good(&text).0.options_for(Some(&BERT_MODEL)).unwrap();
    assert_eq!(options, expected.with_mixed_precision(policy), "outputs are bf16 as well");
}

#[test]
fn debug_reaches_the_ranks() {
    let launch = |debug: &str| {
        let text = BERT.replace("debug: false", debug);
        format!("{:?}", good(&text).0.launch_options().unwrap())
    };
    assert_eq!(launch("debug: true"), format!("{:?}", LaunchOptions::new(2).with_debug(true)));
    assert_eq!(launch("debug: false"), format!("{:?}", LaunchOptions::new(2)));
}

#[test]
fn activation_checkpointing_is_that_of_all_units() {
    use crate::options::ActivationCheckpointing;
    let made = |text: &str| good(text).0.options_for(Some(&BERT_MODEL)).unwrap();
    let on = BERT.replace("activation_checkpointing: false", "activation_checkpointing: true");
    assert_eq!(made(&on), made(BERT).with_activation_checkpointing(ActivationCheckpointing::All));
    assert_eq!(made(BERT).activation_checkpointing, ActivationCheckpointing::Annotated);
}

#[test]
fn the_launcher_names_the_file_and_has_the_last_word_on_the_world() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("config.yaml");
    std::fs::write(&path, "num_processes: 4\n").unwrap();
    let path = path.to_str().unwrap();
    let read = |variables: &[(&str, &str)]| {
        Config::from_variables(|name| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into())
        })
    };
    assert!(read(&[]).unwrap().is_none());
    let world = |variables: &[(&str, &str)]| read(variables).unwrap().unwrap().0.num_processes;
    assert_eq!(world(&[(CONFIG_VARIABLE, path)]), Some(4));
    let two = [(CONFIG_VARIABLE, path), ("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")];
    assert_eq!(world(&two), Some(2));
    assert!(read(&[(CONFIG_VARIABLE, "/no/such.yaml")]).is_err());
}

#[test]
fn ranks_that_cannot_be_cut_into_the_groups_are_an_error() {
    let groups = |replicate: &str, world: &str| {
        let text =
            FSDP2.replace("dp_replicate_size: 2", &format!("dp_replicate_size: {replicate}"));
        let text = text.replace("  parallelism_config_dp_shard_size: 4\n", "");
        text.replace("num_processes: 8", &format!("num_processes: {world}"))
    };
    assert!(good(&groups("4", "8")).0.check().is_ok());
    let (mut config, _) = good(&groups("4", "6"));
    let error = config.check().unwrap_err().to_string();
    for part in ["num_processes", "6", "a multiple of dp_replicate_size", "4"] {
        assert!(error.contains(part), "{error}");
    }
    config.num_processes = Some(8);
    assert!(config.check().is_ok(), "the launcher has started eight");
    // The number of processes is that of the file, and then another that the launcher started.
    let (mut config, _) = good(FSDP2);
    assert!(config.check().is_ok());
    config.num_processes = Some(12);
    let error = config.check().unwrap_err().to_string();
    assert!(error.contains("12") && error.contains("2 x 4"), "{error}");
}

#[test]
fn ranks_as_threads_need_their_number() {
    assert!(good(BERT).0.launch_options().is_ok());
    let error = good("num_machines: 2\nnum_processes: 8\n").0.launch_options().unwrap_err();
    assert!(error.to_string().contains("line 1: `num_machines: 2`"), "{error}");
    let error = Config::default().launch_options().unwrap_err();
    assert!(error.to_string().contains("`num_processes` is missing"), "{error}");
}
