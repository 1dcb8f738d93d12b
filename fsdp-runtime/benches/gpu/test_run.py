"""Tests of `run` with shell scripts in place of the programs, of PyTorch's side and of `nvidia-smi`.

    python3 -B -m unittest discover -s fsdp-runtime/benches/gpu
"""

import json
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

sys.dont_write_bytecode = True

import correctness
import harness
import llama
import speed
from stand_ins import HERE, LOSSES, StandIns

TESTS = """case "$*" in
*--list*) printf 'kernels::a::one: test\\nkernels::a::two: test\\nkernels::b::three: test\\n' ;;
*a::*) printf 'test kernels::a::one ... ok\\ntest kernels::a::two ... ok\\n' ;;
*) printf 'test kernels::b::three ... ok\\n' ;;
esac"""


def agreeing(plain: str, synced: str) -> str:
    rounds = lambda name, losses: f"""echo '{{"variant": "{name}", "step": 0.02, "host": 0.008, "losses": {losses}}}'"""
    return rounds("FULL_SHARD", plain) + "\n" + rounds("FULL_SHARD synced", synced)


class Programs(StandIns):
    def test_equal_losses_pass(self) -> None:
        self.program("bin/bert_finetune", LOSSES)
        code, record = self.run_step("losses", "--device", "flex")
        self.assertEqual((code, record["passed"], len(record["commands"])), (0, True, 5))
        code, record = self.run_step("losses")
        self.assertEqual((code, record["passed"]), (0, True))
        self.assertEqual(record["gpus"][0]["name"], "Some GPU")
        names = [command["command"] for command in record["commands"]]
        self.assertEqual(names[:2], ["first step", "flex"])
        self.assertEqual(names[-1], "nccl, world 1")
        # Each of seven runs ends, and each of the last five is compared with another one.
        self.assertEqual(len(record["checks"]), 7 + 5)

    def test_other_losses_fail(self) -> None:
        other = """case "$*" in *nccl*) echo '{"losses": [0.7, 0.6, 0.51]}' ;; *) %s ;; esac"""
        self.program("bin/bert_finetune", other % LOSSES)
        code, record = self.run_step("losses")
        self.assertEqual((code, self.failed(record)), (1, ["nccl, world 1, to local"]))

    def test_a_failure_keeps_the_output_and_the_other_results(self) -> None:
        self.program("bin/bert_finetune", f'case "$*" in *size\\ 2*) echo broken >&2; exit 3 ;; *) {LOSSES} ;; esac')
        code, record = self.run_step("losses", "--device", "flex")
        self.assertEqual((code, record["passed"]), (1, False))
        broken = record["commands"][3]
        self.assertEqual((broken["exit_code"], broken["stderr_tail"]), (3, "broken\n"))
        self.assertEqual(record["commands"][4]["result"]["losses"], [0.7, 0.6, 0.5])

    def test_a_program_that_hangs_is_killed_with_its_children(self) -> None:
        marker = self.folder / "pid"
        self.program("bin/step", f"trap '' TERM\nsleep 300 & echo $! >{marker}\necho started\nwait; wait")
        begin = time.monotonic()
        code, record = self.run_step("agreement", "--device", "flex", "--deadline", "12")
        self.assertLess(time.monotonic() - begin, 13)
        self.assertEqual((code, record["passed"]), (1, False))
        first, second, _ = record["commands"]
        self.assertTrue(first["timed_out"])
        self.assertEqual(first["stdout_tail"], "started\n")
        self.assertIn("not_run", second)
        status = Path(f"/proc/{marker.read_text().strip()}/stat")
        self.assertTrue(not status.exists() or ") Z " in status.read_text())

    def test_products_must_agree_without_a_warning(self) -> None:
        self.program("bin/bert_finetune", LOSSES)
        self.assertEqual(self.run_step("products")[0], 0)
        self.program("bin/bert_finetune", f"echo \"products of matrices are CubeCL's\" >&2; {LOSSES}")
        code, record = self.run_step("products")
        self.assertEqual((code, len(self.failed(record))), (1, 3))
        other = """case "$FSDP_CUBLASLT" in 0) echo '{"losses": [0.7, 0.6, 0.6]}' ;; *) %s ;; esac"""
        self.program("bin/bert_finetune", other % LOSSES)
        code, record = self.run_step("products", "--device", "flex")
        self.assertEqual((code, self.failed(record)), (1, ["CubeCL, to cuBLASLt"]))

    def test_the_start_is_timed(self) -> None:
        self.program("bin/bert_finetune", f"test -f cubecl.toml || exit 1; {LOSSES}")
        code, record = self.run_step("start")
        self.assertEqual((code, record["results"]["last"]["losses"]), (0, [0.7, 0.6, 0.5]))
        self.program("bin/bert_finetune", "exit 1")
        self.assertEqual(self.run_step("start")[0], 1)

    def test_the_kernels_of_a_step_are_those_between_two_optimizer_steps(self) -> None:
        trace = self.folder / "trace.tsv"
        lines = []
        for update in range(4):
            at = update * 100_000_000
            lines += [f"{at + 10_000_000}\t2000000\t7\tgemm", f"{at + 11_000_000}\t3000000\t8\tgemm"]
            lines += [f"{at + 50_000_000}\t1000000\t7\tAdamKernel"]
        trace.write_text("\n".join(lines))
        argv = [sys.executable, str(HERE / "kernel_times.py"), str(trace)]
        printed = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
        # The products overlap: they take 4 ms of the device, and AdamW 1 ms.
        step = {"steps": 4, "step_ms": 100.0, "busy_ms": 5.0, "launches": 3}
        self.assertEqual(json.loads(printed[0]), step)
        self.assertEqual([line.split()[0] for line in printed[1:]], ["5.000", "1.000"])

    def test_agreement_finds_a_race(self) -> None:
        same = "[[0.7, 0.6], [0.7, 0.6]]"
        self.program("bin/step", agreeing(same, same))
        code, record = self.run_step("agreement")
        self.assertEqual((code, record["passed"]), (0, True))
        self.assertEqual(record["results"]["final_losses"]["blocking"], 0.6)
        self.program("bin/step", agreeing("[[0.7, 0.6], [0.7, 0.601]]", same))
        code, record = self.run_step("agreement")
        self.assertEqual(self.failed(record), [f"{run}: plain, to synced" for run in ("first", "second", "blocking")])
        self.program("bin/step", agreeing("[[0.7, null], [0.7, null]]", same))
        code, record = self.run_step("agreement")
        self.assertEqual((code, record["passed"]), (1, False))

    def test_kernel_tests_are_counted(self) -> None:
        self.program("bin/kernels", TESTS)
        code, record = self.run_step("kernels")
        self.assertEqual((code, record["passed"], len(record["checks"])), (0, True, 3))
        self.program("bin/kernels", TESTS.replace("two ... ok", "two ... FAILED") + "; exit 101")
        code, record = self.run_step("kernels")
        self.assertEqual(record["checks"][1]["failed"], ["kernels::a::two"])
        crash = TESTS.replace("two ... ok\\n'", "two ... '; kill -9 $$")
        self.program("bin/kernels", crash)
        code, record = self.run_step("kernels")
        self.assertEqual(record["commands"][1]["exit_code"], -9)
        self.assertEqual(record["checks"][1]["unfinished"], ["kernels::a::two"])
        self.assertTrue(record["checks"][2]["ok"], "the next module runs")

    def test_conformance_must_have_run_on_all_gpus(self) -> None:
        result = "echo 'skipped: this machine has a GPU' >&2; echo 'test result: ok. 9 passed'"
        self.program("bin/unit_tests", f"echo 'conformed: 1 of 1 GPUs'; {result}")
        self.assertEqual(self.run_step("conformance")[0], 0)
        self.program("bin/unit_tests", f"echo 'skipped: NCCL was not found' >&2; {result}")
        code, record = self.run_step("conformance")
        self.assertEqual(self.failed(record), ["on GPUs", "none is skipped"])

    def test_both_sides_are_measured_in_turns(self) -> None:
        self.program("bin/step", "sleep 0.5; " + agreeing("[]", "[]"))
        (self.folder / "torch_bert.py").write_text("print('torch fsdp rank 0/1: forward 0.1 step 0.01000 s, max')")
        code, record = self.run_step("bert-f32")
        comparison = record["results"]["comparison"]
        self.assertEqual((code, comparison["ours_to_torch"]), (0, 2.0))
        self.assertEqual(comparison["ours"]["rounds"], [0.02] * 3)
        self.assertEqual(comparison["ours"]["gpu_peak_mib"], 700)
        self.assertEqual([run["command"] for run in record["commands"]], ["ours", "torch"] * 3)
        self.assertEqual(record["commands"][1]["env"]["TF32"], "1")
        share = next(check for check in record["checks"] if check["check"] == "the host issues a step in time")
        self.assertEqual((share["ok"], share["found"]), (True, 0.4))
        # A side that fails is not run again.
        (self.folder / "torch_bert.py").write_text("raise SystemExit('no torch')")
        code, record = self.run_step("bert-f32")
        self.assertEqual((code, self.failed(record)), (1, ["torch is measured"]))
        self.assertEqual([run["command"] for run in record["commands"]], ["ours", "torch", "ours", "ours"])

    def test_attention_is_compared_shape_by_shape(self) -> None:
        line = lambda length, causal, both: json.dumps({"length": length, "causal": causal, "both": both})
        shapes = [(length, causal) for length in speed.ATTENTION_LENGTHS for causal in (False, True)]
        times = lambda seconds: "\n".join(line(*shape, seconds * (at + 1)) for at, shape in enumerate(shapes))
        self.program("bin/attention", f"cat <<'END'\n{times(0.02)}\nEND")
        (self.folder / "torch_attention.py").write_text(f"print({times(0.01)!r})")
        code, record = self.run_step("attention-bf16")
        comparison = record["results"]["comparison"]
        self.assertEqual(code, 0)
        self.assertAlmostEqual(comparison["ours_to_torch"], 2.0)
        self.assertAlmostEqual(comparison["ours"]["median"], 0.02 * 21)
        self.assertEqual(comparison["shapes"]["torch"]["4096, causal"], 0.06)
        self.assertAlmostEqual(comparison["ours_to_torch_by_shape"]["1024"], 2.0)
        self.assertIn("bf16", record["commands"][0]["argv"])
        self.assertEqual(record["commands"][1]["env"]["DTYPE"], "bf16")
        self.assertEqual(record["commands"][-1]["env"]["FSDP_ATTENTION_KERNEL"], "0")
        self.assertAlmostEqual(comparison["scores_in_memory"]["2048"], 0.06)
        # A side that has not measured all shapes has no measure.
        self.program("bin/attention", f"cat <<'END'\n{line(1024, False, 0.1)}\nEND\nexit 1")
        code, record = self.run_step("attention-f32")
        self.assertEqual((code, self.failed(record)), (1, ["ours is measured"]))
        self.assertEqual(record["commands"][0]["result"], {"1024": 0.1})

    def test_decoding_must_be_measured(self) -> None:
        row = lambda kernel, megabytes: json.dumps(
            {"megabytes": megabytes, "kernel": kernel, "gb_per_s": 900.5, "copy_gb_per_s": 1000.0}
        )
        rows = [row(name, size) for size in (1, 16, 64) for name in ("cast f32 -> f32", *correctness.DECODES)]
        self.program("bin/kernel_rates", "cat <<'END'\n" + "\n".join(rows) + "\nEND")
        code, record = self.run_step("kernel-rates", "--device", "flex")
        self.assertEqual((code, len(record["results"]["rates"])), (0, 15))
        self.assertEqual(record["checks"][2]["gb_per_s"], {"1 MB": 900.5, "16 MB": 900.5, "64 MB": 900.5})
        self.program("bin/kernel_rates", "cat <<'END'\n" + "\n".join(rows[:-1]) + "\nEND")
        code, record = self.run_step("kernel-rates")
        self.assertEqual((code, self.failed(record)), (1, [f"{correctness.DECODES[-1]} is measured"]))

    def test_one_side_has_a_file_of_its_own(self) -> None:
        self.program("bin/step", agreeing("[]", "[]"))
        running = self.start("bert-bf16", "--side", "ours")
        running.communicate(timeout=60)
        self.assertEqual(running.returncode, 0)
        self.assertIn("--bf16", self.record("bert-bf16-ours")["commands"][0]["argv"])

    def test_a_killed_pretraining_keeps_its_rate(self) -> None:
        lines = "\n".join(f"""echo '{{"num_updates": "1", "wps": "{rate}"}}'""" for rate in (1, 2, 300, 500, 400))
        self.program("bin/gpt_pretrain", lines + "\nsleep 300")
        update = "print('{\"update\": 1, \"seconds\": 2.048}')\n"
        (self.folder / "torch_gpt.py").write_text(update * 4)
        code, record = self.run_step("gpt-1.3b", "--deadline", "14")
        comparison = record["results"]["comparison"]
        self.assertEqual((comparison["ours"]["median"], comparison["torch"]["median"]), (400.0, 2000.0))
        self.assertEqual(comparison["rows"], 2)
        self.assertEqual(code, 0)

    def test_attention_that_fails_its_check_fails_the_step(self) -> None:
        warning = f"echo 'attention of BF16 {speed.FAILED_CHECK}: ..' >&2"
        self.program("bin/gpt_pretrain", f"""for i in 1 2 3; do echo '{{"wps": "7"}}'; done; {warning}""")
        (self.folder / "torch_gpt.py").write_text("print('{\"update\": 1, \"seconds\": 1}\\n' * 3)")
        code, record = self.run_step("gpt-1.3b")
        self.assertEqual((code, set(self.failed(record))), (1, {"attention passes its check"}))

    def test_a_batch_that_does_not_fit_is_halved(self) -> None:
        script = """case "$*" in *size\\ 2*) exit 1 ;; *) for i in 1 2 3; do echo '{"wps": "7"}'; done ;; esac"""
        self.program("bin/gpt_pretrain", script)
        (self.folder / "torch_gpt.py").write_text("print('{\"update\": 1, \"seconds\": 1}\\n' * 3)")
        code, record = self.run_step("gpt-1.3b")
        self.assertEqual((code, record["results"]["comparison"]["rows"]), (0, 1))

    def test_a_llama_is_measured_without_its_warm_up(self) -> None:
        run = {"num_params": speed.LLAMA.parameters(), "losses": [10.8, 10.7], "peak_bytes": 5}
        of_steps = lambda *seconds: json.dumps(run | {"step_seconds": seconds})
        self.program("bin/llm_finetune", f"echo '{of_steps(0.3, 0.2, 0.004, 0.002, 0.004)}'; sleep 0.6")
        torch = of_steps(0.1, 0.1, 0.001, 0.001, 0.002)
        (self.folder / "torch_llama.py").write_text(f"print('{{\"step\": 1}}\\n{torch}')")
        code, record = self.run_step("llama-1.1b")
        comparison = record["results"]["comparison"]
        self.assertEqual((code, comparison["ours"]["rounds"]), (0, [4096 / 0.004] * 3))
        self.assertEqual((comparison["torch"]["median"], comparison["ours_to_torch"]), (4096 / 0.001, 0.25))
        self.assertEqual(comparison["ours"]["gpu_peak_mib"], 700)
        # The command without the steps after the first.
        first = comparison["seconds_to_first_step"]["ours"]
        self.assertAlmostEqual(first[0], record["commands"][0]["seconds"] - 0.21, places=2)
        self.assertGreater(first[0], 0.3)
        ours, torch = (command["argv"] for command in record["commands"][:2])
        self.assertTrue({"--bf16", "--steps", "12", "--batch-size", "2", "2048"} <= set(ours), ours)
        self.assertTrue({"bf16", "--hidden", "--rows", "5632", "32000"} <= set(torch), torch)
        self.assertNotIn("--tied", torch)

    def test_another_llama_fails(self) -> None:
        run = {"num_params": speed.LLAMA.parameters(), "losses": [10.8], "step_seconds": [1, 1, 1]}
        self.program("bin/llm_finetune", f"echo '{json.dumps(run | {'losses': [9.0]})}'")
        (self.folder / "torch_llama.py").write_text(f"print('{json.dumps(run | {'num_params': 7})}')")
        code, record = self.run_step("llama-1.1b")
        self.assertEqual((code, self.failed(record)), (1, ["ours: first loss", "torch: parameters"]))
        # A side that fails has no measure, whatever it has printed.
        self.program("bin/llm_finetune", f"echo '{json.dumps(run)}'; exit 1")
        code, _ = self.run_step("llama-1.1b", "--side", "ours")
        self.assertEqual((code, self.failed(self.record("llama-1.1b-ours"))), (1, ["ours is measured"]))

    def test_a_signal_keeps_the_file(self) -> None:
        self.program("bin/bert_finetune", f'case "$*" in *size\\ 2*) sleep 300 ;; *) {LOSSES} ;; esac')
        running = self.start("losses", "--device", "flex")
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            time.sleep(0.1)
            file = self.folder / "out/losses.json"
            if file.exists() and len(self.record("losses")["commands"]) == 3:
                break
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=30)
        record = self.record("losses")
        self.assertEqual((running.returncode, record["passed"]), (128 + signal.SIGTERM, None))
        self.assertEqual(record["commands"][0]["result"]["losses"], [0.7, 0.6, 0.5])

    def test_without_a_gpu_there_is_one_line(self) -> None:
        self.program("tools/nvidia-smi", "exit 9")
        running = self.start("kernels")
        out, err = running.communicate(timeout=60)
        self.assertEqual((running.returncode, out, err.count("\n")), (1, "", 1))
        self.assertIn("no GPU", err)


class Parts(unittest.TestCase):
    def test_distances(self) -> None:
        self.assertAlmostEqual(correctness.distance([1.0, 2.0], [1.0, 2.2]), 0.1)
        nan = float("nan")
        for one, other in (([], []), ([1.0], [1.0, 2.0]), ([1.0], [None]), ([nan], [1.0]), ([1.0], [nan])):
            self.assertEqual(correctness.distance(one, other), float("inf"), (one, other))
        self.assertEqual(harness.without_infinities({"a": [float("inf"), 1.5]}), {"a": ["inf", 1.5]})

    def test_a_llama_has_the_folder_that_llm_finetune_reads(self) -> None:
        # The numbers that SmolLM2-135M and TinyLlama-1.1B have.
        shapes = (llama.LLAMA_135M, llama.LLAMA_1_1B)
        self.assertEqual([shape.parameters() for shape in shapes], [134_515_008, 1_100_048_384])
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "model"
            flags = llama.our_flags(folder, llama.LLAMA_135M, 512, 2, 3)
            self.assertEqual(flags[:2], ["--model", str(folder)])
            read = lambda file: json.loads((folder / file).read_text())
            config, words = read("config.json"), read("tokenizer.json")["model"]["vocab"]
            rows = [json.loads(line)["text"].split() for line in (folder / "rows.jsonl").read_text().splitlines()]
        self.assertEqual((config["num_key_value_heads"], config["tie_word_embeddings"]), (3, True))
        self.assertEqual((len(words), words["49151"]), (49_152, 49_151))
        self.assertEqual([len(row) for row in rows], [512] * 6)
        self.assertTrue(all(word in words for row in rows for word in row))
        self.assertIn("--tied", llama.torch_flags(llama.LLAMA_135M, 512, 2, 3))

    def test_the_offloaded_size_fits_the_host(self) -> None:
        for gib, arch in ((120, "6.7B"), (64, "2.7B"), (32, None)):
            with tempfile.TemporaryDirectory() as folder, mock.patch("builtins.print"):
                path = Path(folder)
                context = harness.Context(path, path / "bin", path / "out", path)
                step = harness.StepRun("gpt-6.7b", context, "gpt-6.7b")
                with mock.patch("speed.available_bytes", return_value=gib << 30):
                    speed.gpt_offloaded(step)
                argv = [word for command in step.record["commands"] for word in command["argv"]]
                self.assertEqual(arch in argv if arch else argv == [], True, (gib, argv))


if __name__ == "__main__":
    unittest.main()
