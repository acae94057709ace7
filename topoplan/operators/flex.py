"""What bringing tokens to their experts costs with Megatron's flex dispatcher (DeepEP, HybridEP).

The alltoall dispatcher sends one copy of a token for every expert that the token chose. Flex sends one copy to each
NVLink domain that has any of these experts, to the rank at the same place there, which forwards it over NVLink, one
copy to each rank that has any. Both paths are pipelined in one kernel, so the slower one counts (arXiv 2412.19437,
section 3.2.2; DeepEP, `csrc/kernels/internode.cu`). Combine takes the same way back, with partial sums made on the way;
backward mirrors both.

Rates are those of any all-to-all on the same links, in bf16. DeepEP publishes about the same (`docs/legacy.md`, H800):
with four and eight nodes 43 to 45 of 50 GB/s on the wire, once the share that stays within the node is subtracted,
which its 50 to 58 GB/s include (`tests/legacy/test_internode.py`). Over NVLink it publishes 134 to 138 of 200 GB/s,
where NCCL reaches 160, so on cards whose NVLink is the slower path, such as H800 with two nodes, flex takes up to a
quarter longer than predicted here.
"""

from __future__ import annotations

from functools import lru_cache
from math import comb

from topoplan.network.collectives import all_to_all_s
from topoplan.network.placement import Group
from topoplan.network.topology import local_ranks
from topoplan.operators.shard import Shard
from topoplan.specs.case import Case
from topoplan.specs.model import Moe


@lru_cache(maxsize=1 << 12)
def parts_reached(moe: Moe, parts: int) -> float:
    """Return the expected number of parts (ranks or domains) that have at least one expert of a token.

    The experts are divided into `parts` equal consecutive runs. Every choice of experts is equally likely within the
    chosen groups, and so is every choice of groups: a hypergeometric distribution.
    """
    size = moe.experts // parts
    return sum(1.0 - _missed(moe, _overlaps(moe, first, first + size)) for first in range(0, moe.experts, size))


def _overlaps(moe: Moe, first: int, end: int) -> tuple[int, ...]:
    """Return how many of the experts in [first, end) are in each of the groups that the range touches."""
    size = moe.experts // moe.groups
    groups = range(first // size, (end - 1) // size + 1)
    return tuple(min(end, (group + 1) * size) - max(first, group * size) for group in groups)


@lru_cache(maxsize=1 << 12)
def _missed(moe: Moe, overlaps: tuple[int, ...]) -> float:
    """Return the probability that a token chooses none of some experts; `overlaps` has their number in each group."""
    candidates = moe.groups_per_token * (moe.experts // moe.groups)
    # Choices among the touched groups: (groups chosen, experts among the candidates that must be missed) -> ways.
    ways = {(0, 0): 1}
    for overlap in overlaps:
        grown = dict(ways)
        for (chosen, blocked), number in ways.items():
            key = (chosen + 1, blocked + overlap)
            grown[key] = grown.get(key, 0) + number
        ways = grown
    missed = sum(
        number
        * comb(moe.groups - len(overlaps), moe.groups_per_token - chosen)
        * comb(candidates - blocked, moe.experts_per_token)
        for (chosen, blocked), number in ways.items()
        if chosen <= moe.groups_per_token
    )
    return missed / (comb(moe.groups, moe.groups_per_token) * comb(candidates, moe.experts_per_token))


def flex_copies(moe: Moe, shard: Shard) -> float:
    """Return the tokens that a rank receives with flex, and sends: one copy per rank that has experts of the token.

    With expert tensor parallelism, every rank of an expert's group gets a copy.
    """
    tokens = shard.routed_tokens(moe) / moe.experts_per_token
    return tokens * parts_reached(moe, shard.ep)


def flex_s(case: Case, moe: Moe, hidden_bytes: int, shard: Shard) -> float:
    """Return the seconds of one dispatch or one combine, of tokens of `hidden_bytes`."""
    cluster, profile = case.cluster, case.profile
    ranks = shard.etp * shard.ep
    domains = max(1, ranks // local_ranks(cluster))
    members = ranks // domains
    tokens = shard.routed_tokens(moe) / moe.experts_per_token / shard.etp
    inside = all_to_all_s(Group(members, 1), hidden_bytes * flex_copies(moe, shard), cluster, profile)
    # Ranks at the same place in their domains exchange tokens; tokens for the own domain stay.
    across = all_to_all_s(
        Group(domains, members), hidden_bytes * tokens * parts_reached(moe, domains), cluster, profile
    )
    return max(inside, across)
