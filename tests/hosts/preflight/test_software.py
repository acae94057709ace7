from dataclasses import replace

import pytest

from tests.hosts.fleets import cluster, facts, fleet, needs, outcome, required, see
from topoplan.hosts.facts import HostFacts
from topoplan.hosts.preflight.software import packages, python, versions


def having(number: int = 0, **changes: str) -> HostFacts:
    one = facts(number)
    named = {name.replace("_", "-"): version for name, version in changes.items()}
    return replace(one, versions={name: text for name, text in {**one.versions, **named}.items() if text})


LOST = facts(versions={}, python="", missing={"versions": "python: not installed"})


def test_the_python_of_the_trainer() -> None:
    assert outcome(python, fleet(facts())) == "ok"
    assert outcome(python, fleet(replace(LOST, missing={}))) == "skipped"
    found = see(python, fleet(LOST))
    assert found.outcome == "failure"
    assert "/venv/bin/python" in found.what
    place = cluster(nodes=1)
    bare = replace(place, hosts=(replace(place.hosts[0], venv=None),))
    found = see(python, fleet(LOST, of=bare))
    assert "venv" in found.remedy


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (having(), "ok"),
        (having(megatron_core=""), "failure"),
        (having(transformers="5.7.0"), "failure"),
        (having(transformers="4.54.1"), "failure"),
        (having(transformers="5.6.0"), "ok"),
        (having(transformers="5.7.0", llamafactory="0.9.6"), "ok"),
        (having(megatron_core="0.14.0"), "failure"),
        (having(megatron_core="0.18.0rc1"), "ok"),
        (having(megatron_core="0.19.0rc1"), "failure"),
        (LOST, "skipped"),
    ],
)
def test_packages_of_the_trainer(host: HostFacts, expected: str) -> None:
    assert outcome(packages, fleet(host, wanted=needs())) == expected
    assert outcome(packages, fleet(host)) is None


def test_what_to_install_is_named_as_pip_knows_it() -> None:
    wanted = needs(requirements=required("torch", "mcore_adapter", "trinity-rft", megatron_core=">=0.18"))
    found = see(packages, fleet(having(megatron_core=""), wanted=wanted))
    assert found.what == "/venv/bin/python lacks mcore_adapter, trinity-rft, megatron-core"
    assert "'git+https://github.com/alibaba/ROLL.git@8eb27cc2" in found.remedy
    assert "trinity-rft 'megatron-core>=0.18', or correct venv" in found.remedy


def test_a_version_that_would_end_or_spoil_the_run_is_a_failure_with_its_reason() -> None:
    wanted = needs(requirements=required(torch="<2.12", megatron_core=">=0.18,<0.19"))
    found = see(packages, fleet(having(torch="2.13.0+cu130", megatron_core="0.18.2"), wanted=wanted))
    assert found.what == "/venv/bin/python has torch 2.13.0+cu130, and the run wants <2.12: it fails"
    assert found.remedy == "pip install 'torch<2.12'"
    found = see(packages, fleet(having(torch="2.11.0", megatron_core="0.16.1"), wanted=wanted))
    assert found.remedy == "pip install 'megatron-core>=0.18,<0.19'"
    assert outcome(packages, fleet(having(torch="2.11.0", megatron_core="0.18.2"), wanted=wanted)) == "ok"


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (having(2), "ok"),
        (having(2, torch="2.7.0"), "failure"),
        (having(2, nccl="2.19.3"), "failure"),
        (having(2, driver="535.1"), "warning"),
        (having(2, torch=""), "ok"),
        (replace(facts(2), versions={}), "skipped"),
    ],
)
def test_versions_that_differ(host: HostFacts, expected: str) -> None:
    of = fleet(facts(0), facts(1), host)
    assert outcome(versions, of, 2) == expected
    assert outcome(versions, of, 0) == "ok"


def test_a_version_that_differs_is_named_with_where_the_other_is() -> None:
    found = see(versions, fleet(facts(0), facts(1), having(2, torch="2.7.0", nccl="2.26.2")), 2)
    assert found.what == "torch 2.7.0, and 2.6.0 on n0, n1; nccl 2.26.2, and 2.21.5 on n0, n1"


def test_one_host_has_nothing_to_differ_from() -> None:
    assert outcome(versions, fleet(facts())) is None
