"""ms-swift's node scripts, run by a real bash: how torchrun is started."""

import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.bundle.samples import HOSTS
from tests.bundle.shell_scripts import assert_sound
from tests.bundle.test_node_script import NAMES, VALUES, start
from tests.sizes import examples
from tests.trainers.swift.plans import WITH_MEMORY, files_for
from topoplan.bundle.write import write_bundle

# Stands in for Python: finds every module, reads train.yaml with the real one, and records torchrun's arguments.
PYTHON = f"""#!/bin/bash
case "$1 $2" in
  "- "*) exit 0 ;;
  -c*) exec {sys.executable} "$@" ;;
esac
printf '%s\\0' "$@" > "$PROBE/argv"
env -0 > "$PROBE/env"
printf '%s' "$PWD" > "$PROBE/cwd"
printf '%s' "$$" > "$PROBE/pid"
"""
MODEL = "models/Qwen/Qwen3-8B"


def make_node(root: Path, files: dict[str, str] | None = None, *, samples: str = "samples.jsonl", **what: Any) -> Path:
    """Write a bundle and all that its node 1 needs; the working directory is root/work."""
    inside, python = root / "work", root / "venv" / "bin" / "python"
    model = inside / what.get("job", {}).get("trainer", {}).get("model", MODEL)
    for directory in (model, python.parent, (inside / samples).parent):
        directory.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text("{}")
    (inside / samples).touch()
    python.write_text(PYTHON)
    python.chmod(0o755)
    hosts = tuple(replace(host, workdir=str(inside), venv=str(root / "venv")) for host in HOSTS)
    cluster = replace(what.pop("cluster", WITH_MEMORY), hosts=hosts)
    bundle = root / "bundle $x 'ü'"
    write_bundle(files or files_for(cluster=cluster, **what), bundle)
    return bundle


def arguments(argv: list[str], module: str) -> dict[str, list[str]]:
    """Return option -> values for the arguments after the module."""
    assert argv[:2] == ["-m", "torch.distributed.run"]
    place = argv.index(module)
    assert argv[place - 1] == "-m"
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in argv[place + 1 :]:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            values = found.setdefault(name, [])
            values += [value] if equals else []
        else:
            values.append(word)
    return found


@pytest.mark.parametrize(
    ("what", "module"),
    [
        ({}, "swift.cli.sft"),
        ({"job": {"stage": "pt"}}, "swift.cli.pt"),
        ({"backend": "mca"}, "swift.cli._megatron.sft"),
        ({"backend": "megatron", "job": {"stage": "pt"}}, "swift.cli._megatron.pt"),
    ],
)
def test_every_key_of_the_yaml_is_an_argument_of_the_module(tmp_path: Path, what: dict[str, Any], module: str) -> None:
    bundle = make_node(tmp_path, **what)
    started = start(bundle / "node-01.sh", tmp_path / "probe")
    assert started.code == 0, started.stderr
    values = yaml.safe_load((bundle / "train.yaml").read_text(encoding="utf-8"))
    assert arguments(started.argv, module) == {
        key: list(map(str, value)) if isinstance(value, list) else [str(value)] for key, value in values.items()
    }
    assert started.option("--node_rank") == "1"
    assert started.option("--nnodes") == "4"
    assert started.env["SWIFT_CONFIG_FILE"] == f"{bundle}/train.yaml"


@pytest.mark.parametrize(
    ("backend", "option", "file"), [("deepspeed", "deepspeed", "ds_config.json"), ("fsdp2", "fsdp", "fsdp.json")]
)
def test_the_file_that_says_how_to_shard_is_the_one_of_the_bundle(
    tmp_path: Path, backend: str, option: str, file: str
) -> None:
    bundle = make_node(tmp_path, backend=backend)
    started = start(bundle / "node-01.sh", tmp_path / "probe")
    # argparse uses the last one.
    assert arguments(started.argv, "swift.cli.sft")[option] == [file, f"{bundle}/{file}"]


@pytest.mark.parametrize(
    ("backend", "mark", "wanted"),
    [
        ("ddp", "trainer_state.json", {"resume_from_checkpoint": ["saves/r/checkpoint-100"]}),
        (
            "mca",
            "latest_checkpointed_iteration.txt",
            {"mcore_model": ["saves/r/checkpoint-100"], "finetune": ["false"]},
        ),
    ],
)
def test_the_last_checkpoint_that_is_whole_is_named(
    tmp_path: Path, backend: str, mark: str, wanted: dict[str, list[str]]
) -> None:
    bundle = make_node(tmp_path, backend=backend, job={"trainer": {"output_dir": "saves/r"}})
    module = "swift.cli.sft" if backend == "ddp" else "swift.cli._megatron.sft"
    for step in (20, 100, 9):
        checkpoint = tmp_path / "work" / "saves" / "r" / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / mark).write_text("{}")
        (checkpoint / "model.safetensors").write_text("weights")
    (tmp_path / "work" / "saves" / "r" / "checkpoint-200").mkdir()
    found = arguments(start(bundle / "node-01.sh", tmp_path / "probe").argv, module)
    assert {key: found[key] for key in wanted} == wanted
    shutil.rmtree(tmp_path / "work" / "saves")
    found = arguments(start(bundle / "node-01.sh", tmp_path / "probe").argv, module)
    assert not set(wanted) & set(found)


def test_a_yaml_that_cannot_be_read_stops_the_script(tmp_path: Path) -> None:
    bundle = make_node(tmp_path)
    (bundle / "train.yaml").write_text("a: [")
    started = start(bundle / "node-01.sh", tmp_path / "probe")
    assert started.code == 2
    assert "train.yaml cannot be read" in started.stderr


def test_without_samples_the_script_says_so(tmp_path: Path) -> None:
    bundle = make_node(tmp_path, job={"dataset": None})
    started = start(bundle / "node-01.sh", tmp_path / "probe")
    assert started.code == 2
    assert "no data set is configured; set dataset in train.yaml" in started.stderr
    bundle = make_node(tmp_path / "other", job={"dataset": "nowhere.jsonl"})
    started = start(bundle / "node-01.sh", tmp_path / "probe")
    assert "no data set at nowhere.jsonl" in started.stderr


@settings(deadline=None, max_examples=examples(25), suppress_health_check=list(HealthCheck))
@given(model=NAMES, samples=NAMES, said=VALUES, several=st.lists(VALUES, max_size=2))
def test_no_name_can_break_a_script_or_run_a_command(model: str, samples: str, said: str, several: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        samples = f"data/{samples.replace(',', '')}.jsonl"
        trainer = {"model": f"models/{model}", "system": said, "model_author": [f"x{word}" for word in several]}
        bundle = make_node(root, samples=samples, job={"dataset": samples, "trainer": trainer})
        started = start(bundle / "node-01.sh", root / "probe")
        assert started.code == 0, started.stderr
        place = started.argv.index("swift.cli.sft")
        words = started.argv[place + 1 :]
        assert f"--system={said}" in words
        assert f"--model=models/{model}" in words
        assert f"--dataset={samples}" in words
        assert words[words.index("--model_author") + 1 :][: len(several)] == trainer["model_author"]
        assert not list(root.rglob("PWNED"))


@pytest.mark.parametrize(
    "what", [{}, {"backend": "deepspeed"}, {"backend": "fsdp2"}, {"backend": "mca"}, {"job": {"dataset": "a $x b.csv"}}]
)
def test_every_script_passes_bash_and_shellcheck(what: dict[str, Any]) -> None:
    files = files_for(**what)
    assert_sound(files["node-00.sh"], files["node-01.sh"])


def test_adapters_are_gone_on_with_beside_their_model_and_not_from_what_was_merged(tmp_path: Path) -> None:
    job = {"finetuning": "lora", "trainer": {"output_dir": "saves/r"}}
    bundle = make_node(tmp_path, backend="megatron", job=job)
    for name in ("checkpoint-20", "checkpoint-100", "checkpoint-100-merged"):
        checkpoint = tmp_path / "work" / "saves" / "r" / name
        checkpoint.mkdir(parents=True)
        (checkpoint / "latest_checkpointed_iteration.txt").write_text("100")
        (checkpoint / "__0_0.distcp").write_text("weights")
    found = arguments(start(bundle / "node-01.sh", tmp_path / "probe").argv, "swift.cli._megatron.sft")
    assert found["mcore_adapter"] == ["saves/r/checkpoint-100"]
    assert found["finetune"] == ["false"]
    assert "mcore_model" not in found
