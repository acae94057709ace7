import io
import json

from rich.console import Console

from tests.hosts.machines import cluster
from topoplan.errors import HostError
from topoplan.hosts.cluster_yaml import cluster_spec
from topoplan.hosts.result import Result
from topoplan.report.probe import finding_line, print_probe, probe_to_dict

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
