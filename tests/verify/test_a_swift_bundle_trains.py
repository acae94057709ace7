"""Run bundles of ms-swift as `topoplan generate` writes them, on two processes without GPUs, over Gloo.

DeepSpeed is left out, because on a CPU it first compiles its own kernels. `TRAINER` holds the changed keys.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bundle.nodes import nodes, wait_until
from tests.bundle.samples import HOSTS, JOB, ONE_NODE, QWEN3_8B, make_plan
from tests.verify.swift import need_swift
from tests.verify.test_a_bundle_trains import make_model
from tests.verify.trials import STEPS, run_trial
from topoplan.bundle.bundle import generate
from topoplan.bundle.write import write_bundle
from topoplan.layout.layout import Layout, Recompute
from topoplan.planner.logged import read_log
from topoplan.planner.plan import Plan
from topoplan.run.attempts import resumed_at_step
from topoplan.specs.spec import Spec
from topoplan.trainers.trials import how_many

pytestmark = [
    pytest.mark.verify,
    pytest.mark.skipif(sys.platform != "linux", reason="the scripts are for Linux"),
]

TRAINER = {"use_cpu": True, "ddp_backend": "gloo", "attn_impl": "sdpa", "model_type": "qwen3", "template": "qwen3"}
CASES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp2": {"backend": "fsdp2"},
    "ulysses": {"ulysses": 2, "dp": 1, "gradient_accumulation_steps": 4},
    "lora": {"finetuning": "lora"},
}


def make_run(root: Path, **changes: Any) -> Path:
    """Write a bundle, and return the script of its only node."""
    write_bundle(generate(*spec_and_plan(root, **changes), None, "swift"), root / "b")
    return root / "b" / "node-00.sh"


def spec_and_plan(root: Path, *, finetuning: str = "full", epochs: float = 2.0, **changes: Any) -> tuple[Spec, Plan]:
    """Return a spec and a plan for two processes, with a model and samples below `root`."""
    make_model(root / "tiny model")
    rows = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "one two three"}]
    (root / "samples.jsonl").write_text((json.dumps({"messages": rows}) + "\n") * 20, encoding="utf-8")
    host = replace(HOSTS[0], address="one", workdir=str(root), venv=sys.prefix, socket_interface=None, hcas=())
    cluster = replace(ONE_NODE, gpus_per_node=2, cpu_cores=2, hosts=(host,), env={"HF_HUB_OFFLINE": "1"})
    fields = {"backend": "ddp", "dp": 2, "gradient_accumulation_steps": 2, "recompute": Recompute(granularity="full")}
    layout = Layout.of(**{**fields, **changes})
    job = replace(
        JOB,
        seq_len=128,
        global_batch_size=4,
        dataset="samples.jsonl",
        packing=False,
        samples=20,
        epochs=epochs,
        learning_rate=5e-3,
        finetuning=finetuning,
        trainer={**TRAINER, "model": str(root / "tiny model"), "dataset_num_proc": 1, "output_dir": "saves/run"},
    )
    return Spec(cluster=cluster, model=QWEN3_8B, job=job), make_plan(layout, trainer="swift")


def run(script: Path) -> list[dict[str, Any]]:
    """Run the script, and return the lines of the log that have a loss: one per optimizer step."""
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return steps_of(script)


def steps_of(script: Path) -> list[dict[str, Any]]:
    """Return the lines of the log that have a loss, for a run that may have been resumed."""
    log = script.parents[1] / "saves" / "run" / "logging.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return [line for line in map(json.loads, lines) if "loss" in line]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_processes_train_as_it_was_planned(case: str, tmp_path: Path) -> None:
    need_swift()
    steps = run(make_run(tmp_path, **CASES[case]))
    assert len(steps) == 10, "20 samples, 4 a step, twice"
    assert float(steps[-1]["loss"]) < float(steps[0]["loss"])
    saved = {path.name for path in (tmp_path / "saves" / "run" / "checkpoint-10").iterdir()}
    assert ("adapter_model.safetensors" if case == "lora" else "model.safetensors") in saved


def test_a_run_goes_on_from_its_last_whole_checkpoint(tmp_path: Path) -> None:
    need_swift()
    script = make_run(tmp_path)
    first = run(script)
    checkpoints = sorted((tmp_path / "saves" / "run").glob("checkpoint-*"))
    assert [path.name for path in checkpoints] == ["checkpoint-10", "checkpoint-8"]
    (checkpoints[0] / "trainer_state.json").unlink()  # as if the run had ended while this file was written
    again = run(script)[len(first) :]
    assert [line["global_step/max_steps"] for line in again] == ["9/10", "10/10"]


def test_a_run_that_was_killed_goes_on_after_its_last_whole_checkpoint(tmp_path: Path) -> None:
    need_swift()
    script = make_run(tmp_path, epochs=10.0)
    environment = {"PATH": os.environ["PATH"]}
    with nodes(tmp_path / "nodes") as launched:
        first = launched.start(script, env=environment)
        wait_until("it has saved and goes on", lambda: len(steps_of(script)) > 12, [first])
        first.kill_rank(1)
        known = steps_of(script)
        states = (tmp_path / "saves" / "run").glob("checkpoint-*/trainer_state.json")
        last = max(int(state.parent.name.rpartition("-")[2]) for state in states)
        second = launched.start(script, env=environment)
        assert second.wait() == 0, second.text[-4000:]
        assert (resumed_at_step(first.output), resumed_at_step(second.output)) == (None, last)
    again = steps_of(script)[len(known) :]
    assert [line["global_step/max_steps"] for line in again] == [f"{step}/50" for step in range(last + 1, 51)]
    losses = [line["loss"] for line in known[last:]]
    assert [line["loss"] for line in again[: len(losses)]] == pytest.approx(losses, rel=1e-3)


def test_a_trial_trains_on_made_up_samples_and_is_ended_when_it_has_its_steps(tmp_path: Path) -> None:
    need_swift()
    spec, plan = spec_and_plan(tmp_path)
    spec = replace(
        spec, job=replace(spec.job, trainer={**spec.job.trainer, "save_steps": 2, "split_dataset_ratio": 0.1})
    )
    with nodes(tmp_path / "nodes") as launched:
        env = {"PATH": os.environ["PATH"]}
        _, output = run_trial(launched, tmp_path / "job" / plan.id, spec, plan, {}, env)
    text = (output / "logging.jsonl").read_text()
    assert read_log(text, name="logging.jsonl", trainer="swift").total == 2 * STEPS
    first = json.loads(text.split("\n")[0])
    assert float(first["epoch"]) == pytest.approx(spec.job.global_batch_size / how_many(spec), rel=0.01)
