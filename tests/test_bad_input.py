"""Wrong inputs, and the single message for each: where, what, what was expected, what to do.

The table is `data/bad_input.txt`: each line has an input and, after `=>`, words of its message, with `..` for omitted
parts.
"""

import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import topoplan
from topoplan.cli.main import app, main

TABLE = Path(__file__).parent / "data" / "bad_input.txt"
SPEC = {
    "name": "box",
    "nodes": "2",
    "gpus_per_node": "4",
    "gpu": "h100-sxm-80gb",
    "nvlink_bandwidth": "900GB/s",
    "ib_bandwidth": "400Gb/s",
    "nics_per_node": "4",
    "model": "Qwen/Qwen3-0.6B",
}
JOB = {"seq_len": "1024", "global_batch_size": "16", "samples": "1000", "pin": "{tp: 2, pp: 1}"}
CONFIG = {
    **{"model_type": "llama", "hidden_act": "silu", "tie_word_embeddings": False, "rms_norm_eps": 1e-6},
    **{"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096},
}
DOCUMENT: dict[str, Any] = {
    "cluster": {"gpu": "h100-sxm-80gb", "nodes": 1, "gpus_per_node": 8},
    "model": {"name": "Qwen/Qwen3-0.6B"},
    "job": {"seq_len": 1024, "global_batch_size": 16},
    "layout": {"backend": "megatron", "tp": 2},
}
TRAIN = """model_name_or_path: Qwen/Qwen3-0.6B
stage: sft
do_train: true
finetuning_type: full
dataset: ok
cutoff_len: 2048
learning_rate: 1.0e-5
bf16: true
"""
FILES = {
    "train.yaml": TRAIN,
    "nomodel.yaml": TRAIN.partition("\n")[2],
    "lr.yaml": TRAIN.replace("1.0e-5", "2e-5x"),
    "half.yaml": "cutoff_len: 2048\nlearning_rate: 1.0e-5\n",
    "compose.yaml": "services:\n  web:\n    image: nginx\n",
    "prose.sh": "echo hello\n",
    "axolotl.yaml": "base_model: x\nsequence_len: 2048\nmicro_batch_size: 2\ndatasets: [{path: x}]\n",
}
DATA_SETS = {"ok": {"file_name": "ok.json"}, "gone": {"file_name": "gone.json"}, "bad": 5}


def rows(section: str) -> list[tuple[str, str]]:
    """Return input and expected words for each line of a section."""
    (block,) = (part for part in TABLE.read_text().split("\n## ") if part.startswith(section + "\n"))
    lines = [line for line in block.splitlines()[1:] if line and not line.startswith("# ")]
    return [(left, right) for left, _, right in (line.rpartition(" => ") for line in lines)]


def spec_text(changes: str = "") -> str:
    """Return the spec with changed lines: indented ones in the job, `-` for none, and text after `+` appended as is."""
    top, job, raw = dict(SPEC), dict(JOB), ""
    for line in changes.split(" ;; ") if changes else ():
        key, _, value = line.strip().partition(": ")
        block = job if line.startswith("  ") else top
        if line.startswith("+"):
            raw += line[1:].replace("\\t", "\t") + "\n"
        elif value == "-":
            del block[key]
        else:
            block[key] = value
    lines = [f"{key}: {value}\n" for key, value in top.items()] + [raw]
    return "".join(lines if "job" in top else [*lines, "job:\n", *(f"  {key}: {job[key]}\n" for key in job)])


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide a directory with a spec and data sets; unknown models are not looked up on the network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    Path("s.yaml").write_text(spec_text())
    for name, text in FILES.items():
        Path(name).write_text(text)
    Path("loop").symlink_to("loop")
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text(json.dumps(DATA_SETS))


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    out, err = capsys.readouterr()
    assert isinstance(stop.value.code, int)
    return stop.value.code, out, err


def check_refused(capsys: pytest.CaptureFixture[str], words: str, *arguments: str) -> None:
    files = sorted(Path().rglob("*"))
    code, out, err = answer(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("topoplan")
    assert all(part in err for part in words.split(" .. ")), err
    assert sorted(Path().rglob("*")) == files


@pytest.mark.parametrize(("changes", "words"), rows("spec"))
def test_a_spec(changes: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.yaml").write_text(spec_text(changes))
    check_refused(capsys, words, "rank", "s.yaml")


@pytest.mark.parametrize(("text", "words"), rows("file"))
def test_a_file_that_is_no_spec(text: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.yaml").write_text(json.loads(text))
    check_refused(capsys, words, "rank", "s.yaml")


@pytest.mark.parametrize(("changes", "words"), rows("config.json"))
def test_a_model(changes: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = {key: value for key, value in {**CONFIG, **json.loads(changes)}.items() if value != "-"}
    Path("m").mkdir()
    Path("m/config.json").write_text(json.dumps(config))
    Path("s.yaml").write_text(spec_text("model: ./m"))
    check_refused(capsys, words, "rank", "s.yaml")


@pytest.mark.parametrize(("command", "words"), rows("options"))
def test_options(command: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(capsys, words, *shlex.split(command))


@pytest.mark.parametrize(("changes", "words"), rows("run document"))
def test_a_run_document(changes: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = {key: value for key, value in {**DOCUMENT, **json.loads(changes)}.items() if value != "-"}
    Path("run.json").write_text(json.dumps(document))
    code, out, _ = answer(capsys, "predict", "run.json", "--json")
    assert code == 2
    error = json.loads(out)["error"]
    assert all(part in error for part in words.split(" .. ")), error


@pytest.mark.parametrize(("changes", "words"), rows("said by rank"))
def test_what_can_be_planned_and_was_hardly_meant(changes: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.yaml").write_text(spec_text(changes))
    code, out, err = answer(capsys, "rank", "s.yaml", "--json", "--top", "1")
    document = json.loads(out)
    assert (code, err) == (0, "")
    said = [*document["plans"][0]["warnings"], *document.get("data_notes", ()), document["refused"] or ""]
    assert any(all(part in sentence for part in words.split(" .. ")) for sentence in said), said


@pytest.mark.parametrize(("changes", "words"), rows("said of a model"))
def test_what_a_model_is_and_was_hardly_meant_to_be(
    changes: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("m").mkdir()
    Path("m/config.json").write_text(json.dumps({**CONFIG, **json.loads(changes)}))
    Path("s.yaml").write_text(spec_text("model: ./m"))
    _, out, _ = answer(capsys, "rank", "s.yaml", "--json", "--top", "1")
    assert any(words in sentence for sentence in json.loads(out)["plans"][0]["warnings"])


@pytest.mark.parametrize(("changes", "words"), rows("said of a DeepSpeed file"))
def test_a_deepspeed_file(changes: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, **json.loads(changes)}))
    code, out, _ = answer(capsys, "check", "ds.json")
    assert code == 1
    assert all(part in out for part in words.split(" .. ")), out


def test_a_device_is_written_into_and_stays_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo("pipe")
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    for _ in range(2):
        assert answer(capsys, "init", "--force", "--job", "train.yaml", "--gpu", "h100", "-o", "pipe")[0] == 0
    assert os.read(reader, 100).startswith(b"# A spec for topoplan")
    os.close(reader)
    assert Path("pipe").is_fifo()


@pytest.mark.parametrize("stream", ["stdin", "stdout", "stderr"])
def test_a_stream_that_is_closed(
    stream: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, stream, None)
    assert answer(capsys, "init")[0] == 2


def _commands(text: str) -> set[str]:
    """Return the commands that a message suggests, except those with placeholders for the reader.

    In shell text, backticks are preceded by a backslash.
    """
    return {found[1] for found in re.finditer(r"`topoplan ([a-z][^`\\]*)\\?`", " ".join(text.split()))}


def test_every_command_that_a_message_suggests_is_one() -> None:
    package = Path(topoplan.__file__).parent
    texts = [
        TABLE.read_text(),
        *(path.read_text() for end in ("py", "toml", "j2") for path in package.rglob(f"*.{end}")),
    ]
    found = {command for text in texts for command in _commands(text)}
    assert len(found) > 40
    known = app(completion=False)
    for command in found:
        check_command(typer.main.get_command(known), shlex.split(re.sub(r"{[^}]*}", "...", command)), command)


def check_command(verb: Any, words: list[str], command: str) -> None:
    """Check that every verb has its current name, and that every option belongs to its verb."""
    while hasattr(verb, "list_commands"):
        context = typer.Context(verb)
        if words[:1] == [] or words[0] not in verb.list_commands(context):
            assert not words or words[0].startswith("-") or words[0] == "...", command
            break
        verb, words = verb.get_command(context, words[0]), words[1:]
    options = {name for parameter in verb.params for name in (*parameter.opts, *parameter.secondary_opts)}
    given = {word.partition("=")[0] for word in words if word.startswith("-")}
    assert given <= options | {"--help", "-h"}, command


def test_there_are_as_many_as_were_tried_before_and_each_once() -> None:
    lines = [line for line in TABLE.read_text().splitlines() if " => " in line]
    assert len(lines) == len({*lines}) > 229
