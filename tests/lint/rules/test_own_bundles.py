"""No rule reports anything in files that topoplan writes."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import pytest

from tests.bundle.samples import (
    CLUSTER,
    DEEPSEEK,
    HOSTS,
    ONE_NODE,
    QWEN3_8B,
    QWEN3_30B,
    QWEN3_VL_8B,
    make_spec_and_layout,
    make_spec_and_plan,
)
from tests.reading.setups import setup_of
from tests.samples import no_search
from tests.sizes import some
from topoplan.bundle.bundle import generate
from topoplan.bundle.write import write_bundle
from topoplan.engines.engine import Fastest
from topoplan.engines.registry import engine_of
from topoplan.layout.layout import Recompute
from topoplan.lint.check import check
from topoplan.lint.prediction_target import PredictionTarget
from topoplan.lint.rules.registry import rule_modules
from topoplan.planner.plan import Plan
from topoplan.planner.predict import predict
from topoplan.reading.setup import Setup
from topoplan.specs.cluster import Fabric
from topoplan.specs.load import load_spec
from topoplan.specs.spec import Spec
from topoplan.trainers import registry
from topoplan.trainers.case import case_of
from topoplan.trainers.llamafactory.mca import trainer_file
from topoplan.trainers.registry import trainer_refusal

CLUSTERS = {
    "none": CLUSTER,
    "hosts": replace(CLUSTER, hosts=HOSTS),
    "one": ONE_NODE,
    "ethernet": replace(CLUSTER, fabric=Fabric(kind="ethernet")),
    "roce": replace(CLUSTER, fabric=Fabric(kind="roce", traffic_class=106, service_level=3)),
    "efa": replace(CLUSTER, fabric=Fabric(kind="efa")),
    "tcpxo": replace(CLUSTER, hosts=HOSTS, fabric=Fabric(kind="tcpxo")),
    "topology": replace(CLUSTER, fabric=Fabric(topology_file="/opt/microsoft/ndv5-topo.xml")),
}
LAYOUTS = {
    "dense": {"model": QWEN3_8B},
    "vision": {"model": QWEN3_VL_8B, "tp": 2, "pp": 2, "vpp": 2},
    "vision with larger micro batches": {"model": QWEN3_VL_8B, "micro_batch_size": 2},
    "experts": {"model": QWEN3_30B, "tp": 2, "pp": 4, "ep": 4},
    "experts in slices": {"model": QWEN3_30B, "tp": 2, "etp": 2},
    "latent attention": {"model": DEEPSEEK, "tp": 1, "ep": 8},
    "context": {"model": QWEN3_8B, "tp": 2, "cp": 4},
    "selective": {"recompute": Recompute(granularity="selective", modules=("core_attn", "mlp"))},
    "uniform": {"recompute": Recompute(granularity="full", method="uniform", num_layers=2), "model": QWEN3_8B},
    "block": {"pp": 2, "recompute": Recompute(granularity="full", method="block", num_layers=3)},
    "uneven": {"model": QWEN3_8B, "tp": 1, "pp": 2, "pipeline_layout": "Et*17|t*19,L"},
    "offload": {"model": QWEN3_8B, "optimizer_offload_fraction": 0.5},
    "pt": {"model": QWEN3_8B, "job": {"stage": "pt"}},
    "dpo": {"model": QWEN3_8B, "job": {"stage": "dpo", "dataset": "dpo_en_demo"}},
    "fp8": {"model": QWEN3_8B, "job": {"precision": "fp8"}},
    "no packing": {"model": QWEN3_8B, "job": {"packing": False}},
    "keys of the user": {
        "model": QWEN3_8B,
        "overlap_param_gather": False,
        "job": {
            "trainer": {"additional_configs": {"moe_z_loss_coeff": 1e-3}, "neat_packing": True, "save_strategy": "no"}
        },
    },
}


def rules(setup: Setup) -> list[str]:
    """Return the rules that fire, except those on faults of packages, which a bundle itself warns of."""
    found = [one.rule for module in rule_modules() for one in module.findings(setup)]
    return [rule for rule in found if not rule.startswith("fault-")]


def test_nothing_is_said_of_the_bundle_in_the_repository() -> None:
    assert {one.rule for one in check(["generated/h100-4x8"]).findings} <= {"bundle-version", "bundle-to-fill-in"}


@pytest.mark.parametrize("name", CLUSTERS)
def test_nothing_is_said_of_a_bundle_for_any_fabric(name: str, tmp_path: Path) -> None:
    spec, plan = make_spec_and_plan(cluster=CLUSTERS[name])
    write_bundle(generate(spec, plan), tmp_path / "bundle")
    assert [one.rule for one in check([str(tmp_path / "bundle")]).findings] == []


@pytest.mark.parametrize("name", LAYOUTS)
def test_nothing_is_said_of_the_file_of_any_layout(name: str) -> None:
    setup = setup_of(trainer_file(*make_spec_and_layout(**LAYOUTS[name])).text, name="train.yaml")
    assert setup.uses_mca(setup.configurations[0])
    assert rules(setup) == []


def test_what_a_plan_chose_itself_is_not_judged(tmp_path: Path) -> None:
    """Bundles are exempt from the rules on sequence parallelism and on connections, which Blackwell does not need."""
    (tmp_path / "a.yaml").write_text("stage: sft\nmodel_name_or_path: a\ntensor_model_parallel_size: 2\n")
    (tmp_path / "node-00.sh").write_text("export USE_MCA=1\npython -m llamafactory.launcher a.yaml\n")
    judged = {"launch-max-connections", "mca-sequence-parallel-off"}
    setup = check([str(tmp_path / "node-00.sh")]).setup

    assert judged <= {*rules(setup)}
    # The last module reads the bundle's manifest, which does not exist here.
    own = replace(setup, bundles=(tmp_path,))
    assert not judged & {one.rule for module in rule_modules()[:-1] for one in module.findings(own)}


def plans_of(spec: Spec, backend: str) -> Iterator[Plan]:
    """Yield the fastest plans of some families of layouts, such as a search would find."""
    case, engine = case_of(spec, backend), engine_of(backend)
    legal = (family for family, broken in engine.families(case, backend) if broken is None)
    for family in islice(legal, 0, 40, 4):
        for outcome in engine.outcomes(case, family, partial(trainer_refusal, spec), lambda: math.inf, every=False):
            if isinstance(outcome, Fastest):
                yield predict(spec, outcome.layout)


SPECS = [path for path in sorted(Path("cluster_specs").glob("*.yaml")) if "128x8" not in path.stem]
"""All specs except the one with 128 nodes, whose scripts take half a minute to read and equal those of 16 nodes."""


@pytest.mark.parametrize("path", some(SPECS, 3), ids=lambda path: path.stem)
def test_nothing_is_found_against_what_is_generated(path: Path, tmp_path: Path) -> None:
    """Holds for every trainer and backend, on the planned cluster; the prediction must equal the plan."""
    spec, count = load_spec(path), 0
    for trainer in registry.TRAINERS:
        own = replace(spec, trainer=trainer.name)
        for plan in (plan for backend in trainer.backends for plan in islice(plans_of(own, backend), 1)):
            count += 1
            write_bundle(generate(own, plan, trainer=trainer.name), tmp_path / str(count))
            found = check([str(tmp_path / str(count))], PredictionTarget(cluster=spec.cluster, search=no_search))
            assert [one.what for one in found.findings if one.severity != "note"] == []
            for prediction in found.predictions if trainer.name != "trinity" else ():  # its files are not predicted
                one = prediction.plan
                assert one is not None, prediction.reason
                if not plan.layout.optimizer_offload_fraction:  # ms-swift's file then enables more than the plan has
                    assert (one.id, one.memory.device_bytes) == (plan.id, pytest.approx(plan.memory.device_bytes))
                    assert one.time.step_s == pytest.approx(plan.time.step_s)
    assert count > 3


@pytest.mark.parametrize("trainer", registry.trainer_names())
def test_the_best_plan_of_another_backend_is_no_warning(trainer: str, tmp_path: Path) -> None:
    """A user who pinned a backend, or did not take the first plan, made that choice deliberately."""
    spec = replace(load_spec("cluster_specs/a100-1x8.yaml"), trainer=trainer)
    plan = next(plans_of(spec, "fsdp2"))
    write_bundle(generate(spec, plan, trainer=trainer), tmp_path / "bundle")
    found = check([str(tmp_path / "bundle")], PredictionTarget(cluster=spec.cluster))
    assert {one.severity for one in found.findings} <= {"note"}


def test_two_bundles_are_two_jobs(tmp_path: Path) -> None:
    for name, tp in (("one", 2), ("two", 4)):
        spec, plan = make_spec_and_plan(tp=tp)
        write_bundle(generate(spec, plan), tmp_path / name)
    found = check([str(tmp_path / name) for name in ("one", "two")])
    assert len(found.setup.bundles) == 2
    assert [one.rule for one in found.findings] == []
    mixed = [str(tmp_path / name) for name in ("one/train.yaml", "one/node-00.sh", "one/node-01.sh")]
    script = tmp_path / "one" / "node-01.sh"
    script.write_text(script.read_text().replace("--node_rank 1", "--node_rank 0"))
    assert "launch-nodes-disagree" in {one.rule for one in check(mixed).findings}
