import re
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.hosts.fleets import cluster, facts, gpu, needs
from tests.sizes import examples
from topoplan.errors import HostError, InputError
from topoplan.hosts import facts as facts_module
from topoplan.hosts.facts import HostFacts
from topoplan.hosts.needs import RunNeeds
from topoplan.hosts.preflight.checks import CHECKS, NAMES, fleet_of, refuse_unknown, run_checks
from topoplan.hosts.result import Outcome, Result
from topoplan.specs.cluster import Cluster


def preflight(
    place: Cluster,
    wanted: RunNeeds | None,
    said: Mapping[str, HostFacts | HostError],
    *,
    skip: Any = (),
    query_times_s: Any = None,
) -> tuple[Result, ...]:
    return run_checks(fleet_of(place, wanted, said, query_times_s=query_times_s), said, skip=skip)


OUTCOMES = set(get_args(Outcome))
WORDS = st.sampled_from(
    [
        "",
        "lo",
        "eth0",
        "ACTIVE",
        "Ethernet",
        "RoCE v2",
        "10.0.0.1",
        "127.0.1.1",
        "::ffff:10.0.0.1",
        "5.4",
        "/work",
        "nfs4",
    ]
)
NAMED: Mapping[str, st.SearchStrategy[str]] = {
    "nccl_settings": st.sampled_from(["NCCL_ALGO", "NCCL_IB_GID_INDEX", "NCCL_P2P_DISABLE"]),
    "versions": st.sampled_from(["torch", "python", "driver", "nccl", "transformers", "llamafactory"]),
    "paths": st.sampled_from(["/work", "/work/models/m", "/work/data", "/work/saves/a-run"]),
    "missing": st.sampled_from([field.name for field in fields(HostFacts)]),
}


def any_of(kind: Any, name: str = "") -> st.SearchStrategy[Any]:
    """Return a strategy for any value of a type, made of words that mean something to the checks."""
    if get_origin(kind) in (types.UnionType, typing.Union):
        return st.one_of(*(any_of(one, name) for one in get_args(kind)))
    if get_origin(kind) is tuple:
        inner = get_args(kind)
        if inner[-1] is Ellipsis:
            return st.lists(any_of(inner[0]), max_size=3).map(tuple)
        return st.tuples(*(any_of(one) for one in inner))
    if get_origin(kind) is frozenset:
        return st.frozensets(st.integers(0, 65535), max_size=3)
    if isinstance(kind, type) and hasattr(kind, "__dataclass_fields__"):
        hints = get_type_hints(kind, vars(facts_module))
        return st.builds(kind, **{field: any_of(hint, field) for field, hint in hints.items()})
    if get_origin(kind) is not None:  # a mapping
        key, value = get_args(kind)
        return st.dictionaries(NAMED[name] if name in NAMED else any_of(key), any_of(value), max_size=3)
    if kind is str:
        return st.one_of(WORDS, st.text(max_size=5))
    simple: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-(2**63), 2**63),
        float: st.floats(allow_nan=False, allow_infinity=False, min_value=-1e18, max_value=1e18),
        bool: st.booleans(),
        type(None): st.none(),
    }
    return simple[kind]


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(any_of(HostFacts), min_size=1, max_size=3),
    st.sampled_from(["infiniband", "roce", "ethernet"]),
    st.booleans(),
)
def test_whatever_hosts_say_is_an_outcome(said: list[HostFacts], kind: str, planned: bool) -> None:
    place = cluster(nodes=len(said), kind=kind, host_memory_bytes=2**40)
    hosts: dict[str, HostFacts | HostError] = {
        f"n{number}": replace(one, paths={name: replace(path, path=name) for name, path in one.paths.items()})
        for number, one in enumerate(said)
    }
    query_times_s = dict.fromkeys(hosts, (999.0, 1001.0))
    for check in preflight(place, needs() if planned else None, hosts, query_times_s=query_times_s):
        assert check.name in NAMES
        assert check.outcome in OUTCOMES
        assert check.what
        assert bool(check.remedy) == (check.outcome in ("warning", "failure"))


def test_a_host_that_says_nothing_at_all_fails_nothing_but_what_is_known() -> None:
    checks = preflight(cluster(), None, {"n0": HostFacts(), "n1": HostFacts()})
    assert {check.outcome for check in checks} == {"ok", "skipped"}


def test_hosts_that_are_ready_fail_nothing() -> None:
    said: dict[str, HostFacts | HostError] = {f"n{number}": facts(number) for number in range(2)}
    checks = preflight(cluster(), needs(), said, query_times_s=dict.fromkeys(said, (999.9, 1000.1)))
    assert {check.outcome for check in checks} == {"ok"}
    not_here = {"gpu-peer-access", "roce-gid", "roce-traffic-class", "cloud", "fabric-files"}
    assert {check.name for check in checks} == {"reachable", *CHECKS} - not_here


def test_a_host_that_cannot_be_reached_is_one_failure_and_the_others_keep_their_numbers() -> None:
    lost = HostError("connection refused", host="jump", problem="refused", remedy="start sshd")
    checks = preflight(cluster(nodes=3), needs(), {"n0": lost, "n1": facts(1), "n2": facts(2)})
    of_n0 = [check for check in checks if check.host == "n0"]
    assert [(check.name, check.outcome, check.what, check.remedy) for check in of_n0] == [
        ("reachable", "failure", "jump: connection refused", "start sshd")
    ]
    assert not [check for check in checks if check.name == "master-port-free"], "n1 is not node 0"


def test_checks_come_in_one_order_and_skipped_ones_not_at_all() -> None:
    said: dict[str, HostFacts | HostError] = {"n0": facts(0), "n1": facts(1, gpus=(gpu(0, 1),))}
    checks = preflight(cluster(), None, said, skip=("gpus", "reachable"))
    names = list(dict.fromkeys(check.name for check in checks))
    assert names == [name for name in NAMES if name in names]
    assert not {"gpus", "reachable"} & set(names)


def test_a_host_too_many_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="zip"):
        preflight(cluster(nodes=1), None, {"n0": facts(0), "n1": facts(1)})


def test_unknown_checks_are_refused_with_the_nearest() -> None:
    refuse_unknown(NAMES, option="--skip")
    with pytest.raises(InputError, match=r"--skip: 'memlok' is not a check; did you mean 'memlock'\?"):
        refuse_unknown(["shm", "memlok"], option="--skip")


def test_the_page_on_failures_has_every_check() -> None:
    page = (Path(topoplan.__file__).parent.parent / "docs" / "preflight.md").read_text()
    assert re.findall(r"^\| *[0-9, ]*\| `([a-z0-9-]+)`", page, re.MULTILINE) == list(NAMES)


def test_rows_that_checks_name_are_on_the_page() -> None:
    page = (Path(topoplan.__file__).parent.parent / "docs" / "preflight.md").read_text()
    for name, check in CHECKS.items():
        head = re.match(r"Rows? ([0-9]+)(?: and ([0-9]+))?:", check.__doc__ or "")
        (line,) = re.findall(rf"^\|(.*)\| `{name}`", page, re.MULTILINE)
        assert re.findall("[0-9]+", line) == [number for number in (head.groups() if head else ()) if number], name
