import pytest

from tests.hosts.fleets import cluster, facts, fleet, outcome, second, see
from topoplan.hosts.preflight.nccl import nccl_settings


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "ok"),
        ({"NCCL_IB_TC": "106"}, "warning"),
        ({"NCCL_P2P_DISABLE": "1"}, "warning"),
        ({"NCCL_ALGO": "Ring"}, "warning"),
        ({"NCCL_SOCKET_IFNAME": "=eth0"}, "ok"),
    ],
)
def test_settings_of_nccl_on_one_host(settings: dict[str, str], expected: str) -> None:
    assert outcome(nccl_settings, second(nccl_settings=settings), 1) == expected


def test_settings_that_all_hosts_have_are_shown() -> None:
    hosts = [facts(number, nccl_settings={"NCCL_IB_TC": "106", "NCCL_P2P_DISABLE": "0"}) for number in range(2)]
    found = see(nccl_settings, fleet(*hosts))
    assert found.outcome == "ok"
    assert "NCCL_IB_TC=106" in found.what


def test_settings_that_the_spec_overrides_do_not_count() -> None:
    place = cluster(nodes=3, env={"NCCL_ALGO": "Tree"})
    assert outcome(nccl_settings, second(place, nccl_settings={"NCCL_ALGO": "Ring"}), 1) == "ok"


def test_settings_of_googles_profile_are_no_left_overs_of_debugging() -> None:
    profile = {"NCCL_PROTO": "Simple,LL128", "NCCL_BUFFSIZE": "8388608", "NCCL_FASTRAK_NUM_FLOWS": "2"}
    said = (facts(0, nccl_settings=profile), facts(1, nccl_settings=profile))
    assert outcome(nccl_settings, fleet(*said, of=cluster(kind="tcpxo"))) == "ok"
    del profile["NCCL_FASTRAK_NUM_FLOWS"]
    assert outcome(nccl_settings, fleet(*said)) == "warning"
