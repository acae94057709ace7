"""What a stage holds during the whole step: weights, gradients and optimizer, and how each is reduced."""

import pytest

from tests.engines.samples import (
    DENSE,
    MIXED,
    TIED,
    VISION,
    layout_of,
    memory_of,
    spec_of,
    stage_of,
)
from topoplan.engines.megatron.states import rank_kinds, stage_parameters
from topoplan.layout.layout import changed
from topoplan.trainers.case import case_of


def test_the_states_are_2_bytes_of_weight_4_of_gradient_and_12_sharded() -> None:
    spec = spec_of(DENSE)
    layout = layout_of(spec, tp=2, cp=2, pp=2)
    case = case_of(spec, layout.backend)
    elements = stage_parameters(case, layout, 0).total
    parts = stage_of(spec, layout).parts_bytes
    assert parts["weights"] == 2 * elements
    assert parts["gradients"] == 4 * elements
    assert parts["optimizer"] == 12 * elements / (layout.dp * layout.cp)


def test_fp16_training_keeps_the_same_states_as_bf16() -> None:
    half, bfloat = spec_of(DENSE, precision="fp16"), spec_of(DENSE)
    sizes = [stage_of(spec, layout_of(spec, tp=2, pp=2)).parts_bytes for spec in (half, bfloat)]
    for part in ("weights", "gradients", "optimizer", "activations"):
        assert sizes[0][part] == sizes[1][part]


def test_without_the_distributed_optimizer_every_rank_holds_all_of_it() -> None:
    spec = spec_of(DENSE)
    layout = layout_of(spec, tp=2)
    alone = stage_of(spec, changed(layout, distributed_optimizer=False)).parts_bytes
    assert alone["optimizer"] == layout.dp * stage_of(spec, layout).parts_bytes["optimizer"]


def test_experts_are_sharded_over_their_own_data_parallel_group() -> None:
    spec = spec_of(MIXED)
    layout = layout_of(spec, tp=2, ep=8, etp=1)
    case = case_of(spec, layout.backend)
    parameters = stage_parameters(case, layout, 0)
    assert layout.expert_dp == 32 // 8
    expected = 12 * (parameters.dense / 16 + parameters.expert / 4)
    assert stage_of(spec, layout).parts_bytes["optimizer"] == expected


def test_a_precision_aware_optimizer_keeps_two_bytes_of_the_master_weight() -> None:
    spec = spec_of(DENSE)
    layout = layout_of(spec, tp=2)
    plain = stage_of(spec, layout).parts_bytes["optimizer"]
    assert stage_of(spec, changed(layout, precision_aware_optimizer=True)).parts_bytes["optimizer"] == plain * 10 / 12
    low = spec_of(DENSE, precision="fp8")
    assert stage_of(low, changed(layout, precision_aware_optimizer=True)).parts_bytes["optimizer"] == plain


@pytest.mark.parametrize(
    ("dtypes", "element", "copies"),
    [
        ({}, 2 + 4 + 4, 0),
        ({"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}, 2 + 2 + 2, 0),
        ({"exp_avg_dtype": "bf16"}, 2 + 2 + 4, 1),
        ({"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16"}, 2 + 1 + 2, 2),
        ({"main_params_dtype": "fp16", "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}, 2 + 1 + 1, 3),
    ],
)
def test_states_of_lower_precision_take_less_and_are_stepped_in_fp32_copies(
    dtypes: dict[str, str], element: int, copies: int
) -> None:
    spec = spec_of(DENSE)
    layout = layout_of(spec, tp=2)
    plain = stage_of(spec, layout).parts_bytes["optimizer"]
    low = stage_of(spec, changed(layout, precision_aware_optimizer=True, **dtypes))
    assert low.parts_bytes["optimizer"] == plain * element / 12
    made = [dict(moment.terms_bytes)["fp32 copies of its states"] for moment in low.moments[-1:] if copies]
    assert made == [plain * 4 * copies / 12] * bool(copies)


@pytest.mark.parametrize("fraction", [0.25, 1.0])
def test_an_offloaded_optimizer_moves_to_the_host_with_its_gradient(fraction: float) -> None:
    spec = spec_of(DENSE)
    layout = layout_of(spec, backend="megatron", tp=2, pp=2, precision_aware_optimizer=True)
    moved = changed(layout, optimizer_offload_fraction=fraction)
    on_card = stage_of(spec, changed(layout, precision_aware_optimizer=False)).parts_bytes["optimizer"]
    memory = memory_of(spec, moved)
    assert memory.by_stage[0].parts_bytes["optimizer"] == on_card * (1 - fraction)
    # fp32 weight, two moments and gradient of the rank's shard, and fp32 weights from before sharding, for each of the
    # eight ranks of a node.
    shard = max(stage.parts_bytes["optimizer"] for stage in memory_of(spec, layout).by_stage) / 10
    assert memory.host_bytes == pytest.approx(8 * fraction * (16 + 4 * layout.dp) * shard)
    assert memory_of(spec, layout).host_bytes == 0


def test_offload_without_the_precision_aware_optimizer_leaves_the_fp32_weights() -> None:
    spec = spec_of(DENSE)
    layout = layout_of(spec, tp=2)
    plain, moved = stage_of(spec, layout), stage_of(spec, changed(layout, optimizer_offload_fraction=1.0))
    assert plain.allocated_bytes - moved.allocated_bytes == pytest.approx(plain.parts_bytes["optimizer"] * 8 / 12)
    half = stage_of(spec, changed(layout, optimizer_offload_fraction=0.5))
    assert half.parts_bytes["optimizer"] == pytest.approx(plain.parts_bytes["optimizer"] * 8 / 12)


def test_what_is_not_offloaded_is_copied_whole_and_stays() -> None:
    spec = spec_of(DENSE)
    layout = layout_of(spec, tp=2)
    parts = {
        fraction: stage_of(spec, changed(layout, optimizer_offload_fraction=fraction)).parts_bytes
        for fraction in (0.0, 0.25, 1.0)
    }
    assert parts[0.25]["copies for offload"] == pytest.approx(0.75 * parts[0.0]["gradients"])  # fp32 both
    assert all("copies for offload" not in parts[fraction] for fraction in (0.0, 1.0))


def test_low_precision_caches_two_copies_of_the_blocks_and_none_of_the_ends() -> None:
    layout = layout_of(spec_of(DENSE), tp=2)
    plain = stage_of(spec_of(DENSE), layout).parts_bytes["weights"]
    cached = stage_of(spec_of(DENSE, precision="fp8"), layout).parts_bytes["weights"] - plain
    ends = 2 * 151_936 * 4096 / 2 + 4096
    assert cached == pytest.approx(2 * (plain / 2 - ends), rel=1e-3)


def test_frozen_parts_have_weights_alone() -> None:
    frozen = spec_of(VISION)
    whole = spec_of(VISION, freeze_vision_tower=False, freeze_multi_modal_projector=False)
    tower = frozen.model.vision
    layout = layout_of(frozen, tp=2, pp=2)
    still, moving = stage_of(frozen, layout).parts_bytes, stage_of(whole, layout).parts_bytes
    elements = tower.encoder_parameters + tower.projector_parameters
    assert moving["weights"] == still["weights"]
    assert moving["gradients"] - still["gradients"] == 4 * elements
    assert moving["optimizer"] - still["optimizer"] == pytest.approx(12 * elements / layout.dp)
    assert "vision activations" not in still
    assert moving["vision activations"] > 0


def test_the_tied_embedding_has_states_on_both_ends_of_the_pipeline() -> None:
    spec = spec_of(TIED)
    table = spec.model.vocab_size * spec.model.hidden_size
    first, last = (stage_of(spec, layout_of(spec, pp=2), rank).parts_bytes for rank in (0, 1))
    assert first["gradients"] + last["gradients"] == pytest.approx(
        stage_of(spec, layout_of(spec)).parts_bytes["gradients"] + 4 * table
    )


def test_ranks_are_of_one_kind_where_they_hold_the_same_layers() -> None:
    spec = spec_of(DENSE)
    swapped = layout_of(spec, pp=4, pipeline_layout="Et*8|t*8|t*10|t*10L")
    case = case_of(spec, "megatron")
    assert rank_kinds(case, swapped) == (0, 1, 2, 3)
    assert rank_kinds(case, layout_of(spec, pp=4)) == (0, 1, 1, 3)


def test_adapters_alone_have_gradients_and_optimizer_states() -> None:
    spec, frozen = spec_of(DENSE), spec_of(DENSE, finetuning="lora", lora_rank=16)
    layout = layout_of(spec, tp=2, pp=2)
    whole = stage_parameters(case_of(spec, "megatron"), layout, 0)
    found = stage_parameters(case_of(frozen, "megatron"), layout, 0)
    assert (found.frozen, whole.frozen) == (whole.dense, 0)
    # 18 layers: A of column-parallel and B of row-parallel layers are replicated on both ranks of tensor parallelism.
    assert found.dense == 18 * 16 * (4 * 4096 + (6144 + 4096 + 24576 + 12288) // 2)
    parts = stage_of(frozen, layout).parts_bytes
    assert parts["weights"] == 2 * found.total
    assert parts["gradients"] == 4 * found.dense
    assert parts["optimizer"] == 12 * found.dense / layout.dp


def test_adapters_of_experts_are_sharded_as_experts_are() -> None:
    spec = spec_of(MIXED, finetuning="lora")
    layout = layout_of(spec, tp=2, ep=8)
    case = case_of(spec, layout.backend)
    found = stage_parameters(case, layout, 0)
    assert found.expert == 48 * 16 * 8 * (2048 + 1536 + 768 + 2048)
    dense, expert = layout.optimizer_shards
    assert stage_of(spec, layout).parts_bytes["optimizer"] == 12 * (found.dense / dense + found.expert / expert)


def test_a_vision_tower_is_frozen_whole_beside_adapters() -> None:
    spec = spec_of(VISION, finetuning="lora")
    case = case_of(spec, "megatron")
    found = stage_parameters(case, layout_of(spec), 0)
    assert found.frozen > spec.model.vision.parameters
    language = case_of(spec_of("Qwen/Qwen3-8B", finetuning="lora"), "megatron")
    assert found.dense == stage_parameters(language, layout_of(spec), 0).dense


def test_token_prediction_has_adapters_of_its_own() -> None:
    sizes = [
        stage_parameters(case_of(spec, "megatron"), layout_of(spec), 0).dense
        for spec in (spec_of(DENSE, finetuning="lora"), spec_of(DENSE, finetuning="lora", mtp_num_layers=1))
    ]
    eh_proj = 8 * (2 * 4096 + 4096)
    assert sizes[1] == sizes[0] // 36 * 37 + eh_proj
