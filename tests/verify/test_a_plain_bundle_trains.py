"""Run bundles for plain data parallel training on two nodes: real torchrun, LLaMA-Factory and PEFT, over Gloo.

No GPU is needed: two keys of train.yaml are changed (`bf16: false`, `use_cpu: true`); the scripts run as they are
written.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.bundle.nodes import Machine, Nodes, nodes, two_machines, wait_until
from tests.bundle.samples import make_layout, make_plan
from tests.verify.llamafactory import need_llamafactory
from tests.verify.test_a_bundle_trains import environment, make_data, make_model, make_spec, steps_in, two_node_spec
from tests.verify.trials import STEPS, run_trial
from topoplan.bundle.bundle import generate
from topoplan.bundle.write import write_bundle
from topoplan.layout.layout import Recompute
from topoplan.run.attempts import resumed_at_step
from topoplan.specs.load import load_spec
from topoplan.trainers.trials import how_many

pytestmark = [
    pytest.mark.verify,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_llamafactory()
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_model(folder)
    return folder


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Nodes]:
    with nodes(tmp_path / "run") as running:
        (running.folder / "reports").mkdir()
        yield running


@pytest.fixture
def pair() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as machines:
        yield machines


@pytest.mark.parametrize(
    ("job", "recompute", "saved"),
    [
        ({"finetuning": "lora", "lora_rank": 4}, Recompute(granularity="full"), "adapter_model.safetensors"),
        ({}, Recompute(), "model.safetensors"),
    ],
    ids=["lora", "full"],
)
def test_two_nodes_train_one_model(
    job: dict[str, Any],
    recompute: Recompute,
    saved: str,
    launched: Nodes,
    pair: tuple[Machine, Machine],
    model: Path,
    tmp_path: Path,
) -> None:
    spec = load_spec(two_node_spec(tmp_path, model, pair, pin={}, **job))
    layout = make_layout(spec.cluster, backend="ddp", gradient_accumulation_steps=1, recompute=recompute)
    bundle = tmp_path / "bundle"
    write_bundle(generate(spec, make_plan(layout)), bundle)
    train = bundle / "train.yaml"
    values = yaml.safe_load(train.read_text(encoding="utf-8"))
    train.write_text(yaml.safe_dump(values | {"bf16": False, "use_cpu": True}), encoding="utf-8")

    env = environment(launched)
    started = [launched.start(bundle / f"node-0{node}.sh", machine=pair[node], env=env) for node in range(2)]
    assert [(one.wait(), one.text[-4000:]) for one in started if one.wait()] == []
    output = tmp_path / "node 0" / values["output_dir"]
    steps = steps_in(output / "trainer_log.jsonl")
    assert [step["current_steps"] for step in steps] == [*range(1, 11)]  # 20 samples / 4 * 2 epochs
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert (output / saved).exists()
    assert ("Gradient checkpointing enabled." in started[0].text) == (recompute.granularity == "full")
    assert [one.left() for one in started] == [{}, {}]


# Without GPUs the trainer's device is `cpu:0`, but torch loads saved tensors only to `cpu`.
LOADS_TO_CPU_0 = """
import os
if "RANK" in os.environ:
    import torch
    torch.serialization.register_package(9, lambda stored: None, lambda stored, to: stored if to == "cpu:0" else None)
"""


def test_a_run_that_was_killed_goes_on_after_its_last_whole_checkpoint(
    launched: Nodes, model: Path, tmp_path: Path
) -> None:
    spec = load_spec(make_spec(tmp_path / "spec.yaml", model, [], pin={}, epochs=16, trainer={"save_steps": 10}))
    bundle = tmp_path / "bundle"
    write_bundle(
        generate(spec, make_plan(make_layout(spec.cluster, backend="ddp", gradient_accumulation_steps=2))), bundle
    )
    train = bundle / "train.yaml"
    values = yaml.safe_load(train.read_text(encoding="utf-8"))
    train.write_text(yaml.safe_dump(values | {"bf16": False, "use_cpu": True}), encoding="utf-8")
    make_data(bundle / "data")
    (launched.folder / "sitecustomize.py").write_text(LOADS_TO_CPU_0)
    output = bundle / values["output_dir"]
    log = output / "trainer_log.jsonl"

    def losses() -> dict[int, float]:
        return {step["current_steps"]: step["loss"] for step in steps_in(log)}

    first = launched.start(bundle / "node-00.sh", env=environment(launched))
    wait_until("it has saved and goes on", lambda: max(losses(), default=0) > 12, [first])
    first.kill_rank(1)
    known = losses()
    last = max(int(state.parent.name.rpartition("-")[2]) for state in output.glob("checkpoint-*/trainer_state.json"))
    log.unlink()

    second = launched.start(bundle / "node-00.sh", env=environment(launched))
    assert second.wait() == 0, second.text[-4000:]
    assert (resumed_at_step(first.output), resumed_at_step(second.output)) == (None, last)
    again = losses()
    assert list(again) == [*range(last + 1, 81)]
    twice = [step for step in known if step > last]
    assert [again[step] for step in twice] == pytest.approx([known[step] for step in twice], rel=1e-3)


def test_a_trial_trains_on_made_up_samples_and_is_ended_when_it_has_its_steps(
    launched: Nodes, model: Path, tmp_path: Path
) -> None:
    spec = load_spec(make_spec(tmp_path / "spec.yaml", model, [], pin={}, trainer={"save_steps": 2, "val_size": 0.1}))
    plan = make_plan(make_layout(spec.cluster, backend="ddp", gradient_accumulation_steps=2))
    on_the_cpu = {"bf16": False, "use_cpu": True, "save_only_model": True}
    said, output = run_trial(launched, tmp_path / "job" / plan.id, spec, plan, on_the_cpu, environment(launched))
    assert re.search(rf"Num examples = {how_many(spec):,}\b", said)
    steps = steps_in(output / "trainer_log.jsonl")
    assert STEPS <= len(steps) <= 2 * STEPS
    assert steps[0]["total_steps"] == 2 * STEPS
    (shown,) = re.findall(r"^(?:\[default0\]:)?input_ids:\n(?:\[default0\]:)?\[([0-9, ]+)\]", said, re.MULTILINE)
    assert len(shown.split(",")) == spec.job.seq_len
