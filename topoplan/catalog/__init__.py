"""The GPUs and models that topoplan knows, as data.

`gpus.json` has the vendors' figures in the vendors' units (`specs/known.py` converts them to bytes, seconds and
FLOP/s). `profiles.json` has the constants fitted or measured for each architecture (`specs/gpu_profile.py`), and is the
list of architectures. `models.json` lists model names, and `models/<architecture>.json` holds the relevant config.json
fields and the exact parameter count of the architecture that several names share. Each file is read once, when it is
first needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

from topoplan.errors import ModelError, SpecError, listed, nearest


@cache
def load(*path: str) -> Mapping[str, Any]:
    """Return a file of the catalog, read once."""
    found: Mapping[str, Any] = json.loads(files("topoplan").joinpath("catalog", *path).read_text(encoding="utf-8"))
    return found


_SAYS_NOTHING = re.compile(r"[0-9.]*b?|instruct|chat|base|it")
"""Words that models of all families share: sizes, versions, kinds of training."""


@lru_cache(maxsize=64)
def _suggestion(word: str, names: tuple[str, ...]) -> str:
    """Return `did you mean ...?` with the nearest known name, or else with up to three that share most words.

    Shared words help if the spelling is far off: `H100`, or `NVIDIA A100-SXM4-80GB` as the driver reports it.
    """
    if guess := nearest(word, names):
        return guess
    words = {one for one in re.split(r"[^a-z0-9.]+", word.lower()) if not _SAYS_NOTHING.fullmatch(one)}
    shared = {name: len(words & set(re.split(r"[^a-z0-9.]+", name.lower()))) for name in names}
    close = sorted((name for name in names if shared[name]), key=lambda name: -shared[name])[:3]
    return f"did you mean {' or '.join(repr(name) for name in close)}?" if close else ""


def gpu_table() -> Mapping[str, Mapping[str, Any]]:
    """Return the entries of `gpus.json` by name."""
    return load("gpus.json")


def gpu_row(name: str) -> tuple[str, Mapping[str, Any]]:
    """Return (catalog name, figures in the vendor's units) of a GPU. Raises SpecError, with the nearest name."""
    table = gpu_table()
    key = name.strip().lower()
    if key not in table:
        raise SpecError(
            f"GPU {name!r} is not known",
            expected=_suggestion(name, tuple(table)),
            remedy="`topoplan show gpus` lists the known ones, and a gpu: block of its own describes any other",
        )
    return key, table[key]


def gpu_name(short: str) -> str:
    """Return the catalog name for a short name such as `h100`, `a100-80gb` or `4090`.

    Any other name is returned as it is. If cards of several form factors match, the one for HGX boards is chosen.
    Raises SpecError if that leaves several.
    """
    table, words = gpu_table(), set(re.split(r"[-_ ]+", short.strip().lower()))
    if short.strip().lower() in table:
        return short
    found = [name for name in table if words <= _words(name)]
    boards = [name for name in found if "sxm" in _words(name)] or found
    if len(boards) > 1:
        raise SpecError(f"GPU {short!r} is not one card", expected=f"expected {listed(found, 'or')}")
    return boards[0] if boards else short


def _words(name: str) -> set[str]:
    """Return the words of a catalog name, and their common short forms: a workstation card's number (`4090`), `80g`."""
    words = name.split("-")
    return {*words, words[0].removeprefix("rtx"), words[-1].removesuffix("b")}


def gpu_names() -> tuple[str, ...]:
    """Return the catalog names of the GPUs, in the order of `gpus.json`."""
    return tuple(gpu_table())


def profile_entries() -> Mapping[str, Mapping[str, Any]]:
    """Return the entries of `profiles.json`: of each architecture, and of cards that differ from the rest of theirs."""
    return load("profiles.json")


def architectures() -> tuple[str, ...]:
    """Return the architectures that have a profile, oldest first."""
    return tuple(name for name, entry in profile_entries().items() if "cards" not in entry)


def key_list(name: str) -> Mapping[str, Any]:
    """Return a document of `trainer_keys/`: the keys that a trainer or a tool knows, and for which versions."""
    return load("trainer_keys", f"{name}.json")


@lru_cache(maxsize=1)
def _trainer_keys() -> frozenset[str]:
    llamafactory, swift = key_list("llamafactory"), key_list("ms_swift")
    lists = [llamafactory[part] for part in ("keys", "keys_without_megatron")]
    lists += [swift[part] for part in ("shared", "sft", "megatron")]
    return frozenset(key for keys in lists for key in keys)


def is_trainer_key(key: str) -> bool:
    """Return whether a key belongs to a trainer's own configuration file."""
    return key in _trainer_keys()


class _Names:
    """Names of models: published names, mirrors of them, and short names without the organization."""

    def __init__(self, table: Mapping[str, Mapping[str, Any]]) -> None:
        self.published: dict[str, tuple[str, Mapping[str, Any]]] = {}
        """Published name -> (architecture, which is a file name; the config values in which the model differs)."""
        self._by_lower: dict[str, str] = {}
        self._by_short: dict[str, list[str]] = {}
        for architecture, entry in table.items():
            for name, differences in entry["names"].items():
                self.published[name] = (architecture, differences)
                self._by_lower[name.lower()] = name
                self._by_short.setdefault(name.lower().rpartition("/")[2], []).append(name)
            for mirror, name in entry.get("mirrors", {}).items():
                self._by_lower[mirror.lower()] = name

    def matches(self, name: str) -> list[str]:
        """Return the published names that `name` stands for: none, one, or several if a short name is ambiguous."""
        key = name.strip().lower()
        if key in self._by_lower:
            return [self._by_lower[key]]
        return self._by_short.get(key, [])

    def known(self) -> list[str]:
        """Return every accepted name, for suggestions."""
        return [*self.published, *self._by_short]


@lru_cache(maxsize=1)
def _names() -> _Names:
    return _Names(load("models.json"))


def knows_model(name: str) -> bool:
    """Return whether the catalog has a model: by its Hugging Face id in any case, a mirror's, or the last part."""
    return bool(_names().matches(name))


def unknown_model(name: str) -> ModelError:
    """Return the error for a model that the catalog lacks, with the nearest known name."""
    return ModelError(
        f"model {name!r} is not known",
        expected=_suggestion(name, tuple(_names().known())),
        remedy="`topoplan show models` lists the known ones, and the path of any other's config.json is read",
    )


def published_name(name: str) -> str:
    """Return the published name of a model, given that name, a mirror's or a short one. Raises ModelError."""
    matches = _names().matches(name)
    if not matches:
        raise unknown_model(name)
    if len(matches) > 1:
        raise ModelError(f"model {name!r} is ambiguous", expected=f"expected one of {', '.join(matches)}")
    return matches[0]


def model_config(name: str) -> dict[str, Any]:
    """Return the config.json fields of a model. Raises ModelError for an unknown or ambiguous name."""
    architecture, differences = _names().published[published_name(name)]
    return {**load("models", f"{architecture}.json")["config"], **differences}


def model_parameters(name: str) -> int:
    """Return the published parameters, without multi-token prediction. Raises ModelError for an unknown name."""
    architecture, _ = _names().published[published_name(name)]
    count: int = load("models", f"{architecture}.json")["parameters"]
    return count


def model_names() -> tuple[str, ...]:
    """Return the published names of the models, without mirrors."""
    return tuple(_names().published)
