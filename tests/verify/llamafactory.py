"""Parse train.yaml with LLaMA-Factory's own reader and parser, in a separate process, with or without USE_MCA=1.

mcore_adapter is not on PyPI. If it is not installed, a stand-in with the fields of the key list replaces it, and
everything around it is real: OmegaConf, HfArgumentParser, the argument classes of LLaMA-Factory and transformers.
"""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.verify.answers import ONE_RANK, answers
from topoplan.trainers.llamafactory.key_list import known_keys

ROOT = Path(__file__).parents[2]

NOT_BUILT_BY_THE_ADAPTER = frozenset(["qwen3_next"])
"""Model types for which the adapter sets options that no release of megatron-core has."""

# Reads each YAML as `python -m llamafactory.launcher FILE` does, and prints what the trainer would get.
PARSE = """
import json, sys
from llamafactory.hparams import parser

found = {}
wanted = json.load(open(sys.argv[1]))
read = getattr(parser, sys.argv[2])
for path, checkpoint in wanted.items():
    sys.argv = ["launcher", path, "use_cpu=true"]  # bf16 is refused without a GPU otherwise
    try:
        model, data, training, finetuning, _ = read()
        groups = [model, data, training, finetuning]
        if checkpoint:
            from mcore_adapter.models import AutoConfig, model_config

            model_config.initialize_megatron = lambda args: None  # starts torch.distributed
            training.apply_rope_fusion = False  # refused without Transformer Engine
            groups.append(AutoConfig.from_pretrained(checkpoint, training))
    except Exception as error:
        found[path] = {"error": f"{type(error).__name__}: {error}"}
        continue
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


def need_llamafactory() -> None:
    """Skip the test if LLaMA-Factory is not installed."""
    pytest.importorskip("llamafactory", reason="llamafactory is not installed (the verify extra has it)")


def parse(
    paths: Mapping[Path, Path | None], folder: Path, *, megatron: bool = True, checked: bool = False
) -> dict[str, dict[str, str]]:
    """Return path -> the parsed keys of that train.yaml, as repr; {"error": ...} if the parser refuses it.

    `checked` adds LLaMA-Factory's checks of combinations of keys, as on one rank of a distributed run. If a path comes
    with a directory that has a config.json, the result also has the keys of the model configuration that the adapter
    makes from both; mcore_adapter must be installed. `folder` is the working directory.
    """
    search = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    if megatron and importlib.util.find_spec("mcore_adapter") is None:
        search.append(str(stand_in(folder)))
    environment = {
        **(ONE_RANK if checked else {}),
        "USE_MCA": str(int(megatron)),
        "PYTHONPATH": os.pathsep.join(search),
        "DISABLE_VERSION_CHECK": "1",
    }
    wanted = {str(path): str(checkpoint or "") for path, checkpoint in paths.items()}
    read = "get_train_args" if checked else "_parse_train_mca_args"
    return answers(PARSE, wanted, folder, read, environment=environment)


def stand_in(folder: Path) -> Path:
    """Write a package named mcore_adapter whose argument classes have the fields of the key list."""
    entries = [
        (key.name, list(key.types), key.nullable, key.default)
        for key in known_keys().values()
        if key.package == "mcore_adapter"
    ]
    package = folder / "mcore_adapter"
    package.mkdir()
    (package / "__init__.py").write_text(STAND_IN.replace("__ENTRIES__", repr(entries)), encoding="utf-8")
    return folder
