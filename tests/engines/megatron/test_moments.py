"""What a stage holds temporarily: activations under every recompute mode, and the candidates for its peak."""

from typing import Any

import pytest

from tests.engines.samples import (
    CASES,
    DENSE,
    MIXED,
    full_recompute,
    layout_of,
    memory_of,
    spec_of,
    stage_of,
)
from topoplan.layout.layout import changed
from topoplan.operators.activations import layer_activations
from topoplan.operators.shard import shard_of
from topoplan.trainers.case import case_of


@pytest.mark.parametrize("mtp_num_layers", [0, 1, 2])
@pytest.mark.parametrize(("model", "form"), CASES[:4])
def test_the_peak_is_the_largest_moment_and_a_moment_the_sum_of_its_terms(
    model: str, form: dict[str, Any], mtp_num_layers: int
) -> None:
    spec = spec_of(model, mtp_num_layers=mtp_num_layers)
    for stage in memory_of(spec, layout_of(spec, **form)).by_stage:
        worst = max(stage.moments, key=lambda moment: moment.total_bytes)
        assert stage.parts_bytes[f"peak ({worst.name})"] == worst.total_bytes
        for moment in stage.moments:
            assert sum(size for _, size in moment.terms_bytes) == moment.total_bytes
            assert all(size >= 0 for name, size in moment.terms_bytes if name != "activations freed by then")


def test_bf16_gradients_take_half_and_are_cast_for_the_optimizer_step() -> None:
    spec = spec_of(DENSE, seq_len=512, global_batch_size=32)
    layout = layout_of(spec, tp=8, pp=4, recompute="full")  # one replica: the whole optimizer on every rank
    full, half = stage_of(spec, layout), stage_of(spec, changed(layout, grad_reduce_in_fp32=False))
    elements = full.parts_bytes["gradients"] / 4
    assert half.parts_bytes["gradients"] == 2 * elements
    # fp32 gradients of the shard are made after the activations have been freed.
    assert half.parts_bytes["peak (optimizer step)"] + half.parts_bytes["activations"] == pytest.approx(4 * elements)


def test_bf16_gradients_are_cast_for_the_optimizer_that_offload_starts_from() -> None:
    spec = spec_of(DENSE)
    layout = layout_of(
        spec, backend="megatron", tp=2, grad_reduce_in_fp32=False, optimizer_offload_fraction=1.0, recompute="full"
    )

    def moments(precise: bool) -> set[str]:
        one = changed(layout, precision_aware_optimizer=precise)
        return {moment.name for moment in stage_of(spec, one).moments}

    assert "optimizer step" in moments(precise=False)
    assert "optimizer step" not in moments(precise=True)


def test_the_loss_is_a_peak_of_the_last_stage_with_a_large_vocabulary() -> None:
    spec = spec_of(DENSE)
    layout = layout_of(spec, pp=4, cross_entropy_fusion=False, cross_entropy_fusion_impl="te")
    logits = 4096 * 151_936
    peaks = [next(name for name in s.parts_bytes if name.startswith("peak")) for s in memory_of(spec, layout).by_stage]
    assert peaks[-1] == "peak (loss)"
    assert "peak (loss)" not in peaks[:-1]
    fused = stage_of(spec, changed(layout, cross_entropy_fusion=True), 3)
    plain = stage_of(spec, layout, 3)
    assert plain.parts_bytes["peak (loss)"] - fused.parts_bytes["peak (loss)"] == 4 * logits
    adapter = stage_of(spec, changed(layout_of(spec, backend="mca", pp=4), cross_entropy_fusion=True), 3)
    assert dict(adapter.moments[1].terms_bytes)["gradient of the logits"] == 2 * logits


def test_dummy_gradients_are_those_of_the_stated_versions() -> None:
    def loss_terms(**software: str) -> tuple[float, float]:
        named = {name.replace("_", "-"): version for name, version in software.items()}
        spec = spec_of(DENSE, cluster={"software": named})
        (stage,) = memory_of(spec, layout_of(spec, cross_entropy_fusion_impl="te")).by_stage
        loss = next(dict(moment.terms_bytes) for moment in stage.moments if moment.name == "loss")
        return loss["dummy weight gradients"], loss["fp32 copies of the logits"]

    head, logits = 2 * 151_936 * 4096, 4 * 4096 * 151_936
    unknown, _ = loss_terms()
    assert loss_terms(transformer_engine="2.11.0+c188b533", megatron_core="0.16.1") == (unknown, 0)
    assert loss_terms(transformer_engine="2.18.0") == (unknown, logits)
    assert loss_terms(megatron_core="0.13.1") == (unknown - head, 0)
    assert loss_terms(transformer_engine="2.2.0") == (0, 0)


def test_an_old_pytorch_clones_what_it_times() -> None:
    def copies(**software: str) -> float:
        spec = spec_of(DENSE, cluster={"software": software})
        native = layout_of(spec, cross_entropy_fusion=True, cross_entropy_fusion_impl="native")
        (stage,) = memory_of(spec, native).by_stage
        loss = next(dict(moment.terms_bytes) for moment in stage.moments if moment.name == "loss")
        return loss["fp32 copies of the logits"]

    assert copies(torch="2.5.1") == 1.5 * copies() == 1.5 * copies(torch="2.6.0")


def test_a_dummy_that_is_not_kept_takes_the_room_of_one_gradient_in_backward() -> None:
    spec = spec_of(DENSE, cluster={"software": {"transformer-engine": "2.1"}})
    (stage,) = memory_of(spec, layout_of(spec)).by_stage
    backward = next(dict(moment.terms_bytes) for moment in stage.moments if moment.name == "backward")
    assert (backward["dummy weight gradients"], backward["weight gradient"]) == (0, 2 * 151_936 * 4096)


def test_uniform_recomputation_keeps_one_input_a_group_and_brings_back_the_group() -> None:
    spec = spec_of(DENSE)
    layouts = {n: layout_of(spec, pp=2, recompute=full_recompute("uniform", n)) for n in (1, 3)}
    one = layer_activations(spec.model, spec.model.layers[0], shard_of(case_of(spec, "megatron"), layouts[1]))
    sizes = {n: stage_of(spec, layout).parts_bytes for n, layout in layouts.items()}
    assert sizes[1]["activations"] == 2 * 18 * one.input_bytes
    assert sizes[3]["activations"] == 2 * 6 * one.input_bytes
    assert sizes[3]["peak (backward)"] - sizes[1]["peak (backward)"] == pytest.approx(2 * one.saved_bytes)


def test_block_recomputation_recomputes_the_first_layers_of_every_chunk() -> None:
    spec = spec_of(DENSE)
    layout = layout_of(spec, pp=2, recompute=full_recompute("block", 10))
    one = layer_activations(spec.model, spec.model.layers[0], shard_of(case_of(spec, "megatron"), layout))
    parts = stage_of(spec, layout).parts_bytes
    assert parts["activations"] == pytest.approx(2 * (10 * one.input_bytes + 8 * one.saved_bytes))
    everything = stage_of(spec, layout_of(spec, pp=2, recompute=full_recompute("block", 18))).parts_bytes
    uniform = stage_of(spec, layout_of(spec, pp=2, recompute="full")).parts_bytes
    assert everything["activations"] == uniform["activations"]
    # The eight layers that keep everything are freed before the first one is recomputed.
    plain = stage_of(spec, layout_of(spec, pp=2)).parts_bytes
    assert parts["peak (backward)"] == plain["peak (backward)"]
    assert everything["peak (backward)"] == uniform["peak (backward)"]


def terms_of(spec: Any, layout: Any, rank: int) -> dict[str, dict[str, float]]:
    stage = memory_of(spec, layout).by_stage[rank]
    return {moment.name: dict(moment.terms_bytes) for moment in stage.moments}


def test_token_prediction_keeps_its_inputs_its_projections_and_its_layers_activations() -> None:
    plain, deep = spec_of(DENSE), spec_of(DENSE, mtp_num_layers=1)
    layout = layout_of(plain, tp=2, pp=2)
    shard = shard_of(case_of(plain, "megatron"), layout)
    local, hidden = 4096 / 2, 4096
    block = layer_activations(plain.model, plain.model.layers[-1], shard).saved_bytes
    extra = [
        there.parts_bytes["activations"] - here.parts_bytes["activations"]
        for there, here in zip(memory_of(deep, layout).by_stage, memory_of(plain, layout).by_stage, strict=True)
    ]
    # enorm, hnorm, eh_proj (twice as wide) and final norm; the block's slice keeps the whole gathered tensor alive.
    assert extra == [0, block + 2 * hidden * (5 * local + (4096 - local)) + 3 * 4 * local]


def test_the_losses_of_all_depths_are_alive_together() -> None:
    depths = [spec_of(DENSE, mtp_num_layers=n) for n in (0, 1, 2)]
    layout = layout_of(depths[0], pp=2, cross_entropy_fusion=False, cross_entropy_fusion_impl="te")
    logits = 4096 * 151_936
    losses = [terms_of(spec, layout, 1)["loss"] for spec in depths]
    assert "logits of multi-token prediction" not in losses[0]
    assert [loss["logits of multi-token prediction"] / logits for loss in losses[1:]] == [4 + 2, 8 + 2]
    fused = changed(layout, cross_entropy_fusion=True)
    assert terms_of(depths[2], fused, 1)["loss"]["logits of multi-token prediction"] == 2 * 2 * logits
    native = changed(fused, cross_entropy_fusion_impl="native")
    assert terms_of(depths[2], native, 1)["loss"]["logits of multi-token prediction"] == 2 * 4 * logits


def test_one_table_looked_up_twice_has_its_first_gradient_wait_through_the_backward_of_the_layers() -> None:
    spec = spec_of(DENSE, mtp_num_layers=1)
    table = 2 * spec.model.vocab_size * spec.model.hidden_size
    shared = terms_of(spec, layout_of(spec), 0)
    assert shared["embedding gradient"]["gradient of the table"] == 2 * table
    apart = terms_of(spec, layout_of(spec, pp=2), 1)
    assert apart["embedding gradient"]["gradient of the table"] == table
    assert apart["backward"]["embedding gradient that waits"] == 0


def test_frozen_embeddings_and_output_layers_have_no_gradient() -> None:
    spec = spec_of(DENSE, finetuning="lora")
    stage = stage_of(spec, layout_of(spec, recompute="full"))
    assert "embedding gradient" not in {moment.name for moment in stage.moments}
    terms = dict(next(moment for moment in stage.moments if moment.name == "loss").terms_bytes)
    assert terms["gradient of the output layer's gathered input"] == 2 * 4096 * 4096
    dummies = dict(next(moment for moment in stage.moments if moment.name == "backward").terms_bytes)
    assert 0 < dummies["dummy weight gradients"] < 10e6


def test_full_recomputation_keeps_as_much_with_adapters_as_without() -> None:
    plain, frozen = spec_of(DENSE), spec_of(DENSE, finetuning="lora")
    kept = [stage_of(spec, layout_of(spec, recompute="full")).parts_bytes["activations"] for spec in (plain, frozen)]
    assert kept[0] == kept[1]
    # Dropout's results and masks are larger than the inputs, which a frozen weight does not need.
    whole = [stage_of(spec, layout_of(spec)).parts_bytes["activations"] for spec in (plain, frozen)]
    assert whole[0] < whole[1] < 1.5 * whole[0]


def test_a_combined_pass_holds_a_layer_of_the_next_micro_batch() -> None:
    spec = spec_of(MIXED, nodes=4, global_batch_size=256)
    layout = layout_of(spec, ep=8, backend="megatron")
    stage = stage_of(spec, changed(layout, overlap_moe_expert_parallel_comm=True))
    (backward,) = [moment for moment in stage.moments if moment.name == "backward"]
    shard = shard_of(case_of(spec, "megatron"), layout)
    layers = [layer_activations(spec.model, layer, shard).saved_bytes for layer in set(spec.model.layers)]
    assert dict(backward.terms_bytes)["a layer of the next micro batch"] == max(layers)
    assert not any("next micro batch" in name for name, _ in stage_of(spec, layout).moments[0].terms_bytes)
