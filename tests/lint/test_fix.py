"""Edits of text, and corrected copies beside the originals."""

import io
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from tests.reading.setups import setup_of
from topoplan.errors import OutputError
from topoplan.lint.check import check, corrections, fix
from topoplan.lint.fix import Correction, Recheck, apply_edits, copies, corrected, split_node_commands, write_copies
from topoplan.lint.prediction_target import PredictionTarget
from topoplan.reading.finding import Edit, Finding
from topoplan.reading.parts import Part, PartKind
from topoplan.report.check import print_fixed

PLAIN = "model_name_or_path: Qwen/Qwen3-8B\nstage: sft\ndo_train: true\ndataset: a\ntemplate: default\noutput_dir: b\n"


def part(text: str, *, kind: PartKind = "yaml", name: str = "train.yaml", label: str = "") -> Part:
    return Part(kind=kind, name=name, text=text, label=label)


def finding(of: Part, *edits: tuple[int, int, str], rule: str = "a-rule") -> Finding:
    return Finding(
        rule=rule,
        severity="error",
        part=of,
        what="is wrong",
        edits=tuple(Edit(first_line=first, last_line=last, text=text) for first, last, text in edits),
    )


@pytest.mark.parametrize(
    ("edits", "text"),
    [
        ([(2, 2, "B: 2")], "a: 1\nB: 2\nc: 3\n"),
        ([(2, 2, "")], "a: 1\nc: 3\n"),
        ([(1, 0, "z: 0")], "z: 0\na: 1\nb: 2\nc: 3\n"),
        ([(4, 3, "d: 4")], "a: 1\nb: 2\nc: 3\nd: 4\n"),
        ([(1, 2, "x: 1\ny: 2\nz: 3"), (3, 3, "")], "x: 1\ny: 2\nz: 3\n"),
        ([(2, 1, "before: b"), (2, 2, "B: 2")], "a: 1\nbefore: b\nB: 2\nc: 3\n"),
        ([(2, 1, "first: 1"), (2, 1, "second: 2")], "a: 1\nfirst: 1\nsecond: 2\nb: 2\nc: 3\n"),
        ([(3, 3, "C"), (1, 1, "A")], "A\nb: 2\nC\n"),
    ],
)
def test_edits_replace_remove_and_insert_lines(edits: list[tuple[int, int, str]], text: str) -> None:
    one = part("a: 1\nb: 2\nc: 3\n")
    found = [finding(one, edit) for edit in edits]

    assert apply_edits(one.text, found) == (text, found)


def test_a_text_without_a_last_line_break_and_one_with_carriage_returns_keep_them() -> None:
    one = part("a: 1\nb: 2")
    assert apply_edits(one.text, [finding(one, (2, 2, "B"))])[0] == "a: 1\nB"
    dos = part("a: 1\r\nb: 2\r\n")
    assert apply_edits(dos.text, [finding(dos, (1, 1, "x\ny"))])[0] == "x\r\ny\r\nb: 2\r\n"


@pytest.mark.parametrize(
    ("text", "line", "left"),
    [
        ("if a; then\n  export B=1\nfi\nc\n", 2, "if a; then\n  :\nfi\nc\n"),
        (
            "if a; then\n  b\nelse  # why\n  # and\n  export B=1\nfi\n",
            5,
            "if a; then\n  b\nelse  # why\n  # and\n  :\nfi\n",
        ),
        ("f() {\n  export B=1\n}\n", 2, "f() {\n  :\n}\n"),
        ("if a; then\n  export B=1\n  c\nfi\n", 2, "if a; then\n  c\nfi\n"),
    ],
)
def test_a_block_of_the_shell_that_loses_its_last_command_stays_one(text: str, line: int, left: str) -> None:
    one = part(text, kind="shell")
    (correction,) = corrected([one], [finding(one, (line, line, ""))], lambda parts: [])

    assert correction.after.text == left
    assert subprocess.run(["bash", "-n"], input=left, text=True, check=False).returncode == 0


def test_the_edits_of_a_finding_go_together_or_not_at_all() -> None:
    one = part("a\nb\nc\nd\n")
    first, second = finding(one, (1, 2, "ab")), finding(one, (2, 2, "B"), (4, 4, "D"))

    assert apply_edits(one.text, [first, second]) == ("ab\nc\nd\n", [first])


def test_the_same_edit_of_two_findings_is_made_once() -> None:
    one = part("a\nb\n")
    found = [finding(one, (1, 0, "new")), finding(one, (1, 0, "new"), rule="another")]

    assert apply_edits(one.text, found) == ("new\na\nb\n", found)


def words_of(wanted: dict[str, str]) -> Recheck:
    """Return a rule that replaces these lines, one per round."""

    def recheck(parts: Sequence[Part]) -> list[Finding]:
        return [
            finding(one, (number, number, wanted[line]))
            for one in parts
            for number, line in enumerate(one.text.splitlines(), start=1)
            if line in wanted
        ]

    return recheck


def test_corrected_text_is_checked_again_until_nothing_changes() -> None:
    chain = words_of({"a": "b", "b": "c"})
    parts = [part("a\nx\n"), part("x\n", name="other.yaml")]
    (found,) = corrected(parts, chain(parts), chain)

    assert (found.before, found.after.text, len(found.findings)) == (parts[0], "c\nx\n", 2)


def test_rules_that_undo_each_other_come_to_an_end() -> None:
    circle = words_of({"a": "b", "b": "a"})
    parts = [part("a\n")]

    assert len(corrected(parts, circle(parts), circle)) <= 1


def correction(before: Part, text: str) -> Correction:
    after = Part(kind=before.kind, name=before.name, text=text, label=before.label)
    return Correction(before=before, after=after, findings=(finding(before, (1, 1, text)),))


def test_a_copy_stands_beside_its_original_and_says_what_it_is(tmp_path: Path) -> None:
    original = tmp_path / "train.yaml"
    original.write_text("# mine\na: 1\n")
    one = correction(part("# mine\na: 1\n", name=str(original)), "# mine\na: 2\n")
    (copy,) = copies([one], [(one.after,)])
    write_copies([copy])

    assert copy.path == tmp_path / "train.fixed.yaml"
    assert copy.path.read_text() == "# Corrected by `topoplan check --fix` from train.yaml.\n# mine\na: 2\n"
    assert original.read_text() == "# mine\na: 1\n"
    assert copy.line(one.after, 2) == 3


def test_a_script_keeps_its_first_line_and_its_mode(tmp_path: Path) -> None:
    original = tmp_path / "run.sh"
    original.write_text("#!/bin/bash\na\n")
    original.chmod(0o750)
    one = correction(part("#!/bin/bash\na\n", kind="shell", name=str(original)), "#!/bin/bash\nb\n")
    write_copies(found := copies([one], [(one.after,)]))

    (copy,) = found
    assert copy.path.read_text() == "#!/bin/bash\n# Corrected by `topoplan check --fix` from run.sh.\nb\n"
    assert copy.path.stat().st_mode & 0o777 == 0o750
    assert [copy.line(one.after, line) for line in (1, 2)] == [1, 3]


def test_pieces_of_a_document_become_files_of_their_own(tmp_path: Path) -> None:
    name = str(tmp_path / "article.md")
    Path(name).write_text("text")
    first, second = (
        correction(part("a\n", name=name, label=f"yaml block {number}"), f"{number}\n") for number in (1, 2)
    )
    command = correction(part("c\n", name=name, kind="shell", label="bash block 2"), "C\n")
    found = copies([first, second, command], [(first.after,), (second.after,), (command.after,)])

    assert [copy.path.name for copy in found] == ["article.fixed-1.yaml", "article.fixed-2.yaml", "article.fixed.sh"]
    assert all(copy.path.parent == tmp_path for copy in found)


def test_a_command_comes_with_the_variables_above_it_whether_they_were_corrected_or_not(tmp_path: Path) -> None:
    name = str(tmp_path / "article.md")
    Path(name).write_text("text")
    variables = part("export A=1\nexport B=2\n", name=name, kind="shell", label="bash block 1")
    command = correction(part("run\n", name=name, kind="shell", label="bash block 2"), "RUN\n")
    (copy,) = copies([command], [(variables, command.after)])

    lines = copy.text.splitlines()
    assert lines[1:] == ["export A=1", "export B=2", "", "RUN"]
    assert lines[copy.line(command.after, 1) - 1] == "RUN"
    assert lines[copy.line(variables, 2) - 1] == "export B=2"
    other = correction(part("x\n", name=name), "y\n")
    assert copies([other], [(variables,)]) == ()


def test_standard_input_is_corrected_into_the_working_directory() -> None:
    one = correction(part("a\n", name="standard input"), "b\n")
    (copy,) = copies([one], [(one.after,)])

    assert copy.path == Path("stdin.fixed.yaml")


def test_a_file_of_somebody_else_is_not_written_over_and_nothing_is_half_written(tmp_path: Path) -> None:
    for name in ("one.yaml", "two.yaml"):
        (tmp_path / name).write_text("a\n")
    (tmp_path / "two.fixed.yaml").write_text("mine\n")
    both = [correction(part("a\n", name=str(tmp_path / name)), "b\n") for name in ("one.yaml", "two.yaml")]
    found = copies(both, [(one.after,) for one in both])

    with pytest.raises(OutputError, match=r"was not written by `topoplan check --fix`.*--force"):
        write_copies(found)
    assert not (tmp_path / "one.fixed.yaml").exists()
    write_copies(found, force=True)
    assert (tmp_path / "two.fixed.yaml").read_text().endswith("b\n")
    write_copies(found)  # now recognized as our own


def test_json_has_no_comments_and_is_known_by_its_text(tmp_path: Path) -> None:
    original = tmp_path / "zero.json"
    original.write_text("{}\n")
    before = part("{}\n", kind="json", name=str(original))
    one, other = correction(before, '{"a": 1}\n'), correction(before, '{"a": 2}\n')
    found = copies([one], [(one.after,)])
    write_copies(found)
    write_copies(found)

    assert (tmp_path / "zero.fixed.json").read_text() == '{"a": 1}\n'
    with pytest.raises(OutputError):
        write_copies(copies([other], [(other.after,)]))


def test_a_corrected_script_names_the_corrected_file(tmp_path: Path) -> None:
    script = part("torchrun ./train.yaml my-train.yaml\nA=1\n", kind="shell", name=str(tmp_path / "run.sh"))
    train = part("a: 1\n", name=str(tmp_path / "train.yaml"))
    for one in (script, train):
        Path(one.name).write_text(one.text)
    findings = [finding(script, (2, 2, "A=2")), finding(train, (1, 1, "a: 2"))]
    done = corrected([script, train], findings, lambda parts: [])
    run, file = (one.after for one in done)

    copied = copies(done, [(run,), (file,)], references=[(run, file)])
    assert copied[0].text.endswith("run.sh.\ntorchrun ./train.fixed.yaml my-train.yaml\nA=2\n")
    assert copies(done[:1], [(run,)], references=[(run, train)])[0].text.endswith(
        "torchrun ./train.yaml my-train.yaml\nA=2\n"
    )


def test_what_names_a_corrected_file_is_copied_and_names_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = {
        "run.sh": "FORCE_TORCHRUN=1 NPROC_PER_NODE=8 llamafactory-cli train train.yaml\n",
        "other.sh": "FORCE_TORCHRUN=1 NPROC_PER_NODE=8 llamafactory-cli train other.yaml\n",
        "Makefile": "train:\n\tFORCE_TORCHRUN=1 NPROC_PER_NODE=8 llamafactory-cli train train.yaml\n",
        "train.yaml": f"{PLAIN}deepspeed: ds.json\n",
        "other.yaml": PLAIN,
        "ds.json": '{\n  "my_key": 1,\n  "zero_optimization": {\n    "stage": 2,\n    "ofload": 1\n  }\n}\n',
    }
    for name, text in texts.items():
        Path(name).write_text(text)
    found = check(["run.sh", "other.sh", "Makefile"])
    fixed = fix(found, PredictionTarget())
    write_copies(fixed.copies)

    names = {str(copy.path): copy.names for copy in fixed.copies}
    assert names == {
        "run.fixed.sh": ("train.fixed.yaml",),
        "train.fixed.yaml": ("ds.fixed.json",),
        "ds.fixed.json": (),
    }
    assert "train train.fixed.yaml" in Path("run.fixed.sh").read_text()
    assert "deepspeed: ds.fixed.json" in Path("train.fixed.yaml").read_text()
    (copy,) = (copy for copy in fixed.copies if copy.path.suffix == ".json")
    (left,) = (one for one in fixed.after.findings if one.part in copy.parts)
    assert "ofload" in copy.text.splitlines()[copy.line(left.part, left.line or 0) - 1]
    console = Console(file=io.StringIO(), width=80)
    print_fixed(console, found, fixed)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "Wrote run.fixed.sh: names train.fixed.yaml." in printed
    assert "- Makefile still takes train.yaml: name train.fixed.yaml there" in printed


PAGE = """
```bash
export NCCL_DEBUG=INFO
```

```bash
# node 0
NNODES=2 NODE_RANK=0 MASTER_ADDR=h llamafactory-cli train train.yaml

# node 1
NNODES=2 NODE_RANK=1 \\
  MASTER_ADDR=h llamafactory-cli train train.yaml
```
"""


def test_the_commands_of_several_nodes_become_a_script_each(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    found = check([str(page)])
    first, second = fix(found, PredictionTarget()).copies

    assert first.text.splitlines()[1:] == [
        *("export NCCL_DEBUG=WARN", "", "# node 0"),
        "MASTER_PORT=29500 NNODES=2 NODE_RANK=0 MASTER_ADDR=h llamafactory-cli train train.yaml",
    ]
    assert second.text.splitlines()[1:] == [
        *("export NCCL_DEBUG=WARN", "", "", "# node 1", "MASTER_PORT=29500 NNODES=2 NODE_RANK=1 \\"),
        "  MASTER_ADDR=h llamafactory-cli train train.yaml",
    ]
    assert corrections(found) == 3


@pytest.mark.parametrize(
    "commands",
    [
        "ssh a 'NNODES=2 NODE_RANK=0 {}'\nssh b 'NNODES=2 NODE_RANK=1 {}'",
        "NNODES=2 NODE_RANK=0 {} &\nNNODES=2 NODE_RANK=1 {}",
        "if a; then\n  NNODES=2 NODE_RANK=0 {}\nelse\n  NNODES=2 NODE_RANK=1 {}\nfi",
        "NNODES=2 NODE_RANK=0 {}\nNNODES=2 NODE_RANK=0 {}",
        "NODE_RANK=$1 NNODES=2 {}\nNNODES=2 NODE_RANK=1 {}",
    ],
)
def test_what_one_script_starts_stays_one(commands: str) -> None:
    setup = setup_of(commands.format(*["llamafactory-cli train a.yaml"] * 2), name="standard input")

    assert len(setup.launches) == 2
    assert len(list(split_node_commands(setup))) == 1


def test_what_is_said_to_be_corrected_is_what_is_written(tmp_path: Path) -> None:
    """The options of a broken command are checked only once the command is whole again."""
    script = tmp_path / "run.sh"
    script.write_text("swift sft --model a --dataset b\n  --train_type lora\n")
    found = check([str(script)])
    fixed = fix(found, PredictionTarget())

    assert [one.rule for one in found.findings] == ["shell-broken-continuation"]
    assert corrections(found) == sum(len(one.findings) for copy in fixed.copies for one in copy.corrections) == 2
    console = Console(file=io.StringIO(), width=80)
    print_fixed(console, found, fixed)
    assert "then found and corrected: --train_type" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_correction_that_leaves_nothing_is_not_made(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("export NCCL_IB_TIMEOUT=20\n")
    found = check([str(tmp_path / "run.sh")])

    assert (corrections(found), fix(found, PredictionTarget()).copies) == (0, ())
