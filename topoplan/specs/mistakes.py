"""Turn pydantic's report on a file into topoplan's errors: one line each, with file, line, key and remedy."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, NoReturn, TypeVar, cast, get_args, get_type_hints

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from topoplan.catalog import is_trainer_key
from topoplan.errors import InputError, SpecError, UnitError, nearest
from topoplan.specs.forms import GpuForm, JobForm, PinForm, SpecForm
from topoplan.specs.kinds import not_among
from topoplan.specs.passed_on import TRAINER_KEYS_OF_JOB, TRAINER_KEYS_OF_LAYOUT
from topoplan.specs.scalars import scalar
from topoplan.specs.source import KeyPath, dotted, with_key
from topoplan.units import shown

_MAX_MESSAGES = 20
"""What a screen shows: a mistake that stays hidden costs another run."""
_Form = TypeVar("_Form")
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")

# Other tools' names of topoplan's keys.
_OTHER_WORDS: Mapping[str, str] = {
    **TRAINER_KEYS_OF_JOB,
    **TRAINER_KEYS_OF_LAYOUT,
    "model_name_or_path": "model",
    "num_nodes": "nodes",
    "nnodes": "nodes",
    "nproc_per_node": "gpus_per_node",
    "gpus": "gpus_per_node",
    "gpu_type": "gpu",
    "infiniband_bandwidth": "ib_bandwidth",
    "network_bandwidth": "ib_bandwidth",
    "nic_bandwidth": "ib_bandwidth",
    "batch_size": "global_batch_size",
    "sequence_length": "seq_len",
    "max_seq_len": "seq_len",
    "mbs": "micro_batch_size",
    "gas": "gradient_accumulation_steps",
    "sp": "sequence_parallel",
    **dict.fromkeys(("max_length", "max_seq_length", "model_max_length", "block_size", "context_length"), "seq_len"),
    **dict.fromkeys(("gpu_count", "num_gpus", "n_gpus", "gpus_per_machine"), "gpus_per_node"),
    **dict.fromkeys(("node_count", "num_machines", "machines"), "nodes"),
    **dict.fromkeys(("gpu_memory", "vram"), "memory"),
    **dict.fromkeys(("lr", "peak_lr"), "learning_rate"),
    **dict.fromkeys(("train_batch_size", "batch"), "global_batch_size"),
    **dict.fromkeys(("nvlink", "nvlink_bw"), "nvlink_bandwidth"),
    **{
        f"{long}{end}": short
        for long, short in {"tensor": "tp", "pipeline": "pp", "context": "cp", "expert": "ep", "data": "dp"}.items()
        for end in ("_parallel", "_parallel_size", "_parallelism", "_parallel_degree")
    },
    **{f"{short}_size": short for short in ("tp", "pp", "cp", "ep", "dp")},
    **dict.fromkeys(("name", "host", "hostname", "ip"), "address"),
}


def check_form(
    form: type[_Form],
    data: Any,
    place: Callable[[KeyPath], str],
    *,
    within: KeyPath = (),
    context: str | None = None,
) -> _Form:
    """Validate the data at `within` in a document as a form.

    `place` returns the `file:line` of a path relative to `within`. `context` is passed to the kinds of value. Raises
    SpecError or UnitError, with one line for each of the first mistakes.
    """
    try:
        return cast(_Form, _reader(form).validate_python(data, context=context))  # type: ignore[arg-type]  # hashable
    except ValidationError as report:
        mistakes = report.errors(include_url=False)
    _Report(form, data, place, within).refuse(mistakes)


@cache
def _reader(form: Any) -> TypeAdapter[Any]:
    return TypeAdapter(form)


def keys_of(form: type[Any]) -> Mapping[str, Any]:
    """Return the keys of a form as they are written in a file, with the types of their values."""
    if issubclass(form, BaseModel):
        return {field.alias or name: field.annotation for name, field in form.model_fields.items()}
    hints = get_type_hints(form)
    return {field.metadata.get("alias", field.name): hints[field.name] for field in fields(form)}


def likely_key(word: str, known: Iterable[str]) -> str:
    """Return the known key that a user probably meant: by another tool's name for it, or by spelling.

    Empty if the word is a valid key of another block, however close its spelling.
    """
    names = list(known)
    for meant in (_OTHER_WORDS.get(word, word), word):
        if meant in names:
            return meant
    if belongs(word):
        return ""
    return nearest(word, names).removeprefix("did you mean '").removesuffix("'?")


def belongs(key: str) -> str:
    """Return a remedy that says which block a key belongs to; empty for a key that belongs to none."""
    for word in (_OTHER_WORDS.get(key, key).rpartition(".")[2], key):
        if word in keys_of(JobForm):
            return f"`{word}` belongs under `job:`"
        if word in keys_of(SpecForm):
            return f"`{word}` belongs at the top of the file"
        if word in keys_of(PinForm):
            return f"a layout key is held under `pin:` in `job`, as `pin: {{{word}: ...}}`"
        if word in keys_of(GpuForm):
            machine = "; a machine's own is `host_memory`" if word == "memory" else ""
            return f"`{word}` belongs under `gpu:`{machine}"
    is_known = is_trainer_key(key)
    return f"a key of the trainer goes under `trainer:` in `job`, as `trainer: {{{key}: ...}}`" if is_known else ""


def _forms_in(hint: Any) -> Iterator[type[Any]]:
    """Yield the forms among the alternatives (or list items) of a type."""
    if isinstance(hint, type) and (is_dataclass(hint) or issubclass(hint, BaseModel)):
        yield hint
    for argument in get_args(hint):
        yield from _forms_in(argument)


class _Report:
    def __init__(self, form: type[Any], data: Any, place: Callable[[KeyPath], str], within: KeyPath) -> None:
        self._form, self._data, self._place, self._within = form, data, place, within

    def refuse(self, mistakes: list[ErrorDetails]) -> NoReturn:
        """Raise pydantic's first mistakes as one error."""
        for mistake in mistakes:
            mistake["loc"] = self._path(mistake["loc"], mistake["type"])
        # A key under another tool's name is one mistake: report the unknown key, not the missing one as well.
        unknown = {mistake["loc"] for mistake in mistakes if mistake["type"] in _UNKNOWN}
        renamed = {(*path[:-1], likely_key(str(path[-1]), self._keys(path[:-1]))) for path in unknown}
        mistakes = [mistake for mistake in mistakes if mistake["type"] != "missing" or mistake["loc"] not in renamed]
        messages = [self._explained(mistake) for mistake in mistakes[:_MAX_MESSAGES]]
        if len(messages) == 1:
            raise messages[0]
        lines = [str(message) for message in messages]
        if len(mistakes) > _MAX_MESSAGES:
            lines.append(f"and {len(mistakes) - _MAX_MESSAGES} more")
        raise SpecError("\n".join(lines))

    def _path(self, location: KeyPath, problem: str) -> KeyPath:
        """Return a location without the names of union members that pydantic inserts."""
        path: KeyPath = ()
        value = self._data
        for part in location:
            inside = isinstance(value, list | tuple) if isinstance(part, int) else isinstance(value, Mapping)
            if inside and (isinstance(part, int) or part in value or (problem == "missing" and part is location[-1])):
                path = (*path, part)
                value = value[part] if isinstance(part, int) or part in value else None
        return path

    def _forms(self, path: KeyPath) -> list[type[Any]]:
        """Return the forms that the value at a path may have."""
        found = [self._form]
        for part in path:
            if isinstance(part, str):
                found = [inner for form in found for inner in _forms_in(keys_of(form).get(part))]
        return found

    def _keys(self, path: KeyPath) -> list[str]:
        return [key for form in self._forms(path) for key in keys_of(form)]

    def _explained(self, mistake: ErrorDetails) -> InputError:
        path, problem, value = mistake["loc"], mistake["type"], mistake["input"]
        context = mistake.get("ctx", {})
        error: InputError
        match problem:
            case "unit" | "value":
                path = (*path, context["key"]) if context["key"] else path
                kind = UnitError if problem == "unit" else SpecError
                error = kind(context["what"], expected=context["expected"], remedy=context["remedy"])
            case "extra_forbidden" | "unexpected_keyword_argument":
                return self._unknown_key(path)
            case "missing":
                return self._missing_key(path)
            case "literal_error":
                error = not_among(value, tuple(re.findall(r"'([^']*)'", context["expected"])))
            case "union_tag_invalid" | "union_tag_not_found":
                kinds = [kind for form in self._forms(path) for kind in get_args(keys_of(form)["kind"])]
                path, error = (*path, "kind"), not_among(context.get("tag"), tuple(kinds))
            case "list_type" | "tuple_type":
                error = SpecError(
                    f"{shown(value)} is not a list", expected=_expected_list(self._place(path), path, value)
                )
            case "bool_type" | "bool_parsing":
                error = SpecError(f"{shown(value)} is not true or false")
            case "string_type":
                error = SpecError(f"{shown(value)} is not text")
            case "dict_type" | "mapping_type" | "model_type" | "model_attributes_type" | "dataclass_type":
                also = "a name or " if any(getattr(form, "short_key", "") for form in self._forms(path)) else ""
                expected = f"expected {also}`key: value` lines"
                error = SpecError(f"{shown(value)} is not a block of keys", expected=expected)
            case _:
                error = SpecError(mistake["msg"])
        whole = (*self._within, *path)
        where = self._place(path)
        what = with_key(where, whole, error.what)
        return type(error)(what, where=where, expected=error.expected, remedy=error.remedy)

    def _in_block(self, path: KeyPath) -> str:
        block = dotted((*self._within, *path[:-1]))
        return f" in `{block}`" if block else ""

    def _missing_key(self, path: KeyPath) -> SpecError:
        key = str(path[-1])
        examples = [example for form in self._forms(path[:-1]) for example in _examples(form, key)]
        remedy = f"add `{key}: {examples[0]}`" if examples else ""
        return SpecError(f"`{key}` is missing{self._in_block(path)}", where=self._place(path[:-1]), remedy=remedy)

    def _unknown_key(self, path: KeyPath) -> SpecError:
        key, forms, known = str(path[-1]), self._forms(path[:-1]), self._keys(path[:-1])
        expected = remedy = ""
        if likely := likely_key(key, known):
            remedy = f"did you mean {likely!r}?"
        elif lists := [form.list_of_keys for form in forms if getattr(form, "list_of_keys", "")]:
            remedy = lists[0]
        elif place := belongs(key):
            remedy = place
        else:
            expected = f"expected one of {', '.join(known)}"
            remedy = "other keys of the trainer go under `trainer:`" if JobForm in forms else ""
        what = f"unknown key {shown(key)}{self._in_block(path)}"
        return SpecError(what, where=self._place(path), expected=expected, remedy=remedy)


def _expected_list(place: str, path: KeyPath, value: Any) -> str:
    """Say how a list is written, in a file or as the value of an option."""
    if not place.startswith("--"):
        return "expected one item a line, each behind `- `"
    items = [one.strip() for one in value.split(",")] if isinstance(value, str) else ["A", "B"]
    option = place.partition(" ")[0]
    return f"expected {option} {shlex.quote(f'{dotted(path)}={scalar(items)}')}"


def _examples(form: type[Any], key: str) -> list[Any]:
    """Return example values of a key, for messages."""
    if issubclass(form, BaseModel):
        return form.model_fields[key].examples or []
    return [example for own in fields(form) if own.name == key for example in own.metadata.get("examples", ())]
