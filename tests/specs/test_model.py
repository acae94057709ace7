from dataclasses import replace

from tests.samples import make_spec
from topoplan.specs.model import Attention, layer_kind


def test_a_layer_is_called_by_its_two_halves_its_window_and_what_it_predicts() -> None:
    layer = make_spec().model.layers[0]
    assert layer_kind(layer) == "attention + mlp"
    assert isinstance(layer.attention, Attention)
    assert layer_kind(replace(layer, attention=replace(layer.attention, window=128))) == "attention + mlp, window 128"
    assert layer_kind(replace(layer, predicts_next=True)) == "multi-token prediction of attention + mlp"
