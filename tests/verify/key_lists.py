"""Read the keys that the trainers' packages declare, and compare them with the catalog's key lists.

As a program (`make key-lists`), it updates `topoplan/catalog/trainer_keys/` to the packages of the environment, if the
lists name their versions. What a person found out is kept: `ignored`, and the choices of entries with a `note`. A list
covers several versions of a package: `since` is the first version that has a key, if not all do; types and defaults are
those of the newest version, and choices those of any. A key that was removed stays in the list and is reported, so that
a person can decide.
"""

import dataclasses
import enum
import importlib.metadata
import importlib.util
import inspect
import json
import textwrap
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.version import Version

FOLDER = Path(__file__).parents[2] / "topoplan" / "catalog" / "trainer_keys"

Entry = dict[str, Any]
Document = dict[str, Any]

_KINDS = {str: "str", int: "int", float: "float", bool: "bool", dict: "dict", list: "list", tuple: "list"}
_ORDER = ("group", "types", "nullable", "choices", "default", "from", "since", "ignored", "note")
_COMPARED = ("types", "nullable", "choices", "default")


# What classes declare ------------------------------------------------------------------------------------------------


def declared(group: type, *, defaults: bool = True) -> dict[str, Entry]:
    """Return the fields of an argument class that its parser accepts, by name."""
    hints = typing.get_type_hints(group)
    return {
        field.name: _entry(field, hints[field.name], defaults=defaults)
        for field in dataclasses.fields(group)
        if field.init and not field.name.startswith("_")
    }


def _entry(field: dataclasses.Field[Any], hint: Any, *, defaults: bool) -> Entry:
    kinds: set[str] = set()
    choices: list[Any] = list(field.metadata.get("choices") or ())
    default = field.default if field.default is not dataclasses.MISSING else None
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    nullable = default is None
    for part in _parts(hint):
        origin = typing.get_origin(part) or part
        if part is type(None):
            nullable = True
        elif origin is typing.Literal:
            members = typing.get_args(part)
            nullable |= None in members
            kinds |= {_KINDS[type(member)] for member in members if member is not None}
            choices = choices or [member for member in members if member is not None]
        elif isinstance(origin, type) and issubclass(origin, enum.Enum):
            kinds.add("str")
            choices = choices or [member.value for member in origin]
        elif origin in _KINDS:
            kinds.add(_KINDS[origin])
        elif isinstance(origin, type) and dataclasses.is_dataclass(origin):
            kinds.add("dict")
    entry: Entry = {"types": sorted(kinds)}
    if nullable:
        entry["nullable"] = True
    if choices and all(isinstance(choice, str) for choice in choices):
        entry["choices"] = choices
    if defaults:
        entry["default"] = default.value if isinstance(default, enum.Enum) else default
    return entry


def _parts(hint: Any) -> Iterator[Any]:
    """Yield the members of a union, including those of nested unions."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        for member in typing.get_args(hint):
            yield from _parts(member)
    else:
        yield hint


def own_names(group: type, package: str) -> set[str]:
    """Return the fields that an argument class inherits from the classes of a package."""
    return {
        name
        for base in group.__mro__
        if base.__module__.partition(".")[0] == package
        for name in inspect.get_annotations(base)
    }


# A list against a declaration ----------------------------------------------------------------------------------------


def has(entry: Mapping[str, Any], version: str) -> bool:
    """Whether a version of the package has a key: `since` is the first version with it, `until` the first without."""
    since, until = entry.get("since"), entry.get("until")
    at = Version(version)
    return (since is None or at >= Version(since)) and (until is None or at < Version(until))


def differences(
    listed: Mapping[str, Entry], real: Mapping[str, Entry], version: str, *, names_alone: bool = False
) -> list[str]:
    """Return the differences between a list and what a version of the package declares, one sentence each."""
    there = {name: entry for name, entry in listed.items() if has(entry, version)}
    found = [f"{name} is gone" for name in there.keys() - real.keys()]
    found += [f"{name} is new" for name in real.keys() - there.keys()]
    for name in () if names_alone else there.keys() & real.keys():
        for what in _stated(there[name], real[name]):
            mine, theirs = there[name].get(what), real[name].get(what)
            if what == "choices" and mine and theirs:
                found += [f"{name}: {choice} is a new choice" for choice in theirs if choice not in mine]
            elif mine != theirs:
                found.append(f"{name}: {what} is {theirs!r}, and {mine!r} in the list")
    return sorted(found)


def _stated(listed: Entry, real: Entry) -> tuple[str, ...]:
    """Return the fields of an entry that the package determines."""
    left_out = {"choices"} if "note" in listed else set()
    return tuple(what for what in _COMPARED if what not in left_out and (what != "default" or what in real))


def brought_up(
    listed: Mapping[str, Entry], real: Mapping[str, Entry], version: str, known: list[str]
) -> dict[str, Entry]:
    """Return the list updated by what a version declares; `known` holds the versions of the list, oldest first."""
    found = {name: dict(entry) for name, entry in listed.items()}
    for name, entry in real.items():
        mine = found.setdefault(name, {**entry, "since": version})
        if not has(mine, version):
            mine["since"] = version
        if version == known[0]:
            mine.pop("since", None)
        stated = _stated(mine, entry)
        if "choices" in stated and mine.get("choices") and entry.get("choices"):
            entry = {**entry, "choices": list(dict.fromkeys([*entry["choices"], *mine["choices"]]))}
            mine["choices"] = entry["choices"]
        if version == known[-1]:
            kept = {what: value for what, value in mine.items() if what not in stated}
            found[name] = kept | {what: entry[what] for what in stated if what in entry}
    first = real if version == known[-1] else {}
    order = [*first, *(name for name in found if name not in first)]
    return {name: {what: found[name][what] for what in _ORDER if what in found[name]} for name in order}


# The lists -----------------------------------------------------------------------------------------------------------


def read(name: str) -> Document:
    """Return one of the lists."""
    found: Document = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return found


def versions_of(document: Document, package: str) -> list[str]:
    """Return the versions of a package that a list covers, oldest first."""
    blocks = [document["versions"], *document.get("newer", ())]
    found = [block[package] for block in blocks if package in block]
    flat = [version for one in found for version in ([one] if isinstance(one, str) else one)]
    return sorted({version.partition(",")[0] for version in flat}, key=Version)


def text_of(document: Document) -> str:
    """Return the text of a list's file: one entry per line, and long lists of names in lines of 116 characters."""
    return _text(document, "") + "\n"


def _text(value: Any, pad: str) -> str:
    whole = json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict) and "types" not in value and (not pad or len(whole) > 100):
        lines = [f"{pad}  {json.dumps(key)}: {_text(item, pad + '  ')}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{pad}}}"
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        lines = [f"{pad}  {_text(item, pad + '  ')}" for item in value]
        return "[\n" + ",\n".join(lines) + f"\n{pad}]"
    if isinstance(value, list) and len(whole) > 100:
        inside = textwrap.fill(whole[1:-1], 116, initial_indent=pad + "  ", subsequent_indent=pad + "  ")
        return f"[\n{inside}\n{pad}]"
    return whole


@dataclasses.dataclass(frozen=True)
class Declared:
    """The keys of one way of training that a package declares."""

    view: str
    package: str
    version: str
    entries: Mapping[str, Entry]


# LLaMA-Factory -------------------------------------------------------------------------------------------------------

SECTIONS = {"megatron": "keys", "plain": "keys_without_megatron", "bridge": "keys_with_bridge"}
"""Way of training -> the section of llamafactory.json with its own keys. Each way also has the keys of the ways before
it, except that only the first one has those of mcore_adapter."""


def llamafactory_view(document: Document, view: str) -> dict[str, Entry]:
    """Return all keys that a way of training accepts."""
    found = {name: dict(entry) for name, entry in document["keys"].items()}
    if view == "megatron":
        return found
    found = {name: entry for name, entry in found.items() if entry["from"] != "mcore_adapter"}
    for entry in found.values():
        # These fields describe how the Megatron path treats a key.
        for what in ("ignored", "note"):
            entry.pop(what, None)
    found |= document["keys_without_megatron"]
    return found | (document["keys_with_bridge"] if view == "bridge" else {})


def llamafactory_version() -> str:
    """Return the version of the imported LLaMA-Factory, which may be a checkout."""
    from llamafactory.extras.env import VERSION

    return str(VERSION)


def of_llamafactory() -> Iterator[Declared]:
    """Yield the keys of llamafactory.json as the installed packages declare them."""
    import transformers
    from llamafactory import hparams
    from llamafactory.hparams.training_args import TrainingArguments

    version, groups = llamafactory_version(), ("model", "data", "finetuning", "generating")
    shared = {
        name: {"group": group, **entry}
        for group in groups
        for name, entry in declared(getattr(hparams, f"{group.capitalize()}Arguments")).items()
    }
    yield Declared("megatron", "llamafactory", version, shared)
    base = _of_training(transformers.TrainingArguments)
    yield Declared("megatron", "transformers", transformers.__version__, base)
    if importlib.util.find_spec("mcore_adapter"):
        from mcore_adapter import TrainingArguments as McaTrainingArguments

        (adapter,) = versions_of(read("llamafactory.json"), "mcore_adapter")
        adapters = _of_training(McaTrainingArguments)
        entries = {name: entry for name, entry in adapters.items() if name not in base}
        yield Declared("megatron", "mcore_adapter", adapter, entries)
    plain, own = _of_training(TrainingArguments), own_names(TrainingArguments, "llamafactory")
    yield Declared("plain", "llamafactory", version, shared | {name: plain[name] for name in plain if name in own})
    others = {name: entry for name, entry in plain.items() if name not in own}
    yield Declared("plain", "transformers", transformers.__version__, others)
    if bridge := getattr(hparams, "MegatronBridgeArguments", None):
        entries = {name: {"group": "bridge", **entry} for name, entry in declared(bridge).items()}
        yield Declared("bridge", "llamafactory", version, shared | {n: plain[n] for n in plain if n in own} | entries)


def _of_training(group: type) -> dict[str, Entry]:
    return {name: {"group": "training", **entry} for name, entry in declared(group).items()}


def llamafactory_differences(found: Declared) -> list[str]:
    """Return the differences between llamafactory.json and what a package declares."""
    document = read("llamafactory.json")
    listed = llamafactory_view(document, found.view)
    mine = {name: entry for name, entry in listed.items() if entry["from"] == found.package}
    if found.package == "transformers":
        gone = document["removed_from_transformers"]
        taken = {name: {"until": gone[name]} for name in gone if found.view == "megatron" or name not in listed}
        mine |= taken
    names_alone = found.version not in versions_of(document, found.package)
    return differences(mine, found.entries, found.version, names_alone=names_alone)


def write_llamafactory() -> list[str]:
    """Update llamafactory.json; return one sentence for each version that the list does not cover."""
    document, left = read("llamafactory.json"), []
    for found in of_llamafactory():
        known = versions_of(document, found.package)
        if found.version not in known:
            left.append(f"{found.package} {found.version} is none of the versions of llamafactory.json")
            continue
        listed = llamafactory_view(document, found.view)
        mine = {name: entry for name, entry in listed.items() if entry["from"] == found.package}
        entries = {name: {**entry, "from": found.package} for name, entry in found.entries.items()}
        new = brought_up(mine, entries, found.version, known)
        section = SECTIONS[found.view]
        if found.view == "megatron":
            document[section] = _in_place(document[section], new, found.package)
            continue
        base = llamafactory_view({**document, section: {}}, found.view)
        others = {name: entry for name, entry in document[section].items() if entry["from"] != found.package}
        document[section] = others | {name: entry for name, entry in new.items() if base.get(name) != entry}
    (FOLDER / "llamafactory.json").write_text(text_of(document), encoding="utf-8")
    return left


def _in_place(old: Mapping[str, Entry], new: Mapping[str, Entry], package: str) -> dict[str, Entry]:
    """Return a section with the entries of one package replaced; new entries follow the entry before them there."""
    found = {name: entry for name, entry in old.items() if entry["from"] != package or name in new}
    names = list(found)
    last = -1
    for name in new:
        if name in found:
            last = names.index(name)
        else:
            last += 1
            names.insert(last, name)
    return {name: new.get(name, found.get(name, {})) for name in names}


# Its templates and models --------------------------------------------------------------------------------------------


def of_templates() -> dict[str, set[str]]:
    """Return the lists of names in llamafactory_templates.json, as the installed LLaMA-Factory has them."""
    from llamafactory.data.template import TEMPLATES
    from llamafactory.extras import constants

    return {
        "names": set(TEMPLATES),
        "supported_model_types": set(constants.MCA_SUPPORTED_MODELS),
        "bridge_model_types": set(getattr(constants, "MEGATRON_BRIDGE_SUPPORTED_MODELS", ())),
    }


def templates_by_model() -> dict[str, str]:
    """Return hub id -> template, for the models that LLaMA-Factory lists with a template."""
    from llamafactory.extras import constants

    return {
        path: constants.DEFAULT_TEMPLATE[name]
        for name, paths in constants.SUPPORTED_MODELS.items()
        for path in paths.values()
        if name in constants.DEFAULT_TEMPLATE
    }


# Lists of bare names -------------------------------------------------------------------------------------------------


def names_of(document: Document, key: str) -> dict[str, Entry]:
    """Return a list of bare names as entries, with the versions in the document's `since` and `until`."""
    bounds = {word: document.get(word, {}).get(key, {}) for word in ("since", "until")}
    return {name: {word: bounds[word][name] for word in bounds if name in bounds[word]} for name in document[key]}


def name_differences(document: Document, key: str, real: Collection[str], version: str) -> list[str]:
    """Return the differences between a list of bare names and a version of the package."""
    return differences(names_of(document, key), {name: {} for name in real}, version, names_alone=True)


def bring_names_up(document: Document, key: str, real: Collection[str], version: str, known: list[str]) -> None:
    """Update a list of bare names, and when they were added and removed, by the names of one version.

    The result is correct for any order of versions, once each of them has been passed twice.
    """
    at = known.index(version)
    newer = known[at + 1] if version != known[-1] else None
    entries = {name: {**entry} for name, entry in names_of(document, key).items()}
    for name in real:
        entry = entries.setdefault(name, {"since": version})
        if has(entry, version):
            pass
        elif Version(version) < Version(entry.get("since", "0")):
            entry["since"] = version
        else:
            entry["until"] = newer
        if at == 0:
            entry.pop("since", None)
    for name, entry in entries.items():
        if name not in real and has(entry, version):
            entry |= {"since": newer} if at == 0 else {"until": version}
    entries = {name: {word: bound for word, bound in entry.items() if bound} for name, entry in entries.items()}
    document[key] = sorted(entries)
    for word in ("since", "until"):
        bounds = {name: entries[name][word] for name in sorted(entries) if word in entries[name]}
        if bounds or key in document.get(word, {}):
            document.setdefault(word, {})[key] = bounds


def write_names(name: str, package: str, version: str, lists: Mapping[str, Collection[str]]) -> list[str]:
    """Update the lists of bare names in a file."""
    document = read(name)
    known = versions_of(document, package)
    if version not in known:
        return [f"{package} {version} is none of the versions of {name}"]
    for key, real in lists.items():
        bring_names_up(document, key, real, version, known)
    (FOLDER / name).write_text(text_of(document), encoding="utf-8")
    return []


def of_megatron() -> set[str]:
    """Return the settings of megatron_config.json, as the installed megatron-core has them."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    return {field.name for group in (TransformerConfig, MLATransformerConfig) for field in dataclasses.fields(group)}


def of_adapter() -> set[str]:
    """Return the settings that the installed mcore_adapter adds."""
    from mcore_adapter.models import model_config as real

    groups = (real.PretrainedConfig, real.McaModelConfig, real.YarnRotaryEmbeddingConfig)
    return {name for group in groups for name in inspect.get_annotations(group)}


# ms-swift -------------------------------------------------------------------------------------------------------------


def of_swift() -> dict[str, dict[str, Entry]]:
    """Return section of ms_swift.json -> what ms-swift's classes declare of its arguments; of `rlhf` only the names."""
    from tests.verify import bridge_stand_in

    bridge_stand_in.install()
    from swift.arguments import RLHFArguments, SftArguments
    from swift.megatron.arguments import MegatronSftArguments

    own = {
        section: {
            name: entry for name, entry in declared(group, defaults=False).items() if name in own_names(group, "swift")
        }
        for section, group in (("sft", SftArguments), ("megatron", MegatronSftArguments), ("rlhf", RLHFArguments))
    }
    return {**own, "rlhf": {name: {} for name in own["rlhf"] if name not in own["sft"]}}


def swift_view(document: Document, section: str) -> dict[str, Entry]:
    """Return all arguments of a section."""
    return names_of(document, section) if section == "rlhf" else {**document["shared"], **document[section]}


def swift_differences() -> list[str]:
    """Return the differences between ms_swift.json and the installed ms-swift; of older versions only the names."""
    document, version = read("ms_swift.json"), importlib.metadata.version("ms-swift")
    newest = version == versions_of(document, "ms_swift")[-1]
    return [
        f"{section}: {sentence}"
        for section, real in of_swift().items()
        for sentence in differences(swift_view(document, section), real, version, names_alone=not newest)
    ]


def write_swift() -> list[str]:
    """Update ms_swift.json."""
    document, version = read("ms_swift.json"), importlib.metadata.version("ms-swift")
    known, real = versions_of(document, "ms_swift"), of_swift()
    if version not in known:
        return [f"ms-swift {version} is none of the versions of ms_swift.json"]
    bring_names_up(document, "rlhf", real["rlhf"], version, known)
    views = {name: brought_up(swift_view(document, name), real[name], version, known) for name in ("sft", "megatron")}
    both = {name: entry for name, entry in views["sft"].items() if views["megatron"].get(name) == entry}
    document["shared"] = both
    for section, view in views.items():
        document[section] = {name: entry for name, entry in view.items() if name not in both}
    (FOLDER / "ms_swift.json").write_text(text_of(document), encoding="utf-8")
    return []


# All of them ----------------------------------------------------------------------------------------------------------


def main() -> None:
    """Update the lists to the installed packages, and print what is left for a person to decide."""
    left: list[str] = []
    if importlib.util.find_spec("llamafactory"):
        left += write_llamafactory()
        left += write_names("llamafactory_templates.json", "llamafactory", llamafactory_version(), of_templates())
        left += [sentence for found in of_llamafactory() for sentence in llamafactory_differences(found)]
    if importlib.util.find_spec("swift"):
        left += write_swift()
        left += swift_differences()
    elif importlib.util.find_spec("megatron"):
        # Not megatron.core.__version__, which contains the commit of the working directory's repository.
        version = importlib.metadata.version("megatron-core")
        left += write_names("megatron_config.json", "megatron_core", version, {"megatron_core": of_megatron()})
    print("\n".join(left) or "the lists are those of these packages")


if __name__ == "__main__":
    main()
