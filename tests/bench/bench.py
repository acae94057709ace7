"""CPU time and peak memory of `topoplan rank`, the whole process, and how many layouts a CPU second covers.

    make bench                            or: python tests/bench/bench.py [--repeat N] [--check]

CPU seconds differ between machines, so each is also given as a multiple of a bare `python -c pass`.
With --check the exit code is 1 when a limit is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SPECS = ROOT / "cluster_specs"
MEGABYTE = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One search and what it may take."""

    spec: str
    limit_s: float
    limit_bytes: float = float("inf")
    runs: int = 5


CASES = (
    Case(spec="h100-4x8.yaml", limit_s=1.0),
    Case(spec="b200-128x8-deepseek-v3.yaml", limit_s=20.0, limit_bytes=500 * MEGABYTE, runs=1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one process took."""

    cpu_s: float
    peak_bytes: int
    output: bytes
    status: int


def run(command: list[str]) -> Usage:
    """Run a command and read what the kernel booked on exactly this child."""
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(command, cwd=ROOT, stdout=output)
        # wait4 and not getrusage(RUSAGE_CHILDREN): that one keeps the highest peak of all children so far.
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        unit = 1 if sys.platform == "darwin" else 1024
        return Usage(
            cpu_s=usage.ru_utime + usage.ru_stime,
            peak_bytes=usage.ru_maxrss * unit,
            output=output.read(),
            status=child.returncode,
        )


def best(command: list[str], runs: int) -> Usage:
    """The quickest of some runs: what others do on the machine can only add."""
    return min((run(command) for _ in range(runs)), key=lambda usage: usage.cpu_s)


def main() -> int:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeat", type=int, metavar="N", help="runs of each case; the quickest counts")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a limit is broken")
    options = parser.parse_args()

    bare = best([sys.executable, "-c", "pass"], 10)
    print(f"python -c pass: {bare.cpu_s:.3f} s of CPU, {bare.peak_bytes / MEGABYTE:.0f} MB")
    heads = f"{'CPU s':>7} {'limit':>6} {'x bare':>7} {'peak MB':>8} {'limit':>6} {'layouts':>9} {'per CPU s':>10}"
    print(f"{'topoplan rank':30} {heads}")
    broken = 0
    for case in CASES:
        usage = best(
            [sys.executable, "-m", "topoplan", "rank", str(SPECS / case.spec), "--json"], options.repeat or case.runs
        )
        if usage.status != 0:
            print(f"{case.spec:30} failed with exit code {usage.status}")
            broken += 1
            continue
        layouts = json.loads(usage.output)["counts"]["candidates"]
        limit_mb = "-" if case.limit_bytes == float("inf") else f"{case.limit_bytes / MEGABYTE:.0f}"
        over = usage.cpu_s > case.limit_s or usage.peak_bytes > case.limit_bytes
        broken += over
        print(
            f"{case.spec:30} {usage.cpu_s:7.2f} {case.limit_s:6.1f} {usage.cpu_s / bare.cpu_s:7.0f}"
            f" {usage.peak_bytes / MEGABYTE:8.0f} {limit_mb:>6} {layouts:9,} {layouts / usage.cpu_s:10,.0f}"
            + ("  OVER" if over else "")
        )
    return 1 if broken and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
