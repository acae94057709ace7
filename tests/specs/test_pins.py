from typing import Any

import pytest

from tests.specs.documents import BOX, spec_of


@pytest.mark.parametrize(
    "pin",
    [
        {"tp": 4},
        {"tp": 4, "pp": 2, "cp": 1, "dp": 4},
        {"ep": 4, "etp": 1, "pp": 2},
        {"dp": 8, "micro_batch_size": 2, "gradient_accumulation_steps": 4},
        {"pp": 2, "vpp": 3},
        {"recompute": "full"},
        {"recompute": {"granularity": "selective", "modules": ["core_attn"]}},
        {"sequence_parallel": True},
    ],
)
def test_a_pin_that_some_layout_meets_is_kept(pin: dict[str, Any]) -> None:
    kept = spec_of(BOX, pin=pin).job.pin
    assert kept == ({"recompute": {"granularity": "full"}} if pin.get("recompute") == "full" else pin)


def test_tp_may_span_the_nodes_of_a_rack() -> None:
    rack = {"gpu": "gb200-nvl72-186gb", "nodes": 4, "gpus_per_node": 4}
    assert spec_of(rack, pin={"tp": 8}).job.pin == {"tp": 8}
