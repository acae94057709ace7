from dataclasses import fields

import pytest

from topoplan.layout.layout import (
    DEFAULTS,
    KEYS,
    PART_OF,
    Degrees,
    Layout,
    Recompute,
    Sharding,
    Step,
    Switches,
    changed,
    keys_of,
)

FULL = Recompute(granularity="full", method="uniform", num_layers=1)
LAYOUT = Layout.of(tp=4, pp=2, dp=4, gradient_accumulation_steps=8, sequence_parallel=True)


def test_every_key_of_a_part_is_read_by_its_name_alone() -> None:
    parts = (Degrees, Step, Sharding, Switches)
    assert set(KEYS) == {"backend", "recompute"} | {key.name for part in parts for key in fields(part)}
    assert {key: getattr(LAYOUT, key) for key in KEYS} == {**DEFAULTS, "tp": 4, "pp": 2, "dp": 4} | {
        "gradient_accumulation_steps": 8,
        "sequence_parallel": True,
    }
    assert all(getattr(LAYOUT, key) == getattr(getattr(LAYOUT, part), key) for key, part in PART_OF.items())


def test_a_changed_layout_differs_in_these_keys_and_leaves_the_first_alone() -> None:
    new = changed(LAYOUT, backend="megatron", vpp=3, recompute=FULL, fp8_param=True, dp=8)
    assert {key for key in KEYS if getattr(new, key) != getattr(LAYOUT, key)} == {
        *("backend", "vpp", "recompute", "fp8_param", "dp")
    }
    assert (new.degrees, new.states) == (Degrees(tp=4, pp=2, vpp=3, dp=8), LAYOUT.states)
    assert LAYOUT.vpp == 1
    assert changed(LAYOUT) == LAYOUT
    assert hash(changed(LAYOUT)) == hash(LAYOUT)


def test_a_key_that_layouts_do_not_have_is_an_error() -> None:
    with pytest.raises(KeyError):
        changed(LAYOUT, width=3)


def test_layouts_cannot_be_changed_in_place() -> None:
    with pytest.raises(AttributeError):
        LAYOUT.degrees = Degrees()  # type: ignore[misc]
    with pytest.raises(AttributeError):
        LAYOUT.degrees.tp = 2  # type: ignore[misc]


def test_any_split_goes_with_any_sharding_and_switch() -> None:
    """Rules decide which combinations are predicted."""
    layout = Layout(backend="fsdp2", degrees=Degrees(tp=2, ep=4, dp=8), states=Sharding(sharding="hybrid"))
    assert (layout.world_size, layout.expert_dp, layout.id) == (16, 4, "fsdp2-hybrid-tp2-ep4-dp8-mbs1")
    assert {"tp", "ep"} <= {*keys_of("fsdp2")}
