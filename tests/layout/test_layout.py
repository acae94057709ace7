from dataclasses import replace

import pytest

from topoplan.layout.layout import Layout, Recompute, changed

LAYOUT = Layout(tp=4, pp=2, dp=4, gradient_accumulation_steps=8, sequence_parallel=True)


def test_a_changed_layout_is_as_if_replaced_and_leaves_the_first_alone() -> None:
    full = Recompute(granularity="full", method="uniform", num_layers=1)
    new = changed(LAYOUT, vpp=3, recompute=full)
    assert new == replace(LAYOUT, vpp=3, recompute=full)
    assert hash(new) == hash(replace(LAYOUT, vpp=3, recompute=full))
    assert LAYOUT.vpp == 1
    assert changed(LAYOUT) == LAYOUT


def test_a_key_that_layouts_do_not_have_is_an_error() -> None:
    with pytest.raises(KeyError):
        changed(LAYOUT, width=3)


def test_layouts_cannot_be_changed_in_place() -> None:
    with pytest.raises(AttributeError):
        LAYOUT.tp = 2  # type: ignore[misc]
