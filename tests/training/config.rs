//! A configuration file of Accelerate's, and the run it stands for.

use fsdp_runtime::config::Config;
use fsdp_runtime::prelude::*;

use crate::support::{Block, Net, Run};

/// As Accelerate's guide has it, with this model's unit and `mixed_precision` set to no.
const GUIDE: &str = "\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_forward_prefetch: false
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: Block
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

#[test]
fn a_file_of_accelerates_trains_as_the_options_in_code() {
    let (config, _) = Config::parse(GUIDE, "guide.yaml").unwrap();
    let run = Run::new(config.num_processes.unwrap());
    let options = config.options::<Net>().unwrap().with_seed(7);
    let of_file = Run { options, ..run.clone() }.launch();
    let wrap = WrapPolicy::TransformerBased(unit_types![Block]);
    let options = run.options.clone().with_wrap(wrap).with_forward_prefetch(false);
    let in_code = Run { options, ..run }.launch();
    of_file.assert_bitwise(&in_code);
    assert_eq!(of_file.counts, in_code.counts);
}

#[test]
fn a_misspelt_unit_is_an_error_that_names_the_right_one() {
    let text = GUIDE.replace("wrap: Block", "wrap: Blok");
    let (config, _) = Config::parse(&text, "guide.yaml").unwrap();
    let error = config.options::<Net>().unwrap_err().to_string();
    assert_eq!(
        error,
        "guide.yaml: line 14: `fsdp_transformer_layer_cls_to_wrap` names `Blok`, which is no unit \
         of `Net`; did you mean `Block`?"
    );
}
