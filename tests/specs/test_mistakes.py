from typing import Any

import pytest

from topoplan.errors import SpecError
from topoplan.specs.forms import JobForm, PinForm, SpecForm
from topoplan.specs.mistakes import check_form, keys_of, likely_key
from topoplan.specs.source import KeyPath, dotted

JOB = {"seq_len": 4096, "global_batch_size": 64}


def _place(path: KeyPath) -> str:
    return f"spec.yaml:{7 + len(path)}"


def _refused(**keys: Any) -> str:
    with pytest.raises(SpecError) as error:
        check_form(SpecForm, {"gpu": "h100-sxm-80gb", "nodes": 4, **keys}, _place)
    message = str(error.value)
    assert "pydantic" not in message
    return message


def test_an_unknown_key_like_no_other_lists_what_there_is() -> None:
    message = _refused(job={**JOB, "zzz": 1})
    assert "expected one of seq_len, global_batch_size, precision" in message
    assert message.endswith("other keys of the trainer go under `trainer:`")


def test_a_required_key_under_another_tools_name_is_one_mistake() -> None:
    message = _refused(job={"cutoff_len": 4096, "global_batch_size": 64})
    assert message == "spec.yaml:9: unknown key 'cutoff_len' in `job`; did you mean 'seq_len'?"


def test_a_missing_key_says_what_to_add() -> None:
    assert _refused(job={"global_batch_size": 64}) == "spec.yaml:8: `seq_len` is missing in `job`; add `seq_len: 4096`"


def test_several_mistakes_are_one_line_each_and_no_more_than_a_few() -> None:
    with pytest.raises(SpecError) as error:
        check_form(SpecForm, {"gpu": "x", "nodes": 0, "gpus_per_node": 0, "nics_per_node": 0, "cpu_cores": 0}, _place)
    lines = str(error.value).splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("spec.yaml:8: nodes: 0 is out of range")
    assert lines[3] == "and 1 more"


def test_other_tools_words_lead_to_our_keys() -> None:
    assert likely_key("per_device_train_batch_size", keys_of(PinForm)) == "micro_batch_size"
    assert likely_key("num_train_epochs", keys_of(JobForm)) == "epochs"
    assert likely_key("nothing_like_it", keys_of(JobForm)) == ""


def test_a_path_is_written_as_it_would_be_in_python() -> None:
    assert dotted(("hosts", 0, "port")) == "hosts[0].port"
