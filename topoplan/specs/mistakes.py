"""Pydantic's report on a file as our own errors: one line for a mistake, with its file, line, key and remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from topoplan.errors import InputError, SpecError, UnitError, nearest
from topoplan.specs.forms import (
    FabricForm,
    Form,
    GpuForm,
    HostForm,
    JobForm,
    ModelForm,
    PinForm,
    RecomputeForm,
    SpecForm,
)
from topoplan.specs.kinds import TRAINER_KEYS_OF_JOB, TRAINER_KEYS_OF_LAYOUT
from topoplan.specs.source import KeyPath
from topoplan.units import shown

_MAX_MESSAGES = 3
_AnyForm = TypeVar("_AnyForm", bound=Form)

# Words of other tools, and what they are called here.
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
}
_FORM_OF_KEY: Mapping[str, type[Form]] = {
    "gpu": GpuForm,
    "model": ModelForm,
    "job": JobForm,
    "pin": PinForm,
    "recompute": RecomputeForm,
    "hosts": HostForm,
    "fabric": FabricForm,
}


def check_form(form: type[_AnyForm], data: Mapping[str, Any], place: Callable[[KeyPath], str]) -> _AnyForm:
    """The document as a form. Raises SpecError or UnitError, one line for each of the first mistakes."""
    try:
        return form.model_validate(data)
    except ValidationError as report:
        mistakes = report.errors(include_url=False)
    # A key under a name of someone else's is one mistake: the unknown key, not the missing one too.
    unknown = {mistake["loc"] for mistake in mistakes if mistake["type"] == "extra_forbidden"}
    renamed = {(*path[:-1], likely_key(str(path[-1]), _form_holding(path, form).model_fields)) for path in unknown}
    mistakes = [mistake for mistake in mistakes if mistake["type"] != "missing" or mistake["loc"] not in renamed]
    messages = [_explain(mistake, place, form) for mistake in mistakes[:_MAX_MESSAGES]]
    if len(messages) == 1:
        raise messages[0]
    lines = [str(message) for message in messages]
    if len(mistakes) > _MAX_MESSAGES:
        lines.append(f"and {len(mistakes) - _MAX_MESSAGES} more")
    raise SpecError("\n".join(lines))


def likely_key(word: str, known: Iterable[str]) -> str:
    """The known key that a user probably meant: what another tool's word is here, or the nearest spelling."""
    names = list(known)
    if _OTHER_WORDS.get(word) in names:
        return _OTHER_WORDS[word]
    return nearest(word, names).removeprefix("did you mean '").removesuffix("'?")


def dotted(path: KeyPath) -> str:
    """`hosts[0].port`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _form_holding(path: KeyPath, document: type[Form]) -> type[Form]:
    """The form that has the last key of a path in a document of that form."""
    names = [part for part in path[:-1] if isinstance(part, str)]
    return _FORM_OF_KEY[names[-1]] if names else document


def _explain(mistake: ErrorDetails, place: Callable[[KeyPath], str], document: type[Form]) -> InputError:
    """One of pydantic's errors as ours."""
    path: KeyPath = tuple(mistake["loc"])
    what, expected, remedy = mistake["msg"], "", ""
    error: type[InputError] = SpecError
    match mistake["type"]:
        case "unit" | "value":
            parts = mistake["ctx"]
            path = (*path, parts["key"]) if parts["key"] else path
            what, expected, remedy = parts["what"], parts["expected"], parts["remedy"]
            error = UnitError if mistake["type"] == "unit" else SpecError
        case "extra_forbidden":
            return _unknown_key(path, place(path), _form_holding(path, document))
        case "missing":
            form, key = _form_holding(path, document), str(path[-1])
            examples = form.model_fields[key].examples
            remedy = f"add `{key}: {examples[0]}`" if examples else ""
            block = f" in `{dotted(path[:-1])}`" if path[:-1] else ""
            return SpecError(f"`{key}` is missing{block}", where=place(path[:-1]), remedy=remedy)
        case "model_type" | "model_attributes_type" | "dict_type" | "dict_attributes_type":
            form_of_value = _FORM_OF_KEY.get(next((part for part in reversed(path) if isinstance(part, str)), ""))
            also = "a name or " if form_of_value and form_of_value.short_key else ""
            what, expected = f"{shown(mistake['input'])} is not a block of keys", f"expected {also}`key: value` lines"
        case "list_type":
            what, expected = f"{shown(mistake['input'])} is not a list", "expected one item a line, each behind `- `"
    return error(f"{dotted(path)}: {what}" if path else what, where=place(path), expected=expected, remedy=remedy)


def _unknown_key(path: KeyPath, where: str, form: type[Form]) -> SpecError:
    key, block = str(path[-1]), dotted(path[:-1])
    inside = f" in `{block}`" if block else ""
    what = f"unknown key {shown(key)}{inside}"
    if likely := likely_key(key, form.model_fields):
        return SpecError(what, where=where, remedy=f"did you mean {likely!r}?")
    if form.list_of_keys:
        return SpecError(what, where=where, remedy=form.list_of_keys)
    word = _OTHER_WORDS.get(key, key)
    if form is not JobForm and word in JobForm.model_fields:
        return SpecError(what, where=where, remedy=f"`{word}` belongs under `job:`")
    if form is not SpecForm and word in SpecForm.model_fields:
        return SpecError(what, where=where, remedy=f"`{word}` belongs at the top of the file")
    if form is not PinForm and word in PinForm.model_fields:
        return SpecError(
            what, where=where, remedy=f"a layout key is held under `pin:` in `job`, as `pin: {{{word}: ...}}`"
        )
    expected = f"expected one of {', '.join(form.model_fields)}"
    remedy = "other keys of the trainer go under `trainer:`" if form is JobForm else ""
    return SpecError(what, where=where, expected=expected, remedy=remedy)
