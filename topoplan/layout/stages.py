"""Which layers a pipeline stage holds.

Source: megatron-core 0.16 `core/transformer/pipeline_parallel_layer_layout.py` (the layout string),
`core/transformer/transformer_block.py::get_num_layers_to_build` (the even split) and
`core/transformer/multi_token_prediction.py::get_mtp_num_layers_to_build` (multi-token-prediction layers).
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from topoplan.errors import LayoutError
from topoplan.specs.layout_parts import StageSizes
from topoplan.units import shown


class Chunk(NamedTuple):
    """The part of a model that one virtual stage holds."""

    first_layer: int
    num_layers: int
    embedding: bool
    """Whether it has the model's input. A chunk with `mtp_layers` has an embedding of its own as well."""
    final_norm: bool
    head: bool
    """Whether it has the output layer and the loss."""
    mtp_layers: int = 0
    """Multi-token-prediction layers, after `layers`."""

    @property
    def layers(self) -> range:
        """Indexes of the chunk's layers."""
        return range(self.first_layer, self.first_layer + self.num_layers)


Stages = tuple[tuple[Chunk, ...], ...]
"""Chunks indexed by pipeline rank, then by virtual stage."""

# Megatron's own patterns in `parse_str_to_list`, in its order: groups first, then single characters.
_REPEAT = (re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))
_LONGEST_TEXT = 4096
_LONGEST_LAYOUT = 100_000
_MOST_DIGITS = 6


def parse_pipeline_layout(text: str) -> list[str]:
    """Expand Megatron's layout string to one string of E, t, m and L per virtual stage.

    `"Et*3|(tt|)*2t*2L"` -> `["Ettt", "tt", "tt", "ttL"]`. Commas only aid readability; spaces are refused, as in
    Megatron. Raises LayoutError for other characters.
    """
    if len(text) > _LONGEST_TEXT:
        raise LayoutError(f"pipeline_layout has {len(text)} characters", expected=f"expected at most {_LONGEST_TEXT}")
    expanded = text.replace(",", "")
    for pattern in _REPEAT:
        length = len(expanded)
        for body, times in pattern.findall(expanded):
            length += len(body) * int(times) if len(times) <= _MOST_DIGITS else _LONGEST_LAYOUT
        if length > _LONGEST_LAYOUT:
            raise LayoutError(
                f"pipeline_layout {shown(text)} stands for more than {_LONGEST_LAYOUT} characters",
                expected="expected one character a layer",
            )
        expanded = pattern.sub(lambda match: match.group(1) * int(match.group(2)), expanded)
    if wrong := set(expanded) - set("EtmL|"):
        raise LayoutError(
            f"pipeline_layout {shown(text)} has {', '.join(repr(c) for c in sorted(wrong)[:5])}",
            expected="expected E (embedding), t (layer), m (token prediction), L (loss), | between stages, and x*n",
        )
    return expanded.split("|")


def vpp_of(pipeline_layout: str, pp: int) -> int:
    """Return the virtual stages per rank of a layout string. Raises LayoutError if its stages are not divisible by pp.

    Source: MCA `training_args.py::DistributingParallelArguments.__post_init__`.
    """
    stages = len(parse_pipeline_layout(pipeline_layout))
    if stages % pp:
        raise LayoutError(f"pipeline_layout has {stages} stages % pp {pp} = {stages % pp}")
    return stages // pp


@lru_cache(maxsize=4096)
def split_stages(num_layers: int, pp: int, vpp: int, pipeline_layout: str | None, mtp_layers: int = 0) -> Stages:
    """Split a model into pp * vpp virtual stages; virtual stage i is on pipeline rank i % pp.

    Multi-token-prediction layers are in the last virtual stage, or where the layout string has its m. With them the
    final norm is with the last layer, otherwise with the loss (`TransformerBlock.has_final_layernorm_in_this_stage`).

    Raises LayoutError if the layers do not divide or the layout string does not hold the model.
    """
    count = pp * vpp
    if pipeline_layout is None:
        if num_layers % count:
            raise LayoutError(f"{num_layers} layers % (pp {pp} * vpp {vpp}) = {num_layers % count}")
        sizes = [num_layers // count] * count
        mtp = [0] * (count - 1) + [mtp_layers]
    else:
        parts = parse_pipeline_layout(pipeline_layout)
        if len(parts) != count:
            raise LayoutError(f"pipeline_layout has {len(parts)} stages, pp {pp} * vpp {vpp} = {count}")
        sizes, mtp = [part.count("t") for part in parts], [part.count("m") for part in parts]
        if sum(sizes) != num_layers:
            raise LayoutError(f"pipeline_layout holds {sum(sizes)} layers, the model has {num_layers}")
        _check_ends(pipeline_layout, "".join(parts))
        _check_mtp(pipeline_layout, parts, pp, mtp_layers)
    last = max(index for index, size in enumerate(sizes) if size) if mtp_layers else count - 1
    chunks, first = [], 0
    for index, size in enumerate(sizes):
        chunks.append(
            Chunk(
                first,
                size,
                embedding=index == 0,
                final_norm=index == last,
                head=index == count - 1,
                mtp_layers=mtp[index],
            )
        )
        first += size
    return tuple(tuple(chunks[virtual * pp + rank] for virtual in range(vpp)) for rank in range(pp))


def _check_ends(pipeline_layout: str, whole: str) -> None:
    if whole.count("E") != 1 or not whole.startswith("E") or whole.count("L") != 1 or not whole.endswith("L"):
        raise LayoutError(f"pipeline_layout {shown(pipeline_layout)} must start with its one E and end with its one L")


def _check_mtp(pipeline_layout: str, parts: list[str], pp: int, mtp_layers: int) -> None:
    """Raise LayoutError for an m that `validate_layer_layout` refuses."""
    whole = "".join(parts)
    if whole.count("m") != mtp_layers:
        raise LayoutError(
            f"pipeline_layout {shown(pipeline_layout)} has {whole.count('m')} m, mtp_num_layers is {mtp_layers}",
            expected="expected one m for each multi-token-prediction layer",
        )
    if "t" in whole.partition("m")[2]:
        raise LayoutError(f"pipeline_layout {shown(pipeline_layout)} has a t behind its m")
    if sum("m" in part for part in parts) > 1:
        raise LayoutError(f"pipeline_layout {shown(pipeline_layout)} has m in more than one stage")
    if any("m" in part for part in parts[:-pp]):
        raise LayoutError(
            f"pipeline_layout {shown(pipeline_layout)} has m before the last virtual stage of its rank",
            expected=f"expected m in one of the last {pp} stages",
        )


@lru_cache(maxsize=1 << 14)
def spread_pipeline_layout(
    num_layers: int, pp: int, vpp: int, first: int, last: int, mtp_layers: int = 0
) -> str | None:
    """Return a layout string with `first` and `last` layers in the end stages, the others spread as evenly as possible.

    The end stages are the first and the last virtual stage. The last one also has the multi-token-prediction layers,
    and may have no layer but the end of the model. None if another stage would be left without a layer, if the layers
    do not add up, and for a single stage, which needs no string.
    """
    middle, left = pp * vpp - 2, num_layers - first - last
    if middle < 0 or first < 1 or last < 0 or left < middle or (middle == 0 and left):
        return None
    size, longer = divmod(left, middle) if middle else (0, 0)
    # The longer stages are in the middle, away from the memory of the embedding and of the loss.
    start = (middle - longer) // 2
    return _layout_string(
        [first, *(size + (start <= index < start + longer) for index in range(middle)), last], mtp_layers
    )


def _layout_string(sizes: list[int], mtp_layers: int) -> str:
    """Return the layout string of virtual stages with these numbers of layers."""
    parts = ["t" * n if n < 2 else f"t*{n}" for n in sizes]
    text = ""
    for part, run in groupby(parts[1:-1]):
        times = len(list(run))
        text += f"({part}|)*{times}" if times > 2 and part else f"{part}|" * times
    return f"E{parts[0]}|{text}{parts[-1]}{'m' * mtp_layers}L"


def sized_pipeline_layout(num_layers: int, pp: int, vpp: int, sizes: StageSizes, mtp_layers: int = 0) -> str | None:
    """Return the layout string that Megatron's sizes of the first and last stage amount to; None for the even split.

    Raises LayoutError for sizes that contradict each other or do not divide. Source: `get_num_layers_to_build` and
    `core/transformer/transformer_config.py::__post_init__`.
    """
    first, last = sizes.decoder_first_pipeline_num_layers, sizes.decoder_last_pipeline_num_layers
    counted = sizes.account_for_embedding_in_pipeline_split, sizes.account_for_loss_in_pipeline_split
    if first is last is None:
        total, words = num_layers + sum(counted), f"({num_layers} layers + {sum(counted)})"
        if total % (pp * vpp):
            raise LayoutError(f"{words} % (pp {pp} * vpp {vpp}) = {total % (pp * vpp)}")
        ranks = [total // pp] * pp
    elif any(counted):
        raise LayoutError("sizes of first or last stage beside an embedding or a loss that counts as a layer")
    else:
        ranks = _sized_ranks(num_layers, pp, first, last)
    if rest := [layers for layers in ranks if layers % vpp]:
        raise LayoutError(f"{rest[0]} layers of a pipeline rank % vpp {vpp} = {rest[0] % vpp}")
    chunks = [layers // vpp for layers in ranks] * vpp
    chunks[0] -= counted[0]
    chunks[-1] -= counted[1]
    return None if len(set(chunks)) == 1 else _layout_string(chunks, mtp_layers)


def _sized_ranks(num_layers: int, pp: int, first: int | None, last: int | None) -> list[int]:
    """Return the layers of each pipeline rank, given those of the first or the last. Raises LayoutError."""
    ends = [size for size in (first, last) if size is not None]
    left, middle = num_layers - sum(ends), pp - len(ends)
    words = f"{' - '.join(map(str, (num_layers, *ends)))} = {left} layers"
    if pp == 1 or left < middle or (left and not middle):
        raise LayoutError(f"{words} for {max(0, middle)} further stages of pp {pp}")
    if middle and left % middle:
        raise LayoutError(f"({words}) % {middle} further stages = {left % middle}")
    each = left // middle if middle else 0
    return [each if first is None else first, *[each] * (pp - 2), each if last is None else last]


def balanced_pipeline_layout(num_layers: int, pp: int, vpp: int, mtp_layers: int = 0) -> str | None:
    """Return a layout string for layers that do not divide evenly, or None.

    Embedding, loss and multi-token-prediction layers each count as one layer. None if a stage would be left without a
    layer, and for a single stage.
    """
    count = pp * vpp
    size, longer = divmod(num_layers + 2 + mtp_layers, count)
    # If one more stage has to be lengthened than there are in the middle, it is the first one: the last has the logits.
    first, last = size - 1 + (longer == count - 1), size - 1 - mtp_layers
    return spread_pipeline_layout(num_layers, pp, vpp, first, last, mtp_layers)


@lru_cache(maxsize=1 << 14)
def end_sizes(pipeline_layout: str, pp: int, vpp: int) -> tuple[int, int] | None:
    """Return (first, last) of a string written by `spread_pipeline_layout`, or None for any other string.

    Raises LayoutError for characters that do not belong in a layout string.
    """
    parts = parse_pipeline_layout(pipeline_layout)
    sizes = [part.count("t") for part in parts]
    mtp_layers = parts[-1].count("m")
    if spread_pipeline_layout(sum(sizes), pp, vpp, sizes[0], sizes[-1], mtp_layers) == pipeline_layout:
        return sizes[0], sizes[-1]
    return None
