"""What a Trinity-RFT configuration says about long contexts and sequence parallelism.

Only what is sure: transformers `modeling_rope_utils.py` (_validate_yarn_parameters), the Qwen3 model cards ("32,768
natively and 131,072 tokens with YaRN"; config.json has 40,960, room for a prompt of 8,192 beside), and verl
`models/transformers/monkey_patch.py`, whose Ulysses attention asserts that heads divide.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from topoplan.operators.divisors import divisors_of
from topoplan.reading.finding import Finding
from topoplan.reading.rules import read_rules
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import as_number, as_whole, at
from topoplan.specs.model import Model
from topoplan.specs.source import KeyPath, plain_scalar
from topoplan.trainers.models import model_at_hand

RULES = read_rules(__package__, "rules.toml")

_ROPE: KeyPath = ("model", "rope_scaling")
_ULYSSES = "ulysses_sequence_parallel_size"
_ENVIRONMENT = re.compile(r"\$\{oc\.env:(?P<name>\w+)(?:,(?P<default>[^{}]*))?\}")
_DECODED = re.compile(r"\$\{oc\.decode:(?P<inner>[^{}]*)\}")
_QWEN3_POSITIONS = 40960
_QWEN3_NATIVE = 32768


def findings(setup: Setup) -> Iterator[Finding]:
    """What is wrong in the Trinity-RFT configurations."""
    for configuration in setup.of("trinity"):
        name = _filled(setup, configuration, ("model", "model_path"))
        model = model_at_hand(name, configuration.part)
        yield from _rope(setup, configuration, model)
        yield from _sequence_parallel(setup, configuration, model)


def _filled(setup: Setup, configuration: Configuration, path: KeyPath) -> object:
    """A value with `${oc.env:NAME,default}` filled in from what the scripts set; None where that is not known."""
    value = at(configuration.source.data, path)
    if not isinstance(value, str) or "${" not in value:
        return value
    variables = {variable.name: variable.value for variable in setup.variables}

    def fill(found: re.Match[str]) -> str:
        given = variables.get(found["name"], found["default"])
        return found[0] if given is None else given

    text = _DECODED.sub(lambda found: found["inner"], _ENVIRONMENT.sub(fill, value))
    return None if "$" in text else plain_scalar(text.strip())


def _rope(setup: Setup, configuration: Configuration, model: Model | None) -> Iterator[Finding]:
    rope = at(configuration.source.data, _ROPE)
    if not isinstance(rope, Mapping):
        return
    kind = rope.get("rope_type", rope.get("type"))
    factor = as_number(_filled(setup, configuration, (*_ROPE, "factor")))
    original = as_whole(_filled(setup, configuration, (*_ROPE, "original_max_position_embeddings")))
    length = as_whole(_filled(setup, configuration, ("model", "max_model_len")))
    if kind not in ("yarn", "linear", "dynamic"):
        return
    if factor is not None and factor < 1:
        yield RULES["trinity-rope-factor"].at(configuration, (*_ROPE, "factor"), factor=factor, kind=kind)
        return
    if kind != "yarn":
        return
    is_qwen3 = model is not None and model.model_type in ("qwen3", "qwen3_moe")
    if is_qwen3 and model is not None and model.max_position_embeddings == original == _QWEN3_POSITIONS:
        yield RULES["trinity-rope-original"].at(
            configuration,
            (*_ROPE, "original_max_position_embeddings"),
            original=original,
            model=model.name,
            native=_QWEN3_NATIVE,
        )
    if factor is None or original is None or length is None or original < 1:
        return
    place, reach = (*_ROPE, "factor"), factor * original
    if length > reach:
        yield RULES["trinity-rope-too-short"].at(
            configuration, place, length=length, factor=factor, original=original, reach=reach, needed=length / original
        )
    elif factor > 1 and length <= original:
        yield RULES["trinity-rope-not-needed"].at(configuration, place, length=length, original=original)


def _sequence_parallel(setup: Setup, configuration: Configuration, model: Model | None) -> Iterator[Finding]:
    if model is None:
        return
    divisors = divisors_of(model)
    for path in _places(configuration.source.data):
        size = as_whole(_filled(setup, configuration, path))
        if size is None or size < 2:
            continue
        equation = next(
            (f"heads {heads} % {_ULYSSES} {size} = {heads % size}" for heads in divisors.heads if heads % size), None
        ) or next(
            (
                f"KV heads {heads} % {_ULYSSES} {size} = {heads % size}, and {size} % {heads} = {size % heads}"
                for heads in divisors.kv_heads
                if heads % size and size % heads
            ),
            None,
        )
        if equation:
            yield RULES["trinity-sequence-parallel"].at(configuration, path, equation=equation, model=model.name)


def _places(data: object, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Wherever the size of the sequence parallel groups is written."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            if key == _ULYSSES:
                yield (*path, key)
            else:
                yield from _places(value, (*path, key))
