import io
import json
from dataclasses import replace

from rich.console import Console

from tests.hosts.machines import cluster
from topoplan.errors import HostError
from topoplan.hosts.cluster_yaml import cluster_spec
from topoplan.hosts.result import Outcome, Result
from topoplan.report.hosts import finding_line, preflight_to_dict, print_preflight, print_probe, probe_to_dict, worst

GONE = {"gone": HostError("nothing listens", host="gone", problem="refused", remedy="start sshd")}


def printed(*arguments: object, written: str | None = None) -> str:
    stream = io.StringIO()
    print_probe(Console(file=stream, width=120), *arguments, written=written)  # type: ignore[arg-type]
    return stream.getvalue()


def test_the_table_has_a_row_a_host() -> None:
    hosts = cluster("dgx-h100", "dgx-h100")
    text = printed(hosts, {}, cluster_spec(hosts), written="cluster.yaml")
    rows = [line.split() for line in text.splitlines() if line.startswith("node")]
    assert [row[0] for row in rows] == ["node0", "node1"]
    for word in ("8 x NVIDIA H100 80GB HBM3", "81559MiB", "900GB/s", "8 x infiniband", "400Gb/s", "bond0", "550.90.07"):
        assert all(part in text for part in word.split())
    assert "Wrote cluster.yaml" in text
    assert "Next: topoplan rank cluster.yaml" in text


def test_hosts_that_could_not_be_asked_are_named_with_the_remedy() -> None:
    hosts = cluster("dgx-h100")
    text = printed(hosts, GONE, None)
    assert "1 host could not be probed" in text
    assert "gone: nothing listens; start sshd" in text
    assert "1 of 2 hosts could not be probed; --partial" in text
    assert "--partial" not in printed([], GONE, None)


def test_a_card_to_fill_in_is_the_next_step() -> None:
    hosts = cluster("rtx5090-pcie", "rtx5090-pcie")
    assert "fill in what is marked" in printed(hosts, {}, cluster_spec(hosts), written="x.yaml")


def test_a_finding_that_stops_says_so() -> None:
    check = Result(name="gpus", host="node1", outcome="failure", what="no GPUs", remedy="install the driver")
    assert finding_line(check) == "node1: no GPUs [stops]; install the driver"
    hosts = cluster("dgx-h100", "hgx-h20")
    assert "the findings marked [stops] must go first" in printed(hosts, {}, cluster_spec(hosts))


def test_all_of_it_is_json() -> None:
    hosts = cluster("dgx-h100", "dgx-h100")
    view = json.loads(json.dumps(probe_to_dict(hosts, GONE, cluster_spec(hosts), None), allow_nan=False))
    assert view["schema"] == "topoplan.probe/1"
    assert view["failed"] == [{"name": "gone", "problem": "refused", "what": "nothing listens", "remedy": "start sshd"}]
    facts = view["hosts"][0]["facts"]
    assert facts["gpus"][0]["nvlink_bytes_per_s"] == 450e9
    assert ["GPU0", "GPU1", "NV18"] in facts["topology"]
    assert view["complete"] is True
    assert probe_to_dict([], GONE, None, None)["spec"] is None


def check(name: str, host: str, outcome: Outcome = "ok", what: str = "all well", remedy: str = "") -> Result:
    return Result(name=name, host=host, outcome=outcome, what=what, remedy=remedy)


def shown(hosts: list[str], checks: list[Result], width: int = 100) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, highlight=False, markup=False, emoji=False)
    print_preflight(console, "test", hosts, checks)
    return stream.getvalue()


def some(hosts: list[str]) -> list[Result]:
    checks = [check("gpus", host) for host in hosts] + [check("shm", host) for host in hosts[:-1]]
    return [*checks, check("shm", hosts[-1], "failure", "64 MiB", "--ipc=host")]


def test_hosts_that_are_ready_take_two_lines() -> None:
    text = shown(["a", "b"], [check("gpus", "a"), check("gpus", "b"), check("shm", "a"), check("shm", "b")])
    assert text.splitlines() == ["test, 2 hosts: ready.", "", "Ok on all hosts: gpus, shm."]


def test_a_few_hosts_are_columns_by_name_and_only_what_is_not_ok_is_a_row() -> None:
    text = shown(["alpha", "beta"], some(["alpha", "beta"]))
    lines = text.splitlines()
    assert lines[0] == "test, 2 hosts: 1 failure."
    assert lines[2].split() == ["alpha", "beta"]
    assert lines[4].split() == ["shm", "ok", "FAILURE"]
    assert "- shm: beta: 64 MiB; --ipc=host" in lines
    assert "Ok on all hosts: gpus." in lines


def test_what_is_ok_is_said_only_of_hosts_that_answered() -> None:
    hosts = ["a", "b", "c"]
    lost = check("reachable", "c", "failure", "nothing listens", "start sshd")
    checks = [check("reachable", "a"), check("reachable", "b"), lost, check("gpus", "a"), check("gpus", "b")]
    assert shown(hosts, checks).splitlines()[-1] == "Ok on the 2 hosts that answered: gpus."
    checks = [replace(lost, host="a"), replace(lost, host="b"), lost, check("secrets", "")]
    assert shown(hosts, checks).splitlines()[-1] == "Ok: secrets."
    assert shown(hosts[1:], [lost, check("reachable", "b"), check("gpus", "b")]).splitlines()[-1] == (
        "Ok on the one host that answered: gpus."
    )


def test_many_hosts_are_one_sign_each() -> None:
    hosts = [f"node{number}" for number in range(64)]
    text = shown(hosts, some(hosts))
    (row,) = [line for line in text.splitlines() if line.startswith("shm")]
    signs = row.removeprefix("shm").replace(" ", "")
    assert signs == "." * 63 + "X"
    (ruler,) = [line for line in text.splitlines() if line.startswith("node")]
    assert row[ruler.index("60") : ruler.index("60") + 4] == "...X"
    assert max(map(len, text.splitlines())) <= 100


def test_more_hosts_than_a_line_holds_take_several() -> None:
    hosts = [f"node{number}" for number in range(200)]
    text = shown(hosts, some(hosts), width=80)
    rows = [line.removeprefix("shm").replace(" ", "") for line in text.splitlines() if line.startswith("shm")]
    assert "".join(rows) == "." * 199 + "X"
    assert max(map(len, text.splitlines())) <= 80


def test_the_same_finding_of_many_hosts_is_told_once() -> None:
    hosts = [f"n{number}" for number in range(9)]
    text = shown(hosts, [check("shm", host, "warning", "small", "enlarge it") for host in hosts])
    assert "- shm: all 9 hosts: small; enlarge it" in text
    text = shown(hosts, [check("shm", host, "warning", "small", "enlarge it") for host in hosts[1:]])
    assert "- shm: n1, n2, n3, n4, n5, n6 and 2 more: small; enlarge it" in text


def test_names_are_no_markup() -> None:
    assert "[red]x[/red]" in shown(["a"], [check("shm", "a", "warning", "[red]x[/red]", "do")])


def test_what_was_not_checked_is_counted_and_told() -> None:
    text = shown(["a"], [check("mtu", "a", "skipped", "ip: not installed")])
    assert text.splitlines()[0] == "test, 1 host: ready, 1 not checked."
    assert "- mtu: a: ip: not installed" in text


def test_the_document_has_every_check() -> None:
    checks = some(["a", "b"])
    document = json.loads(json.dumps(preflight_to_dict("test", ["a", "b"], checks)))
    assert document["schema"] == "topoplan.preflight/1"
    assert document["outcome"] == "failure"
    assert document["counts"] == {"failure": 1, "warning": 0, "skipped": 0, "ok": 3}
    assert len(document["checks"]) == 4
    assert document["checks"][-1] == {
        "name": "shm",
        "host": "b",
        "outcome": "failure",
        "what": "64 MiB",
        "remedy": "--ipc=host",
    }


def test_the_worst_of_all() -> None:
    assert worst([]) == "ok"
    assert worst([check("a", "x", "skipped")]) == "ok"
    assert worst([check("a", "x", "warning"), check("b", "x")]) == "warning"
