//! The keys of the two parts of a file: the top level, and `fsdp_config`.

use std::collections::HashMap;

use super::reader::Reader;
use crate::options::config::error::ProblemKind;
use crate::options::config::keys::{Effect, Section, newer_name};
use crate::options::config::nearest::nearest;
use crate::options::config::place::Place;
use crate::options::config::values::Named;
use crate::options::config::yaml::KeyValue;

impl Reader {
    /// Reads all entries of a part. Of entries with equal keys, the first is read.
    pub(super) fn section(&mut self, section: Section, entries: &[KeyValue]) {
        let mut places: HashMap<&str, Place> = HashMap::new();
        for entry in entries {
            let name = section.find_older(&entry.key).map_or(entry.key.as_str(), |key| key.name);
            if let Some(&first) = places.get(name) {
                let key = entry.key.clone();
                self.problem(entry.place, ProblemKind::DuplicateKey { key, first });
                continue;
            }
            places.insert(name, entry.place);
            self.entry(section, entry);
        }
    }

    fn entry(&mut self, section: Section, entry: &KeyValue) {
        let Some(key) = section.find_older(&entry.key) else {
            return self.unknown_key(section, entry);
        };
        let entry = &KeyValue { key: key.name.into(), ..entry.clone() };
        match key.effect {
            Effect::Unused { because, off } => {
                let value = entry.value.shown();
                let is_off =
                    entry.value.is_null() || off.iter().any(|off| off.eq_ignore_ascii_case(&value));
                self.note(entry, because, is_off);
            }
            // A key without a value counts as left out.
            Effect::Used if entry.value.is_null() => {}
            Effect::Used => {
                self.config.source.places.insert(key.name, entry.place);
                match section {
                    Section::Top => self.top_level_key(entry),
                    Section::Fsdp => self.fsdp_key(entry),
                }
            }
        }
    }

    fn unknown_key(&mut self, section: Section, entry: &KeyValue) {
        let key = entry.key.clone();
        if section.other().find(&key).is_some() {
            let place = section.other().place();
            return self.problem(entry.place, ProblemKind::Misplaced { key, place });
        }
        // The other part's keys come last: of equally near keys, the first is taken.
        let known = || section.keys().iter().chain(section.other().keys()).map(|key| key.name);
        let prefixed = format!("fsdp_{key}");
        let nearest = nearest(&key, known()).or_else(|| nearest(&prefixed, known()));
        self.problem(entry.place, ProblemKind::UnknownKey { key, nearest });
    }

    fn top_level_key(&mut self, entry: &KeyValue) {
        match entry.key.as_str() {
            "compute_environment" => self.compute_environment(entry),
            "debug" => self.config.debug = self.bool(entry).unwrap_or_default(),
            "distributed_type" => self.distributed_type(entry),
            "downcast_bf16" => self.config.downcast_bf16 = self.bool(entry).unwrap_or_default(),
            "fp16" => self.fp16 = self.bool(entry).unwrap_or_default(),
            "fsdp_config" => self.map(entry, |reader, map| reader.section(Section::Fsdp, map)),
            "gpu_ids" => {
                let all = |ids: &String| ids.eq_ignore_ascii_case("all");
                self.config.gpu_ids = self.text(entry).filter(|ids| !all(ids));
            }
            "machine_rank" => self.config.machine_rank = self.count(entry, 0).unwrap_or_default(),
            "main_process_ip" => self.config.main_process_ip = self.text(entry),
            "main_process_port" => self.main_process_port(entry),
            "mixed_precision" => self.mixed_precision(entry),
            "mpirun_config" => self.map(entry, |reader, map| reader.mpirun(map)),
            "num_machines" => self.config.num_machines = self.count(entry, 1).unwrap_or(1),
            // In Accelerate, -1 stands for one process a GPU. Here it counts as left out.
            "num_processes" if entry.value.text() == Some("-1") => {}
            "num_processes" => self.config.num_processes = self.count(entry, 1),
            "parallelism_config" => self.map(entry, |reader, map| {
                map.iter().for_each(|entry| reader.parallelism(entry));
            }),
            "use_cpu" => self.config.use_cpu = self.bool(entry).unwrap_or_default(),
            _ => self.unknown_key(Section::Top, entry),
        }
    }

    fn fsdp_key(&mut self, entry: &KeyValue) {
        if let Some(newer) = newer_name(&entry.key) {
            return self.renamed.push((newer, entry.clone()));
        }
        if self.plain_field(&entry.key, entry) {
            return;
        }
        match entry.key.as_str() {
            "fsdp_activation_checkpointing" => {
                self.config.fsdp.activation_checkpointing = self.bool(entry).unwrap_or_default();
            }
            "fsdp_activation_checkpointing_offload" => {
                let offload = self.bool(entry).unwrap_or_default();
                self.config.fsdp.activation_checkpointing_offload = offload;
            }
            "fsdp_auto_wrap_policy" => {
                self.config.fsdp.auto_wrap_policy = self.named(entry, Named::named);
            }
            "fsdp_ignored_modules" => self.problem(
                entry.place,
                ProblemKind::Unsupported {
                    key: "fsdp_ignored_modules",
                    value: entry.value.shown(),
                    instead: "the program names parameters, with `FsdpOptions::with_ignored_params`",
                },
            ),
            "fsdp_min_num_params" => self.config.fsdp.min_num_params = self.count(entry, 0),
            "fsdp_offload_params" => {
                self.config.fsdp.offload_params = self.bool(entry).unwrap_or_default();
            }
            "fsdp_reshard_after_forward" => self.reshard_after_forward(entry),
            "fsdp_sharding_strategy" => {
                self.strategy = self.named(entry, Named::named_or_numbered);
            }
            "fsdp_state_dict_type" => {
                self.config.fsdp.state_dict_type = self.named(entry, Named::named_or_numbered);
            }
            "fsdp_transformer_layer_cls_to_wrap" => self.unit_names(entry),
            "fsdp_use_orig_params" => {
                if self.bool(entry) == Some(false) {
                    let reason = "parameters always keep their own shapes, names and ids";
                    self.note(entry, reason, false);
                }
            }
            "fsdp_version" => match self.count(entry, 1) {
                Some(1 | 2) => self.note(entry, "versions 1 and 2 are read alike", true),
                Some(_) => self.wrong_value(entry, "1 or 2"),
                None => {}
            },
            _ => self.unknown_key(Section::Fsdp, entry),
        }
    }
}
