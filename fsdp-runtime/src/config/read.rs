//! From YAML to a [`Config`]: every key is read, noted as without effect, or a problem.

mod agree;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::error::{ConfigError, Note, Problem, ProblemKind};
use super::keys::{Role, Section};
use super::nearest::{list, nearest};
use super::values::{FSDP, MixedPrecision, Named, OTHER_DISTRIBUTED_TYPES};
use super::yaml::{self, Entry, Value};
use super::{AutoWrapPolicy, Config, DEFAULT_MIN_NUM_PARAMS, MpirunConfig, Source};
use crate::options::ShardingStrategy;

/// Reads `text`; `path` names it in errors.
pub(super) fn read(text: &str, path: &Path) -> Result<(Config, Vec<Note>), ConfigError> {
    let syntax = |error: yaml::SyntaxError| ConfigError::Syntax {
        path: path.into(),
        line: error.line,
        column: error.column,
        message: error.message,
    };
    let root = yaml::parse(text).map_err(syntax)?;
    let mut reader = Reader::default();
    reader.config.source = Source { path: path.into(), ..Source::default() };
    match root.map(|root| (root.line, root.value)) {
        None => {}
        Some((_, Value::Map(entries))) => {
            reader.section(Section::Top, &entries);
            reader.agree();
        }
        Some((line, _)) => {
            return Err(syntax(yaml::SyntaxError {
                line,
                column: 1,
                message: "expected lines of `key: value`".into(),
            }));
        }
    }
    let Reader { config, mut notes, mut problems, .. } = reader;
    if problems.is_empty() {
        notes.sort_by_key(|note| note.line);
        return Ok((config, notes));
    }
    problems.sort_by_key(|problem| problem.line);
    Err(ConfigError::Invalid { path: path.into(), problems })
}

const REPLICATE: &str = "parallelism_config_dp_replicate_size";

#[derive(Default)]
struct Reader {
    config: Config,
    notes: Vec<Note>,
    problems: Vec<Problem>,
    /// `fp16: true`, which older files have in place of `mixed_precision`.
    fp16: bool,
    /// What the two keys for the strategy say.
    strategy: Option<ShardingStrategy>,
    reshard: Option<Reshard>,
}

/// The value of `fsdp_reshard_after_forward`: of FSDP2, or a strategy in files of version 1.
#[derive(Clone, Copy)]
enum Reshard {
    After(bool),
    Strategy(ShardingStrategy),
}

impl Reader {
    fn problem(&mut self, line: usize, kind: ProblemKind) {
        self.problems.push(Problem { line: Some(line), kind });
    }

    fn wrong(&mut self, entry: &Entry, expected: impl Into<String>) {
        let (key, value) = (entry.key.clone(), entry.value.shown());
        self.problem(
            entry.value.line,
            ProblemKind::WrongValue { key, value, expected: expected.into() },
        );
    }

    fn note(&mut self, entry: &Entry, reason: impl Into<String>, off: bool) {
        self.notes.push(Note {
            line: entry.line,
            key: entry.key.clone(),
            value: entry.value.shown(),
            reason: reason.into(),
            off,
        });
    }

    fn section(&mut self, section: Section, entries: &[Entry]) {
        let mut first: HashMap<&str, usize> = HashMap::new();
        for entry in entries {
            if let Some(&first) = first.get(entry.key.as_str()) {
                let key = entry.key.clone();
                self.problem(entry.line, ProblemKind::DuplicateKey { key, first });
                continue;
            }
            first.insert(&entry.key, entry.line);
            self.entry(section, entry);
        }
    }

    fn entry(&mut self, section: Section, entry: &Entry) {
        let Some(key) = section.find(&entry.key) else {
            return self.unknown(section, entry);
        };
        match key.role {
            Role::Unused { because, off } => {
                let value = entry.value.shown();
                let is_off =
                    entry.value.is_null() || off.iter().any(|off| off.eq_ignore_ascii_case(&value));
                self.note(entry, because, is_off);
            }
            // A key left open is as good as left out.
            Role::Used if entry.value.is_null() => {}
            Role::Used => {
                self.config.source.lines.insert(key.name, entry.line);
                match section {
                    Section::Top => self.top(entry),
                    Section::Fsdp => self.fsdp(entry),
                }
            }
        }
    }

    fn unknown(&mut self, section: Section, entry: &Entry) {
        let key = entry.key.clone();
        if section.other().find(&key).is_some() {
            let place = section.other().place();
            return self.problem(entry.line, ProblemKind::Misplaced { key, place });
        }
        let nearest = nearest(&key, section.keys().iter().map(|key| key.name));
        self.problem(entry.line, ProblemKind::UnknownKey { key, nearest });
    }

    fn top(&mut self, entry: &Entry) {
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
            "main_process_port" => self.port(entry),
            "mixed_precision" => self.mixed_precision(entry),
            "mpirun_config" => self.map(entry, |reader, map| reader.mpirun(map)),
            "num_machines" => self.config.num_machines = self.count(entry, 1).unwrap_or(1),
            // Accelerate's -1: as many as there are GPUs.
            "num_processes" if entry.value.text() == Some("-1") => {}
            "num_processes" => self.config.num_processes = self.count(entry, 1),
            "parallelism_config" => {
                self.map(entry, |reader, map| map.iter().for_each(|entry| reader.degree(entry)));
            }
            "use_cpu" => self.config.use_cpu = self.bool(entry).unwrap_or_default(),
            _ => self.unknown(Section::Top, entry),
        }
    }

    fn fsdp(&mut self, entry: &Entry) {
        match entry.key.as_str() {
            "fsdp_activation_checkpointing" => {
                self.config.fsdp.activation_checkpointing = self.bool(entry).unwrap_or_default();
            }
            "fsdp_auto_wrap_policy" => {
                self.config.fsdp.auto_wrap_policy = self.named(entry, Named::named);
            }
            "fsdp_backward_prefetch" => {
                self.config.fsdp.backward_prefetch = self.named(entry, Named::named_or_numbered);
            }
            "fsdp_backward_prefetch_policy" => {
                let older = self.named(entry, Named::named_or_numbered);
                let fsdp = &mut self.config.fsdp;
                fsdp.backward_prefetch = fsdp.backward_prefetch.or(older);
            }
            "fsdp_cpu_ram_efficient_loading" => {
                self.config.fsdp.cpu_ram_efficient_loading = self.bool(entry);
            }
            "fsdp_forward_prefetch" => self.config.fsdp.forward_prefetch = self.bool(entry),
            "fsdp_min_num_params" => self.config.fsdp.min_num_params = self.count(entry, 0),
            "fsdp_offload_params" => {
                self.config.fsdp.offload_params = self.bool(entry).unwrap_or_default();
            }
            "fsdp_reshard_after_forward" => self.reshard(entry),
            "fsdp_sharding_strategy" => {
                self.strategy = self.named(entry, Named::named_or_numbered);
            }
            "fsdp_state_dict_type" => {
                self.config.fsdp.state_dict_type = self.named(entry, Named::named_or_numbered);
            }
            "fsdp_sync_module_states" => self.config.fsdp.sync_module_states = self.bool(entry),
            "fsdp_transformer_layer_cls_to_wrap" => self.units(entry),
            "fsdp_use_orig_params" => {
                if self.bool(entry) == Some(false) {
                    let reason = "parameters always keep their own shapes, names and ids";
                    self.note(entry, reason, false);
                }
            }
            "fsdp_version" => {
                if self.count(entry, 1).is_some_and(|version| version > 2) {
                    self.wrong(entry, "1 or 2");
                }
            }
            _ => self.unknown(Section::Fsdp, entry),
        }
    }

    fn text(&mut self, entry: &Entry) -> Option<String> {
        let text = entry.value.text().map(str::trim).filter(|text| !text.is_empty());
        if text.is_none() {
            self.wrong(entry, "a text");
        }
        text.map(str::to_string)
    }

    fn bool(&mut self, entry: &Entry) -> Option<bool> {
        let value = entry.value.text().and_then(boolean);
        if value.is_none() {
            self.wrong(entry, "true or false");
        }
        value
    }

    /// A whole number of at least `least`; `1e8` is one.
    fn count(&mut self, entry: &Entry, least: usize) -> Option<usize> {
        let value = entry.value.text().and_then(whole_number).filter(|value| *value >= least);
        if value.is_none() {
            self.wrong(entry, format!("a whole number of at least {least}"));
        }
        value
    }

    fn named<T: Named>(&mut self, entry: &Entry, read: fn(&str) -> Option<T>) -> Option<T> {
        let text = entry.value.text().unwrap_or_default().trim();
        let value = read(text);
        if value.is_none() {
            let (key, value) = (entry.key.clone(), entry.value.shown());
            let nearest = nearest(text, T::NAMES.iter().copied());
            let valid = T::NAMES.to_vec();
            self.problem(
                entry.value.line,
                ProblemKind::UnknownValue { key, value, nearest, valid },
            );
        }
        value
    }

    fn map(&mut self, entry: &Entry, read: impl FnOnce(&mut Self, &[Entry])) {
        match &entry.value.value {
            Value::Map(entries) => read(self, entries),
            _ => self.wrong(entry, "indented lines of `key: value`"),
        }
    }

    fn compute_environment(&mut self, entry: &Entry) {
        match entry.value.text() {
            Some("LOCAL_MACHINE") => {}
            Some("AMAZON_SAGEMAKER") => {
                let (key, value) = ("compute_environment", entry.value.shown());
                let instead = "write `LOCAL_MACHINE`";
                self.problem(entry.line, ProblemKind::Unsupported { key, value, instead });
            }
            text => {
                let valid = vec!["LOCAL_MACHINE"];
                let nearest = nearest(text.unwrap_or_default(), valid.iter().copied());
                let (key, value) = (entry.key.clone(), entry.value.shown());
                self.problem(entry.line, ProblemKind::UnknownValue { key, value, nearest, valid });
            }
        }
    }

    fn distributed_type(&mut self, entry: &Entry) {
        let text = entry.value.text().unwrap_or_default();
        if text == FSDP {
            return;
        }
        let value = entry.value.shown();
        let kind = if OTHER_DISTRIBUTED_TYPES.contains(&text) {
            ProblemKind::Unsupported {
                key: "distributed_type",
                value,
                instead: "write `FSDP`; data parallel training without sharding is \
                          `fsdp_sharding_strategy: NO_SHARD`",
            }
        } else {
            let nearest = nearest(text, [FSDP]);
            ProblemKind::UnknownValue { key: entry.key.clone(), value, nearest, valid: vec![FSDP] }
        };
        self.problem(entry.line, kind);
    }

    fn mixed_precision(&mut self, entry: &Entry) {
        // YAML 1.1 reads an unquoted `no` as false, and files written by hand rely on it.
        let off = entry.value.text().is_some_and(|text| boolean(text) == Some(false));
        self.config.mixed_precision = if off {
            MixedPrecision::No
        } else {
            self.named(entry, Named::named).unwrap_or(MixedPrecision::No)
        };
    }

    fn port(&mut self, entry: &Entry) {
        match self.count(entry, 0).map(u16::try_from) {
            // Accelerate's 0: any that is free.
            Some(Ok(0)) | None => {}
            Some(Ok(port)) => self.config.main_process_port = Some(port),
            Some(Err(_)) => self.wrong(entry, "a port, 1 to 65535"),
        }
    }

    fn reshard(&mut self, entry: &Entry) {
        let text = entry.value.text().unwrap_or_default();
        // A bare number is a strategy's, as in `fsdp_sharding_strategy`.
        let number = text.parse::<usize>().is_ok();
        self.reshard = match boolean(text).filter(|_| !number) {
            Some(after) => Some(Reshard::After(after)),
            None => match ShardingStrategy::named_or_numbered(text) {
                Some(strategy) => Some(Reshard::Strategy(strategy)),
                None => {
                    let (key, value) = (entry.key.clone(), entry.value.shown());
                    let known = || ["true", "false"].iter().chain(ShardingStrategy::NAMES).copied();
                    let (nearest, valid) = (nearest(text, known()), known().collect());
                    self.problem(
                        entry.value.line,
                        ProblemKind::UnknownValue { key, value, nearest, valid },
                    );
                    None
                }
            },
        };
    }

    fn units(&mut self, entry: &Entry) {
        let texts: Option<Vec<&str>> = match &entry.value.value {
            Value::Scalar { text, .. } => Some(text.split(',').collect()),
            Value::List(items) => items.iter().map(yaml::Node::text).collect(),
            Value::Map(_) => None,
        };
        match texts {
            Some(texts) => {
                let names = texts.iter().map(|name| name.trim()).filter(|name| !name.is_empty());
                self.config.fsdp.transformer_layer_cls_to_wrap =
                    names.map(str::to_string).collect();
            }
            None => self.wrong(entry, "names of unit types, such as `BertLayer,BertEmbeddings`"),
        }
    }

    /// The lines of `mpirun_config`. Accelerate writes none where `mpirun` is not used.
    fn mpirun(&mut self, entries: &[Entry]) {
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
                    self.problem(entry.line, ProblemKind::UnknownKey { key, nearest });
                }
            }
        }
        self.config.mpirun = Some(mpirun);
    }

    /// One line of `parallelism_config`.
    fn degree(&mut self, entry: &Entry) {
        const PREFIX: &str = "parallelism_config_";
        match entry.key.strip_prefix(PREFIX) {
            Some("dp_replicate_size") => {
                self.config.source.lines.insert(REPLICATE, entry.line);
                self.config.fsdp.replicate = self.count(entry, 1);
            }
            Some("dp_shard_size") => self.config.fsdp.shard = self.count(entry, 1),
            Some("tp_size" | "cp_size" | "sp_size") => {
                if self.count(entry, 1).is_some_and(|size| size > 1) {
                    self.wrong(entry, "1; only data parallel training is supported");
                }
            }
            _ => self.note(entry, "only `dp_replicate_size` and `dp_shard_size` are read", false),
        }
    }
}

/// A Boolean of YAML 1.1, or of Python's `strtobool` in quotes.
fn boolean(text: &str) -> Option<bool> {
    match text.trim().to_ascii_lowercase().as_str() {
        "true" | "yes" | "on" | "y" | "t" | "1" => Some(true),
        "false" | "no" | "off" | "n" | "f" | "0" => Some(false),
        _ => None,
    }
}

/// A number without a fraction, `100_000` and `1e8` included.
fn whole_number(text: &str) -> Option<usize> {
    let text = text.trim().replace('_', "");
    if let Ok(number) = text.parse() {
        return Some(number);
    }
    let number: f64 = text.parse().ok()?;
    let exact = number.fract() == 0.0 && (0.0..=9e15).contains(&number);
    exact.then_some(number as usize)
}
