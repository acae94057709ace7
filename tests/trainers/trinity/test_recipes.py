"""The table of recipes, compared with the one that Trinity-RFT publishes."""

import csv
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tests.engines.samples import spec_of
from topoplan.engines.data_parallel.rules import ulysses_degrees
from topoplan.errors import LayoutError, ModelError
from topoplan.operators.params import parameter_count
from topoplan.planner.predict import predict
from topoplan.specs.known import gpu, model
from topoplan.trainers.trinity.recipes import OpenRange, cell, memory_of, recipes, table, usual_machine, yarn_factor
from topoplan.trainers.trinity.recipes import recipe as recipe_of

PUBLISHED = Path(__file__).parent / "recorded" / "trinity_a100.csv"
"""Facts from Trinity-RFT's guide to trainer configurations (A100 80 GB, 1, 2 and 4 GPUs, Qwen3 0.6B to 8B): the first
setting that worked, or -. github.com/modelscope/Trinity-RFT, Apache 2.0."""
A100 = gpu("a100-sxm-80gb")


def test_the_published_table_is_met() -> None:
    rows = list(csv.DictReader(PUBLISHED.read_text().splitlines()))
    assert len(rows) == 160
    wrong_fit, other_recipe = [], []
    for row in rows:
        gpus = int(row["gpus"])
        found = cell(model(row["model"]), usual_machine(A100, gpus), gpus, int(row["max_model_len"])).recipe
        if (found == "-") != (row["cell"] == "-"):
            wrong_fit.append((row, found))
        if found != row["cell"]:
            other_recipe.append((row, found))
    assert len(wrong_fit) <= 0.03 * len(rows), wrong_fit
    assert len(other_recipe) <= 0.06 * len(rows), other_recipe


def test_every_recipe_of_the_published_table_is_one_that_is_tried() -> None:
    published = {row["cell"] for row in csv.DictReader(PUBLISHED.read_text().splitlines())} - {"-"}
    tried = {
        recipe_of(layout)
        for gpus in (1, 2, 4)
        for layout in recipes(model("Qwen3-8B"), usual_machine(A100, gpus), gpus)
    }
    assert published <= tried


def test_recipes_are_tried_from_the_cheapest_to_the_dearest() -> None:
    names = [recipe_of(layout) for layout in recipes(model("Qwen3-8B"), usual_machine(A100, 4), 4)]
    assert names == [
        "vanilla",
        "Env",
        "SP=2",
        "Env + SP=2",
        "SP=4",
        "Env + SP=4",
        "Env + Offload",
        "Env + Offload + SP=2",
        "Env + Offload + SP=4",
    ]


@pytest.mark.parametrize(
    ("name", "gpus", "degrees"),
    [
        ("Qwen3-0.6B", 1, [1]),
        ("Qwen3-0.6B", 6, [1, 2]),  # 16 heads
        ("Qwen3-14B", 10, [1, 2]),  # 40 heads and 8 key heads: 5 and 8 do not divide each other
        ("Qwen2.5-1.5B-Instruct", 6, [1, 2, 6]),  # 12 heads and 2 key heads: 3 and 2 do not divide each other
        ("Qwen3-8B", 64, [1, 2, 4, 8]),  # a node has 8
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", 4, [1]),
    ],
)
def test_degrees_divide_gpus_and_heads_inside_a_node(name: str, gpus: int, degrees: list[int]) -> None:
    assert ulysses_degrees(model(name), gpus, 8) == degrees


def test_more_memory_takes_no_dearer_recipe() -> None:
    qwen = model("Qwen3-4B")
    order = [recipe_of(layout) for layout in recipes(qwen, usual_machine(A100, 4), 4)] + ["-"]
    contexts = range(4096, 131073, 8192)
    small, large = (table([qwen], gpu(name), [4], contexts) for name in ("a100-sxm-80gb", "h200-sxm-141gb"))
    for one, other in zip(small, large, strict=True):
        assert order.index(other.recipe) <= order.index(one.recipe)


def test_a_longer_context_takes_no_cheaper_recipe() -> None:
    qwen = model("Qwen3-1.7B")
    order = [recipe_of(layout) for layout in recipes(qwen, usual_machine(A100, 4), 4)] + ["-"]
    found = [order.index(one.recipe) for one in table([qwen], A100, [4], range(4096, 163841, 4096))]
    assert all(shorter <= longer for shorter, longer in pairwise(found))
    assert found[0] == 0
    assert found[-1] == len(order) - 1


def test_an_open_range_goes_in_the_guides_steps_until_nothing_fits() -> None:
    rows = list(csv.DictReader(PUBLISHED.read_text().splitlines()))
    models = [model(name) for name in ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B")]
    for gpus in (1, 2, 4):
        published = [int(row["max_model_len"]) for row in rows if row["gpus"] == str(gpus)]
        found = table(models, A100, [gpus], OpenRange(first=4096))
        assert [one.max_model_len for one in found] == published
        assert {one.recipe for one in found[-4:]} == {"-"}


def test_a_range_with_an_end_stops_there() -> None:
    found = table([model("Qwen3-0.6B")], A100, [8], OpenRange(first=36864, last=60000))
    assert [one.max_model_len for one in found] == [36864, 40960, 51200]


def test_the_memory_of_a_cell_where_nothing_fits_is_the_nearest_to_fitting() -> None:
    qwen, machine = model("Qwen3-8B"), usual_machine(A100, 1)
    found = cell(qwen, machine, 1, 65536)
    assert found.layout is None
    assert found.memory.device_bytes > found.memory.capacity_bytes
    assert found.memory.host_bytes > 0  # the recipe with offload comes closest


def test_yarn_is_for_contexts_beyond_the_models_own() -> None:
    assert yarn_factor(model("Qwen3-8B"), 40960) is None
    assert yarn_factor(model("Qwen3-8B"), 81920) == 2.5


def test_a_card_without_flash_attention_is_refused() -> None:
    with pytest.raises(LayoutError, match="FlashAttention 2"):
        table([model("Qwen3-8B")], gpu("v100-sxm-32gb"), [1], [4096])


def test_a_model_that_no_job_is_written_for_has_no_table() -> None:
    with pytest.raises(ModelError, match="has a vision tower, for which no Trinity-RFT job is written"):
        table([model("Qwen/Qwen3-8B"), model("Qwen/Qwen3-VL-8B-Instruct")], A100, [1], [4096])


@pytest.mark.parametrize(("ulysses", "expandable", "offload"), [(1, False, False), (2, True, False), (4, True, True)])
def test_the_ranking_and_the_table_need_the_same_memory(ulysses: int, expandable: bool, offload: bool) -> None:
    """Both describe one step of one trainer: `rank --trainer trinity` and `table` must predict the same memory."""
    spec = spec_of("Qwen/Qwen3-1.7B", nodes=1, gpus_per_node=4, gpu="a100-sxm-80gb", seq_len=20480)
    spec = replace(spec, trainer="trinity", job=replace(spec.job, global_batch_size=32, packing=False))
    wanted = next(
        layout
        for layout in recipes(spec.model, usual_machine(A100, 4), 4)
        if (layout.ulysses, layout.expandable_segments, layout.offload) == (ulysses, expandable, offload)
    )
    in_table = memory_of(spec.model, usual_machine(A100, 4), 20480, wanted)
    form = {"backend": "fsdp2", "ulysses": ulysses, "micro_batch_size": 2, "recompute": "full"}
    spec = replace(spec, cluster=replace(spec.cluster, host_memory_bytes=2**41))
    plan = predict(spec, form | {"expandable_segments": expandable, "offload": offload, "grad_reduce_in_fp32": True})
    assert plan.memory.device_bytes == in_table.device_bytes
    assert plan.memory.by_stage[0].moments == in_table.by_stage[0].moments


def test_fsdp_1_keeps_the_embedding_in_its_outermost_unit_and_clones_a_model_of_one_gpu() -> None:
    qwen = model("Qwen3-8B")
    table_size = 151936 * 4096
    vanilla = next(iter(recipes(qwen, usual_machine(A100, 4), 4)))
    one = memory_of(qwen, usual_machine(A100, 4), 20480, vanilla)
    offload = next(layout for layout in recipes(qwen, usual_machine(A100, 4), 4) if layout.offload)
    other = memory_of(qwen, usual_machine(A100, 4), 20480, offload)
    gathered = [
        dict(moment.terms_bytes)["gathered weights"]
        for memory in (one, other)
        for moment in memory.by_stage[0].moments
        if moment.name == "loss"
    ]
    assert gathered[0] - gathered[1] == 2 * table_size
    alone = memory_of(qwen, usual_machine(A100, 1), 4096, next(iter(recipes(qwen, usual_machine(A100, 1), 1))))
    clones = {moment.name: dict(moment.terms_bytes) for moment in alone.by_stage[0].moments}["checkpoint"]
    assert clones["clones of the weights"] == 8 * parameter_count(qwen)


def test_a_block_of_logits_is_lost_without_expandable_segments() -> None:
    qwen = model("Qwen3-1.7B")
    plain, expandable = (
        memory_of(qwen, usual_machine(A100, 4), 20480, layout)
        for layout in recipes(qwen, usual_machine(A100, 4), 4)
        if layout.ulysses == 1 and not layout.offload
    )
    assert plain.allocated_bytes == expandable.allocated_bytes
    assert plain.reserved_bytes - plain.allocated_bytes == pytest.approx(2 * 151936 * 2 * 20480)
    assert expandable.reserved_bytes == pytest.approx(1.01 * expandable.allocated_bytes)


def test_a_token_costs_four_copies_of_its_logits_the_layers_inputs_and_the_last_norm() -> None:
    qwen = model("Qwen3-1.7B")
    vanilla = next(iter(recipes(qwen, usual_machine(A100, 4), 4)))
    live = [memory_of(qwen, usual_machine(A100, 4), tokens, vanilla).allocated_bytes for tokens in (20480, 20481)]
    assert (live[1] - live[0]) / 2 == pytest.approx(4 * 2 * 151936 + 2 * 2048 * 28 + 8 * 2048)
