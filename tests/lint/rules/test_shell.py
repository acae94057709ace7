"""Scripts that bash reads otherwise than they look."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bundle.samples import make_spec_and_plan
from tests.reading.setups import fixed, rules_of, setup_of
from topoplan.bundle.bundle import generate
from topoplan.bundle.write import write_bundle
from topoplan.lint.rules.shell import findings
from topoplan.reading.finding import Finding
from topoplan.reading.read_setup import read_setup
from topoplan.trainers.recognisers import recognisers


def found(text: str) -> dict[str, Finding]:
    return rules_of(findings, setup_of(text))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("torchrun a.py \\\n  --b 1 \\ \n  --c 2\n", "blanks stand behind the backslash"),
        ("torchrun a.py \\\n  --b 1\n  --c 2\n", "does not end with a backslash"),
        ("torchrun a.py \\\n  --b 1 \\\n  # more\n  --c 2\n", "a comment ends the command"),
    ],
)
def test_an_option_that_fell_off_its_command(text: str, why: str) -> None:
    ((rule, finding),) = found(text).items()
    assert (rule, finding.severity) == ("shell-broken-continuation", "error")
    assert why in finding.why
    assert found(fixed(finding)) == {}


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ("torchrun \N{EM DASH}-nnodes 2 a.py\n", "torchrun --nnodes 2 a.py\n"),
        ("torchrun \N{EN DASH}\N{EN DASH}nnodes 2 a.py\n", "torchrun --nnodes 2 a.py\n"),
        (
            "torchrun a.py --b \N{LEFT DOUBLE QUOTATION MARK}c d\N{RIGHT DOUBLE QUOTATION MARK}\n",
            'torchrun a.py --b "c d"\n',
        ),
        ("export A\N{FULLWIDTH EQUALS SIGN}1\ntorchrun a.py\n", "export A=1\ntorchrun a.py\n"),
    ],
)
def test_dashes_and_quotes_of_a_text_editor(text: str, typed: str) -> None:
    finding = found(text)["shell-typographic"]
    assert finding.severity == "error"
    assert fixed(finding) == typed
    assert "shell-typographic" not in found(typed)


@pytest.mark.parametrize(
    "text",
    [
        "torchrun a.py --b 'c \N{EM DASH} \N{LEFT DOUBLE QUOTATION MARK}d\N{RIGHT DOUBLE QUOTATION MARK}'\n",
        "torchrun a.py --b it\N{RIGHT SINGLE QUOTATION MARK}s  # \N{EM DASH}-c\n",
        "echo \N{LEFT DOUBLE QUOTATION MARK}a\N{RIGHT DOUBLE QUOTATION MARK}\ntorchrun a.py\n",
    ],
)
def test_a_text_may_have_the_dashes_and_quotes_of_print(text: str) -> None:
    assert "shell-typographic" not in found(text)


def test_a_variable_as_kubernetes_writes_it() -> None:
    text = "torchrun --nnodes 2 \\\n  --master_addr $(MASTER_ADDR) --node_rank $((RANK)) a.py\n"
    finding = found(text)["shell-command-for-variable"]
    assert (finding.severity, finding.line) == ("warning", 2)
    assert "--master_addr ${MASTER_ADDR} --node_rank $((RANK)) a.py" in fixed(finding)
    assert "shell-command-for-variable" not in found("ADDR() { hostname; }\ntorchrun --master_addr $(ADDR) a.py\n")
    assert "shell-command-for-variable" not in rules_of(
        findings, setup_of("a:\n\ttorchrun $(ARGS) a.py\n", name="Makefile")
    )


def test_a_quote_that_is_never_closed() -> None:
    finding = found("torchrun a.py\ntorchrun b.py --system 'it\n")["shell-unclosed-quote"]
    assert (finding.severity, finding.line) == ("error", 2)


def test_line_ends_of_windows() -> None:
    ((rule, finding),) = found("export A=1\r\ntorchrun \\\r\n  a.py\r\n").items()
    assert rule == "shell-windows-lines"
    assert fixed(finding) == "export A=1\ntorchrun \\\n  a.py\n"


def test_a_variable_for_the_shell_alone() -> None:
    ((rule, finding),) = found("NCCL_DEBUG=INFO\ntorchrun a.py\n").items()
    assert rule == "env-not-exported"
    assert fixed(finding).startswith("export NCCL_DEBUG=INFO\n")


@pytest.mark.parametrize(
    "text",
    [
        "NNODES=2\nNODE_RANK=0\ntorchrun --nnodes $NNODES --node_rank ${NODE_RANK} a.py\n",
        "NCCL_DEBUG=INFO\nexport NCCL_DEBUG\ntorchrun a.py\n",
        "PORT=1\ntorchrun --master_port $PORT a.py\n",
        "torchrun a.py \\\n  --b 1\n\necho done -- --x\n",
    ],
)
def test_right_scripts_give_nothing(text: str) -> None:
    assert found(text) == {}


def test_bundles_of_topoplan_give_nothing(tmp_path: Path) -> None:
    assert list(findings(read_setup(["generated/h100-4x8"], recognisers()))) == []
    spec, plan = make_spec_and_plan()
    write_bundle(generate(spec, plan), tmp_path / "bundle")
    assert list(findings(read_setup([str(tmp_path / "bundle")], recognisers()))) == []


def test_what_the_starter_does_not_read_needs_no_export() -> None:
    assert found("NODE_RANK=0\ntorchrun --nnodes 1 a.py\n") == {}
    assert "env-not-exported" in found("NODE_RANK=0\nllamafactory-cli train a.yaml\n")
