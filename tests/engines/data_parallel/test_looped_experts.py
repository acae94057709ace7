"""Experts that transformers runs one by one: what is gathered, kept and launched for them."""

from dataclasses import replace

from tests.engines.samples import MIXED, spec_of
from topoplan.engines.data_parallel.communication import gathered_linears
from topoplan.layout.forms import layout_from_dict
from topoplan.operators.layers import USE, WHOLE, eager_ops
from topoplan.operators.machine import kernels_of
from topoplan.planner.predict import predict
from topoplan.trainers.case import case_of


def test_stage_3_gathers_every_linear_layer_of_looped_experts_by_itself() -> None:
    spec = spec_of(MIXED)  # 48 layers of 4 linear layers of attention and 128 gated experts
    for impl, finetuning, stated, expected in (
        (None, "full", {}, (192, 18432)),
        (None, "full", {"transformers": "4.57"}, (192, 18432)),
        (None, "full", {"transformers": "5.6"}, (192, 0)),
        ("grouped_mm", "full", {}, (192, 0)),
        (None, "lora", {}, (192, 0)),  # experts get no adapters, as from transformers 5 on
        ("eager", "lora", {}, (192, 18432)),
    ):
        tuned = spec_of(MIXED, finetuning=finetuning)
        case = case_of(replace(tuned, cluster=replace(tuned.cluster, software=stated)), "deepspeed")
        form = {"backend": "deepspeed", "zero_stage": 3, "experts_impl": impl}
        layout = layout_from_dict(form, spec.cluster, spec.model, spec.job)
        assert gathered_linears(case, layout) == expected


def test_looped_experts_keep_what_grouped_ones_do_and_are_launched_one_by_one() -> None:
    spec, (layer, *_) = spec_of(MIXED), spec_of(MIXED).model.layers
    grouped, looped = (
        eager_ops(spec.model, layer, USE._replace(tokens=4096, loops_experts=loops), WHOLE) for loops in (False, True)
    )
    kept = [sum(tensor.saved_bytes for op in ops for tensor in op.saved) for ops in (grouped, looped)]
    assert kept[0] == kept[1]
    case = case_of(spec, "fsdp2")
    ahead, again = (sum(one.launches[0] for one in kernels_of(ops, case, WHOLE)) for ops in (grouped, looped))
    assert again - ahead > 128 * 20


def test_what_is_assumed_of_transformers_is_said_and_widens_the_band() -> None:
    spec = spec_of(MIXED)
    stated = replace(spec, cluster=replace(spec.cluster, software={"transformers": "5.6"}))
    form = {"backend": "deepspeed", "zero_stage": 3, "recompute": {"granularity": "full"}}
    assumed, known = (predict(one, form) for one in (spec, stated))
    (said,) = (line for line in assumed.warnings if "assumes that experts" in line)
    assert "`software: {transformers: '5.6'}`" in said
    assert not any("assumes that experts" in line for line in known.warnings)
    # The published run of such experts takes half as long again as predicted.
    assert assumed.time.band_s[1] > 1.5 * assumed.time.step_s
