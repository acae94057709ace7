import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from topoplan import catalog
from topoplan.specs.forms import JobForm, SpecForm, schema_of_spec
from topoplan.specs.mistakes import keys_of

PUBLISHED = Path(__file__).parents[2] / "cluster_specs" / "spec.schema.json"
SMALLEST: dict[str, Any] = {
    "name": "h100-4x8",
    "nodes": 4,
    "gpus_per_node": 8,
    "gpu": "h100-sxm-80gb",
    "nvlink_bandwidth": "900GB/s",
    "ib_bandwidth": "400Gb/s",
    "nics_per_node": 8,
    "model": "Qwen/Qwen3-8B",
    "job": {"seq_len": 4096, "global_batch_size": 64},
}


def _mistakes(document: dict[str, Any]) -> list[str]:
    return [error.json_path for error in jsonschema.Draft202012Validator(schema_of_spec()).iter_errors(document)]


def test_the_published_schema_is_the_one_that_is_printed() -> None:
    """If this fails, run `topoplan show schema > cluster_specs/spec.schema.json`."""
    assert json.loads(PUBLISHED.read_text(encoding="utf-8")) == schema_of_spec()


def test_it_is_a_json_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(schema_of_spec())


def test_it_describes_every_key() -> None:
    schema = schema_of_spec()
    assert set(schema["properties"]) == {"$schema", *keys_of(SpecForm)}
    job = schema["$defs"]["JobForm"]["properties"]
    assert set(job) == set(keys_of(JobForm))
    for key, value in {**schema["properties"], **job}.items():
        assert key == "$schema" or value.get("description"), key


def test_it_completes_gpu_names() -> None:
    names = schema_of_spec()["properties"]["gpu"]["anyOf"][0]["enum"]
    assert names == list(catalog.gpu_names())


def test_it_tells_the_defaults_of_the_job() -> None:
    job = schema_of_spec()["$defs"]["JobForm"]["properties"]
    assert (job["precision"]["default"], job["epochs"]["default"], job["packing"]["default"]) == ("bf16", 3.0, False)


def test_the_smallest_spec_and_every_block_are_valid() -> None:
    assert _mistakes(SMALLEST) == []
    full = {
        **SMALLEST,
        "$schema": "./spec.schema.json",
        "gpu": {"name": "x", "memory": "96GiB", "bf16_tflops": 989, "memory_bandwidth": "3.35TB/s"},
        "model": {"config": {"hidden_size": 1}},
        "hosts": ["a", {"address": "b", "hcas": ["mlx5_0:1"]}],
        "fabric": {"kind": "roce", "latency": "5us", "rails": 8},
        "margin": "8%",
        "env": {"NCCL_DEBUG": "INFO", "X": 1},
        "slurm": {"partition": "gpu", "time": 90, "requeue": True},
        "job": {**SMALLEST["job"], "trainer": {"save_steps": 5}, "pin": {"tp": 4, "recompute": "full"}},
    }
    assert _mistakes(full) == []


@pytest.mark.parametrize(
    "change",
    [
        {"nvlink_bandwidth": 900},
        {"nvlink_bandwidth": "900gb/s"},
        {"nvlink_bandwidth": "900GB"},
        {"host_memory": "2T"},
        {"nodes": 0},
        {"gpu": "h100"},
        {"ndoes": 4},
        {"job": {"seq_len": 4096}},
        {"name": "a/b"},
        {"margin": 8},
        {"slurm": {"p": "gpu"}},
    ],
)
def test_an_editor_marks_what_loading_refuses(change: dict[str, Any]) -> None:
    assert _mistakes({**SMALLEST, **change})
