"""Tests of the step `ranks` with shell scripts in place of the programs.

    python3 -B -m unittest discover -s fsdp-runtime/benches/gpu
"""

import sys
import unittest

sys.dont_write_bytecode = True

from stand_ins import StandIns


def printed(losses: "list[float]") -> str:
    return f"""echo '{{"losses": {losses}}}'"""


# Twenty losses, and the last ten in a run that resumes.
RANKS_LOSSES = f'case "$*" in *--resume*) {printed([0.7] * 10)} ;; *) {printed([0.7] * 20)} ;; esac'


class Ranks(StandIns):
    def ranks_programs(self, peer: str = "rank 1", losses: str = RANKS_LOSSES) -> None:
        """Programs for the step `ranks`. Ranks that train for long end with the failure of `peer`."""
        self.program("bin/unit_tests", 'echo "conformed: rank $RANK of $WORLD_SIZE"')
        endless = f'echo step 20/100000; if [ "$RANK" = 1 ]; then exec sleep 60; fi; sleep 2.5; echo "{peer}"; exit 75'
        self.program("bin/bert_finetune", f'case "$*" in *100000*) {endless} ;; *) {losses} ;; esac')
        self.program("bin/gpt_pretrain", """echo '{"num_updates": "1", "loss": "9.5"}'""")

    def test_ranks_that_share_a_gpu_must_agree(self) -> None:
        self.ranks_programs()
        code, record = self.run_step("ranks")
        self.assertEqual((code, self.failed(record)), (0, []))
        names = [check["check"] for check in record["checks"]]
        self.assertIn("HYBRID_SHARD, 4 ranks, to FULL_SHARD", names)
        self.assertIn("a stopped rank is named", names)
        hybrid = next(run for run in record["commands"] if run["command"] == "HYBRID_SHARD, 4 ranks")
        self.assertEqual(hybrid["env"]["LOCAL_WORLD_SIZE"], "2")
        self.assertEqual(hybrid["exit_codes"], [0] * 4)

    def test_other_bits_on_the_stream_fail(self) -> None:
        other = f'case "$FSDP_NCCL_STREAM" in 0) {printed([0.7] * 19 + [0.7001])} ;; *) {RANKS_LOSSES} ;; esac'
        self.ranks_programs(peer="nobody", losses=other)
        code, record = self.run_step("ranks")
        bits = [f"waits on the host, {world} ranks: equal bits" for world in (2, 4)]
        named = [f"a {name} rank is named" for name in ("killed", "stopped")]
        self.assertEqual((code, self.failed(record)), (1, bits + named))

    def test_other_losses_of_a_strategy_fail(self) -> None:
        other = f'case "$*" in *NO_SHARD*) {printed([0.7] * 19 + [0.7001])} ;; *) {RANKS_LOSSES} ;; esac'
        self.ranks_programs(losses=other)
        code, record = self.run_step("ranks")
        names = [f"NO_SHARD, {world} ranks, to FULL_SHARD" for world in (2, 4)]
        self.assertEqual((code, self.failed(record)), (1, names))
        found = [run["result"]["losses"][-1] for run in record["commands"] if run["command"].startswith("NO_SHARD")]
        self.assertEqual(found, [0.7001] * 2)

    def test_a_run_that_begins_anew_is_not_resumed(self) -> None:
        self.ranks_programs(losses=printed([0.7] * 20))
        code, record = self.run_step("ranks")
        self.assertEqual((code, self.failed(record)), (1, ["resume at 4 ranks, to 2 ranks without a break"]))

    def test_ranks_that_fail_by_themselves_do_not_pass(self) -> None:
        self.ranks_programs()
        self.program("bin/unit_tests", 'echo "conformed: rank $RANK of $WORLD_SIZE"; kill -SEGV $$')
        early = "echo rank 0 and rank 1 use the same GPU; exit 75"
        self.program("bin/bert_finetune", f'case "$*" in *100000*) {early} ;; *) {RANKS_LOSSES} ;; esac')
        code, record = self.run_step("ranks")
        names = [f"conformance, {world} ranks" for world in (2, 4)]
        names += [f"a {name} rank: the ranks train before" for name in ("killed", "stopped")]
        self.assertEqual((code, self.failed(record)), (1, names))

    def test_a_rank_that_does_not_end_is_killed(self) -> None:
        self.ranks_programs()
        hangs = 'if [ "$RANK" = 1 ]; then exec sleep 60; fi; echo "conformed: rank 0 of $WORLD_SIZE"'
        self.program("bin/unit_tests", hangs)
        code, record = self.run_step("ranks", "--deadline", "14")
        self.assertEqual((code, record["commands"][0]["exit_codes"]), (1, [0, None]))
        self.assertIn("conformance, 2 ranks", self.failed(record))


if __name__ == "__main__":
    unittest.main()
