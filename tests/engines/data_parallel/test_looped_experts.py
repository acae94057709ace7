"""Experts that transformers runs one by one: what is gathered, kept and launched for them."""

from tests.engines.samples import MIXED, spec_of
from topoplan.engines.data_parallel.communication import gathered_linears
from topoplan.layout.forms import layout_from_dict
from topoplan.operators.layers import USE, WHOLE, eager_ops
from topoplan.operators.machine import kernels_of
from topoplan.trainers.case import case_of


def test_stage_3_gathers_every_linear_layer_of_looped_experts_by_itself() -> None:
    spec = spec_of(MIXED)  # 48 layers of 4 linear layers of attention and 128 gated experts
    for impl, finetuning, expected in (
        (None, "full", (192, 18432)),
        ("grouped_mm", "full", (192, 0)),
        (None, "lora", (192, 0)),  # experts get no adapters, as from transformers 5 on
        ("eager", "lora", (192, 18432)),
    ):
        case = case_of(spec_of(MIXED, finetuning=finetuning), "deepspeed")
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
