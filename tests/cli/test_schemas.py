"""Every `--json` output names its schema, except the plain lists of models and GPUs."""

import json
import re
from pathlib import Path

import pytest

from tests.cli.conftest import SPEC, Cli
from tests.cli.test_validate import row as measured_run
from tests.run.test_bundle_reader import bundle_at
from topoplan.cli.commands import command
from topoplan.cli.verbs import VERBS
from topoplan.run import record
from topoplan.run.record import NodeRecord, RunRecord

SMALL = "--pin tp=4,pp=1,cp=1,micro_batch_size=1"
WITHOUT_JSON = {"page", "init", "runs logs", "show", "show schema"}
"""Verbs that write a spec, print the output of others, are no verbs by themselves, or print JSON anyway."""
BARE_LISTS = {"show gpus", "show models"}
ASKED = {
    "rank": f"rank spec.yaml {SMALL}",
    "what-if": f"what-if spec.yaml {SMALL} --set nodes=2",
    "size": f"size spec.yaml {SMALL} --tokens 1M --max-hours 9 --max-nodes 1",
    "predict": "predict run.jsonl",
    "explain": "explain spec.yaml --plan tp4-pp1-dp8-mbs1",
    "timeline": "timeline spec.yaml --plan tp4-pp1-dp8-mbs1",
    "topology": "topology spec.yaml --plan tp4-pp1-dp8-mbs1",
    "probe": "probe 127.0.0.1:9",
    "generate": f"generate spec.yaml {SMALL}",
    "check": "check train.yaml",
    "preflight": "preflight hosts.yaml",
    "validate": "validate measured.jsonl",
    "launch": "launch bundle --dry-run",
    "runs": "runs",
    "runs status": "runs status",
    "runs attach": "runs attach --lost-host-after 1s",
    "runs stop": "runs stop",
    "calibrate": f"calibrate log.jsonl --spec spec.yaml {SMALL} --plan tp4-pp1-dp8-mbs1",
    "tune": f"tune hosts.yaml {SMALL} --dry-run",
    "measure": "measure hosts.yaml",
    "show gpus": "show gpus",
    "show models": "show models",
    "show profile": "show profile h100-sxm-80gb",
    "show recipes": "show recipes --model Qwen/Qwen3-0.6B --gpu h20-sxm-96gb --context 4096",
    "version": "version",
}
"""The arguments of each verb. No host is listening, which is a valid answer too."""
RUN = (
    '{"id": 1, "cluster": {"gpu": "h100"}, "model": {"name": "Qwen/Qwen3-8B"}, "job": {"seq_len": 64}, "layout": {}}\n'
)


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    Path("spec.yaml").write_text(SPEC)
    Path("hosts.yaml").write_text(SPEC.replace("nodes: 4", "nodes: 1") + "hosts: [{address: 127.0.0.1, port: 9}]\n")
    Path("train.yaml").write_text("stage: pt\n")
    Path("run.jsonl").write_text(RUN.replace('"layout": {}', '"layout": {"tp": 1}') + RUN)
    Path("measured.jsonl").write_text(measured_run() + "\n")
    line = '{{"current_steps": {0}, "total_steps": 99, "elapsed_time": "0:00:{0}"}}'
    Path("log.jsonl").write_text("\n".join(line.format(second) for second in range(10, 60)))
    bundle_at(Path("bundle"))
    node = NodeRecord(node=0, name="h", address="127.0.0.1", port=9, run_dir="/w", script="n.sh")
    made = RunRecord(run_id="a-1", name="x", bundle="/b", created=record.now_text(), state="running", nodes=(node,))
    record.create(made)


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb.name not in WITHOUT_JSON], ids=lambda verb: verb.name)
def test_each_verb(cli: Cli, verb: object, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.id
    out = cli(*ASKED[name].split(), "--json").out
    if name in BARE_LISTS:
        assert all("name" in entry for entry in json.loads(out))
        return
    documents = (
        [json.loads(line) for line in out.splitlines()] if name in ("predict", "runs attach") else [json.loads(out)]
    )
    kinds = {"show profile": "profile", "show recipes": "table"}
    expected = rf"topoplan\.{kinds.get(name, name.removeprefix('runs '))}/\d"
    assert documents
    assert all(re.fullmatch(expected, document["schema"]) for document in documents)


def test_the_others_have_no_json() -> None:
    takes = {verb.name for verb in VERBS if any("--json" in option.opts for option in command(verb).params)}
    assert {verb.name for verb in VERBS} - takes == WITHOUT_JSON
