"""`topoplan init`: its output loads and ranks, whatever it was made from; and what it refuses."""

import io
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.hosts.machines import cluster
from tests.lint.test_job_file import FULL, SWIFT
from topoplan.hosts.probe import ProbeResults
from topoplan.specs.load import load_spec
from topoplan.specs.spec import Spec

H100 = ("--gpu", "h100", "--nodes", "4")
JOB = ("--model", "Qwen/Qwen3-8B", "--seq-len", "4096", "--batch", "64")


@pytest.fixture(autouse=True)
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(cli: Cli, *arguments: str) -> Spec:
    """Return the written spec, after checking that the suggested next command accepts it."""
    result = cli("init", *arguments)
    assert (result.code, result.err.count("Error")) == (0, 0)
    assert "Wrote cluster.yaml\n" in result.out
    assert result.out.rstrip().splitlines()[-1] == "Next  topoplan rank cluster.yaml"
    return load_spec("cluster.yaml")


def test_options_are_enough(cli: Cli) -> None:
    spec = written(cli, *H100, *JOB, "--set", "ib_bandwidth=200Gb/s", "--finetuning", "lora", "--pin", "tp=2")
    assert (spec.cluster.gpu.name, spec.cluster.world_size) == ("h100-sxm-80gb", 32)
    assert spec.cluster.nic_bytes_per_s == 25e9
    assert spec.cluster.assumed == ("nvlink_bandwidth", "nics_per_node")
    assert (spec.model.name, spec.job.seq_len, spec.job.global_batch_size) == ("Qwen/Qwen3-8B", 4096, 64)
    assert (spec.job.finetuning, spec.job.pin) == ("lora", {"tp": 2})


@pytest.mark.parametrize(
    ("name", "text", "batch"),
    [
        ("train.yaml", FULL, 16),
        ("train.sh", SWIFT, 64),
        ("job.yaml", "seq_len: 4096\nglobal_batch_size: 7\n", 7),
    ],
)
def test_a_file_of_a_job_is_read(cli: Cli, name: str, text: str, batch: int) -> None:
    Path(name).write_text(text)
    model = ["--model", "Qwen/Qwen3-8B"] if name == "job.yaml" else []
    spec = written(cli, "--from", name, "--gpu", "h100", *model)
    assert spec.trainer == {"train.sh": "swift", "train.yaml": "llamafactory"}.get(name)
    assert (spec.cluster.world_size, spec.job.global_batch_size) == (8, batch)
    assert ("# - the job is that of" in Path("cluster.yaml").read_text()) == (name != "job.yaml")


def test_a_bundle_gives_the_spec_that_it_was_made_from(cli: Cli) -> None:
    cards = ["--gpu", "4090", "--gpus-per-node", "4", "--model", "Qwen/Qwen2.5-7B", "--seq-len", "2k", "--batch", "32"]
    made = [*cards, "--finetuning", "qlora", "--set", "samples=10000", "--set", "dataset=mine"]
    assert cli("generate", *made, "-o", "bundle").code == 0
    spec, again = written(cli, *made), written(cli, "--from", "bundle", "--force")
    assert (again.job, again.model, again.cluster.assumed) == (spec.job, spec.model, spec.cluster.assumed)
    assert written(cli, "--from", "bundle/plan.json", "--nodes", "2", "--force").cluster.nodes == 2


@pytest.mark.parametrize("trainer", ["llamafactory", "swift"])
@pytest.mark.parametrize(
    "job", [["--finetuning", "lora", "--set", "trainer.eval_steps=7", "--pin", "tp=1,pp=1"], ["--pin", "tp=2,pp=1"]]
)
def test_a_bundle_is_ranked_for_its_trainer(cli: Cli, trainer: str, job: list[str]) -> None:
    assert cli("generate", "--gpu", "h100", *JOB, *job, "-o", "bundle", "--trainer", trainer).code == 0
    assert written(cli, "--from", "bundle").trainer == trainer


def test_hosts_say_what_they_are(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ProbeResults(reached=tuple(cluster("hgx-h20", "hgx-h20")), failed={})
    monkeypatch.setattr("topoplan.cli.probe.ask", lambda hosts, *, accept_new: asked)
    spec = written(cli, "--from-hosts", "node0", "node1", *JOB)
    assert (spec.cluster.nodes, spec.cluster.gpu.name, spec.cluster.fabric.kind) == (2, "h20-sxm-96gb", "roce")
    assert [host.address for host in spec.cluster.hosts] == ["node0", "node1"]
    assert spec.job.global_batch_size == 64
    for option in (["--gpu", "h100"], ["--set", "ib_bandwidth=1Gb/s"]):
        result = cli("init", "--from-hosts", "node0", "node1", *JOB, *option, "--force")
        assert result.code == 2
        assert "the hosts say" in result.err


def test_standard_output_has_the_spec_alone(cli: Cli) -> None:
    result = cli("init", *H100, *JOB, "-o", "-")
    assert result.out.startswith("# A spec for topoplan")
    assert result.err == ""
    assert not list(Path().iterdir())


class Terminal(io.StringIO):
    """A user's answers, line by line."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_is_asked_until_the_answers_are_right(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [
        *("h10", "h100", "two", "2", "", "lots", "none", "", "4", "infini", "roce"),
        *("Qwen/Qwen3-14", "Qwen3-14B", "sfr", "", "", "8k", "0", "32", "", "1000"),
    ]
    monkeypatch.setattr("sys.stdin", Terminal("\n".join(answers) + "\n"))
    result = cli("init")
    assert result.code == 0
    wrong = ("'h10' is not known", "'two'", "lots", "'infini'", "'Qwen/Qwen3-14' is not known", "'sfr'", "0 is out of")
    errors = [line for line in result.err.splitlines() if "Error: " in line]
    assert len(errors) == len(wrong)
    for line, words in zip(errors, wrong, strict=True):
        assert words in line
    spec = load_spec("cluster.yaml")
    assert (spec.cluster.nodes, spec.cluster.nvlink_bytes_per_s, spec.cluster.nics_per_node) == (2, 0, 4)
    assert (spec.cluster.fabric.kind, spec.cluster.assumed) == ("roce", ("ib_bandwidth",))
    assert (spec.model.name, spec.job.seq_len, spec.job.global_batch_size) == ("Qwen/Qwen3-14B", 8192, 32)
    assert spec.job.samples == 1000


def test_in_a_terminal_only_what_is_open_is_asked(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("train.yaml").write_text(FULL)
    monkeypatch.setattr("sys.stdin", Terminal("4090\n\n\n\n"))
    result = cli("init", "--from", "train.yaml", "-o", "-", "--nodes", "1")
    assert result.code == 0
    assert "\ngpu: rtx4090-24gb " in result.out
    assert "Machines" not in result.err
    assert "Model" not in result.err
    monkeypatch.setattr("sys.stdin", Terminal(""))
    result = cli("init")
    assert result.code == 130
    assert result.err.endswith("\ntopoplan: interrupted; nothing was written\n")
    assert not Path("cluster.yaml").exists()


def test_rank_takes_the_file_too_and_says_what_it_makes_of_it(cli: Cli, fake_search: list[dict[str, Any]]) -> None:
    Path("train.yaml").write_text(FULL)
    cli("init", *H100, *JOB)
    text = cli("rank", "cluster.yaml", "--job", "train.yaml").out
    assert text.startswith("The job is that of train.yaml, a file of LLaMA-Factory's:\n- a batch of 64: ")
    assert "`topoplan check train.yaml --cluster cluster.yaml` compares its own layout" in " ".join(text.split())
    assert fake_search[-1]["spec"].trainer == "llamafactory"
    job = fake_search[-1]["spec"].job
    assert (job.seq_len, job.global_batch_size, job.dataset) == (2048, 64, "identity,alpaca_en_demo")
    assert '"the job is that of train.yaml' in cli("rank", *H100, "--job", "train.yaml", "--json").out
    cli("what-if", "cluster.yaml", "--job", "train.yaml", "--set", "nodes=8")
    assert {call["spec"].job.global_batch_size for call in fake_search[-2:]} == {64}  # the same job on more machines
    cli("rank", "cluster.yaml", "--job", "train.yaml", "--batch", "32")
    assert fake_search[-1]["spec"].job.global_batch_size == 32
