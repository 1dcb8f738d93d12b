//! Notes about keys that have no effect.

use super::keys::{Effect, Key, Section};
use super::*;
use crate::options::BackwardPrefetch;

/// Returns the notes about a file, as text, with whether each can be ignored.
fn notes(text: &str) -> Vec<(String, bool)> {
    let (_, notes) = Config::parse(text, "config.yaml").unwrap_or_else(|error| panic!("{error}"));
    notes.iter().map(|note| (note.to_string(), note.off)).collect()
}

#[test]
fn keys_for_pytorch_alone_are_noted_with_the_reason() {
    let notes = notes(
        "downcast_bf16: true\n\
         fsdp_config:\n  \
           fsdp_limit_all_gathers: false\n  \
           fsdp_version: 2\n  \
           xla: true\n  \
           xla_fsdp_v2: true\n  \
           xla_fsdp_grad_ckpt: false\n  \
           xla_fsdp_settings: {compute_dtype: bfloat16}\n",
    );
    let expected = [
        ("line 1: `downcast_bf16: true`", "`mixed_precision` is not `bf16`", false),
        ("line 3: `fsdp_limit_all_gathers: false`", "`gather_buffers`", false),
        ("line 4: `fsdp_version: 2`", "read alike", true),
        ("line 5: `xla: true`", "PyTorch/XLA", false),
        ("line 6: `xla_fsdp_v2: true`", "PyTorch/XLA", false),
        ("line 7: `xla_fsdp_grad_ckpt: false`", "PyTorch/XLA", true),
        ("line 8: `xla_fsdp_settings:", "PyTorch/XLA", false),
    ];
    assert_eq!(notes.len(), expected.len(), "{notes:#?}");
    for ((note, note_off), (begin, reason, off)) in notes.iter().zip(expected) {
        assert!(note.starts_with(begin) && note.contains(reason), "{note}");
        assert_eq!(*note_off, off, "{note}");
    }
}

/// Every key that `keys.rs` lists as unused, with a value that would have an effect in Accelerate.
#[test]
fn every_key_without_effect_is_reported_with_its_reason() {
    let mut reported = 0;
    for section in [Section::Top, Section::Fsdp] {
        for Key { name, effect } in section.keys() {
            let Effect::Unused { because, .. } = effect else { continue };
            let text = match section {
                Section::Top => format!("{name}: asked\n"),
                Section::Fsdp => format!("fsdp_config:\n  {name}: asked\n"),
            };
            let found = notes(&text);
            let [(note, off)] = &found[..] else { panic!("{name}: {found:#?}") };
            assert!(note.contains(&format!("`{name}: asked`")), "{note}");
            assert!(note.contains(because) && !off, "{note}");
            reported += 1;
        }
    }
    assert!(reported >= 20, "{reported}");
}

#[test]
fn an_older_key_beside_its_newer_one_is_noted() {
    let found = notes(
        "fp16: true\n\
         mixed_precision: bf16\n\
         fsdp_config:\n  \
           fsdp_backward_prefetch_policy: BACKWARD_POST\n  \
           fsdp_backward_prefetch: BACKWARD_PRE\n",
    );
    let [fp16, prefetch] = &found[..] else { panic!("{found:#?}") };
    let expected = "line 1: `fp16: true` has no effect here: `mixed_precision` is `bf16`, and \
                    replaces it";
    assert_eq!(fp16, &(expected.into(), false));
    let expected = "line 4: `fsdp_backward_prefetch_policy: BACKWARD_POST` has no effect here: \
                    `fsdp_backward_prefetch` is `BACKWARD_PRE`, and replaces it";
    assert_eq!(prefetch, &(expected.into(), false));

    // Keys that agree.
    let agreeing = [
        "mixed_precision: fp16\nfp16: true\n",
        "mixed_precision: 'no'\nfp16: false\n",
        "fsdp_config:\n  fsdp_backward_prefetch: BACKWARD_PRE\n  \
           fsdp_backward_prefetch_policy: 1\n",
    ];
    for text in agreeing {
        assert!(matches!(&notes(text)[..], [(_, true)]), "{text}: {:#?}", notes(text));
    }
    // The other orders, and the older keys alone.
    let read = |text: &str| Config::parse(text, "config.yaml").unwrap();
    let (config, unread) = read("mixed_precision: bf16\nfp16: true\n");
    assert_eq!((config.mixed_precision, unread.len()), (MixedPrecision::Bf16, 1));
    let (config, unread) = read("fp16: true\n");
    assert_eq!((config.mixed_precision, unread.len()), (MixedPrecision::Fp16, 0));
    let (config, unread) = read("fsdp_config:\n  fsdp_backward_prefetch_policy: NO_PREFETCH\n");
    assert_eq!((config.fsdp.backward_prefetch, unread.len()), (Some(BackwardPrefetch::None), 0));
}

#[test]
fn a_form_of_checkpoints_that_the_program_does_not_save_is_noted() {
    let note = |value: &str| {
        let text = format!("fsdp_config:\n  fsdp_state_dict_type: {value}\n");
        let (config, _) = Config::parse(&text, "config.yaml").unwrap();
        config.state_dict_note(StateDictType::Sharded).map(|note| note.to_string())
    };
    assert_eq!(note("SHARDED_STATE_DICT"), None);
    assert_eq!(note("null"), None);
    let full = note("FULL_STATE_DICT").unwrap();
    assert!(full.starts_with("line 2: `fsdp_state_dict_type: FULL_STATE_DICT`"), "{full}");
    assert!(full.contains("`SHARDED_STATE_DICT`") && full.contains("save_pretrained"), "{full}");
    assert!(note("LOCAL_STATE_DICT").is_some());
}
