"""Shell scripts in place of the programs, of PyTorch's side and of `nvidia-smi`, for the tests of `run`."""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
SMI = """case "$*" in
*-lms*) echo 100; echo 700; exec sleep 60 ;;
*) echo "Some GPU, 1.2, 81559 MiB, 9.0" ;;
esac"""
LOSSES = """echo '{"losses": [0.7, 0.6, 0.5]}'"""


class StandIns(unittest.TestCase):
    """Runs steps in a folder with a script for each program."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.program("tools/nvidia-smi", SMI)
        for name in ("bert_finetune", "gpt_pretrain", "step", "kernels", "unit_tests", "attention", "kernel_rates"):
            self.program(f"bin/{name}", "true")
        self.program("bin/llm_finetune", "true")

    def program(self, name: str, script: str) -> None:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        argv = [sys.executable, str(HERE / "run"), *arguments]
        argv += ["--pack", str(self.folder), "--out", str(self.folder / "out")]
        env = os.environ | {"PATH": f"{self.folder}/tools:{os.environ['PATH']}"}
        return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run_step(self, step: str, *arguments: str) -> "tuple[int, dict]":
        """Runs a step. Returns its exit code and its JSON file."""
        running = self.start(step, *arguments)
        running.communicate(timeout=60)
        return running.returncode, self.record(step)

    def record(self, name: str) -> dict:
        return json.loads((self.folder / f"out/{name}.json").read_text())

    def failed(self, record: dict) -> "list[str]":
        return [check["check"] for check in record["checks"] if not check["ok"]]
