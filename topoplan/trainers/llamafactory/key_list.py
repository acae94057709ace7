"""Keys that LLaMA-Factory's YAML may hold, with their types, and checks of the user's keys against them.

LLaMA-Factory's parser refuses unknown keys but checks neither types nor choices (`sequence_parallel: maybe` passes and
counts as true), and its Megatron path ignores some keys that the parser accepts. Both are caught here. The lists are
data in `topoplan/catalog/trainer_keys/`, with the versions they were taken from. They cover several versions of a
package: those that bundles are written for, and newer ones (`catalog/packages.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple

from packaging.version import Version

from topoplan.catalog import key_list
from topoplan.catalog.packages import releases
from topoplan.errors import SpecError, nearest
from topoplan.reading.values import range_missed
from topoplan.specs.secrets import NEVER_WRITTEN, REMEDY, secrets_in

_GONE = {
    "evaluation_strategy": "write eval_strategy",
    "logging_dir": "leave it out: it is deprecated, and the trainer logs below output_dir",
    "overwrite_output_dir": "leave it out: every plan has an output_dir of its own",
    "save_safetensors": "leave it out: safetensors is what the trainer writes",
}
"""Keys that some supported transformers versions refuse, with what to do instead."""

_UNUSED = {
    "add_special_tokens": "the Megatron workflow does not resize the embedding: add the tokens to the model beforehand",
    "add_tokens": "the Megatron workflow does not resize the embedding: add the tokens to the model beforehand",
    "deepspeed": "remove it: sharding is decided by the layout (use_distributed_optimizer)",
    "disable_shuffling": "remove it: the Megatron trainer never shuffles",
    "fsdp": "remove it: sharding is decided by the layout (use_distributed_optimizer)",
    "fsdp_config": "remove it: sharding is decided by the layout (use_distributed_optimizer)",
    "gradient_checkpointing": "remove it and pin the layout's recompute instead",
    "moe_aux_loss_coef": "write moe_aux_loss_coeff, the adapter's own key",
    "optim": "remove it: the optimizer is Megatron's Adam; `optimizer: sgd` is the only other one",
}
"""Specific remedies for keys that the Megatron workflow does not use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of the trainer's YAML."""

    name: str
    types: tuple[str, ...]
    """Accepted types, any of str, int, float, bool, dict, list."""
    nullable: bool
    choices: tuple[Any, ...]
    """The only strings accepted; empty if any string is."""
    default: Any
    package: str
    """llamafactory, transformers, mcore_adapter or ms-swift."""
    since: str
    """First version of the package with the key; empty if all known versions have it."""
    ignored: bool
    """True if the parser accepts the key and the Megatron workflow never reads it."""

    @classmethod
    def of(cls, name: str, entry: Mapping[str, Any], package: str = "") -> Key:
        """Create a key from an entry of a list; the entry names its package if the list covers several."""
        return cls(
            name=name,
            types=tuple(entry["types"]),
            nullable=entry.get("nullable", False),
            choices=tuple(entry.get("choices", ())),
            default=entry.get("default"),
            package=package or entry["from"],
            since=entry.get("since", ""),
            ignored=entry.get("ignored", False),
        )


TrainerPath = str
"""The training path: "mca" for mcore_adapter (USE_MCA=1), "bridge" for Megatron Bridge (USE_MEGATRON_BRIDGE=1), or
"plain" without either."""


class Templates(NamedTuple):
    """LLaMA-Factory's chat templates, and the model types that its Megatron paths support."""

    names: frozenset[str]
    """Templates of all known versions."""
    since: Mapping[str, str]
    """Template -> first version of LLaMA-Factory with it; only templates that some known version lacks."""
    by_model: Mapping[str, str]
    by_model_type: Mapping[str, str]
    supported_model_types: tuple[str, ...]
    """Model types that mcore_adapter supports."""
    bridge_model_types: tuple[str, ...]
    """Model types that Megatron Bridge supports."""
    version: str
    """The version of LLaMA-Factory that bundles are written for."""


@cache
def known_keys() -> Mapping[str, Key]:
    """Return the keys that the parser accepts with USE_MCA=1."""
    return {name: Key.of(name, entry) for name, entry in key_list("llamafactory")["keys"].items()}


@cache
def plain_keys() -> Mapping[str, Key]:
    """Return the keys that the parser accepts without Megatron: DeepSpeed, FSDP or plain data parallelism."""
    shared = {name: replace(key, ignored=False) for name, key in known_keys().items() if key.package != "mcore_adapter"}
    return shared | {
        name: Key.of(name, entry) for name, entry in key_list("llamafactory")["keys_without_megatron"].items()
    }


@cache
def bridge_keys() -> Mapping[str, Key]:
    """Return the keys that the parser accepts with USE_MEGATRON_BRIDGE=1."""
    own = key_list("llamafactory")["keys_with_bridge"]
    return {**plain_keys(), **{name: Key.of(name, entry) for name, entry in own.items()}}


def defaults_of(path: TrainerPath) -> Mapping[str, Any]:
    """Return LLaMA-Factory's defaults for the keys of a path."""
    return {name: key.default for name, key in keys_for(path).items()}


def keys_for(path: TrainerPath) -> Mapping[str, Key]:
    """Return the keys of a path that the parser of any known version accepts."""
    return {"mca": known_keys, "bridge": bridge_keys, "plain": plain_keys}[path]()


@cache
def removed_keys() -> Mapping[str, str]:
    """Return keys that transformers has removed, with the first version without them."""
    removed: Mapping[str, str] = key_list("llamafactory")["removed_from_transformers"]
    return removed


@cache
def own_removed_keys() -> Mapping[str, str]:
    """Return keys that LLaMA-Factory itself has removed since 0.8, with the first version without them."""
    removed: Mapping[str, str] = key_list("llamafactory")["removed"]
    return removed


def deepspeed_keys() -> frozenset[str]:
    """Return the top-level keys of DeepSpeed's JSON."""
    return frozenset(key_list("deepspeed")["top"])


@cache
def megatron_settings() -> Mapping[str, str]:
    """Return the settings for additional_configs, with their versions of megatron-core: `>=0.18.2`; empty for all."""
    document = key_list("megatron_config")
    bounds = {word: document[word]["megatron_core"] for word in ("since", "until")}
    core = {
        name: ",".join(
            f"{sign}{bounds[word][name]}" for sign, word in ((">=", "since"), ("<", "until")) if name in bounds[word]
        )
        for name in document["megatron_core"]
    }
    return core | dict.fromkeys(document["mcore_adapter"], "")


@cache
def trainer_versions() -> Mapping[str, Any]:
    """Return the versions that bundles are written for."""
    versions: Mapping[str, Any] = key_list("llamafactory")["versions"]
    return versions


def newer_than(since: str, package: str = "llamafactory") -> str:
    """Return what a key requires that exists since a version: `transformers 5.6.0 or newer`."""
    if package != "llamafactory":
        return f"{package} {since} or newer"
    before = [one for one in releases() if Version(one.version) < Version(since)]
    name = next(one.name for one in releases() if one.version == since)
    return f"LLaMA-Factory newer than {before[-1].name} ({name})"


def needed_transformers(key: Key) -> str:
    """Return a sentence on a key that only some supported transformers versions have; else empty."""
    if key.package == "transformers-kt":
        return f"the key {key.name} needs transformers-kt, KTransformers' build of transformers"
    if key.package != "transformers" or not key.since:
        return ""
    older = trainer_versions()["transformers"][0]
    return f"the key {key.name} needs transformers {key.since} or newer: {older} refuses the file"


@cache
def templates() -> Templates:
    """Return the chat templates of the catalog."""
    document = key_list("llamafactory_templates")
    return Templates(
        names=frozenset(document["names"]),
        since=document["since"]["names"],
        by_model=document["by_model"],
        by_model_type=document["by_model_type"],
        supported_model_types=tuple(document["supported_model_types"]),
        bridge_model_types=tuple(document["bridge_model_types"]),
        version=document["versions"]["llamafactory"],
    )


def listed_template(model: str) -> str | None:
    """Return the template in LLaMA-Factory's list of models, looked up by hub id or the last part of a path."""
    known = templates().by_model
    last = model.rstrip("/").rpartition("/")[2].lower()
    by_last_part = {name.rpartition("/")[2].lower(): template for name, template in known.items()}
    return known.get(model) or by_last_part.get(last)


def default_template(model: str, model_type: str) -> str | None:
    """Return the template from LLaMA-Factory's list of models, or else by model type."""
    return listed_template(model) or templates().by_model_type.get(model_type)


_NO_TEMPLATE = ("none", "null", "no", "auto", "false")
"""Words that people write for no template, although no template has such a name."""


def missing_template(name: str) -> str:
    """Return a sentence on a template that bundles' version of LLaMA-Factory lacks; else empty."""
    known = templates()
    if name in known.since:
        return f"the template {name!r} needs {newer_than(known.since[name])}, and the bundle is for {known.version}"
    if name in known.names:
        return ""
    if name.lower() in _NO_TEMPLATE:
        close = "leave it out for the model's own, or write empty for one that adds nothing"
    else:
        close = nearest(name, known.names - known.since.keys())
    return f"LLaMA-Factory {known.version} has no template {name!r}" + (f"; {close}" if close else "")


def check_key(name: str, value: Any, where: str, *, path: TrainerPath = "mca") -> Any:
    """Return `value` as it is to be written for a key. Raises SpecError if the value is wrong or would be ignored."""
    verdict = judge_key(name, value, path=path, version=trainer_versions()["llamafactory"])
    if verdict.trouble:
        raise SpecError(verdict.what, where=where, expected=verdict.expected, remedy=verdict.remedy)
    return verdict.value


Trouble = Literal["", "secret", "gone", "unknown", "newer", "type", "ignored", "dropped"]
"""gone: some supported transformers version lacks the key. newer: the version in question does not have it yet. type:
the key does not accept the value. ignored: the Megatron workflow never reads the key. dropped: the workflow reads the
key but discards part of the value."""


class KeyJudgment(NamedTuple):
    """The judgment on a value for a trainer key."""

    value: Any = None
    """The value in the type that the key declares."""
    trouble: Trouble = ""
    what: str = ""
    expected: str = ""
    remedy: str = ""


def judge_key(name: str, value: Any, *, path: TrainerPath = "mca", version: str = "") -> KeyJudgment:
    """Judge a key and its value on a path.

    `version` is LLaMA-Factory's; without it, a key is known if any known version has it.
    """
    if any(secrets_in({name: value})):
        return KeyJudgment(value=value, trouble="secret", what=NEVER_WRITTEN, remedy=REMEDY)
    keys, megatron = keys_for(path), path == "mca"
    if name in _GONE and (megatron or name != "overwrite_output_dir"):
        what = f"{name} is not accepted by every transformers"
        return KeyJudgment(value=value, trouble="gone", what=what, remedy=_GONE[name])
    if name not in keys:
        if name in removed_keys():
            what = f"{name} is gone from transformers {removed_keys()[name]}"
            return KeyJudgment(value=value, trouble="gone", what=what, remedy="leave it out")
        further = "settings of Megatron-core's own go into additional_configs: {...}" if megatron else ""
        what = f"the trainer has no key {name!r}"
        return KeyJudgment(value=value, trouble="unknown", what=what, remedy=nearest(name, keys) or further)
    key = keys[name]
    if version and key.package == "llamafactory" and key.since and Version(version) < Version(key.since):
        what = f"{name} needs {newer_than(key.since)}"
        return KeyJudgment(value=value, trouble="newer", what=what, remedy="leave it out")
    verdict = typed_value(keys[name], value)
    if not verdict.trouble and isinstance(verdict.value, str) and "${" in verdict.value:
        what = f"{name} holds '${{', which LLaMA-Factory's YAML reader takes for a variable"
        return KeyJudgment(value=value, trouble="type", what=what)
    if verdict.trouble or not megatron:
        return verdict
    checked = verdict.value
    unread = keys[name].ignored or name in ("add_tokens", "add_special_tokens")
    if unread and checked not in (keys[name].default, None):
        remedy = _UNUSED.get(name, "remove it, so that the file says what happens")
        what = f"LLaMA-Factory's Megatron path never reads {name}"
        return KeyJudgment(value=checked, trouble="ignored", what=what, remedy=remedy)
    if name == "report_to" and "wandb" in (checked if isinstance(checked, list) else [checked]):
        what = "the Megatron adapter silently drops wandb from report_to"
        return KeyJudgment(value=checked, trouble="dropped", what=what, remedy="use tensorboard, mlflow or use_swanlab")
    return verdict


def typed_value(key: Key, value: Any) -> KeyJudgment:
    """Judge whether `value` has the declared type and range of the key, converting it if possible."""
    verdict = _typed(key, value)
    expected = "" if verdict.trouble else range_missed(key_list("ranges")["ranges"].get(key.name), verdict.value)
    if not expected:
        return verdict
    return KeyJudgment(
        value=value, trouble="type", what=f"{key.name} is {value}", expected=f"{_expected(key)} {expected}"
    )


def _typed(key: Key, value: Any) -> KeyJudgment:

    def refused(what: str, remedy: str = "") -> KeyJudgment:
        return KeyJudgment(value=value, trouble="type", what=what, expected=_expected(key), remedy=remedy)

    if value is None:
        return KeyJudgment() if key.nullable else refused(f"{key.name} cannot be null")
    types = key.types
    if isinstance(value, bool):
        if "bool" in types:
            return KeyJudgment(value=value)
        hint = 'YAML reads an unquoted yes, no, on or off as true or false; write "no" in quotes'
        return refused(f"{key.name} is {str(value).lower()}", hint)
    if isinstance(value, int):
        if "int" in types:
            return KeyJudgment(value=value)
        if "float" in types and abs(value) < 10**300:
            return KeyJudgment(value=value)
    if isinstance(value, float):
        if "float" in types:
            return KeyJudgment(value=value)
        if "int" in types and value.is_integer():
            return KeyJudgment(value=int(value))
    if isinstance(value, str):
        number = _number(value)  # PyYAML reads 2e-5 as a string, other parsers as the number that the user meant
        if "str" not in types and "float" in types and number is not None:
            return KeyJudgment(value=number)
        if "str" in types:
            if key.choices and value not in key.choices:
                return refused(f"{key.name} is {value!r}", nearest(value, [str(choice) for choice in key.choices]))
            return KeyJudgment(value=value)
    if isinstance(value, Mapping) and "dict" in types:
        return KeyJudgment(value=dict(value))
    if isinstance(value, list | tuple) and "list" in types:
        return KeyJudgment(value=list(value))
    return refused(f"{key.name} is {value!r}")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _expected(key: Key) -> str:
    if key.choices and key.types == ("str",):
        return "expected one of " + ", ".join(str(choice) for choice in key.choices)
    names = {"str": "a string", "int": "a whole number", "float": "a number", "bool": "true or false"}
    names |= {"dict": "a mapping", "list": "a list"}
    return "expected " + " or ".join(names[kind] for kind in key.types)
