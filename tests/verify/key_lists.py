"""What the trainers' packages declare, in the form of the catalog's key lists, and how the lists differ from it.

Run as a program (`make key-lists`) it brings `topoplan/catalog/trainer_keys/` to the packages of the environment, as
far as their versions are named in the lists. What a person has found out stays as it is: `ignored`, and the choices of
entries that have a `note`. A list knows several versions of a package. What not all of them have says in `since` which
is the first; types and defaults are those of the newest, and choices those of any. A key that is gone is left in the
list, and named, for a person to decide.
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
    """The fields of an argument class that its parser takes, by name."""
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
    """The members of a union, of one in it too."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        for member in typing.get_args(hint):
            yield from _parts(member)
    else:
        yield hint


def own_names(group: type, package: str) -> set[str]:
    """The fields that an argument class has from the classes of a package."""
    return {
        name
        for base in group.__mro__
        if base.__module__.partition(".")[0] == package
        for name in inspect.get_annotations(base)
    }


# A list against a declaration ----------------------------------------------------------------------------------------


def has(entry: Mapping[str, Any], version: str) -> bool:
    """Whether a version of the package has a key: from `since` on, and before `until`."""
    since, until = entry.get("since"), entry.get("until")
    at = Version(version)
    return (since is None or at >= Version(since)) and (until is None or at < Version(until))


def differences(
    listed: Mapping[str, Entry], real: Mapping[str, Entry], version: str, *, names_alone: bool = False
) -> list[str]:
    """What a list says otherwise than a version of the package declares, a sentence each."""
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
    """What of an entry is the package's to say."""
    left_out = {"choices"} if "note" in listed else set()
    return tuple(what for what in _COMPARED if what not in left_out and (what != "default" or what in real))


def brought_up(
    listed: Mapping[str, Entry], real: Mapping[str, Entry], version: str, known: list[str]
) -> dict[str, Entry]:
    """The list with what a version declares; `known` are the versions of the list, oldest first."""
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
    """One of the lists."""
    found: Document = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return found


def versions_of(document: Document, package: str) -> list[str]:
    """The versions of a package that a list knows, oldest first."""
    blocks = [document["versions"], *document.get("newer", ())]
    found = [block[package] for block in blocks if package in block]
    flat = [version for one in found for version in ([one] if isinstance(one, str) else one)]
    return sorted({version.partition(",")[0] for version in flat}, key=Version)


def text_of(document: Document) -> str:
    """A list as it stands in its file: an entry a line, and many names in lines of 116 characters."""
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
    """What a package declares of the keys that one way of training takes."""

    view: str
    package: str
    version: str
    entries: Mapping[str, Entry]


# LLaMA-Factory -------------------------------------------------------------------------------------------------------

SECTIONS = {"megatron": "keys", "plain": "keys_without_megatron", "bridge": "keys_with_bridge"}
"""Way of training -> the section of llamafactory.json with its own keys. Each has those of the one before it, too, but
that mcore_adapter's are of the first alone."""


def llamafactory_view(document: Document, view: str) -> dict[str, Entry]:
    """All keys that a way of training takes."""
    found = {name: dict(entry) for name, entry in document["keys"].items()}
    if view == "megatron":
        return found
    found = {name: entry for name, entry in found.items() if entry["from"] != "mcore_adapter"}
    for entry in found.values():
        # They say what the Megatron path makes of a key.
        for what in ("ignored", "note"):
            entry.pop(what, None)
    found |= document["keys_without_megatron"]
    return found | (document["keys_with_bridge"] if view == "bridge" else {})


def llamafactory_version() -> str:
    """Of the LLaMA-Factory that is imported, which may be a checkout."""
    from llamafactory.extras.env import VERSION

    return str(VERSION)


def of_llamafactory() -> Iterator[Declared]:
    """The keys of llamafactory.json, as the packages here declare them."""
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
    """What llamafactory.json has otherwise than a package declares."""
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
    """Bring llamafactory.json up; what is gone, and versions that the list does not know, a sentence each."""
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
    """A section with the entries of one package replaced: new ones stand behind the one that they follow there."""
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
    """The lists of names in llamafactory_templates.json, as the installed LLaMA-Factory has them."""
    from llamafactory.data.template import TEMPLATES
    from llamafactory.extras import constants

    return {
        "names": set(TEMPLATES),
        "supported_model_types": set(constants.MCA_SUPPORTED_MODELS),
        "bridge_model_types": set(getattr(constants, "MEGATRON_BRIDGE_SUPPORTED_MODELS", ())),
    }


def templates_by_model() -> dict[str, str]:
    """Hub id -> template, for the models that LLaMA-Factory lists with one."""
    from llamafactory.extras import constants

    return {
        path: constants.DEFAULT_TEMPLATE[name]
        for name, paths in constants.SUPPORTED_MODELS.items()
        for path in paths.values()
        if name in constants.DEFAULT_TEMPLATE
    }


# Lists of bare names -------------------------------------------------------------------------------------------------


def names_of(document: Document, key: str) -> dict[str, Entry]:
    """A list of bare names as entries: `since` and `until` of the document have the versions of those that need it."""
    bounds = {word: document.get(word, {}).get(key, {}) for word in ("since", "until")}
    return {name: {word: bounds[word][name] for word in bounds if name in bounds[word]} for name in document[key]}


def name_differences(document: Document, key: str, real: Collection[str], version: str) -> list[str]:
    """What a list of bare names has otherwise than a version of the package."""
    return differences(names_of(document, key), {name: {} for name in real}, version, names_alone=True)


def bring_names_up(document: Document, key: str, real: Collection[str], version: str, known: list[str]) -> None:
    """A list of bare names with what a version has, and when names came and went: right, in whatever order versions are
    brought, once each has been twice.
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
    """Bring lists of bare names in a file up."""
    document = read(name)
    known = versions_of(document, package)
    if version not in known:
        return [f"{package} {version} is none of the versions of {name}"]
    for key, real in lists.items():
        bring_names_up(document, key, real, version, known)
    (FOLDER / name).write_text(text_of(document), encoding="utf-8")
    return []


def of_megatron() -> set[str]:
    """The settings of megatron-core in megatron_config.json, as the installed one has them."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    return {field.name for group in (TransformerConfig, MLATransformerConfig) for field in dataclasses.fields(group)}


def of_adapter() -> set[str]:
    """Those of mcore_adapter."""
    from mcore_adapter.models import model_config as real

    groups = (real.PretrainedConfig, real.McaModelConfig, real.YarnRotaryEmbeddingConfig)
    return {name for group in groups for name in inspect.get_annotations(group)}


# ms-swift -------------------------------------------------------------------------------------------------------------


def of_swift() -> dict[str, dict[str, Entry]]:
    """Section of ms_swift.json -> what ms-swift's own classes declare of its arguments; `rlhf`: names alone."""
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
    """All arguments of a section."""
    return names_of(document, section) if section == "rlhf" else {**document["shared"], **document[section]}


def swift_differences() -> list[str]:
    """What ms_swift.json has otherwise than the installed ms-swift declares; of older versions the names alone."""
    document, version = read("ms_swift.json"), importlib.metadata.version("ms-swift")
    newest = version == versions_of(document, "ms_swift")[-1]
    return [
        f"{section}: {sentence}"
        for section, real in of_swift().items()
        for sentence in differences(swift_view(document, section), real, version, names_alone=not newest)
    ]


def write_swift() -> list[str]:
    """Bring ms_swift.json up."""
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
    """Bring the lists to the packages that are here, and say what is left for a person."""
    left: list[str] = []
    if importlib.util.find_spec("llamafactory"):
        left += write_llamafactory()
        left += write_names("llamafactory_templates.json", "llamafactory", llamafactory_version(), of_templates())
        left += [sentence for found in of_llamafactory() for sentence in llamafactory_differences(found)]
    if importlib.util.find_spec("swift"):
        left += write_swift()
        left += swift_differences()
    elif importlib.util.find_spec("megatron"):
        # Not megatron.core.__version__, which has the commit of the working directory's repository in it.
        version = importlib.metadata.version("megatron-core")
        left += write_names("megatron_config.json", "megatron_core", version, {"megatron_core": of_megatron()})
    print("\n".join(left) or "the lists are those of these packages")


if __name__ == "__main__":
    main()
