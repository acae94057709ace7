"""Secrets of a run on the client's side; tests of where they arrive on hosts, and where not, are in test_launch.py."""

from typing import Any, cast

import pytest

from topoplan.errors import HostError, InputError
from topoplan.hosts.result import Result
from topoplan.remote.connection import Completed, Connection
from topoplan.run.events import host_failure
from topoplan.run.node import start_node
from topoplan.run.programs import ExitCode
from topoplan.run.secrets import Mask, check, take

TOKEN = "hf_" + "Abc1" * 8
NAMES = ("HF_TOKEN", "WANDB_API_KEY")


def test_values_are_taken_from_the_environment() -> None:
    both = {"HF_TOKEN": TOKEN, "WANDB_API_KEY": "w"}
    assert take(NAMES, {**both, "OTHER": "x"}) == both
    assert take((), {}) == {}


def test_what_is_not_set_is_named_with_what_to_do() -> None:
    with pytest.raises(InputError) as caught:
        take(NAMES, {"HF_TOKEN": TOKEN, "WANDB_API_KEY": ""})
    assert str(caught.value) == (
        "secrets: WANDB_API_KEY is not set here, and the spec names it; export it in the shell that calls topoplan;"
        " `read -rs WANDB_API_KEY; export WANDB_API_KEY` keeps the value out of its history"
    )
    found = check(NAMES, {})
    assert (found.outcome, found.host) == ("failure", "")
    assert found.what == "HF_TOKEN, WANDB_API_KEY are not set here, and the spec names them"
    ok = Result(name="secrets", host="", outcome="ok", what="HF_TOKEN set here")
    assert (check(("HF_TOKEN",), {"HF_TOKEN": TOKEN}), check((), {})) == (ok, None)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"Bearer {TOKEN}, and {TOKEN}", "Bearer ***, and ***"),
        (f"cut off: {TOKEN[:20]}", "cut off: ***"),
        ("hf_Abc is another", "hf_Abc is another"),
        ("two\nlines-of-it", "***"),
        ("of one line: lines-of-it", "of one line: ***"),
        ("x7 is too short to hide", "x7 is too short to hide"),
        ("esc\\x1baped", "***"),
    ],
)
def test_values_and_large_parts_of_them_are_hidden(text: str, shown: str) -> None:
    assert Mask([TOKEN, "two\nlines-of-it", "x7", "esc\x1baped"]).text(text) == shown


def test_events_and_errors_hold_none() -> None:
    mask = Mask([TOKEN])
    error = HostError(f"it said {TOKEN}", host="node0", problem="command", remedy=f"not {TOKEN}")
    assert (mask.error(error).what, mask.error(error).remedy) == ("it said ***", "not ***")
    event = mask.value(host_failure("node-00", error))
    assert TOKEN not in repr(event)
    assert event.data["what"] == "it said ***"


def test_a_host_that_says_it_back_is_not_quoted_with_it() -> None:
    class Host:
        name = "node0"

        def run(self, *words: str, **options: Any) -> Completed:
            return Completed(code=ExitCode.NOT_STARTED, stdout=b"", stderr=b"x" * 285 + TOKEN.encode())

    with pytest.raises(HostError) as caught:
        start_node(cast(Connection, Host()), run_dir="/r", script="s", environment={"HF_TOKEN": TOKEN}, deadline_s=1)
    assert "***" in str(caught.value)
    assert "Abc1" not in str(caught.value)
