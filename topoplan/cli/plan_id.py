"""From the id of a plan back to its layout."""

from __future__ import annotations

import re
from typing import Any

from topoplan.errors import LayoutError
from topoplan.layout.stages import spread_pipeline_layout

_DEGREES = {
    "tp": "tp",
    "pp": "pp",
    "vpp": "vpp",
    "cp": "cp",
    "ep": "ep",
    "etp": "etp",
    "dp": "dp",
    "mbs": "micro_batch_size",
}
_SHARDED: dict[str, dict[str, Any]] = {
    "ddp": {"backend": "ddp"},
    "fsdp2": {"backend": "fsdp2"},
    **{f"zero{stage}": {"backend": "deepspeed", "zero_stage": stage} for stage in (1, 2, 3)},
}
"""What the first word of an id says where data alone is split."""


def layout_of_id(plan_id: str, num_layers: int, mtp_layers: int = 0, *, option: str = "--plan") -> dict[str, Any]:
    """The layout keys that `Layout.id` was made of: `tp4-pp2-dp4-mbs1-full` -> {"tp": 4, "pp": 2, ...}.

    `zero3-dp8-mbs1-offload` -> {"backend": "deepspeed", "zero_stage": 3, ...}: where data alone is split, the id says
    it all.

    `num_layers` of the model and the multi-token-prediction layers of the job: what an uneven split is made of.
    """
    if plan_id.split("-")[0] in _SHARDED:
        return _sharded_layout_of_id(plan_id, option)
    layout: dict[str, Any] = {}
    ends: tuple[int, int] | None = None
    words = plan_id.split("-")
    position = 0
    while position < len(words):
        word, following = words[position], words[position + 1 : position + 2]
        degree = re.fullmatch(r"([a-z]+)([0-9]+)", word)
        if degree and degree[1] in _DEGREES and _DEGREES[degree[1]] not in layout:
            layout[_DEGREES[degree[1]]] = int(degree[2])
        elif degree and degree[1] == "offload":
            layout["optimizer_offload_fraction"] = int(degree[2]) / 100
        elif word == "nosp":
            layout["sequence_parallel"] = False
        elif word == "sel" and following:
            layout["recompute"] = {"granularity": "selective", "modules": following[0].split("+")}
            position += 1
        elif word == "full":
            method = re.fullmatch(r"(uniform|block)([0-9]+)", following[0]) if following else None
            name, layers = (method[1], int(method[2])) if method else ("uniform", 1)
            layout["recompute"] = {"granularity": "full", "method": name, "num_layers": layers}
            position += 1 if method else 0
        elif split := re.fullmatch(r"ends([0-9]+)\+([0-9]+)", word):
            ends = int(split[1]), int(split[2])
        elif word == "uneven":
            raise LayoutError(
                f"{plan_id!r} does not say where its uneven stages begin and end",
                where=option,
                remedy="choose it by its rank",
            )
        else:
            raise _unknown(plan_id, option)
        position += 1
    if "tp" not in layout or "pp" not in layout:
        raise _unknown(plan_id, option)
    if ends:
        pp, vpp = layout["pp"], layout.get("vpp", 1)
        layout["pipeline_layout"] = spread_pipeline_layout(num_layers, pp, vpp, *ends, mtp_layers)
        if layout["pipeline_layout"] is None:
            raise LayoutError(
                f"{plan_id!r}: {num_layers} layers cannot have {ends[0]} in the first stage and {ends[1]} in the last",
                where=option,
                remedy="choose a plan by its rank",
            )
    layout.setdefault("sequence_parallel", layout["tp"] > 1)
    layout.setdefault("etp", 1)
    return layout


def _sharded_layout_of_id(plan_id: str, option: str) -> dict[str, Any]:
    first, *words = plan_id.split("-")
    layout: dict[str, Any] = dict(_SHARDED[first])
    layout |= {"recompute": "none", "fused_linear_cross_entropy": False, "expandable_segments": False}
    if layout["backend"] == "deepspeed":
        layout |= {"offload_optimizer": False, "offload_param": False}
    elif layout["backend"] == "fsdp2":
        layout |= {"sharding": "full", "offload": False, "sync_each_batch": True}
    meant: dict[str, dict[str, Any]] = {
        "full": {"recompute": "full"},
        "sel": {"recompute": "selective"},
        "hybrid": {"sharding": "hybrid"},
        "nosync": {"sync_each_batch": False},
        "liger": {"fused_linear_cross_entropy": True},
        "expandable": {"expandable_segments": True},
        "offload": {"offload_optimizer" if "offload_optimizer" in layout else "offload": True},
        "offload+param": {"offload_optimizer": True, "offload_param": True},
    }
    degrees = {"cp": "cp", "ulysses": "ulysses", "dp": "dp", "mbs": "micro_batch_size"}
    for word in words:
        degree = re.fullmatch(r"([a-z]+)([0-9]+)", word)
        if degree and degree[1] in degrees:
            layout[degrees[degree[1]]] = int(degree[2])
        elif word in meant:
            layout |= meant[word]
        else:
            raise _unknown(plan_id, option)
    return layout


def _unknown(plan_id: str, option: str) -> LayoutError:
    return LayoutError(
        f"{plan_id!r} is not a plan",
        where=option,
        expected="expected a rank such as 3, or an id such as tp4-pp1-dp8-mbs1 or zero3-dp8-mbs1 from `topoplan rank`",
    )
