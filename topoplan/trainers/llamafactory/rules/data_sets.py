"""Datasets as LLaMA-Factory looks them up: `dataset_info.json` in `dataset_dir`, if it is on this machine.

Sources, at LLaMA-Factory 0.9.5: `data/parser.py` (get_dataset_list), `data/loader.py` (_load_single_dataset,
_get_merged_dataset).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from topoplan.errors import InputError, listed, nearest
from topoplan.reading.finding import Finding
from topoplan.reading.named_files import find, is_relative
from topoplan.reading.setup import Configuration
from topoplan.reading.values import words
from topoplan.specs.source import below, is_there, read_text
from topoplan.trainers.llamafactory.rules.table import RULES
from topoplan.units import shown

INFO = "dataset_info.json"
_ENDINGS_OF_FILES = (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".txt")
_PLACES = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
_COLUMNS = frozenset(
    [
        *("prompt", "query", "response", "history", "messages", "system", "tools"),
        *("images", "videos", "audios", "chosen", "rejected", "kto_tag"),
    ]
)
"""Keys of `columns` that DatasetAttr.join reads."""
_FORMATTINGS = ("alpaca", "sharegpt", "openai")
_TAGS = ("role_tag", "content_tag", "user_tag", "assistant_tag", "observation_tag", "function_tag", "system_tag")
_IN_PAIRS = ("rm", "dpo")
_OWN = {
    True: (
        *("dpo_en_demo", "dpo_zh_demo", "dpo_mix_en", "dpo_mix_zh", "ultrafeedback", "coig_p", "rlhf_v"),
        *("vlfeedback", "rlaif_v", "orca_pairs", "nectar_rm", "orca_dpo_de"),
    ),
    False: (
        *("identity", "alpaca_en_demo", "alpaca_zh_demo", "glaive_toolcall_en_demo", "glaive_toolcall_zh_demo"),
        *("mllm_demo", "kto_en_demo", "wiki_demo", "c4_demo"),
    ),
}
"""Names in LLaMA-Factory's own list, by whether they hold preference pairs, for use if no list is at hand."""


def data_set_findings(configuration: Configuration) -> Iterator[Finding]:
    """Report datasets missing from the list, missing files, and datasets for another stage."""
    directory = words(configuration, "dataset_dir") or "data"
    if not is_relative(directory) and not directory.startswith("/"):
        yield from _files(configuration)
        return
    info = find(configuration.part, f"{directory}/{INFO}")
    known = None if info is None else _read(info)
    if isinstance(known, str) and info is not None:
        yield RULES["llamafactory-undefined-dataset.unreadable"].at(
            configuration, "dataset", info=str(info), error=known
        )
        return
    if info is None or not isinstance(known, dict):
        yield from _not_here(configuration, directory, is_there=info is not None)
        return
    for key in ("dataset", "eval_dataset"):
        for name in _names(configuration, key):
            if name in known:
                yield from _entry(configuration, key, name, known[name], info)
            elif _is_file(name):
                yield RULES["llamafactory-dataset-file"].at(configuration, key, name=shown(name), info=str(info))
            elif "$" not in name:
                remedy = nearest(name, known)
                yield RULES["llamafactory-undefined-dataset"].at(
                    configuration, key, name=shown(name), info=str(info), remedy=remedy
                )


def _names(configuration: Configuration, key: str) -> Iterator[str]:
    return filter(None, (one.strip() for one in (words(configuration, key) or "").split(",")))


def _is_file(name: str) -> bool:
    return name.lower().endswith(_ENDINGS_OF_FILES) or name.startswith(("/", "./"))


def _files(configuration: Configuration) -> Iterator[Finding]:
    """Report datasets that look like files, where the list, which may have an entry of that name, is not at hand."""
    for key in ("dataset", "eval_dataset"):
        if file := next(filter(_is_file, _names(configuration, key)), None):
            yield RULES["llamafactory-dataset-file.unlisted"].at(configuration, key, name=shown(file))


def _not_here(configuration: Configuration, directory: str, *, is_there: bool) -> Iterator[Finding]:
    """Report what is certain without the list: that `data` has one, or the kind of LLaMA-Factory's own datasets."""
    is_path = ":" not in directory and directory != "ONLINE"
    if is_path:
        yield from _files(configuration)
    if not is_there and is_path and directory != "data" and find(configuration.part, f"data/{INFO}") is not None:
        yield RULES["llamafactory-undefined-dataset.list"].at(configuration, "dataset_dir", directory=directory)
    elif not is_there and directory == "data":
        for name in _names(configuration, "dataset"):
            ranked = next((is_ranked for is_ranked, names in _OWN.items() if name in names), None)
            if ranked is not None:
                yield from _of_stage(configuration, "dataset", name, ranked=ranked)


def _read(info: Path) -> Mapping[str, Any] | str | None:
    """Return the list, what is wrong with its JSON, or None if it is not readable here."""
    try:
        found = json.loads(read_text(info))
    except json.JSONDecodeError as error:
        return f"line {error.lineno}: {error.msg}"
    except (InputError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else "not a mapping"


def _entry(configuration: Configuration, key: str, name: str, entry: Any, info: Path) -> Iterator[Finding]:
    if not isinstance(entry, dict):
        return
    columns, directory = entry.get("columns"), info.parent
    if isinstance(columns, dict) and (unknown := [one for one in columns if one not in _COLUMNS]):
        rule = RULES["llamafactory-undefined-dataset.columns"]
        yield rule.at(configuration, key, name=shown(name), info=str(info), unknown=listed([*map(shown, unknown)]))
    yield from _keys(configuration, key, name, entry)
    file, is_elsewhere = entry.get("file_name"), any(place in entry for place in _PLACES)
    if isinstance(file, str) and not is_elsewhere and not is_there(below(directory, file)):
        rule = RULES["llamafactory-undefined-dataset.file"]
        yield rule.at(configuration, key, name=shown(name), file=file, directory=str(directory))
    elif isinstance(file, str) and not is_elsewhere:
        yield from _columns(configuration, key, name, entry, below(directory, file))
    yield from _of_stage(configuration, key, name, ranked=bool(entry.get("ranking")))


def _keys(configuration: Configuration, key: str, name: str, entry: Mapping[str, Any]) -> Iterator[Finding]:
    """Report keys and values of an entry that LLaMA-Factory does not know: DatasetAttr.join, get_dataset_converter."""
    rule = RULES["llamafactory-undefined-dataset.entry"]
    if not any(place in entry for place in ("file_name", *_PLACES)):
        what = "neither file_name nor the address of a hub"
        yield rule.at(configuration, key, name=shown(name), what=what)
    if (formatting := entry.get("formatting", "alpaca")) not in _FORMATTINGS:
        remedy = nearest(str(formatting), _FORMATTINGS)
        yield rule.at(configuration, key, name=shown(name), what=f"formatting {shown(formatting)}", remedy=remedy)
    tags = entry.get("tags")
    for one in tags if isinstance(tags, Mapping) else ():
        if one not in _TAGS:
            yield rule.at(
                configuration, key, name=shown(name), what=f"the tag {shown(one)}", remedy=nearest(one, _TAGS)
            )


def _columns(
    configuration: Configuration, key: str, name: str, entry: Mapping[str, Any], file: Path
) -> Iterator[Finding]:
    """Report columns that no record of the file has: data/converter.py, 'KeyError'."""
    has_messages, columns = entry.get("formatting") in ("sharegpt", "openai"), entry.get("columns")
    usual = {"messages": "conversations"} if has_messages else {"prompt": "instruction", "query": "input"}
    read = columns if isinstance(columns, Mapping) else usual
    if has_messages and not read.get("messages"):
        what = "conversations, and no column for messages"
        yield RULES["llamafactory-undefined-dataset.entry"].at(configuration, key, name=shown(name), what=what)
    held = _fields(file)
    for column in read.values() if held else ():
        if isinstance(column, str) and column not in held:
            rule, close = RULES["llamafactory-undefined-dataset.field"], nearest(column, held)
            yield rule.at(configuration, key, name=shown(name), column=shown(column), file=file.name, remedy=close)


def _fields(file: Path) -> frozenset[str]:
    """Return the keys of all records of a JSON file; empty if it is large, or of another kind."""
    if file.suffix not in (".json", ".jsonl") or not file.is_file():
        return frozenset()
    try:
        text = read_text(file)
        records = json.loads(text) if text.lstrip().startswith("[") else [*map(json.loads, text.splitlines())]
    except (InputError, ValueError, RecursionError):
        return frozenset()
    return frozenset(key for record in records if isinstance(record, dict) for key in record)


def _of_stage(configuration: Configuration, key: str, name: str, *, ranked: bool) -> Iterator[Finding]:
    stage = configuration.get("stage", "sft")
    if ranked != (stage in _IN_PAIRS):
        kind = "pairs of answers" if ranked else "no pairs of answers"
        yield RULES["llamafactory-undefined-dataset.stage"].at(
            configuration, key, name=shown(name), kind=kind, stage=stage
        )
