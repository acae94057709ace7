"""Keys that both Megatron trainers share."""

from typing import Any

import pytest

from tests.lint.translating import translated
from topoplan.errors import SpecError
from topoplan.layout.layout import Recompute
from topoplan.specs.cluster import Cluster


@pytest.mark.parametrize(
    ("keys", "recompute"),
    [
        ({}, Recompute()),
        ({"recompute_granularity": None}, Recompute()),
        ({"recompute_granularity": "full"}, Recompute(granularity="full", method="uniform", num_layers=1)),
        (
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 4},
            Recompute(granularity="full", method="block", num_layers=4),
        ),
        ({"recompute_granularity": "selective"}, Recompute(granularity="selective", modules=("core_attn",))),
        (
            {"recompute_granularity": "selective", "recompute_modules": "mlp,core_attn"},
            Recompute(granularity="selective", modules=("mlp", "core_attn")),
        ),
        ({"moe_layer_recompute": True}, Recompute(granularity="selective", modules=("moe",))),
    ],
)
def test_recompute_modes_are_the_trainers(h100s: Cluster, keys: dict[str, Any], recompute: Recompute) -> None:
    assert translated(h100s, **keys).layout.recompute == recompute


def test_embedding_and_loss_that_count_as_layers_make_uneven_stages(h100s: Cluster) -> None:
    layout = translated(
        h100s,
        model_name_or_path="Qwen/Qwen3-32B",  # 64 layers
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=3,
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
    ).layout

    assert layout.pipeline_layout == "Et*10|(t*11|)*4t*10L"
    with pytest.raises(SpecError, match=r"\(64 layers \+ 1\) % \(pp 2 \* vpp 1\) = 1"):
        translated(
            h100s,
            model_name_or_path="Qwen/Qwen3-32B",
            pipeline_model_parallel_size=2,
            account_for_loss_in_pipeline_split=True,
        )


def test_a_pipeline_layout_gives_the_virtual_stages(h100s: Cluster) -> None:
    layout = translated(
        h100s, pipeline_model_parallel_size=2, pipeline_model_parallel_layout='"Et*9|t*9|t*9|t*9L"'
    ).layout

    assert (layout.pp, layout.vpp) == (2, 2)


def test_offload_counts_where_it_is_switched_on(h100s: Cluster) -> None:
    fraction = {"optimizer_offload_fraction": 0.5}

    assert translated(h100s, **fraction).layout.optimizer_offload_fraction == 0
    assert translated(h100s, **fraction, optimizer_cpu_offload=True).layout.optimizer_offload_fraction == 0.5
