from typing import Any

import pytest

from tests.specs.documents import BOX, refusal, spec_of
from topoplan.errors import LayoutError


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


@pytest.mark.parametrize(
    ("pin", "equation"),
    [
        ({"tp": 4, "pp": 2, "cp": 1, "dp": 8}, "tp 4 * pp 2 * cp 1 * dp 8 = 64 != 32 GPUs (4 nodes * 8)"),
        ({"tp": 4, "pp": 1, "cp": 1, "dp": 4}, "tp 4 * pp 1 * cp 1 * dp 4 = 16 != 32 GPUs (4 nodes * 8)"),
        ({"tp": 16}, "tp 16 > 8 GPUs of the NVLink domain"),
        ({"tp": 3}, "32 GPUs (4 nodes * 8) % (tp 3) = 2"),
        ({"pp": 3, "cp": 2}, "32 GPUs (4 nodes * 8) % (pp 3 * cp 2) (6) = 2"),
        ({"ep": 64}, "32 GPUs (4 nodes * 8) % (ep 64) = 32"),
        ({"micro_batch_size": 3}, "global_batch_size 64 % (micro_batch_size 3) = 1"),
        (
            {"dp": 8, "micro_batch_size": 2, "gradient_accumulation_steps": 8},
            "dp 8 * micro_batch_size 2 * gradient_accumulation_steps 8 = 128 != global_batch_size 64",
        ),
        ({"pp": 1, "vpp": 2}, "vpp 2 > 1 with pp 1"),
        ({"tp": 1, "sequence_parallel": True}, "sequence_parallel with tp 1"),
        ({"overlap_param_gather": True, "distributed_optimizer": False}, "overlap_param_gather without"),
        (
            {"recompute": {"granularity": "none", "modules": ["mlp"]}},
            "recompute modules with granularity none; expected",
        ),
        (
            {"recompute": {"granularity": "selective", "num_layers": 2}},
            "recompute num_layers with granularity selective",
        ),
        ({"recompute": {"method": "block", "modules": ["mlp"]}}, "recompute method with granularity selective"),
    ],
)
def test_a_pin_that_contradicts_itself_shows_the_equation(pin: dict[str, Any], equation: str) -> None:
    assert refusal(BOX, kind=LayoutError, pin=pin).startswith(f"pin: {equation}")


def test_tp_stays_in_the_node_without_nvlink() -> None:
    message = refusal({"gpu": "rtx4090-24gb", "nodes": 2}, pin={"tp": 16})
    assert message.startswith("pin: tp 16 > 8 GPUs of one node")


def test_tp_may_span_the_nodes_of_a_rack() -> None:
    rack = {"gpu": "gb200-nvl72-186gb", "nodes": 4, "gpus_per_node": 4}
    assert spec_of(rack, pin={"tp": 8}).job.pin == {"tp": 8}
