import io
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tests.samples import make_plan, make_spec
from topoplan.report.bundle import bundle_to_dict, print_bundle
from topoplan.specs.cluster import Host

FILES = [Path("out dir") / name for name in ("README.md", "hosts.json", "node-00.sh", "node-01.sh", "plan.json")]


def test_the_next_command_can_be_pasted() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=100, color_system=None, highlight=False)
    print_bundle(console, make_spec(), make_plan(tp=4), "swift", Path("out dir"), FILES, ["what the trainer does"])
    text = stream.getvalue()
    assert "Plan tp4-pp1-dp8-mbs1 for ms-swift: 58.3 of 79.6 GiB, 3.21 s per step (2.82-3.60)" in text
    assert "Warning: what the trainer does\n" in text
    assert "Wrote 5 files" in text
    assert "less 'out dir/README.md'" in text
    assert "MASTER_ADDR=10.0.0.1 bash 'out dir/node-00.sh'   # on node 0" in text


def test_one_node_needs_no_address() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=100, color_system=None, highlight=False)
    print_bundle(console, make_spec(nodes=1), make_plan(), "llamafactory", Path("out"), [Path("out/node-00.sh")], [])
    assert "  bash out/node-00.sh   # on node 0\n" in stream.getvalue()


def test_with_a_job_script_the_next_command_submits_it() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=100, color_system=None, highlight=False)
    print_bundle(
        console, make_spec(), make_plan(), "llamafactory", Path("out dir"), [*FILES, Path("out dir/job.sbatch")], ()
    )
    assert stream.getvalue().endswith("\n  less 'out dir/README.md'\n  sbatch 'out dir/job.sbatch'\n")


def test_with_hosts_in_the_spec_the_next_command_launches_it() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=100, color_system=None, highlight=False)
    hosts = tuple(Host(address=f"node{number}") for number in range(4))
    spec = make_spec()
    spec = replace(spec, cluster=replace(spec.cluster, hosts=hosts))
    print_bundle(console, spec, make_plan(), "llamafactory", Path("out dir"), FILES, ())
    assert stream.getvalue().endswith("\n  less 'out dir/README.md'\n  topoplan launch 'out dir'\n")


def test_the_json_twin_has_a_schema_and_the_files() -> None:
    view = bundle_to_dict(make_plan(), "llamafactory", Path("out dir"), FILES, ["what the trainer does"])
    assert view["schema"] == "topoplan.generate/1"
    assert view["files"][0] == "out dir/README.md"
    assert view["warnings"] == ["what the trainer does"]
    assert view["plan"]["id"] == "tp1-pp1-dp32-mbs1"
