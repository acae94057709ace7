"""Which findings are reported, chosen by options and by comments in the file."""

import pytest

from tests.reading.setups import setup_of
from topoplan.errors import InputError
from topoplan.lint.check import check_setup
from topoplan.lint.finding_filter import FindingFilter, chosen
from topoplan.lint.prediction_target import PredictionTarget

SCRIPT = """export NCCL_DEBUG=INFO
NNODES=2 NODE_RANK=0 \\
  MASTER_ADDR=localhost NCCL_P2P_DISABLE=1 \\
  llamafactory-cli train a.yaml
"""
LOG, PEER, PORT = "env-nccl-log", "env-nccl-debugging", "launch-missing-master-port"
ALL = {LOG, PEER, PORT, "launch-file-not-found"}


def told(text: str, choice: FindingFilter | None = None) -> set[str]:
    checked = check_setup(setup_of(text, name="run.sh"), PredictionTarget(), choice or FindingFilter())
    assert checked.ignored + len(checked.findings) == len(ALL)
    return {one.rule for one in checked.findings}


@pytest.mark.parametrize(
    ("choice", "rules"),
    [
        (FindingFilter(), ALL),
        (FindingFilter(select=("env",)), {LOG, PEER}),
        (FindingFilter(select=("env", "launch"), ignore=("launch-file-not-found", PEER)), {LOG, PORT}),
        (FindingFilter(ignore=("env-nccl",)), ALL - {LOG, PEER}),
        (FindingFilter(select=("env-nccl-lo",)), set()),  # only whole words match
    ],
)
def test_rules_are_chosen_by_their_names_and_how_these_begin(choice: FindingFilter, rules: set[str]) -> None:
    assert told(SCRIPT, choice) == rules


@pytest.mark.parametrize(
    ("line", "comment", "left_out"),
    [
        (1, "export NCCL_DEBUG=INFO  # topoplan: ignore[env-nccl-log]", {LOG}),
        (1, "export NCCL_DEBUG=INFO  # topoplan: ignore", {LOG}),
        (1, "export NCCL_DEBUG=INFO  # topoplan:ignore[launch, env]", {LOG}),
        (1, "export NCCL_DEBUG=INFO  # topoplan: ignore[launch]", set()),
        (1, "# topoplan: ignore[env]\nexport NCCL_DEBUG=INFO", {LOG}),
        (
            1,
            "export NCCL_DEBUG=INFO\n# on every node\n# topoplan: ignore[env-nccl-debugging, launch]",
            ALL - {LOG},
        ),
        (1, "export NCCL_DEBUG=INFO\n# topoplan: ignore-file[env]\necho", {LOG, PEER}),
        (1, "export NCCL_DEBUG=INFO\n# topoplan: ignore-file\necho", ALL),
    ],
)
def test_a_comment_answers_for_a_line_a_command_or_the_file(line: int, comment: str, left_out: set[str]) -> None:
    lines = SCRIPT.splitlines()
    lines[line - 1] = comment
    assert told("\n".join(lines) + "\n") == ALL - left_out


def test_a_key_of_yaml_is_answered_for_in_its_line() -> None:
    text = "stage: sft\nmodel_name_or_path: a\nlearnig_rate: 1.0e-4{}\n"
    for comment, count in (("", 1), ("  # topoplan: ignore[llamafactory-unknown-key]", 0)):
        checked = check_setup(setup_of(text.format(comment), name="train.yaml"), PredictionTarget())
        assert sum(one.rule == "llamafactory-unknown-key" for one in checked.findings) == count


def test_a_name_that_no_rule_has_is_refused() -> None:
    assert chosen(["launch,env-nccl-log", "plan-slower"], "--select") == ("launch", "env-nccl-log", "plan-slower")
    with pytest.raises(InputError, match=r"--ignore: there is no rule 'env-nccl-logs'.*did you mean 'env-nccl-log'"):
        chosen(["env-nccl-logs"], "--ignore")


def test_a_name_like_no_rule_is_told_where_the_rules_are() -> None:
    with pytest.raises(
        InputError, match=r"there is no rule 'xyzzy'; expected .* such as `launch`; docs/checks.md lists"
    ):
        chosen(["xyzzy"], "--select")
