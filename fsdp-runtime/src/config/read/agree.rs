//! What holds across keys, once all are read: contradictions, and settings that two keys may say.

use super::*;

impl Reader {
    /// What holds across keys.
    pub(super) fn agree(&mut self) {
        let config = &self.config;
        let mut found = Vec::new();
        if config.machine_rank >= config.num_machines {
            found.push(Problem {
                line: config.source.line("machine_rank"),
                kind: ProblemKind::WrongValue {
                    key: "machine_rank".into(),
                    value: config.machine_rank.to_string(),
                    expected: format!("less than `num_machines`, which is {}", config.num_machines),
                },
            });
        }
        if let Some(processes) = config.num_processes.filter(|n| n % config.num_machines != 0) {
            found.push(Problem {
                line: config.source.line("num_processes"),
                kind: ProblemKind::WrongValue {
                    key: "num_processes".into(),
                    value: processes.to_string(),
                    expected: format!(
                        "a multiple of `num_machines`, which is {}: it counts the processes of all \
                         machines",
                        config.num_machines
                    ),
                },
            });
        }
        let fsdp = &config.fsdp;
        if fsdp.cpu_ram_efficient_loading == Some(true) && fsdp.sync_module_states == Some(false) {
            found.extend(self.contradiction(
                ("fsdp_cpu_ram_efficient_loading", "true"),
                ("fsdp_sync_module_states", "false"),
                "weights that rank 0 alone has read must be broadcast",
            ));
        }
        self.problems.extend(found);
        self.settle_strategy();
        self.settle_wrapping();
        if self.fp16 && !self.config.source.lines.contains_key("mixed_precision") {
            self.config.mixed_precision = MixedPrecision::Fp16;
        }
    }

    fn contradiction(
        &self,
        (key, value): (&'static str, &str),
        (other, other_value): (&'static str, &str),
        fix: &'static str,
    ) -> Option<Problem> {
        let line = self.config.source.line(key);
        let other_line = self.config.source.line(other)?;
        let (value, other_value) = (value.into(), other_value.into());
        let kind = ProblemKind::Contradiction { key, value, other, other_line, other_value, fix };
        Some(Problem { line, kind })
    }

    /// `fsdp_sharding_strategy` and its newer form say the same, or one of them is missing.
    fn settle_strategy(&mut self) {
        use ShardingStrategy::{FullShard, HybridShard, HybridShardZero2, NoShard, ShardGradOp};
        let replicated = self.config.fsdp.replicate.is_some_and(|groups| groups > 1);
        let strategy = match (self.strategy, self.reshard) {
            (None, None) if replicated => HybridShard,
            (None, None) => FullShard,
            (Some(strategy), None) | (None, Some(Reshard::Strategy(strategy))) => strategy,
            (None, Some(Reshard::After(true))) if replicated => HybridShard,
            (None, Some(Reshard::After(true))) => FullShard,
            (None, Some(Reshard::After(false))) if replicated => HybridShardZero2,
            (None, Some(Reshard::After(false))) => ShardGradOp,
            (Some(strategy), Some(reshard)) => {
                let (agree, value) = match reshard {
                    Reshard::Strategy(other) => (other == strategy, other.name_in_file()),
                    Reshard::After(true) => (matches!(strategy, FullShard | HybridShard), "true"),
                    Reshard::After(false) => {
                        let kept = matches!(strategy, ShardGradOp | HybridShardZero2 | NoShard);
                        (kept, "false")
                    }
                };
                if !agree {
                    let problem = self.contradiction(
                        ("fsdp_reshard_after_forward", value),
                        ("fsdp_sharding_strategy", strategy.name_in_file()),
                        "remove one of them",
                    );
                    self.problems.extend(problem);
                }
                strategy
            }
        };
        self.config.fsdp.sharding_strategy = strategy;
        self.settle_mesh(strategy);
    }

    /// Groups of ranks that hold the whole model each make a strategy a hybrid one.
    fn settle_mesh(&mut self, strategy: ShardingStrategy) {
        let groups = self.config.fsdp.replicate.unwrap_or(1);
        if groups > 1 && strategy.shards() && !strategy.is_hybrid() {
            let problem = self.contradiction(
                (REPLICATE, &groups.to_string()),
                ("fsdp_sharding_strategy", strategy.name_in_file()),
                "write `HYBRID_SHARD` or `HYBRID_SHARD_ZERO2` there",
            );
            self.problems.extend(problem);
        }
        // Groups alone are held against the number that is started, which flags may change.
        if self.config.fsdp.shard.is_some() {
            self.problems.extend(self.config.mesh_problem());
        }
    }

    /// Keys that only one wrapping policy reads are noted under the others.
    fn settle_wrapping(&mut self) {
        let policy = self.config.fsdp.auto_wrap_policy;
        let named = self.config.fsdp.transformer_layer_cls_to_wrap.join(",");
        let min = self.config.fsdp.min_num_params;
        let transformer = policy.is_none_or(|policy| policy == AutoWrapPolicy::TransformerBased);
        if !transformer && !named.is_empty() {
            self.idle("fsdp_transformer_layer_cls_to_wrap", named, &["TRANSFORMER_BASED_WRAP"]);
        }
        if let Some(min) = min.filter(|_| policy != Some(AutoWrapPolicy::SizeBased)) {
            self.idle("fsdp_min_num_params", min.to_string(), &["SIZE_BASED_WRAP"]);
        }
        if policy == Some(AutoWrapPolicy::SizeBased) && min.is_none() {
            self.config.fsdp.min_num_params = Some(DEFAULT_MIN_NUM_PARAMS);
        }
    }

    fn idle(&mut self, key: &str, value: String, policies: &[&str]) {
        if let Some(line) = self.config.source.line(key) {
            let reason =
                format!("`fsdp_auto_wrap_policy` is not {}", list(policies.iter().copied()));
            self.notes.push(Note { line, key: key.into(), value, reason, off: false });
        }
    }
}
