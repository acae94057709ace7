import io
import json

from rich.console import Console

from topoplan.hosts.result import Outcome, Result
from topoplan.report.preflight import preflight_to_dict, print_preflight, worst


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
