"""Layout ids, written and read: `tp4-pp2-dp4-mbs1-full`, `zero3-dp8-mbs1-offload`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from topoplan.errors import LayoutError
from topoplan.layout.stages import end_sizes, spread_pipeline_layout
from topoplan.specs.layout_parts import RECOMPUTE_MODULES

if TYPE_CHECKING:
    from topoplan.layout.layout import Layout


class _Word(NamedTuple):
    """A word of an id, with how to write and how to read it."""

    pattern: str
    write: Callable[[Any], str]
    """Returns the word for a layout; empty if it is left out."""
    read: Callable[[str], dict[str, Any]]
    """Returns keys and values in their JSON form; for an empty text, those of a layout whose id lacks the word."""
    always: bool = False


def _number(prefix: str, key: str, *, always: bool = False) -> _Word:
    """Return the word for a number, such as `tp4`; 1 is left out unless the id always has the word."""

    def write(layout: Layout) -> str:
        value = getattr(layout, key)
        return f"{prefix}{value}" if always or value > 1 else ""

    return _Word(f"{prefix}[0-9]{{1,9}}", write, lambda text: {key: int(text.removeprefix(prefix) or 1)}, always)


def _switch(word: str, key: str, value: Any, usual: Any) -> _Word:
    """Return a word that stands for one value of a key, and is left out for the default value."""
    return _Word(
        word,
        lambda layout: word if getattr(layout, key) == value else "",
        lambda text: {key: value if text else usual},
    )


def _name(backend: str) -> _Word:
    return _Word(backend, lambda _: backend, lambda _: {}, always=True)


def _write_recompute(layout: Layout) -> str:
    mode = layout.recompute
    if mode.granularity == "selective":
        return "sel-" + "+".join(mode.modules)
    if mode.granularity == "full":
        return "full" if (mode.method, mode.num_layers) == ("uniform", 1) else f"full-{mode.method}{mode.num_layers}"
    return ""


def _read_recompute(text: str) -> dict[str, Any]:
    granularity, _, rest = text.partition("-")
    if granularity == "sel":
        return {"recompute": {"granularity": "selective", "modules": rest.split("+")}}
    if method := re.fullmatch(r"([a-z]+)([0-9]+)", rest):
        return {"recompute": {"granularity": "full", "method": method[1], "num_layers": int(method[2])}}
    return {"recompute": granularity or "none"}


def _write_split(layout: Layout) -> str:
    """Return `ends8+6`: the layers of the first and the last virtual stage, the others spread evenly between.

    Return `uneven` for any other split, and an empty string for the even one.
    """
    if not layout.pipeline_layout:
        return ""
    try:
        ends = end_sizes(layout.pipeline_layout, layout.pp, layout.vpp)
    except LayoutError:
        ends = None
    return f"ends{ends[0]}+{ends[1]}" if ends else "uneven"


_MODULE = f"(?:{'|'.join(RECOMPUTE_MODULES)})"
_MEGATRON = (
    _number("tp", "tp", always=True),
    _number("pp", "pp", always=True),
    _number("vpp", "vpp"),
    _number("cp", "cp"),
    _switch("a2a", "cp_comm_type", "a2a", "p2p"),
    _number("ep", "ep"),
    _number("etp", "etp"),
    _number("dp", "dp", always=True),
    _number("mbs", "micro_batch_size", always=True),
    _Word(
        "nosp",
        lambda layout: "nosp" if layout.tp > 1 and not layout.sequence_parallel else "",
        lambda text: {"sequence_parallel": False if text else None},
    ),
    _Word(rf"sel-{_MODULE}(?:\+{_MODULE})*|full(?:-(?:uniform|block)[0-9]{{1,9}})?", _write_recompute, _read_recompute),
    _Word(r"ends[0-9]{1,9}\+[0-9]{1,9}|uneven", _write_split, lambda text: {"pipeline_layout": text or None}),
    _Word(
        "offload[0-9]{1,3}",
        lambda layout: f"offload{round(share * 100)}" if (share := layout.optimizer_offload_fraction) else "",
        lambda text: {"optimizer_offload_fraction": int(text.removeprefix("offload") or 0) / 100},
    ),
)
_DEGREES = tuple(_number(key, key) for key in ("tp", "pp", "vpp", "cp", "ep", "etp"))
_ULYSSES = _number("ulysses", "ulysses")
_STEP = (
    _number("dp", "dp", always=True),
    _number("mbs", "micro_batch_size", always=True),
    _Word(
        "full|sel",
        lambda layout: {"none": "", "selective": "sel", "full": "full"}[layout.recompute.granularity],
        lambda text: {"recompute": {"": "none", "sel": "selective", "full": "full"}[text]},
    ),
)
_SWITCHES = (
    _switch("liger", "fused_linear_cross_entropy", True, False),
    _switch("expandable", "expandable_segments", True, False),
    _switch("grouped", "experts_impl", "grouped_mm", None),
    _switch("looped", "experts_impl", "eager", None),
)
_WORDS: dict[str, tuple[_Word, ...]] = {
    "mca": _MEGATRON,
    "megatron": _MEGATRON,
    "ddp": (_name("ddp"), *_DEGREES, *_STEP, *_SWITCHES),
    "deepspeed": (
        _number("zero", "zero_stage", always=True),
        *_DEGREES,
        _ULYSSES,
        *_STEP,
        _Word(
            r"offload(?:\+param)?",
            lambda layout: ("offload" + "+param" * layout.offload_param) * layout.offload_optimizer,
            lambda text: {"offload_optimizer": bool(text), "offload_param": text.endswith("+param")},
        ),
        *_SWITCHES,
    ),
    "fsdp2": (
        _name("fsdp2"),
        _switch("hybrid", "sharding", "hybrid", "full"),
        *_DEGREES,
        _ULYSSES,
        *_STEP,
        _switch("offload", "offload", True, False),
        _switch("nosync", "sync_each_batch", False, True),
        *_SWITCHES,
    ),
}
"""The words of each backend's ids, in order. Those of mca and megatron are the same."""


def id_of(layout: Layout) -> str:
    """Return the short, stable name of a layout; keys at their default are left out."""
    return "-".join(filter(None, [word.write(layout) for word in _WORDS[layout.backend]]))


def layout_of_id(plan_id: str, num_layers: int, mtp_layers: int = 0, *, option: str = "--plan") -> dict[str, Any]:
    """Return the keys that an id states, in their JSON form: `tp4-pp2-dp4-mbs1-full` -> {"tp": 4, "pp": 2, ...}.

    Words that are left out yield keys with their default values; ids do not tell mca from megatron. `num_layers` of the
    model and `mtp_layers` of the job determine an uneven split. Raises LayoutError.
    """
    for backend, words in _WORDS.items():
        pattern = "".join(f"(?:({word.pattern})-){'' if word.always else '?'}" for word in words)
        if match := re.fullmatch(pattern, f"{plan_id}-"):
            keys: dict[str, Any] = {} if words is _MEGATRON else {"backend": backend}
            for word, text in zip(words, match.groups(default=""), strict=True):
                keys |= word.read(text)
            if split := keys.get("pipeline_layout"):
                keys["pipeline_layout"] = _split_of(split, keys["pp"], keys["vpp"], num_layers, mtp_layers, option)
            return keys
    expected = "expected a rank such as 3, or an id such as tp4-pp1-dp8-mbs1 or zero3-dp8-mbs1 from `topoplan rank`"
    raise LayoutError(f"{plan_id!r} is not a plan", where=option, expected=expected)


def _split_of(word: str, pp: int, vpp: int, num_layers: int, mtp_layers: int, option: str) -> str:
    """Return the layout string that `ends8+6` stands for."""
    if word == "uneven":
        what = "an id with `uneven` does not say where its stages begin and end"
        raise LayoutError(what, where=option, remedy="choose the plan by its rank")
    first, last = (int(size) for size in word.removeprefix("ends").split("+"))
    if (text := spread_pipeline_layout(num_layers, pp, vpp, first, last, mtp_layers)) is None:
        what = f"{num_layers} layers cannot have {first} in the first stage and {last} in the last"
        raise LayoutError(what, where=option, remedy="choose a plan by its rank")
    return text
