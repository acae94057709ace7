"""A cached search answers the same question, and no other."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import topoplan
from tests.cli.conftest import Cli
from tests.reading.setups import FULL_YAML
from tests.samples import make_ranking, make_spec
from topoplan.cli import search as kept_searches
from topoplan.cli.search import SearchCache, search, searches, searches_directory
from topoplan.planner import search as searching
from topoplan.planner.plan import Ranking
from topoplan.planner.search import rank
from topoplan.specs.load import load_spec
from topoplan.specs.spec import Spec


def test_several_searches_share_one_line_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []

    def rank(spec: Any, *, progress: Any) -> Ranking:
        progress(1, 10)
        return make_ranking(spec=spec)

    monkeypatch.setattr("topoplan.planner.search.rank", rank)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr(
        "topoplan.report.progress.ProgressLine.__call__", lambda self, done, total: shown.append((done, total))
    )
    with searches(4, fresh=True) as search_next:
        search_next(make_spec())
        search_next(make_spec(global_batch_size=128))
    assert shown == [(1, 40), (11, 40)]


SPECS = Path(__file__).parents[2] / "cluster_specs"
SPEC = """\
name: two
nodes: 1
gpus_per_node: 2
gpu: h100-sxm-80gb
model: Qwen/Qwen3-0.6B
job: {seq_len: 4096, global_batch_size: 8, pin: {micro_batch_size: 1}}
"""


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide an empty cache directory of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "topoplan" / "searches"


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[Spec]:
    """Return a list that records the specs searched."""
    asked: list[Spec] = []

    def counted(spec: Spec, **options: Any) -> Any:
        asked.append(spec)
        return rank(spec, **options)

    monkeypatch.setattr(searching, "rank", counted)
    return asked


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    path = tmp_path / "two.yaml"
    path.write_text(SPEC)
    return path


def timeless(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if '"elapsed_s"' not in line)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("h100-4x8", ("--set", "nodes=2", "--pin", "cp=1,tp=2")),
        ("h100-4x8", ("--set", "nodes=1", "--set", "finetuning=lora", "--pin", "micro_batch_size=1")),
        (
            "rtx4090-2x8-pcie",
            ("--set", "nodes=1", "--set", "gpus_per_node=1", "--model", "Qwen/Qwen3-1.7B"),
        ),  # too large
    ],
)
def test_an_answer_is_the_same_from_a_search_of_before(
    cli: Cli, kept: Path, searched: list[Spec], tmp_path: Path, name: str, options: tuple[str, ...]
) -> None:
    asked, bundle = (SPECS / f"{name}.yaml", *options), tmp_path / "bundle"
    verbs = (
        ("rank", *asked, "--json", "--top", 20),
        ("rank", *asked, "--top", 12),
        ("explain", *asked, "--versus", 2),
        ("generate", *asked, "--plan", 2, "--force", "-o", bundle),
    )

    def told(*more: str) -> list[tuple[int, str, str]]:
        answers = [cli(*verb, *more) for verb in verbs]
        return [(one.code, timeless(one.out), one.err) for one in answers]

    without = told("--no-cache")
    files = {path.name: path.read_bytes() for path in bundle.rglob("*") if path.is_file()}
    assert not kept.exists()
    searched.clear()
    first = cli(*verbs[0])
    assert searched
    searched.clear()
    assert told() == without
    assert cli(*verbs[0]) == first, "to the second that the search took"
    assert {path.name: path.read_bytes() for path in bundle.rglob("*") if path.is_file()} == files
    assert not searched


@pytest.mark.parametrize("verb", ["explain", "timeline", "topology", "what-if", "size", "generate", "check"])
def test_every_verb_that_searches_knows_what_rank_found(
    cli: Cli, kept: Path, searched: list[Spec], spec_file: Path, tmp_path: Path, verb: str
) -> None:
    (tmp_path / "train.yaml").write_text(FULL_YAML)
    more = {
        "topology": ("--plan", "1"),
        "what-if": ("--set", "nodes=1", "--set", "global_batch_size=8,16"),
        "size": ("--max-hours", "1e6", "--tokens", "1M"),
        "generate": ("-o", tmp_path / "bundle", "--force"),
    }.get(verb, ())
    arguments = (
        (tmp_path / "train.yaml", "--cluster", SPECS / "h100-4x8.yaml") if verb == "check" else (spec_file, *more)
    )
    first = cli(verb, *arguments)
    assert len(searched) == len({repr(spec) for spec in searched}) > 0
    searched.clear()
    assert cli(verb, *arguments) == first
    assert not searched
    cli(verb, *arguments, "--no-cache")
    assert searched


def test_cases_that_are_alike_are_searched_once(spec_file: Path, searched: list[Spec]) -> None:
    with searches(3, fresh=True) as find:
        first, again = find(load_spec(spec_file)), find(load_spec(spec_file))
        find(load_spec(spec_file, overrides=("global_batch_size=16",)))
    assert first.plans == again.plans
    assert len(searched) == 2


CHANGES: dict[str, Callable[[Path], Spec]] = {
    "margin": lambda path: load_spec(path, keys={"--margin": ("margin", "7%")}),
    "pin": lambda path: load_spec(path, pins=("tp=2",)),
    "job": lambda path: load_spec(path, overrides=("lora_rank=16", "finetuning=lora")),
    "model": lambda path: load_spec(path, model="Qwen/Qwen3-1.7B"),
    "environment": lambda path: load_spec(path, overrides=("env={NCCL_DEBUG: INFO}",)),
    "backend": lambda path: replace(load_spec(path), backends=("fsdp2",)),
    "trainer": lambda path: replace(load_spec(path), trainer="swift"),
    "past": lambda path: replace(load_spec(path), path=None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_question_is_searched(kept: Path, searched: list[Spec], spec_file: Path, change: str) -> None:
    search(load_spec(spec_file), fresh=False)
    search(CHANGES[change](spec_file), fresh=False)
    assert len(searched) == 2


def test_another_profile_is_another_question(kept: Path, searched: list[Spec], cli: Cli, spec_file: Path) -> None:
    own = spec_file.with_name("own.yaml")
    cli("profile", "h100-sxm-80gb", "-o", own)
    for text in (own.read_text(), own.read_text().replace("\ngemm_efficiency: 0.", "\ngemm_efficiency: 0.1")):
        own.write_text(text)
        search(load_spec(spec_file, profile=str(own)), fresh=False)
    assert len(searched) == 2


def test_specs_are_values_through_and_through(spec_file: Path) -> None:
    """Values missing from a spec's repr, or shown there by their address, would be missing from the cache key."""

    def parts(value: Any) -> None:
        assert " at 0x" not in repr(value)
        if is_dataclass(value):
            assert all(field.repr for field in fields(value))
            [parts(getattr(value, field.name)) for field in fields(value)]
        elif isinstance(value, (tuple, dict)):
            [parts(one) for one in (value.values() if isinstance(value, dict) else value)]
        else:
            assert value is None or isinstance(value, (bool, int, float, str))

    for path in (*SPECS.glob("*.yaml"), spec_file):
        parts(load_spec(path))
        assert repr(load_spec(path)) == repr(load_spec(path))


def test_a_change_of_version_or_code_is_another_question(
    kept: Path, searched: list[Spec], spec_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "package").mkdir()
    module = tmp_path / "package" / "module.py"
    module.write_text("ONE = 1\n")

    def changed(when_s: float) -> None:
        os.utime(module, (when_s, when_s))
        kept_searches._code.cache_clear()
        search(load_spec(spec_file), fresh=False)

    monkeypatch.setattr(topoplan, "__path__", [str(tmp_path / "package")])
    monkeypatch.setattr(kept_searches, "STARTED_S", module.stat().st_ctime + 60)
    try:
        for when_s, count in ((1000.0, 1), (1000.5, 2), (1000.5, 3)):
            changed(when_s)  # setting the modification time updates the change time of the file system
            assert len(searched) == count
        search(load_spec(spec_file), fresh=False)
        assert len(searched) == 3
        monkeypatch.setattr(topoplan, "__version__", "0.1.1")
        search(load_spec(spec_file), fresh=False)
        assert len(searched) == 4
        monkeypatch.setattr(kept_searches, "version", lambda name: "99.0")
        search(load_spec(spec_file), fresh=False)
        assert len(searched) == 5
        # Files newer than the program: it is unknown which version was imported.
        monkeypatch.setattr(kept_searches, "STARTED_S", module.stat().st_ctime)
        kept_searches._code.cache_clear()
        assert searches_directory() is None
    finally:
        monkeypatch.undo()
        kept_searches._code.cache_clear()


def test_part_of_a_search_is_not_kept(kept: Path, spec_file: Path) -> None:
    for stop in (1, 3):
        SearchCache(kept).keep(rank(load_spec(spec_file), progress=lambda done, total, stop=stop: done >= stop))
    assert not kept.exists()


def documents() -> dict[str, Callable[[dict[str, Any]], Any]]:
    """Return cached searches with one defect each."""
    return {
        "a list": lambda kept: [kept],
        "no layouts": lambda kept: {key: value for key, value in kept.items() if key != "layouts"},
        "a number that is text": lambda kept: kept | {"elapsed_s": "1"},
        "a layout that is none": lambda kept: kept | {"layouts": [7, *kept["layouts"][1:]]},
        "degrees of text": lambda kept: kept | {"layouts": [{"degrees": {"tp": "2"}}, *kept["layouts"][1:]]},
        "another question": lambda kept: kept | {"question": "0" * 64},
    }


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda packed: b"",
    "cut": lambda packed: packed[:-20],
    "not packed": lambda packed: b"{}",
    "a bit": lambda packed: packed[:200] + bytes([packed[200] ^ 4]) + packed[201:],
    "pickled": lambda packed: gzip.compress(b"\x80\x04\x95N."),
    "large": lambda packed: gzip.compress(b" " * (33 * 2**20)),
}


def test_what_is_damaged_is_searched_again(kept: Path, searched: list[Spec], spec_file: Path) -> None:
    spec = load_spec(spec_file)
    whole = search(spec, fresh=False)
    (file,) = kept.iterdir()
    packed = file.read_bytes()
    document = json.loads(gzip.decompress(packed))
    damaged = {name: damage(packed) for name, damage in DAMAGE.items()}
    damaged |= {name: gzip.compress(json.dumps(wrong(document)).encode()) for name, wrong in documents().items()}
    for name, data in damaged.items():
        file.write_bytes(data)
        searched.clear()
        assert search(spec, fresh=False).plans == whole.plans, name
        assert len(searched) == 1, name
        search(spec, fresh=False)
        assert len(searched) == 1, f"{name}: and kept again"


def test_what_is_no_file_of_ones_own_is_left_alone(
    kept: Path, searched: list[Spec], spec_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search(load_spec(spec_file), fresh=False)
    (file,) = kept.iterdir()
    file.rename(kept / "elsewhere")
    file.symlink_to(kept / "elsewhere")
    search(load_spec(spec_file), fresh=False)
    file.unlink()
    os.mkfifo(file)  # has no writer, so that reading it would block forever
    search(load_spec(spec_file), fresh=False)
    assert len(searched) == 3
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    search(load_spec(spec_file), fresh=False)
    assert len(searched) == 4


@pytest.mark.parametrize("place", ["a file", "no right to write", "no home"])
def test_where_nothing_can_be_kept_everything_is_searched(
    cli: Cli, searched: list[Spec], spec_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if place == "a file":
        (tmp_path / "cache").write_text("")
    elif place == "no right to write":
        (tmp_path / "cache").mkdir(mode=0o500)
        if os.geteuid() == 0:  # root can write anywhere
            monkeypatch.setattr("tempfile.NamedTemporaryFile", lambda **_: (tmp_path / "cache" / "no" / "x").open("wb"))
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    first, second = cli("rank", spec_file, "--json"), cli("rank", spec_file, "--json")
    assert (first.code, first.err, timeless(first.out)) == (0, "", timeless(second.out))
    assert len(searched) % 2 == 0
    assert searched


def test_the_oldest_make_room(kept: Path, spec_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, ranking = SearchCache(kept), rank(load_spec(spec_file))
    specs = [load_spec(spec_file, overrides=(f"epochs={epochs}",)) for epochs in range(1, 5)]
    for age, spec in enumerate(specs):
        store.keep(replace(ranking, spec=spec))
        for file in kept.iterdir():
            os.utime(file, (file.stat().st_mtime - 100,) * 2)
        if age == 0:
            monkeypatch.setattr(kept_searches, "MOST_BYTES", 2.5 * next(kept.iterdir()).stat().st_size)
    found = [SearchCache(kept).find(spec) is not None for spec in specs]
    assert found == [False, False, True, True]


WRITER = """\
import sys
from dataclasses import replace
from pathlib import Path
from topoplan.cli.search import SearchCache
from topoplan.planner.search import rank
from topoplan.specs.load import load_spec
spec = load_spec(sys.argv[1])
ranking, store = rank(spec), SearchCache(Path(sys.argv[2]))
for _ in range(20):
    store.keep(ranking)
    assert SearchCache(Path(sys.argv[2])).find(spec) is not None
"""


def test_two_processes_that_write_the_same_are_in_nobodys_way(kept: Path, spec_file: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(spec_file), str(kept)]
    with ThreadPoolExecutor() as pool:
        ends = list(pool.map(lambda _: subprocess.run(command, capture_output=True, check=False), range(2)))
    assert [(end.returncode, end.stderr) for end in ends] == [(0, b"")] * 2
    assert len(list(kept.iterdir())) == 1, "and nothing half written is left"
