"""Commands with a time limit, and the JSON file of a step.

Each command runs in a process group of its own, which is killed when its time is over and after its end. Its
output goes to files, so that no pipe can fill up, and what it printed before it was killed is kept. The JSON
file is written anew after each command and each check.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

# Characters of a failed command's output that the JSON file keeps.
TAIL = 4000
# Seconds between two looks at a command, and between the two signals that end a process group.
POLL = 0.05
GRACE = 3.0
# Seconds of a step that commands may not use: those that end them and write the file.
RESERVE = 10.0
NVIDIA_SMI_LIMIT = 20


@dataclass
class Context:
    """Where the programs are, and what `run` was asked for."""

    pack: Path
    programs: Path
    out: Path
    scratch: Path
    device: str = "cuda"
    side: str = "both"
    python: str = sys.executable
    deadline: float = 540.0
    dry_run: bool = False
    # Variables for this crate's programs.
    env: dict[str, str] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def program(self, name: str) -> str:
        return str(self.programs / name)


@dataclass
class Outcome:
    """What a command left. The exit code is None if it was not run, or was killed at its limit."""

    exit_code: int | None = None
    timed_out: bool = False
    stdout: str = ""
    stderr: str = ""

    @property
    def ok(self) -> bool:
        return self.exit_code == 0


def json_lines(text: str) -> list[dict[str, Any]]:
    """All lines that are JSON objects. A line that was cut off is left out."""
    found = []
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found


def last_json(text: str) -> dict[str, Any] | None:
    """The last line that is a JSON object."""
    return (json_lines(text) or [None])[-1]


def without_infinities(value: Any) -> Any:
    """The value with text in place of numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: without_infinities(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_infinities(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def gpus() -> list[dict[str, str]]:
    """Name, driver and memory of each GPU. Empty if `nvidia-smi` is missing, fails or hangs."""
    names = ("name", "driver_version", "memory.total", "compute_cap")
    query = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_SMI_LIMIT)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return [dict(zip(names, map(str.strip, line.split(",")))) for line in lines if line.strip()]


def available_bytes() -> int:
    """Host memory that can be allocated without swapping; 0 if it is not known."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


class GpuMemory:
    """Records the most memory in use on GPU 0, in MiB, with `nvidia-smi` in a loop."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile("w+")
        query = ["--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", "100"]
        try:
            self.process: subprocess.Popen[str] | None = subprocess.Popen(
                ["nvidia-smi", *query], stdout=self.file, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            self.process = None

    def stop(self) -> int | None:
        if self.process:
            self.process.kill()
            try:
                self.process.wait(GRACE)
            except subprocess.TimeoutExpired:
                pass
        self.file.seek(0)
        # The last line may be cut off.
        lines = self.file.read().split("\n")[:-1]
        self.file.close()
        return max((int(line) for line in lines if line.strip().isdigit()), default=None)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def end_group(child: subprocess.Popen[bytes], signals: tuple[int, ...] = (signal.SIGTERM, signal.SIGKILL)) -> None:
    """Ends all processes of a command's group, in at most the grace time for each signal."""
    for number in signals:
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            return
        try:
            child.wait(GRACE)
        except subprocess.TimeoutExpired:
            continue


def wait(argv: list[str], env: dict[str, str], limit: float, entry: dict[str, Any]) -> Outcome:
    """Runs a command for at most `limit` seconds. Notes its time, exit code and use of memory in `entry`."""
    begin, before = time.monotonic(), available_bytes()
    least = before
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            child = subprocess.Popen(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        except OSError as error:
            entry |= {"seconds": 0.0, "exit_code": None, "timed_out": False}
            return Outcome(stderr=str(error))
        try:
            while child.poll() is None and time.monotonic() - begin < limit:
                least = min(least, available_bytes())
                time.sleep(POLL)
            timed_out = child.poll() is None
        finally:
            end_group(child)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    exit_code = None if timed_out else child.returncode
    entry |= {"seconds": round(time.monotonic() - begin, 2), "exit_code": exit_code, "timed_out": timed_out}
    # By as much the available memory fell. Page-locked memory counts.
    entry["host_peak_bytes"] = before - least
    return Outcome(exit_code, timed_out, *texts)


class StepRun:
    """One run of a step, and its JSON file."""

    def __init__(self, name: str, context: Context, file_name: str) -> None:
        self.context = context
        self.file = context.out / f"{file_name}.json"
        self.begin = time.monotonic()
        manifest = context.pack / "manifest.json"
        self.record: dict[str, Any] = {
            "step": name,
            "passed": None,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "device": context.device,
            "gpus": [] if context.dry_run else gpus(),
            "programs": context.programs.name,
            "pack": json.loads(manifest.read_text()) if manifest.is_file() else None,
            "seconds": 0.0,
            "checks": [],
            "results": {},
            "commands": [],
        }
        self.save()

    def left(self) -> float:
        """Seconds that commands of this step may still use."""
        return self.context.deadline - RESERVE - (time.monotonic() - self.begin)

    def save(self) -> None:
        if self.context.dry_run:
            return
        self.record["seconds"] = round(time.monotonic() - self.begin, 1)
        self.context.out.mkdir(parents=True, exist_ok=True)
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(without_infinities(self.record), indent=1) + "\n")
        os.replace(new, self.file)

    def result(self, name: str, value: Any) -> None:
        self.record["results"][name] = value
        self.save()

    def check(self, name: str, ok: bool, **found: Any) -> bool:
        """Records a requirement, with what was found and, as a rule, the limit."""
        if not self.context.dry_run:
            self.record["checks"].append({"check": name, "ok": bool(ok)} | found)
            print(f"  {'ok    ' if ok else 'FAILED'} {name}  {found or ''}", flush=True)
        self.save()
        return ok

    def finish(self) -> bool:
        """Sets `passed`: whether all checks are met, or None without any."""
        checks = self.record["checks"]
        self.record["passed"] = all(check["ok"] for check in checks) if checks else None
        self.save()
        return self.record["passed"] is True

    def command(
        self,
        name: str,
        argv: list[str],
        env: dict[str, str] | None = None,
        limit: float | None = None,
        parse: Callable[[Outcome], Any] | None = None,
        watch_gpu: bool = False,
    ) -> Outcome:
        """Runs a command for at most `limit` seconds, and no longer than the step has left.

        The file keeps what `parse` makes of its output, also for a command that failed or was killed.
        """
        extra = env or {}
        if self.context.dry_run:
            print("  " + shlex.join([*(f"{key}={value}" for key, value in extra.items()), *argv]))
            return Outcome()
        entry: dict[str, Any] = {"command": name, "argv": argv, "env": extra}
        self.record["commands"].append(entry)
        limit = min(self.left(), limit or self.left())
        if limit <= 0:
            entry["not_run"] = "the step has no time left"
            self.save()
            return Outcome()
        print(f"  {name} (at most {limit:.0f} s)", flush=True)
        # If this program is killed, the file shows what was running.
        entry["running"] = True
        self.save()
        memory = GpuMemory() if watch_gpu and self.context.on_gpu else None
        try:
            outcome = wait(argv, os.environ | extra, limit, entry)
        finally:
            if memory:
                entry["gpu_peak_mib"] = memory.stop()
            del entry["running"]
            self.save()
        if parse:
            entry["result"] = parse(outcome)
        if not outcome.ok:
            entry["stdout_tail"] = outcome.stdout[-TAIL:]
            entry["stderr_tail"] = outcome.stderr[-TAIL:]
        self.save()
        return outcome
