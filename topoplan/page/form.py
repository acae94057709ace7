"""The fields of the page's form, the values that apply when a field is empty, and the reply to a question."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from topoplan.errors import TopoplanError
from topoplan.planner.view import rounded
from topoplan.specs.spec import Spec

_FIELDS = {
    "gpu": ("GPU", ""),
    "nodes": ("Nodes", ""),
    "gpus_per_node": ("GPUs per node", ""),
    "set.nvlink_bandwidth": ("NVLink", "such as 900GB/s"),
    "set.ib_bandwidth": ("A NIC", "such as 400Gb/s"),
    "set.nics_per_node": ("NICs per node", ""),
    "model": ("Model", "a name; or drop a config.json"),
    "seq_len": ("Tokens in a sequence", ""),
    "batch": ("Sequences in a step", ""),
    "finetuning": ("Fine-tuning", ""),
    "set.precision": ("Precision", ""),
    "job": ("File of the job", "drop a train.yaml"),
    "pin": ("Pins", "such as tp=4,pp=1"),
    "margin": ("Margin", "such as 5%"),
    "backend": ("Backend", ""),
    "trainer": ("Trainer", ""),
    "overrides": ("Other keys", "samples=10000"),
}
"""Name of an option, or `set.KEY` for a key of `--set` -> label and hint of its field."""
_KEY = re.compile(r"--set ([a-z_.]+)=")
_OPTION = re.compile(r"--([a-z-]+)")

_KEYS_OF_SPEC = frozenset(["gpu", "nodes", "gpus_per_node", "hosts", "fabric"])
_KEYS_OF_CONFIG = frozenset(
    ["model_type", "architectures", "hidden_size", "num_hidden_layers", "n_layer", "text_config"]
)
_KEYS_OF_DEEPSPEED = frozenset(["zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"])
_YAML_KEY = re.compile(r"^[\"']?(\w+)[\"']?[ ]*:", re.MULTILINE)
_JSON_KEY = re.compile(r'"(\w+)"\s*:')


def form_of(
    spec: Spec | None, name: str, example: Mapping[str, str], known: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    """Return the fields, the `known` values of some of them (each with a remark), and initial values. With a spec,
    called `name`, the fields are empty and show the spec's values; without one they hold the example."""
    fields = [
        {"name": field, "label": label, "hint": hint, "known": list(known.get(field, {}).items())}
        for field, (label, hint) in _FIELDS.items()
    ]
    if spec is None:
        return {"fields": fields, "spec": "", "has": {}, "example": dict(example)}
    return {"fields": fields, "spec": name, "has": values_of(spec), "example": {}}


def field_of(where: str, message: str, files: Mapping[str, str]) -> str:
    """Return the field that an error message is about, `spec` for the spec's file, or '' for none. `files` maps each
    file that was named to its field or `spec`."""
    said = where or message
    if found := _KEY.match(said):
        name = f"set.{found[1].removeprefix('job.')}"
        return name if name in _FIELDS else "overrides"
    if found := _OPTION.match(said):
        name = "overrides" if found[1] == "set" else found[1].replace("-", "_")
        return name if name in _FIELDS else ""
    return next((field for file, field in files.items() if said == file or said.startswith(f"{file}:")), "")


def files_of(question: Any) -> dict[str, str]:
    """Map the files that a question names to their field, or `spec`."""
    asked = question if isinstance(question, dict) else {}
    options = asked.get("options")
    given = options if isinstance(options, dict) else {}
    named = {"spec": asked.get("spec"), "model": given.get("model"), "job": given.get("job")}
    return {name: field for field, name in named.items() if isinstance(name, str) and name}


def use_of(name: str, text: str) -> str:
    """Classify a dropped file: `spec`, `model` (a config.json), `job`, or '' for a file that others refer to."""
    is_json = name.lower().endswith(".json")
    keys = set((_JSON_KEY if is_json else _YAML_KEY).findall(text))
    if is_json and (keys & _KEYS_OF_CONFIG or name.lower() == "config.json"):
        return "model"
    if keys & _KEYS_OF_DEEPSPEED:
        return ""
    return "spec" if keys & _KEYS_OF_SPEC else "job"


def values_of(spec: Spec) -> dict[str, str]:
    """Return a spec's values for the fields."""
    cluster, job = spec.cluster, spec.job
    values = {
        "gpu": cluster.gpu.name,
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "set.nics_per_node": cluster.nics_per_node,
        "set.ib_bandwidth": f"{rounded(cluster.nic_bytes_per_s * 8 / 1e9):g}Gb/s",
        "model": spec.model.name,
        "seq_len": job.seq_len,
        "batch": job.global_batch_size,
        "finetuning": job.finetuning,
        "set.precision": job.precision,
    }
    return {name: str(value) for name, value in values.items()}


Answer = Callable[[Mapping[str, Any]], Any]


def reply(answer: Answer, asked: Any) -> Any:
    """Return the answer; `error` holds the message of the command line, and the form field that it is about."""
    given = asked if isinstance(asked, dict) else {}
    try:
        return answer(given)
    except TopoplanError as error:
        field = field_of(getattr(error, "where", ""), str(error), files_of(given.get("question")))
        return _error(str(error), field)
    except ModuleNotFoundError as error:
        return _error(f"this needs the package {error.name}, which is not here")
    except Exception as error:  # a defect triggered by one question must not end the page
        traceback.print_exc(file=sys.stderr)
        return _error(f"a defect of topoplan, {type(error).__name__}: {str(error).partition(chr(10))[0]}")


def _error(message: str, field: str = "") -> dict[str, Any]:
    return {"error": {"message": message, "field": field}}
