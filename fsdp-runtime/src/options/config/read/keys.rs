//! Keys whose values need rules of their own.

use std::path::PathBuf;

use super::reader::{REPLICATE, Reader, Reshard};
use crate::options::ShardingStrategy;
use crate::options::config::error::ProblemKind;
use crate::options::config::keys::{CONTEXT, PARALLELISM_PREFIX};
use crate::options::config::nearest::nearest;
use crate::options::config::types::MpirunConfig;
use crate::options::config::values::{
    FSDP, MixedPrecision, Named, OTHER_DISTRIBUTED_TYPES, boolean,
};
use crate::options::config::yaml::{KeyValue, Node, Value};

impl Reader {
    pub(super) fn compute_environment(&mut self, entry: &KeyValue) {
        match entry.value.text() {
            Some("LOCAL_MACHINE") => {}
            Some("AMAZON_SAGEMAKER") => {
                let (key, value) = ("compute_environment", entry.value.shown());
                let instead = "write `LOCAL_MACHINE`";
                self.problem(entry.place, ProblemKind::Unsupported { key, value, instead });
            }
            text => self.unknown_value(entry, text.unwrap_or_default(), vec!["LOCAL_MACHINE"]),
        }
    }

    pub(super) fn distributed_type(&mut self, entry: &KeyValue) {
        let text = entry.value.text().unwrap_or_default();
        if text == FSDP {
            return;
        }
        if !OTHER_DISTRIBUTED_TYPES.contains(&text) {
            return self.unknown_value(entry, text, vec![FSDP]);
        }
        let kind = ProblemKind::Unsupported {
            key: "distributed_type",
            value: entry.value.shown(),
            instead: "write `FSDP`; data parallel training without sharding is \
                      `fsdp_sharding_strategy: NO_SHARD`",
        };
        self.problem(entry.place, kind);
    }

    pub(super) fn mixed_precision(&mut self, entry: &KeyValue) {
        // YAML 1.1 reads an unquoted `no` as false, and files written by hand rely on it.
        let off = entry.value.text().is_some_and(|text| boolean(text) == Some(false));
        self.config.mixed_precision = if off {
            MixedPrecision::No
        } else {
            self.named(entry, Named::named).unwrap_or(MixedPrecision::No)
        };
    }

    pub(super) fn main_process_port(&mut self, entry: &KeyValue) {
        match self.count(entry, 0).map(u16::try_from) {
            // In Accelerate, 0 stands for any free port.
            Some(Ok(0)) | None => {}
            Some(Ok(port)) => self.config.main_process_port = Some(port),
            Some(Err(_)) => self.wrong_value(entry, "a port, 1 to 65535"),
        }
    }

    pub(super) fn reshard_after_forward(&mut self, entry: &KeyValue) {
        let text = entry.value.text().unwrap_or_default();
        // A number is a strategy, as in `fsdp_sharding_strategy`: 1 is FULL_SHARD, not true.
        let number = text.parse::<usize>().is_ok();
        self.reshard = match boolean(text).filter(|_| !number) {
            Some(after) => Some(Reshard::After(after)),
            None => ShardingStrategy::named_or_numbered(text).map(Reshard::Strategy),
        };
        if self.reshard.is_none() {
            let valid = ["true", "false"].iter().chain(ShardingStrategy::NAMES).copied();
            self.unknown_value(entry, text, valid.collect());
        }
    }

    /// Reads `fsdp_transformer_layer_cls_to_wrap`: a text with commas, or a list.
    pub(super) fn unit_names(&mut self, entry: &KeyValue) {
        let texts: Option<Vec<&str>> = match &entry.value.value {
            Value::Scalar { text, .. } => Some(text.split(',').collect()),
            Value::List(items) => items.iter().map(Node::text).collect(),
            Value::Map(_) => None,
        };
        match texts {
            Some(texts) => {
                let names = texts.iter().map(|name| name.trim()).filter(|name| !name.is_empty());
                self.config.fsdp.transformer_layer_cls_to_wrap =
                    names.map(str::to_string).collect();
            }
            None => {
                self.wrong_value(entry, "names of unit types, such as `BertLayer,BertEmbeddings`");
            }
        }
    }

    /// Reads the keys of `mpirun_config`. Accelerate writes an empty map if `mpirun` is not used.
    pub(super) fn mpirun(&mut self, entries: &[KeyValue]) {
        if entries.is_empty() {
            return;
        }
        let mut mpirun = MpirunConfig::default();
        for entry in entries {
            match entry.key.as_str() {
                "mpirun_hostfile" if entry.value.is_null() => {}
                "mpirun_hostfile" => mpirun.hostfile = self.text(entry).map(PathBuf::from),
                "mpirun_ccl" => self.note(entry, "for Intel's oneCCL", true),
                _ => {
                    let nearest = nearest(&entry.key, ["mpirun_hostfile", "mpirun_ccl"]);
                    let key = entry.key.clone();
                    self.problem(entry.place, ProblemKind::UnknownKey { key, nearest });
                }
            }
        }
        self.config.mpirun = Some(mpirun);
    }

    /// Reads a key of `parallelism_config`.
    pub(super) fn parallelism(&mut self, entry: &KeyValue) {
        match entry.key.strip_prefix(PARALLELISM_PREFIX) {
            Some("dp_replicate_size") => {
                self.config.source.places.insert(REPLICATE, entry.place);
                self.config.fsdp.replicate = self.count(entry, 1);
            }
            Some("dp_shard_size") => self.config.fsdp.shard = self.count(entry, 1),
            Some("tp_size") => self.config.fsdp.tensor = self.count(entry, 1),
            Some("cp_size") => {
                self.config.source.places.insert(CONTEXT, entry.place);
                self.config.fsdp.context = self.count(entry, 1);
            }
            Some("cp_comm_strategy") => {
                self.config.fsdp.context_exchange = self.named(entry, Named::named);
            }
            Some("sp_size") => {
                if self.count(entry, 1).is_some_and(|size| size > 1) {
                    self.wrong_value(
                        entry,
                        "1: it is for DeepSpeed's Ulysses; write `parallelism_config_cp_size` for long rows",
                    );
                }
            }
            _ => {
                let read = "only `dp_replicate_size`, `dp_shard_size`, `cp_size`, `cp_comm_strategy` and `tp_size` are read";
                self.note(entry, read, false);
            }
        }
    }
}
