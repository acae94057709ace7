"""Run the command line inside the test process, with a planner that answers at once."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.bed.bed import Bed
from tests.cli.live_run import LiveRun, live_run, two_hosts
from tests.samples import make_plan, usual_ranking
from tests.shipped import graded
from topoplan.bundle import draft
from topoplan.cli.main import main
from topoplan.errors import LayoutError
from topoplan.hosts import needs
from topoplan.planner import predict
from topoplan.planner.measured import MeasuredRun, shipped_runs
from topoplan.planner.plan import Plan, Ranking
from topoplan.planner.validate import Validation
from topoplan.specs.gpu_profile import OwnProfile
from topoplan.specs.spec import Spec
from topoplan.trainers.registry import writer_of
from topoplan.trainers.trainer import Trainer, TrainingPath

SPEC = """\
name: test-2x8
nodes: 4
gpus_per_node: 8
gpu: h100-sxm-80gb
nvlink_bandwidth: 900GB/s
ib_bandwidth: 400Gb/s
nics_per_node: 8
model: Qwen/Qwen3-8B
job:
  seq_len: 4096
  global_batch_size: 64
"""


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    def is_refused(self, message: str) -> bool:
        """Whether there is one message about the input, and no other output."""
        is_one = (self.code, self.out, self.err.count("\n")) == (2, "", 1) and self.err.startswith("topoplan")
        return is_one and message in self.err


Cli = Callable[..., Result]


@pytest.fixture
def graded_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the shipped runs already graded, instead of predicting them again."""

    def graded_runs(runs: Sequence[MeasuredRun], profile: OwnProfile | None) -> Validation:
        assert (runs, profile) == (shipped_runs(), None)
        return graded()

    monkeypatch.setattr("topoplan.planner.validate.validate", graded_runs)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    def run(*arguments: object) -> Result:
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        code = stop.value.code
        assert isinstance(code, int)
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(SPEC)
    return path


@pytest.fixture
def fake_search(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replace the search by `usual_ranking`; the list holds the arguments of each call."""
    calls: list[dict[str, Any]] = []

    def rank(spec: Spec, **options: Any) -> Ranking:
        calls.append({"spec": spec, **options})
        return replace(usual_ranking(), spec=spec)

    monkeypatch.setattr("topoplan.planner.search.rank", rank)
    return calls


@pytest.fixture
def fake_predict(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace predictions by plans with made-up figures; the list holds the layouts requested."""
    asked: list[Any] = []

    def made_up(spec: Spec, layout: dict[str, Any]) -> Plan:
        asked.append(layout)
        if layout["tp"] > 8:
            raise LayoutError(f"tp {layout['tp']} > 8 GPUs of a node")
        if layout["tp"] == 7:
            raise ZeroDivisionError("division by zero")
        return make_plan(tp=layout["tp"], pp=layout.get("pp", 1), device_gib=99.0 if layout.get("pp") == 16 else 50.0)

    monkeypatch.setattr("topoplan.planner.predict.predict", made_up)
    return asked


@pytest.fixture
def worked_out(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often a plan is predicted, and a trainer asked for its files."""
    counts: Counter[str] = Counter()

    def counted(name: str, job: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return job(*arguments, **options)

        return call

    def counting_writer(*arguments: Any) -> tuple[Trainer, TrainingPath]:
        trainer, way = writer_of(*arguments)
        return trainer, replace(way, files=counted("files", way.files))

    for module in (draft, needs):
        monkeypatch.setattr(module, "writer_of", counting_writer)
    monkeypatch.setattr(predict, "plan_of", counted("plan", predict.plan_of))
    return counts


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as bed:
        yield bed


@pytest.fixture
def live(hosts: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveRun]:
    with live_run(hosts, tmp_path, monkeypatch) as run:
        yield run
