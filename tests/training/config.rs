//! A configuration file written by Accelerate trains as the same options in code.

use fsdp_runtime::config::Config;
use fsdp_runtime::prelude::*;

use crate::support::{Block, Net, Run};

/// The file of Accelerate's guide to FSDP, with `mixed_precision` set to no.
const GUIDE: &str = include_str!("../../fsdp-runtime/tests/support/accelerate.yaml");

/// Returns the file of Accelerate's guide, with this model's unit.
fn guide() -> String {
    GUIDE.replace("BertLayer", "Block")
}

#[test]
fn a_configuration_file_trains_as_the_options_in_code() {
    let (config, _) = Config::parse(&guide(), "guide.yaml").unwrap();
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
    let text = guide().replace("wrap: Block", "wrap: Blok");
    let (config, _) = Config::parse(&text, "guide.yaml").unwrap();
    let error = config.options::<Net>().unwrap_err().to_string();
    assert_eq!(
        error,
        "guide.yaml: line 14: `fsdp_transformer_layer_cls_to_wrap` names `Blok`, which is no unit \
         of `Net`; did you mean `Block`?"
    );
}

/// A program that does not cut rows would train on parts that do not belong together.
#[test]
fn parts_of_rows_are_for_programs_that_cut_them() {
    let text = format!("{}parallelism_config:\n  parallelism_config_cp_size: 2\n", guide());
    let (config, _) = Config::parse(&text, "guide.yaml").unwrap();
    let error = config.options::<Net>().unwrap_err().to_string();
    let expected = "`parallelism_config_cp_size` is `2`; expected 1, as";
    assert!(error.contains(expected) && error.contains("`options_for_parts`"), "{error}");
    let options = config.options_for_parts::<Net>().unwrap();
    let whole = Config::parse(&guide(), "guide.yaml").unwrap().0.options::<Net>().unwrap();
    assert_eq!(options, whole.with_context_parallel(2));
}
