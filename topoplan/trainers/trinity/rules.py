"""The rules on Trinity-RFT's configurations: keys, its validator's refusals, long contexts, sequence parallelism.

The last two only report what is certain, based on: transformers `modeling_rope_utils.py` (_validate_yarn_parameters);
the Qwen3 model cards ("32,768 natively and 131,072 tokens with YaRN"; config.json has 40,960, including 8,192 for a
prompt); and verl `models/transformers/monkey_patch.py`, whose Ulysses attention asserts that heads divide evenly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from topoplan.operators.divisors import sizes_divided
from topoplan.reading.finding import Finding
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import as_number, as_whole, at
from topoplan.specs.model import Model
from topoplan.specs.source import KeyPath
from topoplan.trainers.around import context_of
from topoplan.trainers.key_classes import KeyClasses
from topoplan.trainers.models import model_at_hand
from topoplan.trainers.relations import read_relations
from topoplan.trainers.trinity.document import trained_positions
from topoplan.trainers.trinity.refused import RULES, ULYSSES, filled, refused_findings

_ROPE: KeyPath = ("model", "rope_scaling")
_SIZE = ULYSSES[-1]
_RELATIONS = read_relations("topoplan.trainers.trinity", "relations.toml")
_KEYS = KeyClasses(
    listed="trinity",
    top="Config",
    unknown=RULES["trinity-unknown-key"],
    wrong=RULES["trinity-wrong-value"],
    removed=RULES["trinity-removed-key"],
)
"""OmegaConf validates a file against the classes of `common/config.py`."""


def findings(setup: Setup) -> Iterator[Finding]:
    """Report faults of Trinity-RFT configurations."""
    for configuration in setup.of("trinity"):
        name = filled(setup, configuration, ("model", "model_path"))
        model = model_at_hand(name, configuration.part)
        of_keys = list(_KEYS.findings(configuration))
        yield from of_keys
        is_old = any(finding.rule == "trinity-removed-key" for finding in of_keys)
        yield from refused_findings(setup, configuration, is_old=is_old)
        known = context_of(setup, configuration)
        refused, unwise = RULES["trinity-refused-together"], RULES["trinity-refused-together.unwise"]
        yield from _RELATIONS.findings(refused, configuration, known, unwise=unwise)
        yield from _rope(setup, configuration, model)
        yield from _sequence_parallel(setup, configuration, model)


def _rope(setup: Setup, configuration: Configuration, model: Model | None) -> Iterator[Finding]:
    rope = at(configuration.source.data, _ROPE)
    if not isinstance(rope, Mapping):
        return
    kind = rope.get("rope_type", rope.get("type"))
    factor = as_number(filled(setup, configuration, (*_ROPE, "factor")))
    original = as_whole(filled(setup, configuration, (*_ROPE, "original_max_position_embeddings")))
    length = as_whole(filled(setup, configuration, ("model", "max_model_len")))
    if kind not in ("yarn", "linear", "dynamic"):
        return
    if factor is not None and factor < 1:
        yield RULES["trinity-rope-factor"].at(configuration, (*_ROPE, "factor"), factor=factor, kind=kind)
        return
    if kind != "yarn":
        return
    if model is not None and model.max_position_embeddings == original != trained_positions(model):
        yield RULES["trinity-rope-original"].at(
            configuration,
            (*_ROPE, "original_max_position_embeddings"),
            original=original,
            model=model.name,
            native=trained_positions(model),
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
    for path in _places(configuration.source.data):
        size = as_whole(filled(setup, configuration, path))
        if size is None or size < 2:
            continue
        equations = [
            f"heads {heads} % {_SIZE} {size} = {heads % size}"
            for heads in sizes_divided(model, "heads")
            if heads % size
        ] + [
            f"KV heads {heads} % {_SIZE} {size} = {heads % size}, and {size} % {heads} = {size % heads}"
            for heads in sizes_divided(model, "KV heads")
            if heads % size and size % heads
        ]
        for equation in equations[:1]:
            yield RULES["trinity-sequence-parallel"].at(configuration, path, equation=equation, model=model.name)


def _places(data: object, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield every path at which the size of sequence-parallel groups is set."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            if key == _SIZE:
                yield (*path, key)
            else:
                yield from _places(value, (*path, key))
