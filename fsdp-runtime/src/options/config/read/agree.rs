//! Rules that hold across keys, checked after all keys are read.
//!
//! Keys that contradict each other are problems. Where two keys can set one option, the option is
//! decided here.

use super::reader::{REPLICATE, Reader, Reshard};
use crate::options::ShardingStrategy;
use crate::options::config::error::{Note, Problem, ProblemKind};
use crate::options::config::types::DEFAULT_MIN_NUM_PARAMS;
use crate::options::config::values::{AutoWrapPolicy, MixedPrecision, Named};

impl Reader {
    pub(super) fn check_agreement(&mut self) {
        self.check_sizes();
        self.check_loading();
        self.decide_strategy();
        self.check_shard_groups();
        self.check_wrapping();
        self.decide_precision();
        self.read_renamed();
        self.check_downcast();
    }

    /// Decides the precision. `fp16` is a key of older files, and has an effect only without
    /// `mixed_precision`.
    fn decide_precision(&mut self) {
        if self.config.source.place("mixed_precision").is_none() {
            if self.fp16 {
                self.config.mixed_precision = MixedPrecision::Fp16;
            }
            return;
        }
        let precision = self.config.mixed_precision;
        let agrees = self.fp16 == (precision == MixedPrecision::Fp16);
        let value = if self.fp16 { "true" } else { "false" };
        let reason = format!("`mixed_precision` is `{precision}`, and replaces it");
        self.note_unused("fp16", value, reason, agrees);
    }

    /// Reads the keys with an older name, which have an effect only without the newer one.
    pub(super) fn read_renamed(&mut self) {
        for (newer, entry) in std::mem::take(&mut self.renamed) {
            let value = |reader: &mut Self| reader.config.fsdp.plain_field(newer)?.text();
            let own = value(self);
            self.plain_field(newer, &entry);
            let older = value(self);
            let Some((own, older)) = own.zip(older) else { continue };
            if let Some(field) = self.config.fsdp.plain_field(newer) {
                field.parse(&own);
            }
            let reason = format!("`{newer}` is `{own}`, and replaces it");
            self.note_unused(&entry.key, &older, reason, older == own);
        }
    }

    /// Notes that `key` has no effect, since another key decides. `agrees` says whether it would
    /// have the same effect. Adds no note if the file does not have `key`.
    fn note_unused(&mut self, key: &str, value: &str, reason: String, agrees: bool) {
        if let Some(place) = self.config.source.place(key) {
            let (key, value) = (key.into(), value.into());
            self.notes.push(Note { place, key, value, reason, off: agrees });
        }
    }

    /// Notes `downcast_bf16` without bf16.
    fn check_downcast(&mut self) {
        let (key, config) = ("downcast_bf16", &self.config);
        if !config.downcast_bf16 || config.mixed_precision == MixedPrecision::Bf16 {
            return;
        }
        self.note_unused(key, "true", "`mixed_precision` is not `bf16`".into(), false);
    }

    /// Checks that `machine_rank` is below `num_machines`, and `num_processes` a multiple of it.
    fn check_sizes(&mut self) {
        let config = &self.config;
        if config.machine_rank >= config.num_machines {
            self.problems.push(Problem {
                place: config.source.place("machine_rank"),
                kind: ProblemKind::WrongValue {
                    key: "machine_rank".into(),
                    value: config.machine_rank.to_string(),
                    expected: format!("less than `num_machines`, which is {}", config.num_machines),
                },
            });
        }
        if let Some(processes) = config.num_processes.filter(|n| n % config.num_machines != 0) {
            self.problems.push(Problem {
                place: config.source.place("num_processes"),
                kind: ProblemKind::WrongValue {
                    key: "num_processes".into(),
                    value: processes.to_string(),
                    expected: format!(
                        "a multiple of `num_machines`, which is {}, because `num_processes` counts \
                         the processes of all machines",
                        config.num_machines
                    ),
                },
            });
        }
    }

    /// Checks that weights that only rank 0 has read are broadcast.
    fn check_loading(&mut self) {
        let fsdp = &self.config.fsdp;
        if fsdp.cpu_ram_efficient_loading == Some(true) && fsdp.sync_module_states == Some(false) {
            self.contradiction(
                ("fsdp_cpu_ram_efficient_loading", "true"),
                ("fsdp_sync_module_states", "false"),
                "weights that only rank 0 has read must be broadcast",
            );
        }
    }

    /// Decides the strategy from `fsdp_sharding_strategy` and `fsdp_reshard_after_forward`. A file
    /// that has both must give them one meaning.
    fn decide_strategy(&mut self) {
        use ShardingStrategy::{FullShard, HybridShard, HybridShardZero2, ShardGradOp};
        let replicated = self.config.fsdp.replicate.is_some_and(|groups| groups > 1);
        self.config.fsdp.sharding_strategy = match (self.strategy, self.reshard) {
            (None, None | Some(Reshard::After(true))) if replicated => HybridShard,
            (None, None | Some(Reshard::After(true))) => FullShard,
            (None, Some(Reshard::After(false))) if replicated => HybridShardZero2,
            (None, Some(Reshard::After(false))) => ShardGradOp,
            (Some(strategy), None) | (None, Some(Reshard::Strategy(strategy))) => strategy,
            (Some(strategy), Some(reshard)) => {
                self.check_reshard(strategy, reshard);
                strategy
            }
        };
    }

    /// Checks that `fsdp_reshard_after_forward` agrees with the strategy.
    fn check_reshard(&mut self, strategy: ShardingStrategy, reshard: Reshard) {
        use ShardingStrategy::{FullShard, HybridShard, HybridShardZero2, NoShard, ShardGradOp};
        let (agrees, value) = match reshard {
            Reshard::Strategy(other) => (other == strategy, other.name_in_file()),
            Reshard::After(true) => (matches!(strategy, FullShard | HybridShard), "true"),
            Reshard::After(false) => {
                (matches!(strategy, ShardGradOp | HybridShardZero2 | NoShard), "false")
            }
        };
        if !agrees {
            self.contradiction(
                ("fsdp_reshard_after_forward", value),
                ("fsdp_sharding_strategy", strategy.name_in_file()),
                "remove one of them",
            );
        }
    }

    /// Checks that several shard groups have a hybrid strategy, and divide the ranks.
    fn check_shard_groups(&mut self) {
        let strategy = self.config.fsdp.sharding_strategy;
        let groups = self.config.fsdp.replicate.unwrap_or(1);
        if groups > 1 && strategy.shards() && !strategy.is_hybrid() {
            self.contradiction(
                (REPLICATE, &groups.to_string()),
                ("fsdp_sharding_strategy", strategy.name_in_file()),
                "write `HYBRID_SHARD` or `HYBRID_SHARD_ZERO2` there",
            );
        }
        // A number of groups alone is checked later (`Config::check`), against the number of
        // processes that were started, which flags may change.
        if self.config.fsdp.shard.is_some() {
            self.problems.extend(self.config.shard_group_problem());
        }
    }

    /// Notes the keys that only another wrap policy reads.
    fn check_wrapping(&mut self) {
        let policy = self.config.fsdp.auto_wrap_policy;
        let names = self.config.fsdp.transformer_layer_cls_to_wrap.join(",");
        let min = self.config.fsdp.min_num_params;
        let transformer = policy.is_none_or(|policy| policy == AutoWrapPolicy::TransformerBased);
        if !transformer && !names.is_empty() {
            self.note_unread(
                "fsdp_transformer_layer_cls_to_wrap",
                names,
                AutoWrapPolicy::TransformerBased,
            );
        }
        if let Some(min) = min.filter(|_| policy != Some(AutoWrapPolicy::SizeBased)) {
            self.note_unread("fsdp_min_num_params", min.to_string(), AutoWrapPolicy::SizeBased);
        }
        if policy == Some(AutoWrapPolicy::SizeBased) && min.is_none() {
            self.config.fsdp.min_num_params = Some(DEFAULT_MIN_NUM_PARAMS);
        }
    }

    /// Notes that `key` has no effect because the wrap policy is not `policy`.
    fn note_unread(&mut self, key: &str, value: String, policy: AutoWrapPolicy) {
        let reason = format!("`fsdp_auto_wrap_policy` is not `{policy}`");
        self.note_unused(key, &value, reason, false);
    }

    /// Adds a problem: `key` contradicts `other`. Adds none if the file does not have `other`.
    fn contradiction(
        &mut self,
        (key, value): (&'static str, &str),
        (other, other_value): (&'static str, &str),
        fix: &'static str,
    ) {
        let place = self.config.source.place(key);
        let Some(other_place) = self.config.source.place(other) else { return };
        let (value, other_value) = (value.into(), other_value.into());
        let kind = ProblemKind::Contradiction { key, value, other, other_place, other_value, fix };
        self.problems.push(Problem { place, kind });
    }
}
