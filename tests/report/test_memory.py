import ast
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import topoplan
from tests.engines.samples import DENSE, MIXED, VISION, spec_of
from topoplan.planner.breakdown import breakdown
from topoplan.planner.plan import Plan
from topoplan.planner.predict import predict
from topoplan.report.memory import SOURCES, memory_to_dict, print_memory
from topoplan.specs.spec import Spec

PACKAGE = Path(topoplan.__file__).parent


def sample(
    model: str = DENSE, *, cluster: dict[str, Any] | None = None, job: Any = None, **form: Any
) -> tuple[Spec, Plan]:
    spec = spec_of(model, cluster=cluster, **(job or {}))
    return spec, predict(spec, {"backend": "megatron", **form})


def rendered(spec: Spec, plan: Plan, *, width: int = 100) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, color_system=None, highlight=False)
    print_memory(console, spec, plan, breakdown(spec, plan))
    return stream.getvalue()


def flat(text: str) -> str:
    return " ".join(text.split())


SAMPLES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (DENSE, {}, {"tp": 2}),
    (DENSE, {}, {"tp": 8, "pp": 4, "vpp": 3, "recompute": "full"}),
    (VISION, {"stage": "dpo", "freeze_vision_tower": False}, {"pp": 4, "tp": 2}),
    (MIXED, {"precision": "fp8"}, {"tp": 2, "pp": 2, "ep": 4, "etp": 2}),
]


@pytest.mark.parametrize(("model", "job", "form"), SAMPLES)
@pytest.mark.parametrize("width", [80, 100, 140])
def test_no_line_is_wider_than_the_terminal(model: str, job: Any, form: Any, width: int) -> None:
    text = rendered(*sample(model, job=job, **form), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert width < 100 or "…" not in text


def test_every_source_is_a_file_of_the_package_and_a_name_in_it() -> None:
    for name, source in SOURCES.items():
        file, names = source.split(";")[0].split(",")[0].split(" ", 1)
        path = PACKAGE / file
        assert path.is_file(), name
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        assert set(names.split(" and ")) <= defined, name


def test_every_part_of_every_sample_has_a_source() -> None:
    for model, job, form in SAMPLES:
        _, plan = sample(model, job=job, **form)
        for stage in plan.memory.by_stage:
            for part in stage.parts_bytes:
                assert ("peak" if part.startswith("peak") else part) in SOURCES


def test_the_blocks_lead_from_the_stages_to_the_card() -> None:
    spec, plan = sample(MIXED, tp=2, pp=2, ep=4, recompute={"granularity": "selective", "modules": ["moe"]})
    text = flat(rendered(spec, plan))
    blocks = (
        "Stages, GiB",
        "Stage 0, by part",
        "Moments that may be the peak",
        "Activations that a layer saves, one micro batch: attention + moe, 24 layers",
        "Micro batches in flight",
        "Weights of a layer, elements: attention + moe, 24 layers (tp 2, ep 4, etp 1)",
        "Weights before and behind the layers",
        "From allocated to the card",
    )
    positions = [text.index(block) for block in blocks]
    assert positions == sorted(positions)
    assert "experts.linear_fc1 input" in text
    assert "moe, full recomputed" in text
    assert "8 communicators" in text
    for one in breakdown(spec, plan).communicators:
        assert f"{one.name}: {one.size} ranks, {one.device_bytes / 2**20:,.1f} MiB" in text
    assert "the error band of the prediction" in text


def test_every_moment_of_the_worst_stage_is_taken_apart() -> None:
    spec, plan = sample(tp=2, recompute="full")
    text = flat(rendered(spec, plan))
    assert "the peak" in text
    assert "bf16 logits" in text
    assert "dummy weight gradients" in text
    moments = memory_to_dict(plan, breakdown(spec, plan))["moments"]
    assert {moment["name"] for moment in moments} == {"backward", "loss", "embedding gradient"}
    sizes = [moment["mib"] for moment in moments]
    assert sizes == sorted(sizes, reverse=True)
    for moment in moments:
        assert sum(moment["terms_mib"].values()) == pytest.approx(moment["mib"], rel=1e-4)
    parts = plan.memory.by_stage[0].parts_bytes
    assert parts[f"peak ({moments[0]['name']})"] / 2**20 == pytest.approx(moments[0]["mib"], rel=1e-4)


def test_token_prediction_is_named_in_the_account() -> None:
    text = flat(rendered(*sample(tp=2, job={"mtp_num_layers": 1})))
    assert "multi-token prediction of attention + mlp, 1 layer" in text
    assert "eh_proj input" in text
    assert "logits of multi-token prediction" in text


def test_one_stage_needs_no_table_of_stages() -> None:
    assert "Stages, GiB" not in rendered(*sample(tp=2))


def test_chunks_of_an_interleaved_stage_have_a_line_each() -> None:
    text = flat(rendered(*sample(tp=4, pp=4, vpp=3)))
    assert "chunk 2: 3 layers keep" in text
    assert "x 7 in flight" in text


def test_full_recomputation_is_explained() -> None:
    text = flat(rendered(*sample(tp=2, recompute="full")))
    assert "the layer's input alone" in text
    assert "Full recomputation, uniform: one input for each 1 layer." in text
    block = {"granularity": "full", "method": "block", "num_layers": 4}
    assert "the first 4 layers of each chunk; the others keep all" in flat(rendered(*sample(tp=2, recompute=block)))


def test_a_plan_that_does_not_fit_says_by_how_much() -> None:
    text = flat(rendered(*sample("Qwen/Qwen2.5-72B", tp=8)))
    assert " over " in text


def test_a_stated_margin_and_the_host_memory_are_named() -> None:
    cluster = {"margin": 0.1, "host_memory": "2TiB"}
    text = flat(rendered(*sample(tp=2, cluster=cluster, optimizer_offload_fraction=1.0)))
    assert "as the spec or --margin says" in text
    assert "GiB for the offloaded optimizer, of 2048.0" in text


def test_frozen_weights_are_counted() -> None:
    text = rendered(*sample(VISION, tp=2))
    assert "of them frozen" in text
    assert "vision encoder" in text


def test_the_document_holds_every_term() -> None:
    spec, plan = sample(MIXED, tp=2, pp=2, ep=4)
    memory = memory_to_dict(plan, breakdown(spec, plan))
    assert json.loads(json.dumps(memory)) == memory
    assert memory["worst_stage"] == 0
    for stage in memory["stages"]:
        assert sum(stage["parts_gib"].values()) == pytest.approx(stage["allocated_gib"], rel=1e-4)
    (layer,) = memory["layers"]
    assert sum(row["mib"] for row in layer["saved"]) == pytest.approx(layer["saved_mib"], rel=1e-4)
    device = memory["device"]
    assert device["reserved_gib"] == pytest.approx(device["allocated_gib"] * (1 + device["fragmentation"]), rel=1e-4)
    assert device["margin_from"] == "band"
    assert set(memory["sources"]) == set(SOURCES)
