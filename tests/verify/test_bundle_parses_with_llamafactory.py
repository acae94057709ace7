"""train.yaml through LLaMA-Factory's own reader and parser, on the path that USE_MCA=1 takes.

mcore_adapter is not on PyPI. Where it is not installed, a stand-in with the fields of the key list takes its place, and
everything around it is real: OmegaConf, HfArgumentParser, the argument classes of LLaMA-Factory and transformers.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.emit.samples import DEEPSEEK, QWEN3_8B, QWEN3_30B, QWEN3_VL_8B, make_spec_and_plan
from topoplan.emit.bundle import generate
from topoplan.emit.trainer_keys import known_keys, templates, trainer_versions
from topoplan.layout.layout import Recompute

pytestmark = pytest.mark.verify

ROOT = Path(__file__).parents[2]

CASES: dict[str, dict[str, Any]] = {
    "dense": {"model": QWEN3_8B},
    "dense-context": {"model": QWEN3_8B, "tp": 2, "cp": 2},
    "dense-pt": {"model": QWEN3_8B, "job": {"stage": "pt"}},
    "dense-dpo": {"model": QWEN3_8B, "job": {"stage": "dpo"}},
    "dense-fp8": {"model": QWEN3_8B, "job": {"precision": "fp8"}},
    "dense-offload": {"model": QWEN3_8B, "optimizer_offload_fraction": 0.5},
    "dense-uneven": {"model": QWEN3_8B, "tp": 1, "pp": 2, "pipeline_layout": "Et*17|t*19,L"},
    "moe": {"model": QWEN3_30B, "tp": 2, "pp": 4, "vpp": 2, "ep": 4},
    "moe-latent": {"model": DEEPSEEK, "tp": 1, "ep": 8},
    "vision": {"model": QWEN3_VL_8B},
    "vision-pipeline": {"model": QWEN3_VL_8B, "tp": 2, "pp": 2, "vpp": 2},
    "selective": {"recompute": Recompute(granularity="selective", modules=("core_attn", "mlp"))},
    "uniform": {"recompute": Recompute(granularity="full", method="uniform", num_layers=2)},
    "block": {"pp": 2, "recompute": Recompute(granularity="full", method="block", num_layers=3)},
    "user": {
        "model": QWEN3_8B,
        "job": {
            "trainer": {
                "additional_configs": {"moe_z_loss_coeff": 1e-3},
                "eval_strategy": "steps",
                "lr_scheduler_kwargs": {"min_lr": 1e-6},
                "neat_packing": True,
                "report_to": ["tensorboard"],
                "save_strategy": "no",
                "val_size": 0.1,
            }
        },
    },
}

# Reads each YAML as `python -m llamafactory.launcher FILE` does, and prints what the trainer would get.
PARSE = """
import json, sys
from llamafactory.hparams import parser

found = {}
for path in json.loads(sys.argv[1]):
    sys.argv = ["launcher", path, "use_cpu=true"]  # bf16 is refused without a GPU otherwise
    try:
        model, data, training, finetuning, _ = parser._parse_train_mca_args()
    except Exception as error:
        found[path] = {"error": f"{type(error).__name__}: {error}"}
        continue
    groups = (model, data, training, finetuning)
    found[path] = {
        key: repr(getattr(group, key)) for group in groups for key in vars(group) if not key.startswith("_")
    }
print(json.dumps(found))
"""

STAND_IN = """
from dataclasses import field, make_dataclass
from typing import Any, Optional

import transformers

KINDS = {"str": str, "int": int, "float": float, "bool": bool, "dict": dict, "list": list}


def adapter_field(name, types, nullable, default):
    kind = KINDS["dict" if "dict" in types else types[0]]
    annotation = Optional[kind] if nullable else kind
    if isinstance(default, (dict, list)):
        return name, annotation, field(default_factory=lambda: type(default)(default))
    return name, annotation, field(default=default)


FIELDS = [adapter_field(*entry) for entry in __ENTRIES__]
TrainingArguments = make_dataclass("TrainingArguments", FIELDS, bases=(transformers.TrainingArguments,))
Seq2SeqTrainingArguments = make_dataclass(
    "Seq2SeqTrainingArguments", FIELDS, bases=(transformers.Seq2SeqTrainingArguments,)
)
"""


def is_listed_version(package: str) -> bool:
    """True when the installed version is the one, or the newest one, that the key list was taken from."""
    listed = trainer_versions()[package]
    return importlib.metadata.version(package) == (listed if isinstance(listed, str) else listed[-1])


def need_llamafactory() -> None:
    pytest.importorskip("llamafactory", reason="llamafactory is not installed (the verify extra has it)")
    try:
        import torchaudio  # noqa: F401
    except (OSError, RuntimeError):
        # Built for other CUDA libraries than this machine's torch; llamafactory imports it, and no test decodes sound.
        stand_in = types.ModuleType("torchaudio")
        stand_in.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
        sys.modules["torchaudio"] = stand_in
    except ImportError:
        pass  # llamafactory's own import says what it needs


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, str]]:
    """Case -> what the parser made of its train.yaml, key by key, as repr."""
    need_llamafactory()
    folder = tmp_path_factory.mktemp("yaml")
    paths = {}
    for case, what in CASES.items():
        paths[case] = folder / f"{case}.yaml"
        paths[case].write_text(generate(*make_spec_and_plan(**what))["train.yaml"], encoding="utf-8")
    for case, line in {
        "bad-renamed": "evaluation_strategy: steps",
        "bad-gone": "overwrite_output_dir: true",
        "bad-unknown": "micro_batch_size: 1",
    }.items():
        paths[case] = folder / f"{case}.yaml"
        paths[case].write_text(paths["dense"].read_text(encoding="utf-8") + line + "\n", encoding="utf-8")

    search = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    if importlib.util.find_spec("mcore_adapter") is None:
        search.append(str(stand_in(tmp_path_factory.mktemp("adapter"))))
    answer = subprocess.run(
        [sys.executable, "-c", PARSE, json.dumps([str(path) for path in paths.values()])],
        env={**os.environ, "USE_MCA": "1", "PYTHONPATH": os.pathsep.join(search), "DISABLE_VERSION_CHECK": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert answer.returncode == 0, answer.stderr[-4000:]
    by_path = json.loads(answer.stdout.splitlines()[-1])
    return {case: by_path[str(path)] for case, path in paths.items()}


def stand_in(folder: Path) -> Path:
    """A package of the name mcore_adapter whose argument classes have the fields of the key list."""
    entries = [
        (key.name, list(key.types), key.nullable, key.default)
        for key in known_keys().values()
        if key.package == "mcore_adapter"
    ]
    package = folder / "mcore_adapter"
    package.mkdir()
    (package / "__init__.py").write_text(STAND_IN.replace("__ENTRIES__", repr(entries)), encoding="utf-8")
    return folder


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_parser_takes_every_key_and_gets_the_value_that_was_meant(
    case: str, parsed: Mapping[str, Mapping[str, str]]
) -> None:
    seen = parsed[case]
    assert "error" not in seen, seen.get("error")
    spec, plan = make_spec_and_plan(**CASES[case])
    layout = plan.layout
    assert seen["tensor_model_parallel_size"] == repr(layout.tp)
    assert seen["pipeline_model_parallel_size"] == repr(layout.pp)
    assert seen["context_parallel_size"] == repr(layout.cp)
    assert seen["virtual_pipeline_model_parallel_size"] == (repr(layout.vpp) if layout.vpp > 1 else "None")
    assert seen["per_device_train_batch_size"] == repr(layout.micro_batch_size)
    assert seen["gradient_accumulation_steps"] == repr(layout.gradient_accumulation_steps)
    assert seen["sequence_parallel"] == repr(layout.sequence_parallel)
    assert seen["use_distributed_optimizer"] == seen["bf16"] == "True"
    assert seen["learning_rate"] == "2e-05"
    assert float(seen["warmup_steps"]) == 141
    assert seen["stage"] == repr(spec.job.stage)
    # Stated as true, packing takes one token off, which the Megatron workflow adds again.
    packs = spec.job.stage == "sft"
    assert seen["cutoff_len"] == repr(spec.job.seq_len - packs)
    granularity = layout.recompute.granularity
    assert seen["recompute_granularity"] == ("None" if granularity == "none" else repr(granularity))
    assert seen["report_to"] == ("['tensorboard']" if case == "user" else "[]")


def test_the_parser_refuses_what_the_key_list_refuses(parsed: Mapping[str, Mapping[str, str]]) -> None:
    for case in ("bad-renamed", "bad-gone", "bad-unknown"):
        assert "not used by the HfArgumentParser" in parsed[case].get("error", ""), case


def test_the_key_list_is_the_one_of_the_installed_versions() -> None:
    need_llamafactory()
    import dataclasses

    import transformers
    from llamafactory.hparams import DataArguments, FinetuningArguments, GeneratingArguments, ModelArguments

    classes = {
        "llamafactory": (ModelArguments, DataArguments, FinetuningArguments, GeneratingArguments),
        "transformers": (transformers.TrainingArguments,),
    }
    major = transformers.__version__.split(".")[0]
    for package, declared in classes.items():
        real = {field.name for group in declared for field in dataclasses.fields(group) if field.init}
        listed = {key.name for key in known_keys().values() if key.package == package}
        wanted = {name for name in listed if known_keys()[name].transformers in ("", major)}
        assert wanted <= real, f"{package}: {sorted(wanted - real)} are gone"
        if is_listed_version(package):
            assert real <= listed, f"{package}: {sorted(real - listed)} are new"


def test_templates_and_model_types_are_those_of_the_installed_version() -> None:
    need_llamafactory()
    from llamafactory.data.template import TEMPLATES
    from llamafactory.extras.constants import MCA_SUPPORTED_MODELS

    if not is_listed_version("llamafactory"):
        pytest.skip(f"the lists are of LLaMA-Factory {templates().version}")
    assert set(templates().supported_model_types) == set(MCA_SUPPORTED_MODELS)
    assert templates().names == set(TEMPLATES)


def test_the_launcher_module_trains_when_it_is_run() -> None:
    """The launch form of the node scripts: argv[1] is the YAML, and there is no word `train`."""
    need_llamafactory()
    import inspect

    import llamafactory.launcher

    main = inspect.getsource(llamafactory.launcher).partition('if __name__ == "__main__":')[2]
    assert "run_exp()" in main
    assert "subprocess" not in main
