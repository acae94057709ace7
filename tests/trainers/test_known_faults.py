"""The table of known faults: each is triggered by the layout that it names, and not without its cause."""

import re
from dataclasses import replace
from typing import Any

import pytest

from tests.bundle.samples import CLUSTER, QWEN3_8B, QWEN3_30B, make_spec_and_plan
from tests.reading.setups import setup_of
from topoplan.catalog.packages import allows, packages
from topoplan.errors import LayoutError
from topoplan.layout.layout import Layout, changed
from topoplan.lint.check import check_setup
from topoplan.lint.prediction_target import PredictionTarget
from topoplan.specs import known
from topoplan.specs.model import Model
from topoplan.specs.spec import Spec
from topoplan.trainers.known_faults import FAULTS, faults_of_keys, refused_keys
from topoplan.trainers.registry import caveats_of, trainer_named

DENSE = {"model": QWEN3_8B}
EXPERTS = {"model": QWEN3_30B}
PIPELINE = {"pp": 2, "vpp": 2, "dp": 16, "gradient_accumulation_steps": 4}


def case(**what: Any) -> tuple[Spec, Layout]:
    spec, plan = make_spec_and_plan(**what)
    return spec, plan.layout


def met(spec: Spec, layout: Layout) -> set[str]:
    return {fault.name for fault in FAULTS if not fault.keys and fault.is_triggered(spec, layout, {})}


def of_catalog(name: str, **layout: Any) -> tuple[Spec, Layout]:
    spec, plan = make_spec_and_plan(**DENSE)
    model: Model = known.model(name)
    return replace(spec, model=model), changed(plan.layout, **layout)


def of_zero(model: str, trainer: str, stage: int = 3) -> tuple[Spec, Layout]:
    spec, layout = of_catalog(model, backend="deepspeed", zero_stage=stage)
    return replace(spec, trainer=trainer), layout


CASES = {
    "experts-gathered-apart": (
        of_zero("deepseek-ai/DeepSeek-V2", "swift"),
        of_zero("deepseek-ai/DeepSeek-V2", "llamafactory"),
    ),
    "checkpoint-plan": (case(**DENSE), case(**DENSE, distributed_optimizer=False, overlap_param_gather=False)),
    "interleaving-frees-early": (
        case(**DENSE, **PIPELINE),
        case(**DENSE, **{**PIPELINE, "micro_batch_size": 2, "gradient_accumulation_steps": 2}),
    ),
    "expert-gradient-norm": (case(**EXPERTS, tp=2, dp=16, ep=4), case(**EXPERTS, tp=1, dp=32, ep=4)),
    "expert-gradients-mixed": (case(**EXPERTS, tp=2, dp=16, etp=1), case(**EXPERTS, tp=2, dp=16, etp=2)),
    "few-kv-heads": (of_catalog("Qwen/Qwen3-30B-A3B", tp=8), of_catalog("Qwen/Qwen3-30B-A3B", tp=4)),
    "output-gate-not-split": (
        of_catalog("Qwen/Qwen3-Next-80B-A3B-Instruct", tp=4),
        of_catalog("Qwen/Qwen3-Next-80B-A3B-Instruct", tp=2),
    ),
    "linear-attention-norm": (
        of_catalog("Qwen/Qwen3-Next-80B-A3B-Instruct", tp=2, sequence_parallel=False),
        of_catalog("Qwen/Qwen3-Next-80B-A3B-Instruct", tp=2, sequence_parallel=True),
    ),
    "sink-gradient-norm": (of_catalog("openai/gpt-oss-20b", tp=2), of_catalog("openai/gpt-oss-20b", tp=1)),
    "token-prediction-loss": (
        case(**DENSE, cp=2, dp=16, job={"mtp_num_layers": 1}),
        case(**DENSE, cp=1, dp=32, job={"mtp_num_layers": 1}),
    ),
}


@pytest.mark.parametrize("name", [fault.name for fault in FAULTS if not fault.keys])
def test_a_layout_meets_it_and_its_neighbour_does_not(name: str) -> None:
    with_it, without_it = CASES[name]
    assert name in met(*with_it)
    assert name not in met(*without_it)


@pytest.mark.parametrize(
    ("model", "stage"), [("deepseek-ai/DeepSeek-V2", 2), ("Qwen/Qwen3-30B-A3B", 3), ("Qwen/Qwen3-8B", 3)]
)
def test_experts_are_gathered_together_or_not_at_all(model: str, stage: int) -> None:
    assert met(*of_zero(model, "swift", stage)) == set()


@pytest.mark.parametrize(("leaves", "told"), [("", True), ('"leaf_module": {"classes": ["DeepseekV2MoE"]}, ', False)])
def test_a_file_of_deepspeeds_that_names_leaf_modules_spares_them(leaves: str, told: bool) -> None:
    command = "NPROC_PER_NODE=8 swift sft --model deepseek-ai/DeepSeek-V2 --dataset a --deepspeed ds.json\n"
    document = f'{{"zero_optimization": {{{leaves}"stage": 3}}, "train_micro_batch_size_per_gpu": "auto"}}'
    found = check_setup(setup_of(command, ds_json=document), PredictionTarget()).findings
    assert any(one.rule == "fault-experts-gathered-apart" for one in found) is told


@pytest.mark.parametrize("backend", ["ddp", "deepspeed", "fsdp2"])
def test_what_does_not_run_on_megatron_meets_none(backend: str) -> None:
    spec, layout = CASES["expert-gradient-norm"][0]
    assert met(spec, changed(layout, backend=backend)) == set()


@pytest.mark.parametrize(
    ("keys", "layout", "name"),
    [
        ({"overlap_p2p_comm": False}, PIPELINE, "interleaving-batched-sends"),
        ({"additional_configs": {"overlap_p2p_comm": False}}, PIPELINE, "interleaving-batched-sends"),
        ({"overlap_p2p_comm": False}, {**PIPELINE, "pp": 4, "dp": 8}, ""),
        ({"overlap_p2p_comm": False}, {**PIPELINE, "vpp": 1}, ""),
        ({"overlap_p2p_comm": True}, PIPELINE, ""),
        ({"save_strategy": "no"}, {"overlap_param_gather": True}, "stale-final-weights"),
        ({"save_strategy": "no"}, {"overlap_param_gather": False}, ""),
        ({"save_strategy": "steps"}, {"overlap_param_gather": True}, ""),
        ({"save_hf_model": True}, {**EXPERTS, "tp": 2, "dp": 16, "ep": 4}, "expert-export"),
        ({"save_hf_model": False}, {**EXPERTS, "tp": 2, "dp": 16, "ep": 4}, ""),
        ({"save_hf_model": True}, {**EXPERTS, "tp": 2, "dp": 16, "etp": 2}, ""),
        ({"save_hf_model": True}, {**EXPERTS, "tp": 1, "dp": 32, "ep": 4}, ""),
    ],
)
def test_keys_that_train_something_else_are_refused(keys: dict[str, Any], layout: dict[str, Any], name: str) -> None:
    spec, asked = case(**{**DENSE, **layout, "job": {"trainer": keys}})
    assert [fault.name for fault in faults_of_keys(spec, asked, keys)] == ([name] if name else [])
    said = list(refused_keys(spec, asked))
    assert [one.rule for one in said] == ([name] if name else [])
    assert all(one.kind is LayoutError and one.where.startswith("job.trainer.") for one in said)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_is_told_in_full(fault: Any) -> None:
    assert fault.package in packages()
    assert fault.source
    assert fault.cure or fault.remedy
    assert "{" not in fault.text
    assert re.match(r"[a-z]", fault.text)
    if fault.cure and fault.versions:
        border = re.search(r"[\d.]+", fault.versions)[0]  # type: ignore[index]
        for version in (border, f"{border}.0", "0.0.1", "99"):
            assert allows(fault.versions, version) is not allows(fault.cure, version)
    assert len({other.name for other in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({**DENSE}, ()),
        ({**DENSE, **PIPELINE}, ("vpp > 1 needs megatron-core",)),
        ({**DENSE, **PIPELINE, "cluster": replace(CLUSTER, software={"megatron-core": "0.18.2"})}, ()),
        ({**EXPERTS, "ep": 8, "tp": 2, "dp": 16, "etp": 1}, ("ep > 1 with tp > 1", "cannot resume", "no Hugging Face")),
    ],
    ids=["plain", "interleaved", "interleaved-cured", "experts"],
)
def test_what_is_known_to_go_wrong_with_a_layout_is_its_caveats(what: dict[str, Any], words: tuple[str, ...]) -> None:
    spec, layout = case(**what)
    found = caveats_of(spec, layout, trainer_named("llamafactory"))
    assert len(found) == len(words)
    assert all(word in caveat for word, caveat in zip(words, found, strict=True))


def test_a_layout_that_no_trainer_runs_has_a_caveat() -> None:
    assert len(caveats_of(*case(**DENSE), None)) == 1
