"""What a search costs: CPU time and peak memory of `topoplan rank`, layouts a CPU second, and growth with the cluster.

    make bench                            or: python tests/bench/bench.py [--repeat N] [--check]

CPU seconds differ between machines, so each is also given as a multiple of a bare `python -c pass`.
With --check the exit code is 1 when a limit is broken.
"""

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
NODES = (1, 4, 16, 64, 256, 1024, 2048)

HUGE = """
name: h100-2048x8
nodes: 2048
gpus_per_node: 8
gpu: h100-sxm-80gb
model: deepseek-ai/DeepSeek-V3
job: {seq_len: 4096, global_batch_size: 16384}
"""
GROWING = """
name: h100-growing
nodes: 1
gpus_per_node: 8
gpu: h100-sxm-80gb
model: Qwen/Qwen3-30B-A3B
job: {seq_len: 4096, global_batch_size: 64}
"""

IN_PROCESS = """
import gc, json, sys, time
import topoplan, topoplan.planner.search
spec = topoplan.load_spec(sys.argv[1])
gc.disable()
started = time.process_time()
counts = topoplan.rank(spec).counts
print(json.dumps([time.process_time() - started, counts.candidates]))
"""
"""The search alone: what is read and imported before it is not timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One search and what it may take."""

    name: str
    spec: Path
    limit_s: float
    limit_bytes: float = float("inf")
    runs: int = 5


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


def search_of(spec: Path, runs: int) -> tuple[float, int]:
    """(CPU seconds, layouts) of the search alone, the quickest of some runs."""
    usages = [run([sys.executable, "-c", IN_PROCESS, str(spec)]) for _ in range(runs)]
    seconds, layouts = min(json.loads(usage.output) for usage in usages)
    return seconds, layouts


def print_cases(cases: list[Case], bare_s: float, repeat: int | None) -> int:
    """A line for each case; returns how many limits are broken."""
    heads = f"{'CPU s':>7} {'limit':>6} {'x bare':>7} {'peak MB':>8} {'limit':>6} {'layouts':>9} {'search s':>9}"
    print(f"{'topoplan rank':22} {heads} {'per s':>8}")
    broken = 0
    for case in cases:
        runs = repeat or case.runs
        usage = best([sys.executable, "-m", "topoplan", "rank", str(case.spec), "--json", "--no-cache"], runs)
        if usage.status != 0:
            print(f"{case.name:22} failed with exit code {usage.status}")
            broken += 1
            continue
        search_s, layouts = search_of(case.spec, runs)
        limit_mb = "-" if case.limit_bytes == float("inf") else f"{case.limit_bytes / MEGABYTE:.0f}"
        over = usage.cpu_s > case.limit_s or usage.peak_bytes > case.limit_bytes
        broken += over
        print(
            f"{case.name:22} {usage.cpu_s:7.2f} {case.limit_s:6.1f} {usage.cpu_s / bare_s:7.0f}"
            f" {usage.peak_bytes / MEGABYTE:8.0f} {limit_mb:>6} {layouts:9,} {search_s:9.2f} {layouts / search_s:8,.0f}"
            + ("  OVER" if over else "")
        )
    return broken


SECOND = (
    ["rank"],
    ["explain"],
    ["timeline"],
    ["topology", "--plan", "1"],
    ["generate", "--force", "-o", "bundle"],
    ["what-if", "--set", "nodes=128"],
)
SECOND_LIMIT_S = 0.6


def print_second(spec: Path, folder: str, repeat: int | None) -> int:
    """What verbs cost after the `rank` of the same spec; returns how many are over the limit."""
    os.environ["XDG_CACHE_HOME"] = folder
    print(f"\n{f'after rank {spec.stem}':42} {'CPU s':>7} {'limit':>6}")
    run([sys.executable, "-m", "topoplan", "rank", str(spec)])
    broken = 0
    for verb, *more in SECOND:
        target = [str(Path(folder, word)) if word == "bundle" else word for word in more]
        usage = best([sys.executable, "-m", "topoplan", verb, str(spec), *target], repeat or 5)
        is_over = usage.status != 0 or usage.cpu_s > SECOND_LIMIT_S
        broken += is_over
        print(f"{verb:42} {usage.cpu_s:7.2f} {SECOND_LIMIT_S:6.1f}{'  OVER' if is_over else ''}")
    return broken


def print_growth(spec: Path) -> None:
    """What the same job costs to search on ever more nodes, its batch growing with them."""
    print(f"\n{'Qwen3-30B-A3B on nodes':26} {'CPU s':>7} {'layouts':>9} {'x one node':>11}")
    first = 0.0
    for nodes in NODES:
        sets = [f"nodes={nodes}", f"global_batch_size={64 * nodes}"]
        command = [sys.executable, "-m", "topoplan", "rank", str(spec), "--json", "--no-cache"]
        usage = best([*command, *(word for each in sets for word in ("--set", each))], 1)
        first = first or usage.cpu_s
        layouts = json.loads(usage.output)["counts"]["candidates"]
        print(f"{nodes:26} {usage.cpu_s:7.2f} {layouts:9,} {usage.cpu_s / first:11.1f}")


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeat", type=int, metavar="N", help="runs of each case; the quickest counts")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a limit is broken")
    options = parser.parse_args()

    bare = best([sys.executable, "-c", "pass"], 10)
    print(f"python -c pass: {bare.cpu_s:.3f} s of CPU, {bare.peak_bytes / MEGABYTE:.0f} MB")
    with tempfile.TemporaryDirectory() as folder:
        huge, growing = Path(folder, "huge.yaml"), Path(folder, "growing.yaml")
        huge.write_text(HUGE, encoding="utf-8")
        growing.write_text(GROWING, encoding="utf-8")
        deepseek = SPECS / "b200-128x8-deepseek-v3.yaml"
        broken = print_cases(
            [
                Case(name="h100-4x8", spec=SPECS / "h100-4x8.yaml", limit_s=0.6),
                Case(name="DeepSeek-V3 on 128x8", spec=deepseek, limit_s=20.0, limit_bytes=500 * MEGABYTE, runs=1),
                Case(name="DeepSeek-V3 on 2048x8", spec=huge, limit_s=10.0, limit_bytes=1000 * MEGABYTE, runs=1),
            ],
            bare.cpu_s,
            options.repeat,
        )
        broken += print_second(deepseek, folder, options.repeat)
        print_growth(growing)
    return 1 if broken and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
