"""A written spec is read back as the same spec."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from topoplan.report.spec_text import spec_text
from topoplan.specs.load import load_spec
from topoplan.specs.source import parse_source
from topoplan.specs.spec import Spec

OWN_CARD = "gpu={name: x1, memory: 48GiB, memory_bandwidth: 2TB/s, bf16_tflops: 300}"
SPECS = [
    *([str(path)] for path in sorted(Path("cluster_specs").glob("*.yaml"))),
    ["cluster_specs/h100-4x8.yaml", "finetuning=freeze", "freeze_trainable_layers=-3", "stage=pt", "packing=false"],
    ["cluster_specs/h100-4x8.yaml", "model=Qwen/Qwen3-8B", "finetuning=lora", "lora_target=[q_proj,v_proj]"],
    [
        "cluster_specs/h100-4x8.yaml",
        "hosts=[{address: a, hcas: [mlx5_0]}, b, c, d]",
        "env={A: '1'}",
        "secrets=[HF_TOKEN]",
    ],
    ["cluster_specs/h100-4x8.yaml", "nvlink_bandwidth=none", "sockets=4", "host_memory=1234GiB", "margin=8%"],
    ["cluster_specs/h100-4x8.yaml", "lengths=[[512, 100], [4096, 3]]", "pin={tp: 2}", "trainer.save_steps=7"],
    ["cluster_specs/h100-4x8.yaml", "fabric={kind: roce, rails: 8, latency: 7us}", "software={python: '3.12'}"],
    ["cluster_specs/h100-4x8.yaml", OWN_CARD, "gpu.sm_count=100"],
    ["cluster_specs/h100-4x8.yaml", OWN_CARD, "nvlink_bandwidth=none"],
    ["cluster_specs/h100-4x8.yaml", "gpu={name: h100-sxm-80gb, memory: 64GiB}", "slurm={partition: gpu}"],
]


@pytest.mark.parametrize("given", SPECS, ids=" ".join)
def test_it_is_the_same_spec(given: list[str]) -> None:
    path, *overrides = given
    spec = load_spec(path, overrides=overrides)
    again = load_spec(parse_source(spec_text(spec), name="written"))
    for part in ("cluster", "job"):
        one, other = getattr(spec, part), getattr(again, part)
        for field in fields(one):
            if field.name not in ("gpu", "lengths"):
                assert getattr(other, field.name) == getattr(one, field.name), field.name
    assert again.model == spec.model
    assert lengths(again) == lengths(spec)
    card, same = spec.cluster.gpu, again.cluster.gpu
    for field in fields(card):
        if field.name != "source":
            assert getattr(same, field.name) == pytest.approx(getattr(card, field.name)), field.name


def lengths(spec: Spec) -> object:
    return spec.job.lengths and spec.job.lengths.counts


def test_what_is_assumed_stays_assumed_and_is_shown() -> None:
    said = {"gpu": "h100", "nodes": "2", "model": "Qwen/Qwen3-8B", "job.seq_len": "32k", "job.global_batch_size": "64"}
    spec = load_spec(None, keys={f"--{key}": (key, value) for key, value in said.items()})
    text = spec_text(spec, notes=["from a\nfile"])
    assert "# nvlink_bandwidth: 900GB/s" in text
    assert "\n# ib_bandwidth: 400Gb/s " in text
    assert "\n  seq_len: 32768 " in text
    assert "\n# - from a file\njob:\n" in text
    again = load_spec(parse_source(text, name="written")).cluster
    assert again.assumed == ("nvlink_bandwidth", "ib_bandwidth", "nics_per_node")
    uncommented = load_spec(parse_source(text.replace("# ib_bandwidth: 400", "ib_bandwidth: 100"), name="written"))
    assert uncommented.cluster.nic_bytes_per_s == 100e9 / 8


def test_samples_that_are_counted_from_the_data_set_are_not_written(tmp_path: Path) -> None:
    data = tmp_path / "mine.jsonl"
    turns = [{"role": "user", "content": "word " * 50}, {"role": "assistant", "content": "answer " * 20}]
    data.write_text((json.dumps({"messages": turns}) + "\n") * 100)
    given = [f"dataset={data}", "model=Qwen/Qwen3-8B"]
    spec = load_spec("cluster_specs/h100-4x8.yaml", overrides=[*given, "samples=null"])
    text = spec_text(spec)
    assert spec.job.samples == 100
    assert "samples:" not in text
    packed = load_spec(parse_source(text, name="written"), overrides=["packing=true"])
    assert packed.job.samples is not None
    assert packed.job.samples < 10  # packed sequences, not samples
    assert "samples: 70 " in spec_text(load_spec("cluster_specs/h100-4x8.yaml", overrides=[*given, "samples=70"]))
