from typing import Any

import pytest

from topoplan.errors import SpecError
from topoplan.specs.forms import SpecForm
from topoplan.specs.mistakes import check_form
from topoplan.specs.source import KeyPath

JOB = {"seq_len": 4096, "global_batch_size": 64}


def _place(path: KeyPath) -> str:
    return f"spec.yaml:{7 + len(path)}"


def _refused(**keys: Any) -> str:
    with pytest.raises(SpecError) as error:
        check_form(SpecForm, {"gpu": "h100-sxm-80gb", "nodes": 4, **keys}, _place)
    message = str(error.value)
    assert "pydantic" not in message
    return message


def test_a_required_key_under_another_tools_name_is_one_mistake() -> None:
    message = _refused(job={"cutoff_len": 4096, "global_batch_size": 64})
    assert message == "spec.yaml:9: unknown key 'cutoff_len' in `job`; did you mean 'seq_len'?"


def test_several_mistakes_are_one_line_each_and_no_more_than_a_screen() -> None:
    wrong = {"nodes": 0, "gpus_per_node": 0, "nics_per_node": 0, "cpu_cores": 0, "modle": "x"}
    lines = _refused(**wrong).splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("spec.yaml:8: nodes: 0 is out of range")
    assert "unknown key 'modle'; did you mean 'model'?" in lines[4]
    lines = _refused(**{f"key_{number}": 0 for number in range(30)}).splitlines()
    assert (len(lines), lines[20]) == (21, "and 10 more")
