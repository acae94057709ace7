"""What each trainer's files hold for a plan, what they warn of, and what is refused before anything is written.

`written/*.yaml` has sections of cases that change one usual job:

    plain:
      trainer: llamafactory
      usual: {model: qwen3-8b, layout: {backend: ddp}}
      cases:
      - {job: {precision: fp16}, writes: {fp16: true}, lacks: [bf16]}
      - {own: {pure_bf16: true}, of: SpecError, refused: set job.pure_bf16}

`model` is one of the catalog or of `MODELS`, or changes one by its fields; `cluster`, `job` and `layout` have changed
fields, and `own` has keys of the user. `writes` are keys of the file (`a.b` is in block a), `lacks` names keys that it
does not have, `text` and `beside` are parts of its text and of the files beside it. `warns` and `warns_not` are parts
of the warnings, of which a `quiet` case has none. `refused` is a part of the message, `of` the class of the error, and
`hides` what the message must not repeat.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.bundle.samples import B200, CLUSTER, DEEPSEEK, QWEN3_8B, QWEN3_30B, QWEN3_VL_8B, V100, make_spec_and_layout
from tests.tables import table
from topoplan import errors
from topoplan.layout.layout import Layout, Recompute
from topoplan.specs import known
from topoplan.specs.load import load_spec
from topoplan.specs.source import Source
from topoplan.specs.spec import Spec
from topoplan.trainers.llamafactory.key_list import known_keys, plain_keys
from topoplan.trainers.registry import has_backend, written_by
from topoplan.trainers.swift.arguments import arguments_of

MODELS = {"qwen3-8b": QWEN3_8B, "qwen3-30b": QWEN3_30B, "qwen3-vl-8b": QWEN3_VL_8B, "deepseek": DEEPSEEK}
CARDS = {"b200": B200, "v100": V100}
SECTIONS = {
    f"{path.stem} {name}": section
    for path in sorted((Path(__file__).parent / "written").glob("*.yaml"))
    for name, section in table(path).items()
}
CASES = [
    pytest.param(name, case, id=f"{name}, {number}")
    for name, section in SECTIONS.items()
    for number, case in enumerate(section["cases"])
]
KEYS = {
    "llamafactory megatron": known_keys(),
    "llamafactory plain": plain_keys(),
    "swift sft": arguments_of("swift sft").types,
    "swift megatron": arguments_of("megatron sft").types,
}


def spec_and_layout(usual: Mapping[str, Any], case: Mapping[str, Any]) -> tuple[Spec, Layout]:
    model = case.get("model", usual["model"])
    name, changes = (model, {}) if isinstance(model, str) else (model["is"], {**model})
    changes.pop("is", None)
    cluster, job, layout = ({**usual.get(key, {}), **case.get(key, {})} for key in ("cluster", "job", "layout"))
    if "gpu" in cluster:
        cluster["gpu"] = CARDS.get(cluster["gpu"]) or known.gpu(cluster["gpu"])
    if "recompute" in layout:
        modules = tuple(layout["recompute"].get("modules", ()))
        layout["recompute"] = Recompute(**{**layout["recompute"], "modules": modules})
    job |= {"trainer": case.get("own", {})} | {key: tuple(job[key]) for key in ("lora_target",) if key in job}
    model = replace(MODELS.get(name) or known.model(name), **changes)
    return make_spec_and_layout(cluster=replace(CLUSTER, **cluster), model=model, job=job, **layout)


def block_of(values: Any, dotted: str) -> Any:
    """Return the value of `a.b`, or None."""
    return reduce(lambda block, key: (block or {}).get(key), dotted.split("."), values)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_a_plan_is_written_as_its_trainer_reads_it_or_refused(name: str, case: dict[str, Any]) -> None:
    section = SECTIONS[name]
    spec, layout = spec_and_layout(section["usual"], case)
    _, path = written_by(layout.backend, section["trainer"])
    if "refused" in case:
        with pytest.raises(getattr(errors, case.get("of", "InputError"))) as error:
            path.written(spec, layout)
        assert case["refused"] in str(error.value)
        assert "hides" not in case or case["hides"] not in str(error.value)
        return
    files = path.written(spec, layout)
    values: dict[str, Any] = yaml.safe_load(files.text)
    assert values == files.values
    assert values.keys() <= KEYS.get(name, values).keys()
    expected = case.get("writes", {})
    assert {key: block_of(values, key) for key in expected} == expected
    assert [key for key in case.get("lacks", ()) if block_of(values, key) is not None] == []
    assert [words for words in case.get("text", ()) if words not in files.text] == []
    assert [beside for beside, words in case.get("beside", {}).items() if words not in files.files[beside]] == []
    warnings = " ".join(files.warnings)
    assert [words for words in case.get("warns", ()) if words not in warnings] == []
    assert [words for words in case.get("warns_not", ()) if words in warnings] == []
    assert not ("quiet" in case and warnings)


@pytest.mark.parametrize(
    ("job", "adapters"),
    [({}, (8, 16, 0.0)), ({"lora_rank": 64, "lora_dropout": 0.1}, (64, 128, 0.1)), ({"lora_alpha": 5}, (8, 5, 0.0))],
)
def test_every_plan_of_a_job_trains_the_same_adapters(job: dict[str, Any], adapters: tuple[float, ...]) -> None:
    alpha = {"trainer": {"lora_alpha": job.pop("lora_alpha")}} if "lora_alpha" in job else {}
    usual = {"seq_len": 4096, "global_batch_size": 64, "finetuning": "lora", "dataset": "a", **alpha}
    data = {"gpu": "h100", "nodes": 1, "gpus_per_node": 8, "model": "Qwen/Qwen3-8B", "job": usual | job}
    spec = load_spec(Source(name="spec", data=data))
    found = set()
    for trainer, backend in product(("llamafactory", "swift"), ("ddp", "deepspeed", "fsdp2", "megatron")):
        if has_backend(backend, trainer):
            layout = Layout.of(backend=backend, dp=8, gradient_accumulation_steps=8, sequence_parallel=False)
            values = written_by(backend, trainer)[1].written(spec, layout).values
            found.add(tuple(values[key] for key in ("lora_rank", "lora_alpha", "lora_dropout")))
    assert found == {adapters}


GONE = {
    *("overwrite_output_dir", "evaluation_strategy", "warmup_ratio", "save_safetensors", "logging_dir"),
    *("deepspeed", "gradient_checkpointing"),
}
"""Keys that some version of transformers, or LLaMA-Factory's Megatron path, refuses."""


def test_every_key_of_the_megatron_path_is_of_its_type_and_known_to_every_version() -> None:
    section = SECTIONS["llamafactory megatron"]
    for case in section["cases"]:
        if {"refused", "own"} & case.keys():
            continue
        spec, layout = spec_and_layout(section["usual"], case)
        for name, value in written_by("mca", "llamafactory")[1].written(spec, layout).values.items():
            key = known_keys()[name]
            assert (bool(key.ignored), bool(key.since), name in GONE) == (False, False, False), name
            assert key.types not in (("int",), ("bool",)) or (type(value).__name__,) == key.types, name
            assert not key.choices or value in key.choices, name
