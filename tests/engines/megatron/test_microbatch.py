"""Time of one micro-batch: the layers, what is recomputed of them, and what runs before and after them."""

from dataclasses import replace
from typing import Any

import pytest

from tests.engines.samples import (
    CASES,
    DENSE,
    VISION,
    layout_of,
    micro_batch_of,
    pipeline_times_of,
    spec_of,
    time_of,
)
from topoplan.engines.megatron.microbatch import recomputed_share, stage_parts
from topoplan.layout.layout import Recompute, stages_of
from topoplan.layout.stages import Chunk
from topoplan.trainers.case import case_of


def test_ranks_of_the_same_kind_keep_their_places_in_the_pipeline() -> None:
    spec = spec_of(DENSE)
    layout = layout_of(spec, pp=4, pipeline_layout="Et*8|t*10|t*8|t*10L")
    stages = pipeline_times_of(spec, layout)
    layers = [seconds[0] for seconds in (stage.forward_s for stage in stages[1:3])]
    assert layers[0] == pytest.approx(layers[1] * 10 / 8)


@pytest.mark.parametrize(("model", "form"), CASES)
def test_the_chunks_of_a_rank_add_up_to_its_parts(model: str, form: dict[str, Any]) -> None:
    spec = spec_of(model)
    layout = layout_of(spec, **form)
    pieces = micro_batch_of(spec, layout)
    case = case_of(spec, layout.backend)
    for stage, chunks in zip(pipeline_times_of(spec, layout), stages_of(spec.model, spec.job, layout), strict=True):
        assert len(stage.forward_s) == len(stage.backward_s) == len(stage.recompute_s) == layout.vpp
        layers, ends = stage_parts(case, chunks, pieces)
        parts = sum(layers) + sum(stage.recompute_s) + ends
        assert stage.total_s == pytest.approx(parts)
        assert all(part < whole for part, whole in zip(stage.recompute_s, stage.backward_s, strict=True))


def test_token_prediction_takes_a_layer_a_lookup_and_a_loss_more() -> None:
    plain, deep = spec_of(DENSE), spec_of(DENSE, mtp_num_layers=1)
    layout = layout_of(plain, tp=2)
    less, more = time_of(plain, layout).parts_s, time_of(deep, layout).parts_s
    assert more["ends"] == pytest.approx(2 * less["ends"])
    for part in ("attention", "elementwise", "tp_comm"):
        assert 37 / 36 <= more[part] / less[part] < 39 / 36, part
    # eh_proj has 2 h^2 weights beside the 9.4 h^2 of a layer of this model.
    assert more["gemm"] / less["gemm"] == pytest.approx(1 + (1 + 2 / 11.5) / 36, abs=0.002)


def test_block_recomputation_costs_its_share_of_the_layers() -> None:
    spec = spec_of(DENSE)

    def repeated(method: str, num_layers: int) -> float:
        mode = {"granularity": "full", "method": method, "num_layers": num_layers}
        return time_of(spec, layout_of(spec, tp=2, recompute=mode)).parts_s["recompute"]

    assert repeated("block", 9) == pytest.approx(repeated("uniform", 1) / 4)
    assert repeated("uniform", 4) == repeated("uniform", 1)


def test_a_frozen_tower_has_a_forward_alone() -> None:
    frozen, trained = spec_of(VISION), spec_of(VISION, freeze_vision_tower=False)
    projector = spec_of(VISION, freeze_multi_modal_projector=False)
    layout = layout_of(frozen, tp=2)
    language = time_of(spec_of(DENSE), layout).parts_s["ends"]
    forward = time_of(frozen, layout).parts_s["ends"] - language
    assert forward > 0
    assert time_of(trained, layout).parts_s["ends"] - language == pytest.approx(3 * forward)
    assert time_of(projector, layout).parts_s["ends"] == time_of(frozen, layout).parts_s["ends"]


def test_images_attend_to_themselves_whatever_the_micro_batch() -> None:
    spec = spec_of(VISION, global_batch_size=256)
    language = spec_of(DENSE, global_batch_size=256)
    towers = []
    for micro_batch in (1, 4):
        layout = layout_of(spec, micro_batch_size=micro_batch)
        towers.append(time_of(spec, layout).parts_s["ends"] - time_of(language, layout).parts_s["ends"])
    assert towers[1] <= towers[0]


def test_fp16_on_a_card_without_bf16_runs_the_loss_on_its_tensor_cores_too() -> None:
    spec = spec_of("Qwen/Qwen3-1.7B", gpu="v100-sxm-32gb", precision="fp16")
    parts = time_of(spec, layout_of(spec)).parts_s
    # The output layer has a quarter of the layers' weights; on the fp32 units it would take longer than all of them.
    assert parts["ends"] < 0.6 * parts["gemm"]


def test_fp8_makes_the_layers_quicker_and_leaves_the_ends() -> None:
    plain, low = spec_of(DENSE), spec_of(DENSE, precision="fp8")
    layout = layout_of(plain, tp=2)
    before, after = time_of(plain, layout).parts_s, time_of(low, layout).parts_s
    assert after["gemm"] < 0.75 * before["gemm"]
    assert after["ends"] == before["ends"]
    assert after["elementwise"] > before["elementwise"]


def test_a_block_recomputes_its_own_layers_and_no_more_than_there_are() -> None:
    chunk = Chunk(0, 6, embedding=False, final_norm=False, head=False)
    layer = spec_of(DENSE).model.layers[0]
    for number, share in ((4, 4 / 6), (9, 1.0)):
        recompute = Recompute(granularity="full", method="block", num_layers=number)
        assert recomputed_share(chunk, layer, recompute) == share
        assert recomputed_share(chunk, replace(layer, predicts_next=True), recompute) == 0.0
    assert recomputed_share(chunk, layer, Recompute()) == 1.0


def test_frozen_ends_have_half_a_backward_or_none() -> None:
    spec, frozen = spec_of(DENSE), spec_of(DENSE, finetuning="lora")
    for form in ({"tp": 2}, {"tp": 2, "sequence_parallel": False}, {}):
        plain, found = micro_batch_of(spec, layout_of(spec, **form)), micro_batch_of(frozen, layout_of(frozen, **form))
        assert found.embedding_s == (plain.embedding_s[0], 0.0)
        assert found.head_s[0] == plain.head_s[0]
        assert found.head_s[1] < 0.75 * plain.head_s[1]
