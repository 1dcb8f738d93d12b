//! The readers of bytes from outside. `fsdp-runtime/fuzz` uses this file too.
#![allow(dead_code, reason = "a target of cargo fuzz uses one of them")]

use std::ffi::OsString;

use fsdp_runtime::checkpoint::{Manifest, parse_bytes, seal};
use fsdp_runtime::config::{Config, Overrides, update};
use fsdp_runtime::launch::env::RankEnv;

/// A reader.
pub struct Target {
    pub name: &'static str,
    /// Reads bytes, asserts what holds of accepted ones, and returns whether they are accepted.
    pub read: fn(&[u8]) -> bool,
    /// Words of the format.
    pub words: &'static [&'static [u8]],
}

const JSON: &[&[u8]] =
    &[b"{}", b"[]", b"null", b"\"\"", b"{\"\":", b"[[[[[[[[", b"\\u0000", b"1e999"];
const PICKLE: &[&[u8]] = &[
    b"(",
    b")",
    b"}",
    b"]",
    b"u",
    b"s",
    b"R",
    b"b",
    b"t",
    b"\x85",
    b"\x86",
    b"\x93",
    b"\x94",
    b"Q",
    b".",
    b"h\x00",
    b"K\x00",
    b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"ccollections\nOrderedDict\n",
    b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"cos\nsystem\n",
    b"PK\x05\x06",
    b"PK\x01\x02",
    b"PK\x03\x04",
];
const YAML: &[&[u8]] =
    &[b": ", b"\n- ", b"\n  ", b"&a ", b"*a", b"<<: ", b"!!str ", b"---\n", b"'", b"{a: ["];

pub const TARGETS: &[Target] = &[
    reader("manifest", manifest, JSON),
    reader("rank_file", parse_bytes::rank_file, JSON),
    reader("safetensors", parse_bytes::safetensors, JSON),
    reader("weights_index", parse_bytes::weights_index, JSON),
    reader("burn_record", parse_bytes::burn_record, &[]),
    reader("torch_file", parse_bytes::torch_file, PICKLE),
    reader("distributed_checkpoint", parse_bytes::distributed_checkpoint, PICKLE),
    reader("peft_config", parse_bytes::peft_config, JSON),
    reader("yaml_config", yaml_config, YAML),
    reader("yaml_update", yaml_update, YAML),
    reader("trainer_config", trainer_config, JSON),
    reader("config_variable", config_variable, JSON),
    #[cfg(feature = "nccl")]
    reader("store_message", fsdp_runtime::parse_store_message, &[b"\x80", b"\xff\xff\x7f"]),
    reader(
        "launcher_environment",
        launcher_environment,
        &[b"RANK=", b"\n", b"WORLD_SIZE=", b"(x2)"],
    ),
];

const fn reader(
    name: &'static str,
    read: fn(&[u8]) -> bool,
    words: &'static [&'static [u8]],
) -> Target {
    Target { name, read, words }
}

/// The bytes are the body of a manifest: a checksum is added, which changed bytes would not fit.
fn manifest(bytes: &[u8]) -> bool {
    let _ = Manifest::parse(bytes, "raw");
    let sealed = seal(&String::from_utf8_lossy(bytes));
    let Ok(manifest) = Manifest::parse(sealed.as_bytes(), "sealed") else { return false };
    for (name, tensor) in manifest.tensors() {
        let held: usize = tensor.pieces.iter().map(|piece| piece.range().len()).sum();
        assert_eq!(Some(held), tensor.numel().map(|numel| numel * tensor.copies), "{name}");
    }
    let again = Manifest::parse(manifest.to_text().as_bytes(), "again");
    assert_eq!(again.expect("what was read can be written").to_text(), manifest.to_text());
    true
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn yaml_config(bytes: &[u8]) -> bool {
    let Ok((config, _)) = Config::parse(&text(bytes), "config.yaml") else { return false };
    // What was read can be written and read again.
    let written = config.to_yaml();
    let (again, _) = Config::parse(&written, "again.yaml").expect("what was written can be read");
    assert_eq!(again.to_yaml(), written);
    let _ = config.check();
    true
}

fn yaml_update(bytes: &[u8]) -> bool {
    update(&text(bytes), "config.yaml").is_ok()
}

fn trainer_config(bytes: &[u8]) -> bool {
    Overrides::default().parse_trainer_config(&text(bytes), "trainer.json").is_ok()
}

fn config_variable(bytes: &[u8]) -> bool {
    Overrides::from_variable(&text(bytes)).is_ok()
}

/// Variables as lines `NAME=VALUE`.
fn launcher_environment(bytes: &[u8]) -> bool {
    let text = text(bytes);
    let variable = |name: &str| -> Option<OsString> {
        let value = |line: &str| Some(line.split_once('=')?.1.into());
        text.lines()
            .find(|line| line.starts_with(name) && line[name.len()..].starts_with('='))
            .and_then(value)
    };
    match RankEnv::from_variables(variable) {
        Ok(Some(env)) => {
            assert!(env.rank.index() < env.world.size());
            true
        }
        _ => false,
    }
}

/// Reads bytes with the target of this name.
pub fn read(name: &str, bytes: &[u8]) {
    let target = TARGETS.iter().find(|target| target.name == name).expect("a target");
    let _ = (target.read)(bytes);
}
