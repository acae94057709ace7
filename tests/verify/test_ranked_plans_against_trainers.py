"""Check ranked plans with megatron-core, LLaMA-Factory's parser and, if it is installed, the adapter.

The plans are the best ones of every shipped spec in every stage, those of every model type that the trainer supports,
and at least one of each kind: uneven and even stages, interleaved or not, each recompute mode, offload, multi-token
prediction.
"""

import importlib.util
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from tests.layout.specs import DENSE, MLA, MOE, VISION, make_spec
from tests.verify.llamafactory import NOT_BUILT_BY_THE_ADAPTER, ROOT, need_llamafactory, parse
from tests.verify.megatron import refused_by_megatron, stages_by_megatron
from topoplan import catalog
from topoplan.bundle.bundle import generate
from topoplan.layout.layout import stages_of
from topoplan.planner.plan import Plan
from topoplan.planner.search import rank
from topoplan.specs import known
from topoplan.specs.config_json import model_from_config
from topoplan.specs.load import load_spec
from topoplan.specs.model import Model
from topoplan.specs.spec import Spec
from topoplan.trainers.llamafactory.key_list import templates

SUPPORTED_MODEL_TYPES = frozenset(templates().supported_model_types)

pytestmark = pytest.mark.verify

REASON = "megatron-core is not installed (the verify extra has it)"
TIB = 2**40
BEST = 3
"""Number of plans tried for each shipped spec and each model type."""
STAGES = ("pt", "sft", "dpo")


@dataclass(frozen=True)
class Sample:
    spec: Spec
    config: Mapping[str, Any]
    """The model's config.json."""
    plans: tuple[Plan, ...]


def kind(plan: Plan) -> tuple[object, ...]:
    layout = plan.layout
    recompute = layout.recompute
    return (
        layout.pipeline_layout is not None,
        min(layout.vpp, 5),
        recompute.method or recompute.granularity,
        layout.optimizer_offload_fraction > 0,
        layout.etp == layout.tp,
    )


def one_of_every_kind(model: str, **keys: Any) -> Sample:
    spec = make_spec(model, **keys)
    spec = replace(spec, cluster=replace(spec.cluster, host_memory_bytes=2 * TIB))
    rng = random.Random(json.dumps([model, keys]))
    by_kind: dict[tuple[object, ...], list[Plan]] = {}
    for plan in rank(spec).plans:
        by_kind.setdefault(kind(plan), []).append(plan)
    plans = tuple(rng.choice(by_kind[key]) for key in sorted(by_kind, key=repr))
    return Sample(spec, catalog.model_config(model), plans)


def stages_for(path: Path) -> tuple[str, ...]:
    """Return the stages in which the trainer supports the model: no preference pairs with images."""
    return STAGES if load_spec(path).model.vision is None else ("pt", "sft")


def best_of_shipped_spec(path: Path, stage: str) -> Sample:
    spec = load_spec(path)
    spec = replace(spec, job=replace(spec.job, stage=stage))
    return Sample(spec, catalog.model_config(spec.model.name), rank(spec).plans[:BEST])


def best_of_type(model_type: str) -> Sample:
    """Return the smallest catalog model of a type, or else the default model of transformers."""
    names = [name for name in catalog.model_names() if known.model(name).model_type == model_type]
    if names:
        name = min(names, key=catalog.model_parameters)
        config = catalog.model_config(name)
        model: str | Model = name
    else:
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        defaults = transformers.AutoConfig.for_model(model_type)
        # The defaults of tower and language model do not match.
        defaults.vision_config.out_hidden_size = defaults.text_config.hidden_size
        config = defaults.to_dict()
        # Part of every published config.json; transformers stores it as layer_types.
        config["text_config"]["full_attention_interval"] = 4
        model = model_from_config(config, name=model_type, where=model_type)
    gpu, nodes = ("b200-sxm-180gb", 32) if model_type == "deepseek_v3" else ("h200-sxm-141gb", 4)
    spec = make_spec(model, gpu=gpu, nodes=nodes, global_batch_size=512)
    return Sample(spec, config, rank(spec).plans[:BEST])


SAMPLES: dict[str, Callable[[], Sample]] = {
    "dense": partial(one_of_every_kind, DENSE, nodes=2),
    "dense-small-cards": partial(one_of_every_kind, DENSE, nodes=1, gpu="a100-sxm-40gb"),
    "long": partial(one_of_every_kind, "Qwen/Qwen2.5-32B", nodes=2, seq_len=32768, global_batch_size=16),
    "moe": partial(one_of_every_kind, MOE, nodes=2, seq_len=8192),
    "moe-small-cards": partial(one_of_every_kind, MOE, nodes=2, gpu="a100-sxm-40gb"),
    "moe-mtp": partial(one_of_every_kind, "zai-org/GLM-4.5-Air", nodes=8, mtp_num_layers=1, pin={"cp": 1}),
    "latent": partial(one_of_every_kind, MLA, nodes=32, gpu="b200-sxm-180gb", global_batch_size=512, pin={"cp": 1}),
    "latent-mtp": partial(
        one_of_every_kind,
        MLA,
        nodes=32,
        gpu="b200-sxm-180gb",
        global_batch_size=512,
        mtp_num_layers=1,
        pin={"cp": 1, "etp": 1},
    ),
    "vision": partial(one_of_every_kind, VISION, nodes=4),
    "vision-small-cards": partial(one_of_every_kind, VISION, nodes=1, gpu="a100-sxm-40gb", seq_len=8192),
    **{
        f"{path.stem} {stage}": partial(best_of_shipped_spec, path, stage)
        for path in sorted((ROOT / "cluster_specs").glob("*.yaml"))
        for stage in stages_for(path)
    },
    **{model_type: partial(best_of_type, model_type) for model_type in sorted(SUPPORTED_MODEL_TYPES)},
}


@cache
def sample_of(name: str) -> Sample:
    sample = SAMPLES[name]()
    assert sample.plans, f"nothing fits: {name}"
    return sample


@pytest.fixture(params=SAMPLES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def sample(name: str) -> Sample:
    return sample_of(name)


@pytest.fixture(scope="module")
def all_parsed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    """Return each plan's train.yaml as the parser and, if it is installed, the adapter's configuration read it."""
    need_llamafactory()
    paths: dict[str, dict[Path, Path | None]] = {}
    for name in SAMPLES:
        sample, folder = sample_of(name), tmp_path_factory.mktemp(name)
        adapter = importlib.util.find_spec("mcore_adapter") is not None and name not in NOT_BUILT_BY_THE_ADAPTER
        checkpoint = write_checkpoint(folder / "checkpoint", sample.config) if adapter else None
        paths[name] = {folder / f"{number}.yaml": checkpoint for number in range(len(sample.plans))}
        for path, plan in zip(paths[name], sample.plans, strict=True):
            path.write_text(generate(sample.spec, plan)["train.yaml"], encoding="utf-8")
    every = {path: checkpoint for some in paths.values() for path, checkpoint in some.items()}
    found = parse(every, tmp_path_factory.mktemp("parser"))
    return {name: [found[str(path)] for path in some] for name, some in paths.items()}


@pytest.fixture
def parsed(name: str, all_parsed: dict[str, list[dict[str, str]]]) -> list[dict[str, str]]:
    return all_parsed[name]


def write_checkpoint(folder: Path, config: Mapping[str, Any]) -> Path:
    if config["model_type"] == "deepseek_v3":
        config = {**config, "scoring_func": "sigmoid"}  # stored in the checkpoint, and irrelevant to a plan
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.filterwarnings("ignore")
def test_megatron_accepts_every_ranked_layout(sample: Sample) -> None:
    pytest.importorskip("megatron.core", reason=REASON)
    for plan in sample.plans:
        assert refused_by_megatron(sample.spec, plan.layout) is None, plan.id


def test_every_ranked_split_is_read_by_megatron_as_it_was_meant(sample: Sample) -> None:
    layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout", reason=REASON)
    model, job = sample.spec.model, sample.spec.job
    for plan in sample.plans:
        text = plan.layout.pipeline_layout
        if text is None:
            continue
        theirs = stages_by_megatron(
            layouts.PipelineParallelLayerLayout, text, plan.layout.pp, model.num_layers, job.mtp_num_layers
        )
        stages = stages_of(model, job, plan.layout)
        assert [[list(chunk.layers) for chunk in rank] for rank in stages] == theirs, plan.id


def test_the_trainer_gets_every_ranked_layout_as_it_was_planned(sample: Sample, parsed: list[dict[str, str]]) -> None:
    for plan, seen in zip(sample.plans, parsed, strict=True):
        layout = plan.layout
        assert "error" not in seen, (plan.id, seen.get("error"))
        recompute, offload = layout.recompute, layout.optimizer_offload_fraction
        expected = {
            "stage": sample.spec.job.stage,
            "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp,
            "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
            "context_parallel_size": layout.cp,
            "per_device_train_batch_size": layout.micro_batch_size,
            "gradient_accumulation_steps": layout.gradient_accumulation_steps,
            "sequence_parallel": layout.sequence_parallel,
            "recompute_granularity": None if recompute.granularity == "none" else recompute.granularity,
            "recompute_method": recompute.method,
            "recompute_num_layers": recompute.num_layers,
            "optimizer_cpu_offload": offload > 0,
            "optimizer_offload_fraction": float(offload),
        }
        assert {key: seen[key] for key in expected} == {key: repr(value) for key, value in expected.items()}, plan.id


def test_the_adapters_configuration_of_every_ranked_layout_is_the_planned_one(
    name: str, sample: Sample, parsed: list[dict[str, str]]
) -> None:
    if importlib.util.find_spec("mcore_adapter") is None:
        pytest.skip("mcore_adapter is not installed (https://github.com/alibaba/ROLL, mcore_adapter/)")
    if name in NOT_BUILT_BY_THE_ADAPTER:
        pytest.skip("the adapter does not build it: test_rules_against_mcore_adapter.py has the reason")
    model, job = sample.spec.model, sample.spec.job
    for plan, seen in zip(sample.plans, parsed, strict=True):
        assert seen["num_layers"] == repr(model.num_layers), plan.id
        assert seen["mtp_num_layers"] == repr(job.mtp_num_layers or None), plan.id
        # As an object, because a string would have quotes.
        assert seen["pipeline_model_parallel_layout"] == (plan.layout.pipeline_layout or "None"), plan.id


def test_the_samples_have_every_kind_of_plan() -> None:
    seen: Counter[str] = Counter()
    for name in SAMPLES:
        for plan in sample_of(name).plans:
            layout = plan.layout
            seen["all"] += 1
            seen[f"stage {sample_of(name).spec.job.stage}"] += 1
            seen["uneven"] += layout.pipeline_layout is not None
            seen["interleaved and uneven"] += layout.pipeline_layout is not None and layout.vpp > 1
            seen["four virtual stages"] += layout.pipeline_layout is not None and layout.vpp == 4
            seen["token prediction"] += sample_of(name).spec.job.mtp_num_layers > 0
            seen["block"] += layout.recompute.method == "block"
            seen["offload"] += layout.optimizer_offload_fraction > 0
    assert seen["all"] > 300, seen
    assert min(seen.values()) > 10, seen
