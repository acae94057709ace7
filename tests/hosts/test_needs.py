from pathlib import Path
from typing import Any

import pytest

from tests.bundle.samples import QWEN3_8B, make_spec_and_plan
from tests.hosts.fleets import needs
from topoplan import load_spec, predict
from topoplan.bundle.bundle import generate
from topoplan.hosts.facts import LIBRARIES
from topoplan.hosts.needs import needs_of, path_on, paths_on, python_on
from topoplan.planner.plan import Plan
from topoplan.specs.cluster import Host
from topoplan.specs.spec import Spec

SPEC = """\
nodes: 2
gpus_per_node: 8
gpu: h100-sxm-80gb
nvlink_bandwidth: 900GB/s
ib_bandwidth: 400Gb/s
nics_per_node: 8
hosts: [a, b]
model: Qwen/Qwen3-8B
job: {seq_len: 4096, global_batch_size: 64}
"""


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Spec, Plan]:
    file: Path = tmp_path_factory.mktemp("spec") / "two.yaml"
    file.write_text(SPEC)
    spec = load_spec(file)
    return spec, predict(spec, {"tp": 2, "pp": 1, "micro_batch_size": 1})


def test_needs_are_those_of_the_bundle(planned: tuple[Spec, Plan]) -> None:
    wanted = needs_of(*planned)
    script = generate(*planned)["node-00.sh"]
    assert f"master_port={wanted.master_port}\n" in script
    assert f"model_dir={wanted.run.model_dir}\n" in script
    assert f"output_dir={wanted.run.output_dir}\n" in script
    assert not wanted.has_dataset
    assert wanted.model_bytes == 2 * 8_190_735_360
    assert wanted.gpu_bytes == planned[1].memory.device_bytes
    found = {one.package.name for one in wanted.run.requirements}
    assert found >= {"torch", "megatron-core", "mcore_adapter", "llamafactory", "transformers"}


def test_what_a_person_wrote_into_train_yaml_counts(planned: tuple[Spec, Plan]) -> None:
    wanted = needs_of(*planned, {"dataset": "mine", "model_name_or_path": "/models/q", "tokenized_path": "/tok"})
    assert wanted.has_dataset
    assert wanted.run.model_dir == "/models/q"
    assert wanted.run.dataset_dir is None
    assert wanted.master_port == needs_of(*planned).master_port


TRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    "mca": ("llamafactory", {"backend": "mca"}),
    "plain": ("llamafactory", {"backend": "fsdp2"}),
    "qlora": ("llamafactory", {"backend": "ddp", "job": {"finetuning": "qlora"}}),
    "swift": ("swift", {"backend": "deepspeed", "fused_linear_cross_entropy": True}),
    "megatron": ("swift", {"backend": "megatron"}),
    "trinity": ("trinity", {"backend": "fsdp2", "job": {"packing": False}}),
}


@pytest.mark.parametrize("case", TRAINED, ids=str)
def test_hosts_are_asked_for_every_package_that_a_run_needs(case: str) -> None:
    # Otherwise preflight would miss it everywhere, and launch would never start.
    trainer, what = TRAINED[case]
    spec, plan = make_spec_and_plan(model=QWEN3_8B, **what)
    wanted = {one.package.name for one in needs_of(spec, plan, trainer=trainer).run.requirements}
    assert wanted <= set(LIBRARIES)


def test_relative_paths_are_below_the_working_directory() -> None:
    assert path_on(Host(address="a", workdir="/work"), "data/x") == "/work/data/x"
    assert path_on(Host(address="a", workdir="/work"), "/data/x") == "/data/x"
    assert path_on(Host(address="a"), "/data/x") == "/data/x"
    assert path_on(Host(address="a"), "data/x") is None


def test_a_host_is_asked_for_each_path_once() -> None:
    host = Host(address="a", workdir="/work")
    wanted = needs(dataset_dir="models/m")
    assert paths_on(host, wanted) == ("/work", "/work/models/m", "/work/saves/a-run")
    assert paths_on(host, None) == ("/work",)
    assert paths_on(Host(address="a"), wanted) == ()


def test_the_python_of_a_virtual_environment() -> None:
    assert python_on(Host(address="a", venv="/opt/v")) == "/opt/v/bin/python"
    assert python_on(Host(address="a")) is None
