from dataclasses import fields
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from topoplan.cli.plan_id import layout_of_id
from topoplan.errors import LayoutError
from topoplan.layout.layout import Layout, Recompute
from topoplan.layout.stages import spread_pipeline_layout

RECOMPUTES = st.sampled_from(
    [
        Recompute(),
        Recompute(granularity="selective", modules=("core_attn",)),
        Recompute(granularity="selective", modules=("moe_act", "layernorm", "mla_up_proj")),
        Recompute(granularity="full", method="uniform", num_layers=1),
        Recompute(granularity="full", method="uniform", num_layers=4),
        Recompute(granularity="full", method="block", num_layers=12),
    ]
)
POWERS = st.sampled_from([1, 2, 4, 8])


@given(
    tp=POWERS,
    pp=POWERS,
    vpp=POWERS,
    cp=POWERS,
    ep=POWERS,
    etp=POWERS,
    dp=st.integers(1, 4096),
    mbs=POWERS,
    sequence_parallel=st.booleans(),
    recompute=RECOMPUTES,
    offload=st.sampled_from([0.0, 0.25, 1.0]),
)
def test_an_id_says_all_of_an_even_layout(
    tp: int, pp: int, vpp: int, cp: int, ep: int, etp: int, dp: int, mbs: int,
    sequence_parallel: bool, recompute: Recompute, offload: float,
) -> None:  # fmt: skip
    layout = Layout(
        tp=tp,
        pp=pp,
        vpp=vpp,
        cp=cp,
        ep=ep,
        etp=etp if ep > 1 else 1,
        dp=dp,
        micro_batch_size=mbs,
        gradient_accumulation_steps=3,
        sequence_parallel=sequence_parallel and tp > 1,
        recompute=recompute,
        optimizer_offload_fraction=offload,
    )
    keys = layout_of_id(layout.id, 64)
    keys["recompute"] = as_recompute(keys.get("recompute", {"granularity": "none"}))
    assert Layout(**keys, gradient_accumulation_steps=3) == layout


def as_recompute(keys: dict[str, object]) -> Recompute:
    assert set(keys) <= {field.name for field in fields(Recompute)}
    modules = keys.get("modules", [])
    assert isinstance(modules, list)
    return Recompute(**{**keys, "modules": tuple(modules)})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["", "7up", "tp4", "tp4-pp1-xx3", "tp4-tp2-pp1", "best", "-1", "tp4-pp1-sel", "tpx-pp1"]
)
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(LayoutError, match=r"--plan: .* is not a plan; expected a rank such as 3, or an id"):
        layout_of_id(text, 64)


def test_an_uneven_layout_cannot_be_read_from_its_id() -> None:
    with pytest.raises(LayoutError, match="choose it by its rank"):
        layout_of_id("tp4-pp4-dp2-mbs1-uneven", 64)


@given(
    layers=st.integers(2, 96),
    pp=st.integers(2, 8),
    vpp=st.integers(1, 3),
    first=st.integers(1, 20),
    last=st.integers(0, 20),
)
def test_an_id_names_the_ends_of_an_uneven_split(layers: int, pp: int, vpp: int, first: int, last: int) -> None:
    text = spread_pipeline_layout(layers, pp, vpp, first, last)
    assume(text is not None)
    layout = Layout(tp=1, pp=pp, vpp=vpp, dp=1, gradient_accumulation_steps=8, pipeline_layout=text)
    assert layout.id.endswith(f"ends{first}+{last}")
    assert layout_of_id(layout.id, layers)["pipeline_layout"] == text


def test_ends_that_the_layers_do_not_have_are_refused() -> None:
    with pytest.raises(LayoutError, match="36 layers cannot have 30 in the first stage and 20 in the last"):
        layout_of_id("tp1-pp4-dp2-mbs1-ends30+20", 36)


def test_a_split_of_ones_own_has_no_ends_in_its_id() -> None:
    layout = Layout(tp=1, pp=4, dp=1, gradient_accumulation_steps=8, pipeline_layout="Et*3|t*20|t*3|t*10L")
    assert layout.id.endswith("uneven")


@given(
    backend=st.sampled_from(["ddp", "deepspeed", "fsdp2"]),
    zero_stage=st.sampled_from([1, 2, 3]),
    ulysses=POWERS,
    dp=st.integers(1, 4096),
    mbs=POWERS,
    recompute=st.sampled_from(["none", "selective", "full"]),
    flags=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_an_id_says_all_of_a_layout_that_splits_data_alone(
    backend: str, zero_stage: int, ulysses: int, dp: int, mbs: int, recompute: str, flags: list[bool]
) -> None:
    hybrid, away, param, liger, expandable, sync = flags
    form: dict[str, Any] = {"backend": backend, "dp": dp, "micro_batch_size": mbs}
    form |= {"fused_linear_cross_entropy": liger, "expandable_segments": expandable}
    if backend == "deepspeed":
        both = away and param and zero_stage == 3
        form |= {"zero_stage": zero_stage, "offload_optimizer": away, "offload_param": both, "ulysses": ulysses}
    elif backend == "fsdp2":
        form |= {"sharding": "hybrid" if hybrid else "full", "offload": away, "ulysses": ulysses}
        form["sync_each_batch"] = sync
    layout = Layout(**form, gradient_accumulation_steps=1, recompute=Recompute(granularity=recompute))
    found = layout_of_id(layout.id, 36)
    assert found.pop("recompute") == recompute
    assert found.pop("ulysses", 1) == form.pop("ulysses", 1)
    assert found == form


@pytest.mark.parametrize("plan_id", ["zero4-dp8-mbs1", "ddp-dp8-mbs1-nosp", "fsdp2-tp2-dp4-mbs1"])
def test_what_no_such_layout_is_called_is_refused(plan_id: str) -> None:
    with pytest.raises(LayoutError, match="zero3-dp8-mbs1"):
        layout_of_id(plan_id, 36)
