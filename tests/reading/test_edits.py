import json

import pytest

from tests.reading.setups import make_command, make_setup
from topoplan.reading.edits import applied, change, drop
from topoplan.reading.finding import Edit
from topoplan.reading.setup import Configuration

TEXT = """# a job
eval: no   # or steps
"quoted": 'it''s'
list: [1, 2]
block:
  inner: 1   # one
  other: 2

last: x
"""
JSON = """{
  "train_batch_size": 8,
  "fp16": {
    "enabled": true
  },
  "activation_checkpointing": {
    "profile": false
  }
}
"""


def configuration(text: str = TEXT) -> Configuration:
    return make_setup(text).configurations[0]


def test_a_value_is_replaced_and_the_comment_stays() -> None:
    edits = change(configuration(), ("eval",), value="no")
    assert applied(TEXT, edits).splitlines()[1] == 'eval: "no"   # or steps'


def test_a_key_is_renamed_in_its_quotes() -> None:
    edits = change(configuration(), ("quoted",), name="new")
    assert applied(TEXT, edits).splitlines()[2] == "\"new\": 'it''s'"


def test_a_name_and_a_value_change_together() -> None:
    edits = change(configuration(), ("block", "inner"), name="outer", value=True)
    assert applied(TEXT, edits).splitlines()[5] == "  outer: true   # one"


def test_a_block_goes_with_all_that_hangs_on_it() -> None:
    left = applied(TEXT, drop(configuration(), ("block",)))
    assert "inner" not in left
    assert left.splitlines()[-1] == "last: x"


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("{a: 1, b: 2}", ("a",)),  # more than one key on the line
        ("a: |\n  long\n  text\nb: 1", ("a",)),
        ("a: one\n  two\nb: 1", ("a",)),
        ("a: &x 1\nb: *x", ("a",)),
        ("b: 1", ("a",)),
    ],
)
def test_there_is_no_edit_where_the_line_does_not_allow_it(text: str, path: tuple[str, ...]) -> None:
    assert change(configuration(text), path, value=7) == ()


def test_json_stays_json() -> None:
    source = make_setup(JSON, "deepspeed", kind="json").configurations[0]
    last = json.loads(applied(JSON, drop(source, ("activation_checkpointing",))))
    assert last == {"train_batch_size": 8, "fp16": {"enabled": True}}
    first = json.loads(applied(JSON, drop(source, ("train_batch_size",))))
    assert list(first) == ["fp16", "activation_checkpointing"]
    changed = json.loads(applied(JSON, change(source, ("train_batch_size",), value="auto")))
    assert changed["train_batch_size"] == "auto"


def test_an_option_of_a_command_is_renamed_replaced_and_dropped() -> None:
    command = make_command({"train_type": "full", "lora_rank": "8", "max_length": "4096"})
    configuration, text = command.configurations[0], command.parts[0].text
    renamed = applied(text, change(configuration, ("train_type",), name="tuner_type"))
    assert renamed.splitlines()[1] == "    --tuner_type full \\"
    replaced = applied(text, change(configuration, ("max_length",), value=2048))
    assert replaced.splitlines()[3] == "    --max_length 2048"
    assert "lora_rank" not in applied(text, drop(configuration, ("lora_rank",)))
    assert drop(configuration, ("max_length",)) == ()  # the preceding line would end in a backslash


def test_a_new_line_ends_as_the_others_and_a_whole_text_as_it_says() -> None:
    edit = Edit(first_line=2, last_line=2, text="B: 2")
    assert applied("a: 1\r\nb: 2\r\n", [edit]) == "a: 1\r\nB: 2\r\n"
    assert applied("a: 1\r\nb: 2\r\n", [Edit(first_line=1, last_line=2, text="a: 1\nb: 2")]) == "a: 1\nb: 2\n"
