"""Where the time of a step of a layout that splits data only goes, as a tree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from topoplan.engines.account import BANDS, Flow, TimeAccount, by_part, end_term, operator_term, sent_in_layers
from topoplan.engines.data_parallel.step import (
    LayerPass,
    ShardedTerms,
    sharded_shard,
    sharded_terms,
    sharded_time,
)
from topoplan.engines.prediction import Time
from topoplan.layout.layout import Layout
from topoplan.operators.machine import Kernel
from topoplan.operators.times import eager_kernels
from topoplan.operators.vision import vision_s
from topoplan.specs.case import Case
from topoplan.specs.model import layer_kind
from topoplan.terms import Term, source_of, sum_of

_WHAT = {
    "gemm": "linear layers",
    "attention": "attention kernels",
    "elementwise": "norms, activations, casts: bound by memory",
    "tp_comm": "",
    "cp_comm": "all-to-all of Ulysses, or ring attention",
    "ep_comm": "",
    "recompute": "forward that checkpointing repeats",
}
_ZERO = "ZeRO, arXiv 1910.02054, section 7"


def time_account(case: Case, layout: Layout, time: Time) -> TimeAccount:
    """Return the terms of `time`."""
    terms = sharded_terms(case, layout)
    kinds = _kinds(terms.passes.layers)
    shard = sharded_shard(case, layout)
    operators = [eager_kernels(case, one.layer, one.use, shard) for one in kinds]
    layers = tuple(_layer_term(one, found, terms.count) for one, found in zip(kinds, operators, strict=True))
    parts = [
        *by_part(layers, _WHAT, source_of(sharded_terms, "torch/utils/checkpoint.py")),
        _ends(terms),
        *_around(terms),
    ]
    return TimeAccount(
        step=sum_of("step", parts, source_of(sharded_time, BANDS), "s"),
        microbatches=terms.count,
        slowest_stage=0,
        stages=(),
        layers=layers,
        sent=tuple(_sent(case, terms, kinds, operators)),
        copied_s=terms.count * terms.copied_s + terms.copied_after_s,
    )


def _kinds(passes: tuple[LayerPass, ...]) -> list[LayerPass]:
    """Merge consecutive passes that differ only in their count."""
    kinds: list[LayerPass] = []
    for one in passes:
        if kinds and replace(kinds[-1], count=one.count) == one:
            kinds[-1] = replace(one, count=kinds[-1].count + one.count)
        else:
            kinds.append(one)
    return kinds


def _layer_term(one: LayerPass, operators: tuple[Kernel, ...], microbatches: int) -> Term:
    times = microbatches * one.count
    back = one.has_backward
    rows = [operator_term(each, times, times, one.repeated * each.forward_s, has_backward=back) for each in operators]
    facts = {"count": one.count, "recomputed": one.count * one.repeated}
    name = layer_kind(one.layer) + ("" if one.has_backward else ", no backward")
    return sum_of(name, rows, source_of(eager_kernels), "s", times=times, facts=facts)


def _ends(terms: ShardedTerms) -> Term:
    """Return what runs before and after the layers."""
    tower, all_ends = terms.passes.vision_s, terms.passes.ends_s
    rest = all_ends[0] - tower[0], all_ends[1] - tower[1]
    source = source_of(sharded_terms, "transformers loss/loss_utils.py")
    rows = [
        end_term(name, ahead, back, terms.count, place)
        for name, (ahead, back), place in (
            ("vision tower", tower, source_of(vision_s)),
            ("embedding, output layer, loss", rest, source),
        )
    ]
    return sum_of("ends", rows, source, "s", what="embedding, output layer, loss")


def _around(terms: ShardedTerms) -> Iterator[Term]:
    """Yield the parts of the step besides the work of layers and ends."""
    count = terms.count
    for name, what, origin, rows in (
        (
            "host launches",
            "the GPU waits for the host's launches",
            "eager_launch_s and zero3_hook_s of the profile",
            [("host launches", count * terms.waited_s)],
        ),
        ("dp_comm", "weights and gradients, what is not hidden", _ZERO, _exposed(terms)),
        (
            "offload",
            "copies over PCIe, what is not hidden",
            "bytes over PCIe's rate",
            [
                ("copies over PCIe, not hidden", count * terms.exposed_copied_s),
                ("weights back over PCIe", terms.copied_after_s),
            ],
        ),
        (
            "optimizer",
            "Adam, host work",
            "bytes over the memory's rate",
            [
                ("Adam on the host" if terms.adam_on_host else "Adam", terms.adam_s),
                ("host work of a step", terms.overhead_s),
            ],
        ),
        (
            "reference",
            "the reference model, forward only",
            "trl trainer/dpo_trainer.py",
            [("reference", terms.reference_s)],
        ),
    ):
        source = source_of(sharded_terms, origin)
        children = [Term(row, seconds, "s", source) for row, seconds in rows]
        yield sum_of(name, children, source, "s", what=what)


def _exposed(terms: ShardedTerms) -> list[tuple[str, float]]:
    communication, count = terms.communication, terms.count

    def named(when: str) -> str:
        # "weights for backward" and "gradients to their shards": the first word says what is sent.
        return " and ".join(dict.fromkeys(one.name.split()[0] for one in communication.sendings if one.when == when))

    return [
        (f"{named('forward')} in forward, not hidden", count * terms.exposed_forward_s),
        (f"{named('backward')} in backward, not hidden", count * terms.exposed_backward_s),
        (f"{named('last')} in the last backward, not hidden", terms.exposed_last_s),
        ("copies into and out of buffers", count * communication.copies_s),
        ("weights after the step", communication.seconds("after")),
    ]


def _sent(
    case: Case, terms: ShardedTerms, kinds: list[LayerPass], operators: list[tuple[Kernel, ...]]
) -> Iterator[Flow]:
    """Yield weights and gradients sent among the ranks that share them, and what layers send.

    Layers send by Ulysses or ring attention.
    """
    gpus = case.cluster.gpus_per_node
    for one in terms.communication.sendings:
        times = terms.count if one.when in ("forward", "backward") else 1
        yield Flow(name=one.name, moment=one.when, times=times, number=one.calls, call=one.call, gpus_per_node=gpus)
    runs = (
        (operator, kind.count * (1 + kind.repeated), kind.count * kind.has_backward)
        for kind, found in zip(kinds, operators, strict=True)
        for operator in found
    )
    yield from sent_in_layers(runs, terms.count, gpus)
