import json
import math
from dataclasses import fields, replace

import pytest

from tests.bundle.samples import (
    CLUSTER,
    DEEPSEEK,
    HOSTS,
    QWEN3_8B,
    QWEN3_VL_8B,
    make_layout,
    make_plan,
    make_spec_and_plan,
)
from topoplan.layout.layout import Recompute
from topoplan.planner.view import cluster_to_dict, job_to_dict, model_to_dict, plan_to_dict, rounded, spec_to_dict
from topoplan.specs.cluster import Cluster
from topoplan.specs.job import Job
from topoplan.specs.lengths import Lengths
from topoplan.specs.model import Layer, Mlp, Model


def test_a_plan_has_the_keys_of_the_contract() -> None:
    view = plan_to_dict(make_plan(make_layout()), rank=1)
    assert list(view) == [
        *("rank", "id", "layout", "fits", "memory", "time"),
        *("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "warnings"),
    ]
    assert view["id"] == "tp4-pp1-dp8-mbs1"
    assert view["fits"] is True
    assert view["memory"] | {"by_stage": None} == {
        "allocated_gib": 50.25,
        "reserved_gib": 55.5,
        "device_gib": 60.125,
        "capacity_gib": 79.65,
        "band": [57.1187, 63.1313],
        "margin_gib": 4.0,
        "host_gib": 0.0,
        "by_stage": None,
    }
    assert view["memory"]["by_stage"] == [
        {"stage": 0, "allocated_gib": 50.25, "parts_gib": {"weights": 20.0, "activations": 30.25}}
    ]
    assert view["time"] == {"step_s": 2.0, "band": [1.8, 2.3], "parts_s": {"compute": 1.5, "tp": 0.5}}
    assert view["tflops_per_gpu"] == 210.0
    assert view["mfu"] == 0.212346


def test_a_lone_prediction_has_no_rank() -> None:
    assert "rank" not in plan_to_dict(make_plan(make_layout()))


def test_the_layout_of_a_plan_is_complete() -> None:
    layout = plan_to_dict(make_plan(make_layout(recompute=Recompute(granularity="selective", modules=("mlp",)))))[
        "layout"
    ]
    assert layout["recompute"] == {"granularity": "selective", "modules": ["mlp"]}
    assert (layout["tp"], layout["dp"], layout["gradient_accumulation_steps"]) == (4, 8, 8)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1 / 3, 0.333333), (123456.789, 123457.0), (0.0, 0.0), (2.5e-7, 2.5e-7), (-1.23456789, -1.23457)],
)
def test_numbers_are_rounded_to_six_significant_digits(value: float, expected: float) -> None:
    assert rounded(value) == expected
    assert rounded(rounded(value)) == rounded(value)


def test_infinity_stays() -> None:
    assert rounded(math.inf) == math.inf


def test_a_spec_has_every_field_of_cluster_model_and_job() -> None:
    spec, _ = make_spec_and_plan(cluster=replace(CLUSTER, hosts=HOSTS, env={"A": "1"}))
    view = spec_to_dict(spec)
    assert set(view) == {"cluster", "model", "job"}
    assert set(view["cluster"]) == {field.name for field in fields(Cluster)}
    assert set(view["job"]) == {field.name for field in fields(Job)} - {"lengths"}
    assert {field.name for field in fields(Model)} <= set(view["model"])
    assert view["cluster"]["hosts"][0]["hcas"] == ["mlx5_0:1", "mlx5_1:1"]
    assert json.loads(json.dumps(view)) == view


def test_lengths_of_samples_are_summed_up() -> None:
    lengths = Lengths(counts=((100, 98), (900, 2)), samples=100, source="a.json")
    spec, _ = make_spec_and_plan(job={"lengths": lengths})
    view = spec_to_dict(spec)["job"]["lengths"]
    assert view["source"] == "a.json"
    assert (view["samples"], view["mean"], view["median"], view["p99"], view["longest"]) == (100, 116.0, 100, 900, 900)


def test_all_lengths_are_there_where_the_whole_is_wanted() -> None:
    lengths = Lengths(counts=((100, 98), (900, 2)), samples=100, source="a.json")
    spec, _ = make_spec_and_plan(job={"lengths": lengths})
    short, whole = (spec_to_dict(spec, whole=is_whole)["job"]["lengths"] for is_whole in (False, True))
    assert whole == {**short, "counts": ["100:98 900:2"]}


def test_a_layer_says_what_it_predicts_only_where_that_is_unusual() -> None:
    usual, ahead = QWEN3_8B.layers[0], replace(QWEN3_8B.layers[0], predicts_next=True)
    layers = model_to_dict(replace(QWEN3_8B, layers=(usual, ahead)))["layers"]
    assert "predicts_next" not in layers[0]
    assert layers[1]["predicts_next"] is True


def test_runs_of_equal_layers_are_one_entry() -> None:
    dense = replace(QWEN3_8B.layers[0], ffn=Mlp(intermediate_size=10944))
    view = model_to_dict(replace(DEEPSEEK, layers=(dense,) * 3 + DEEPSEEK.layers[3:]))
    assert [layer["count"] for layer in view["layers"]] == [3, 58]
    assert view["num_layers"] == 61
    assert [layer["ffn"]["kind"] for layer in view["layers"]] == ["mlp", "moe"]
    assert [layer["attention"]["kind"] for layer in view["layers"]] == ["attention", "latent_attention"]
    assert view["layers"][1]["attention"]["kv_lora_rank"] == 512


def test_equal_layers_that_are_different_objects_are_one_run_too() -> None:
    copies = tuple(Layer(attention=layer.attention, ffn=layer.ffn) for layer in QWEN3_8B.layers)
    assert model_to_dict(replace(QWEN3_8B, layers=copies))["layers"][0]["count"] == 36


def test_a_vision_tower_is_a_block() -> None:
    assert model_to_dict(QWEN3_VL_8B)["vision"]["patch_size"] == 16
    assert model_to_dict(QWEN3_8B)["vision"] is None


def test_values_that_json_does_not_know_become_text() -> None:
    from datetime import date

    assert job_to_dict(Job(seq_len=1, global_batch_size=1, trainer={"run_name": date(2024, 1, 2)}))["trainer"] == {
        "run_name": "2024-01-02"
    }


def test_the_cluster_keeps_its_units() -> None:
    assert cluster_to_dict(CLUSTER)["nvlink_bytes_per_s"] == 450e9
