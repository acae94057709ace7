from dataclasses import replace
from math import prod
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.layout.specs import make_spec
from topoplan.errors import LayoutError
from topoplan.layout.forms import layout_from_dict
from topoplan.layout.ids import layout_of_id
from topoplan.layout.layout import BACKENDS, Layout, keys_of
from topoplan.layout.stages import spread_pipeline_layout

SPEC = make_spec()
POWERS = st.sampled_from([1, 2, 4, 8])
FULL = {"granularity": "full"}
VALUES: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("tp", "pp", "vpp", "cp", "ep", "etp", "ulysses", "micro_batch_size"), POWERS),
    "dp": st.integers(1, 4096),
    "sequence_parallel": st.booleans(),
    "optimizer_offload_fraction": st.sampled_from([0.0, 0.25, 1.0]),
    "zero_stage": st.sampled_from([1, 2, 3]),
    "sharding": st.sampled_from(["full", "hybrid"]),
    **dict.fromkeys(("offload", "offload_optimizer", "sync_each_batch"), st.booleans()),
    **dict.fromkeys(("fused_linear_cross_entropy", "expandable_segments"), st.booleans()),
}
RECOMPUTES = st.sampled_from(["none", "full"])
MEGATRON_RECOMPUTES = RECOMPUTES | st.sampled_from(
    [
        {"granularity": "selective", "modules": ["core_attn"]},
        {"granularity": "selective", "modules": ["moe_act", "layernorm", "mla_up_proj"]},
        FULL | {"method": "uniform", "num_layers": 4},
        FULL | {"method": "block", "num_layers": 12},
    ]
)


def read(form: dict[str, Any]) -> Layout:
    """Return the layout of a form, on as many GPUs and with as large a batch as the form implies."""
    world = prod(form.get(key, 1) for key in ("tp", "pp", "cp", "ulysses", "dp"))
    job = replace(SPEC.job, global_batch_size=3 * form["dp"] * form["micro_batch_size"])
    return layout_from_dict(form, replace(SPEC.cluster, nodes=world, gpus_per_node=1), SPEC.model, job)


@given(backend=st.sampled_from(BACKENDS), data=st.data())
def test_an_id_says_all_of_a_layout_but_which_megatron_trainer_it_is_for(backend: str, data: st.DataObject) -> None:
    form = {key: data.draw(VALUES[key], label=key) for key in keys_of(backend) if key in VALUES}
    form |= {"backend": backend, "recompute": data.draw(RECOMPUTES)}
    if "sequence_parallel" in form:
        form["recompute"] = data.draw(MEGATRON_RECOMPUTES)
        form["sequence_parallel"] &= form["tp"] > 1
    if "zero_stage" in form:
        form["offload_param"] = form["offload_optimizer"] and form["zero_stage"] == 3
    layout = read(form)
    again = read({"backend": backend} | layout_of_id(layout.id, SPEC.model.num_layers))
    assert (again, again.id) == (layout, layout.id)


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"tp": 4, "pp": 2, "dp": 4}, "tp4-pp2-dp4-mbs1"),
        ({"tp": 2, "dp": 4, "sequence_parallel": False, "recompute": FULL}, "tp2-pp1-dp4-mbs1-nosp-full"),
        ({"backend": "deepspeed", "zero_stage": 3, "dp": 8, "recompute": FULL}, "zero3-dp8-mbs1-full"),
        ({"backend": "fsdp2", "sharding": "hybrid", "ulysses": 2, "dp": 4}, "fsdp2-hybrid-ulysses2-dp4-mbs1"),
        ({"backend": "fsdp2", "tp": 2, "ep": 4, "dp": 4}, "fsdp2-tp2-ep4-dp4-mbs1"),
    ],
)
def test_a_layout_is_called(keys: dict[str, Any], name: str) -> None:
    assert read({"micro_batch_size": 1} | keys).id == name


@pytest.mark.parametrize(
    "text",
    ["", "7up", "tp4", "tp4-tp2-pp1-dp8-mbs1", "best", "-1", "tp4-pp1-dp8-mbs1-sel", "tpx-pp1", "ddp-dp8-mbs1-nosp"],
)
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(LayoutError, match=r"--plan: .* is not a plan; expected a rank such as 3, or an id"):
        layout_of_id(text, 64)


def test_an_uneven_layout_cannot_be_read_from_its_id() -> None:
    with pytest.raises(LayoutError, match="choose the plan by its rank"):
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
    layout = Layout.of(pp=pp, vpp=vpp, pipeline_layout=text)
    assert layout.id.endswith(f"ends{first}+{last}")
    assert layout_of_id(layout.id, layers)["pipeline_layout"] == text


def test_ends_that_the_layers_do_not_have_are_refused() -> None:
    with pytest.raises(LayoutError, match="36 layers cannot have 30 in the first stage and 20 in the last"):
        layout_of_id("tp1-pp4-dp2-mbs1-ends30+20", 36)


def test_a_split_of_ones_own_has_no_ends_in_its_id() -> None:
    assert Layout.of(pp=4, pipeline_layout="Et*3|t*20|t*3|t*10L").id.endswith("uneven")
