"""Run a trial as a Slurm job does, but without Slurm: the node's script, and the program that watches its log."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.bundle.nodes import Nodes
from topoplan.bundle.trials_job import QueuedTrial, trial_draft, trials_files
from topoplan.bundle.write import write_bundle
from topoplan.planner.plan import Plan
from topoplan.specs.spec import Spec

STEPS = 6
OUTPUT = "saves/trials/x"


def run_trial(
    launched: Nodes, bundle: Path, spec: Spec, plan: Plan, keys: Mapping[str, Any], env: Mapping[str, str]
) -> tuple[str, Path]:
    """Run a trial, and return its output and its output directory; `keys` override those of train.yaml."""
    draft = trial_draft(spec, plan, STEPS, OUTPUT, made_up=True)
    bundles, own = trials_files([QueuedTrial(draft=draft, steps=STEPS, at_most_s=200, quiet_s=100)], "")
    write_bundle(bundles[plan.id], bundle)
    train, watch, ended = bundle / "train.yaml", bundle.parent / "watch.py", bundle.parent / "ended"
    train.write_text(yaml.safe_dump(yaml.safe_load(train.read_text(encoding="utf-8")) | dict(keys)), encoding="utf-8")
    watch.write_text(own["watch.py"])
    started = launched.start(bundle / "node-00.sh", env=env)
    words = map(str, (started.output, ended, STEPS, 200, 100, started.process.pid))
    with subprocess.Popen([sys.executable, str(watch), *words]) as watcher:
        assert started.wait() != 0, started.text[-4000:]
        watcher.kill()
    assert ended.exists(), started.text[-4000:]
    assert ended.read_text() == "steps\n"
    assert not started.left()
    output = Path(spec.cluster.hosts[0].workdir or "" if spec.cluster.hosts else bundle, OUTPUT)
    assert not [
        path for path in output.rglob("*") if path.name.startswith("checkpoint") or path.suffix == ".safetensors"
    ]
    return started.text, output
