"""Commands and variables of a script, without executing it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoplan.errors import TopoplanError
from topoplan.reading.parts import Part
from topoplan.reading.session import Command, Script
from topoplan.reading.shell import read_script
from topoplan.trainers.recognizers import recognizers


def read(text: str) -> Script:
    return read_script(Part(kind="shell", name="run.sh", text=text), recognizers())


def words(text: str) -> list[list[str]]:
    return [[word.text for word in command.words] for command in read(text).commands]


def seen(command: Command) -> dict[str, str]:
    variables = command.environment.variables() if command.environment else ()
    return {variable.name: variable.value for variable in variables}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"""a 'b c' "d e" f\ g $'h\ti' "j\"k" $"l" """, [["a", "b c", "d e", "f g", "h\ti", 'j"k', "l"]]),
        ("run a#b # it's a comment\nc", [["run", "a#b"], ["c"]]),
        ('x $(which "a)b" | (cat)) `date +%s` ${A:-$(b c)}', [["x", '$(which "a)b" | (cat))', "`date +%s`", "$(b c)"]]),
        ("cat <<EOF > f\nit's ( {\nEOF\nnext <<-'X'\n\tY\n\tX\nlast", [["cat"], ["next"], ["last"]]),
        ("((n = 1 << 2))\nnext", [["next"]]),
        ("run 2>&1 >log a", [["run", "a"]]),
        ("[[ a < b ]] && run", [["run"]]),
        ("A=1 B=2\nrun $A", [["run", "1"]]),  # the grammar reads both as environment of `run`
        ("B=1\nrun $A/$B.yaml", [["run", "$A/1.yaml"]]),  # the grammar reads B.yaml as a word of its own
        ("a |\n grep -v '^$'\n\nA=2\nrun $A", [["a"], ["grep", "-v", "^$"], ["run", "2"]]),
        ("run a\\\nb \\\r\n c", [["run", "ab", "c"]]),
    ],
)
def test_words_as_bash_has_them(text: str, expected: list[list[str]]) -> None:
    assert words(text) == expected


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("$(expr 16 / $N)", "4"),
        ("`expr 2 \\* $N`", "8"),
        ("--steps=$((N * (3 + ${M})))", "--steps=20"),
        ('"$(( -9 / M ))" ', "-4"),
        ("$((7 % $N))", "3"),
        ("$((FROM_OUTSIDE * 2))", "$((FROM_OUTSIDE * 2))"),
        ("$((N / 0))", "$((N / 0))"),
        ("$((2 ** 99999999))", "$((2 ** 99999999))"),
        ("$(date)", "$(date)"),
    ],
)
def test_arithmetic_over_known_variables_is_worked_out(expression: str, expected: str) -> None:
    assert words(f"N=4 M=2\nrun {expression}") == [["run", expected]]


@pytest.mark.parametrize(
    ("text", "unclosed"),
    [
        ("a\nb 'c", ("'", 2)),
        ('a "b', ('"', 1)),
        ("a $(b", ("(", 1)),
        ("a ${b", ("{", 1)),
        ("a 'b'", None),
        ("(a", None),
    ],
)
def test_what_is_never_closed_is_noted_with_its_line(text: str, unclosed: tuple[str, int] | None) -> None:
    assert read(text).unclosed == unclosed


def test_nesting_twenty_thousand_deep_is_read_or_refused_in_time() -> None:
    for opening in ("(", "$(", '"$(', "${", "`", "((", "[[", "{ ", "if a; then "):
        read(opening * 20_000)
    with pytest.raises(TopoplanError, match="takes too long"):
        read("a | " * 20_000)


def test_variables_of_the_script_are_put_in_place() -> None:
    assert words("A=1\nB='x y'\nrun $A ${A}b \"$B\" $B $C") == [["run", "1", "1b", "x y", "x", "y", "$C"]]


@pytest.mark.parametrize(
    "command",
    [
        "$(hostname -s)",
        "`hostname -s`",
        '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "$(a $(b (c d)))",
    ],
)
def test_what_a_command_prints_is_one_word_where_its_variable_stands_without_quotes(command: str) -> None:
    assert words(f"head={command}\ntorchrun --master_addr $head --nnodes 2") == [
        ["torchrun", "--master_addr", command, "--nnodes", "2"]
    ]


def test_a_default_is_taken_and_said_to_be_assumed() -> None:
    (command,) = read("run --port ${PORT:-29500}").commands
    assert [(word.text, word.assumed) for word in command.words] == [
        ("run", False),
        ("--port", False),
        ("29500", True),
    ]


def test_options_in_a_string_over_several_lines_keep_their_lines() -> None:
    (command,) = read('ARGS="\n  --a 1 \\\n  --b 2\n"\nrun $ARGS').commands
    assert [(word.text, word.line) for word in command.words] == [
        ("run", 5),
        ("--a", 2),
        ("1", 2),
        ("--b", 3),
        ("2", 3),
    ]


def test_options_in_an_array_keep_their_lines() -> None:
    (command,) = read('ARGS=(\n  --a 1 # why\n  --b "x y"\n)\nARGS+=(--c)\nrun "${ARGS[@]}"').commands
    assert [(word.text, word.line) for word in command.words] == [
        ("run", 6),
        ("--a", 2),
        ("1", 2),
        ("--b", 3),
        ("x y", 3),
        ("--c", 5),
    ]


def test_a_command_sees_what_was_exported_before_it_and_what_stands_in_front_of_it() -> None:
    script = read("export A=1 B=2\nC=3 run one\nexport B=9\nunset A\nrun two")
    assert [seen(command) for command in script.commands] == [{"A": "1", "B": "2", "C": "3"}, {"B": "9"}]
    assert [(variable.name, variable.line) for variable in script.variables] == [("A", 1), ("B", 1), ("C", 2), ("B", 3)]


def test_an_assignment_without_export_is_not_seen_until_it_is_exported() -> None:
    script = read("A=1\nB=2\nexport B\nrun")
    assert seen(script.commands[0]) == {"B": "2"}
    assert [variable.name for variable in script.not_exported] == ["A"]


def test_set_a_exports_everything() -> None:
    assert seen(read("set -a\nA=1\nrun").commands[0]) == {"A": "1"}


def test_what_one_branch_sets_is_not_known_behind_it() -> None:
    script = read("if [ -z x ]; then\n  export A=local\n  run $A\nfi\nrun $A")
    assert [word.text for command in script.commands for word in command.words if word.text != "run"][-2:] == [
        "local",
        "$A",
    ]
    assert seen(script.commands[-1]) == {"A": "$A"}


def test_the_variable_of_a_loop_is_not_known() -> None:
    assert ["run", "$i"] in words("i=7\nfor i in 1 2; do run $i; done")


def test_operators_end_commands_and_a_background_job_is_marked() -> None:
    script = read("cd /x && run a | tee log & run b; (run c)")
    assert [(command.words[0].text, command.background) for command in script.commands] == [
        ("cd", False),
        ("run", False),
        ("tee", True),
        ("run", False),
        ("run", False),
    ]


def test_eval_reads_its_words_once_more() -> None:
    assert words('CMD="run --a 1"\neval $CMD')[-1] == ["run", "--a", "1"]


def test_values_that_double_each_time_stay_bounded() -> None:
    script = read("A=xx\n" + "A=$A$A\n" * 2000 + "run $A")
    assert sum(len(word.text) for word in script.commands[-1].words) < 5_000_000


def test_nothing_is_run(tmp_path: Path) -> None:
    target = tmp_path / "made"
    read(f"touch {target}; $(touch {target}); `touch {target}`; echo > {target}; eval 'touch {target}'")
    assert not target.exists()


@given(st.text(alphabet=st.sampled_from("ab=1 $(){}<>|&;'\"`\\\n\t#-ifthenfdoevalexport"), max_size=300))
def test_any_text_is_read_or_refused_calmly(text: str) -> None:
    try:
        script = read(text)
    except TopoplanError:
        return
    lines = text.count("\n") + 1
    assert all(1 <= word.line <= lines for command in script.commands for word in command.words)
    assert all(1 <= variable.line <= lines for variable in script.variables)
