"""What a run requires of its environment, and a plan's warnings about unavoidable faults."""

from dataclasses import replace
from typing import Any

import pytest

from tests.bundle.samples import CLUSTER, QWEN3_8B, QWEN3_30B, make_spec_and_plan
from topoplan.layout.layout import Layout
from topoplan.specs.spec import Spec
from topoplan.trainers.registry import TRAINERS
from topoplan.trainers.requirements import (
    Versions,
    environment_warnings,
    install_commands,
    requirements_of,
    stopping_faults,
)

LLAMA_FACTORY, MS_SWIFT, TRINITY = (trainer.versions for trainer in TRAINERS)
WANTED = {"torch": "", "llamafactory": "==0.9.5", "megatron-core": "==0.16.1", "mcore_adapter": ""}
INTERLEAVED = {"model": QWEN3_8B, "pp": 2, "vpp": 2, "dp": 16, "gradient_accumulation_steps": 4}


def case(software: dict[str, str] | None = None, **what: Any) -> tuple[Spec, Layout]:
    spec, plan = make_spec_and_plan(**{"model": QWEN3_8B, "cluster": CLUSTER, **what})
    return replace(spec, cluster=replace(spec.cluster, software=software or {})), plan.layout


def asked(spec: Spec, layout: Layout, trainer: Versions = LLAMA_FACTORY) -> dict[str, str]:
    found = requirements_of(spec, layout, trainer, WANTED)
    assert all(one.why for one in found if one.versions)
    return {one.package.name: one.versions for one in found if one.versions}


def test_the_adapter_is_given_a_torch_that_it_can_save_with() -> None:
    found = requirements_of(*case(), LLAMA_FACTORY, WANTED)
    assert [one.package.name for one in found] == list(WANTED)
    assert asked(*case()) == {"torch": "<2.12", "megatron-core": ">=0.15,<0.19", "mcore_adapter": ">=0.10.dev0"}
    commands = install_commands(found)
    assert commands[:2] == ("pip install 'torch<2.12'", "pip install llamafactory==0.9.5 megatron-core==0.16.1")
    assert commands[2].startswith("pip install 'git+https://github.com/alibaba/ROLL.git@8eb27cc2")


def test_interleaving_asks_for_a_megatron_that_does_not_free_early_and_its_python() -> None:
    wanted = asked(*case(**INTERLEAVED))
    assert wanted["megatron-core"] == ">=0.18,<0.19"
    assert wanted["python"] == ">=3.12"
    commands = install_commands(requirements_of(*case(**INTERLEAVED), LLAMA_FACTORY, WANTED))
    assert commands[1] == "pip install llamafactory==0.9.5 'megatron-core>=0.18,<0.19'"
    wanted = asked(*case(**INTERLEAVED), MS_SWIFT)
    assert (wanted["megatron-core"], wanted["python"]) == (">=0.18,<0.20", ">=3.12")


def test_where_it_cannot_be_had_nothing_is_asked_and_the_plan_warns() -> None:
    spec, layout = case({"python": "3.11"}, **INTERLEAVED)
    assert asked(spec, layout)["megatron-core"] == ">=0.15,<0.19"
    assert "python" not in asked(spec, layout)
    warning = next(one for one in environment_warnings(spec, layout, LLAMA_FACTORY) if one.startswith("vpp > 1"))
    assert "frees the output of a stage" in warning
    assert "needs Python 3.12 or newer, and `software` of the spec has 3.11" in warning
    one_version = MS_SWIFT._replace(tried=lambda: {"megatron-core": ("0.16.1",)})
    assert asked(*case(**INTERLEAVED), one_version)["megatron-core"] == ">=0.16,<0.20"
    warning = next(one for one in environment_warnings(*case(**INTERLEAVED), one_version) if one.startswith("vpp > 1"))
    assert warning.endswith("; files for ms-swift are written for megatron-core 0.16.1")


@pytest.mark.parametrize(
    ("software", "said"),
    [
        ({}, ["vpp > 1 needs megatron-core >=0.18,<0.19, on Python 3.12 or newer"]),
        ({"python": "3.12"}, ["vpp > 1 needs megatron-core >=0.18,<0.19, on Python 3.12 or newer"]),
        ({"python": "3.12", "megatron-core": "0.18.2"}, []),
        ({"megatron-core": "0.17.1", "torch": "2.11.0+cu128"}, ["vpp > 1 needs megatron-core >=0.18,<0.19, on"]),
        ({"megatron-core": "0.18.2", "torch": "2.13.0"}, ["a distributed optimizer needs torch <2.12"]),
    ],
)
def test_a_plan_says_what_it_needs_and_is_not_known_to_be_there(software: dict[str, str], said: list[str]) -> None:
    found = list(environment_warnings(*case(software, **INTERLEAVED), LLAMA_FACTORY))
    assert len(found) == len(said)
    assert all(one.startswith(start) for one, start in zip(found, said, strict=True))
    stated = software.get("torch" if "torch" in "".join(said) else "megatron-core")
    assert all((f"the hosts have {stated}" in one) is (stated is not None) for one in found)


@pytest.mark.parametrize(
    ("software", "stops"),
    [
        ({}, []),
        ({"megatron-core": "0.17.1"}, ["interleaving-frees-early"]),
        ({"megatron-core": "0.18.2", "torch": "2.13.0"}, ["checkpoint-plan"]),
        ({"python": "3.11"}, ["interleaving-frees-early"]),  # megatron-core 0.18 needs a newer one
        ({"python": "3.12", "megatron-core": "main"}, []),
    ],
)
def test_faults_stop_a_layout_on_the_stated_versions_alone(software: dict[str, str], stops: list[str]) -> None:
    spec, layout = case(software, **INTERLEAVED)
    assert [fault.name for fault in stopping_faults(spec, layout, LLAMA_FACTORY)] == stops


def test_a_fault_that_the_hosts_versions_lack_is_not_told() -> None:
    what = {"model": QWEN3_30B, "tp": 2, "dp": 16, "ep": 4}
    for software, told in (({}, True), ({"megatron-core": "0.18.2"}, True), ({"megatron-core": "0.19.0"}, False)):
        found = list(environment_warnings(*case(software, **what), LLAMA_FACTORY))
        assert any("leaves experts out of the gradient norm" in one for one in found) is told
    assert list(environment_warnings(*case(), None)) == [] or case()[1].backend == "mca"
