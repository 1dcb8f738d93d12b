#!/usr/bin/env python3
"""Prints the kernels of one training step from a file of `kernel_times.c`.

    kernel_times.py TRACE [--marker adam] [--step -2] [--top 40]

A step ends with the last kernel of the optimizer, whose name contains the marker.
"""

from __future__ import annotations

import argparse
import collections
import json
from pathlib import Path

# Nanoseconds between two groups of the optimizer's kernels.
GAP = 5_000_000


def records(path: Path) -> list[tuple[int, int, int, str]]:
    found = []
    for line in path.read_text(errors="replace").splitlines():
        parts = line.split("\t", 3)
        if len(parts) == 4:
            found.append((int(parts[0]), int(parts[1]), int(parts[2]), parts[3]))
    return sorted(found)


def ends(kernels: list[tuple[int, int, int, str]], marker: str) -> list[int]:
    """The times at which the groups of marked kernels end."""
    marked = [start + time for start, time, _, name in kernels if marker in name.lower()]
    last = [end for end, after in zip(marked, marked[1:] + [1 << 62]) if after - end > GAP]
    return last


def busy(kernels: list[tuple[int, int, int, str]]) -> int:
    """Nanoseconds in which at least one kernel runs."""
    total, until = 0, 0
    for start, time, *_ in kernels:
        end = start + time
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--marker", default="adam")
    parser.add_argument("--step", type=int, default=-2, help="which step, counted from the end [-2]")
    parser.add_argument("--top", type=int, default=40)
    args = parser.parse_args()
    kernels = records(args.trace)
    steps = ends(kernels, args.marker)
    if len(steps) < 3:
        print(json.dumps({"kernels": len(kernels), "steps": len(steps), "error": "fewer than three steps"}))
        begin, end = 0, 1 << 62
    else:
        begin, end = steps[args.step - 1], steps[args.step]
    inside = [kernel for kernel in kernels if begin <= kernel[0] < end]
    summary = {
        "steps": len(steps),
        "step_ms": round((end - begin) / 1e6, 3) if len(steps) >= 3 else None,
        "busy_ms": round(busy(inside) / 1e6, 3),
        "launches": len(inside),
    }
    print(json.dumps(summary))
    by_name: dict[str, list[int]] = collections.defaultdict(list)
    for _, time, stream, name in inside:
        by_name[name].append(time)
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[: args.top]:
        print(f"{sum(times) / 1e6:9.3f} ms {len(times):6} x {sum(times) / len(times) / 1e3:8.1f} us  {name[:140]}")


if __name__ == "__main__":
    main()
