"""Dispatch and combine of experts beside the work of another micro-batch (overlap_moe_expert_parallel_comm).

Megatron-core runs the forward of one micro-batch together with the backward of another one, layer by layer
(`core/models/common/model_chunk_schedule_plan.py::TransformerLayerSchedulePlan.run`):

    communication   combine, backward  | dispatch, forward and backward | combine, forward
    computation     attention, forward | experts, backward and forward  | attention, backward
"""

from __future__ import annotations

from collections.abc import Sequence

from topoplan.operators.machine import Kernel
from topoplan.operators.op import Work

_EXPERTS = "experts."
_BETWEEN = ("permute, sort, unpermute", "residual additions")
"""Operators in part on the stream of the communication; they hide nothing."""


class Hidden(Work):
    """Communication that runs beside computation."""

    __slots__ = ()
    source = "model_chunk_schedule_plan.py, TransformerLayerSchedulePlan.run; the profile's expert_overlap"


def hidden_exchange(kernels: Sequence[Kernel], share: float, expert_overlap: float) -> Kernel | None:
    """Return what the other pass hides of a layer's dispatch and combine, as negative seconds; None without any.

    `share` is the `combined_share` of the shard, `expert_overlap` the profile's: the two streams wait for each other,
    so that not all of what fits is hidden. The layers of the two passes are taken to be of one kind.
    """
    exchanges = [one for one in kernels if one.part == "ep_comm"]
    if not exchanges:
        return None
    ahead_s, back_s = (sum(one.forward_s for one in exchanges) / 2, sum(one.backward_s for one in exchanges) / 2)
    experts = [one for one in kernels if one.name.startswith(_EXPERTS)]
    before = [one for one in kernels if one not in exchanges and one not in experts and one.name not in _BETWEEN]
    dispatched_s = min(ahead_s + back_s, sum(one.forward_s + one.backward_s for one in experts))
    fits_ahead_s = dispatched_s / 2 + min(ahead_s, sum(one.backward_s for one in before))
    fits_back_s = dispatched_s / 2 + min(back_s, sum(one.forward_s for one in before))
    forward_s = share * min(fits_ahead_s, 2 * expert_overlap * ahead_s)
    backward_s = share * min(fits_back_s, 2 * expert_overlap * back_s)
    return Kernel("hidden by the other pass", "ep_comm", -forward_s, -backward_s, work=Hidden())
