"""Tensor-parallel collectives that overlap with GEMMs (tp_comm_overlap), in user buffers mapped between ranks."""

from __future__ import annotations

from dataclasses import dataclass

from topoplan.network.placement import Group
from topoplan.operators.machine import Machine, Product
from topoplan.operators.op import BF16, Collective, Seconds, Work
from topoplan.operators.shard import Shard

USER_BUFFER_SMS = 16
"""SMs that GEMMs leave to a collective that copy engines cannot run, because it reduces."""
SCATTER_SPLITS = 4
"""Pieces of a product; the sums of one piece are scattered while the next is computed."""
GATHER_BUFFERS, SCATTER_BUFFERS = 8, 4
"""User buffers of a rank, each as large as the hidden states of a micro-batch; with fp8 the gather buffers hold 8
bits."""


@dataclass(frozen=True, slots=True)
class UserBuffers(Work):
    """What collectives inside GEMMs add to the time of the GEMMs, for a column- and row-parallel pair of layers.

    The inputs of the column-parallel product, and in backward the output gradients of the row-parallel one, move around
    a ring one rank's part at a time while the previous part is multiplied. The row-parallel product is reduce-scattered
    in pieces. In the column-parallel layer's backward, its input is gathered while the input gradient is computed, and
    the input gradient is reduce-scattered while the weight gradient is computed. In 8 bits, what is gathered is cast
    before; sums are in bf16.
    """

    column: Product
    row: Product
    source = "TE 2.8 pytorch/module/base.py::initialize_ub, its default methods"

    def seconds(self, on: Machine) -> Seconds:
        """Return the seconds in addition to those of the products alone."""
        column, row, group = self.column, self.row, Group(on.shard.tp, 1)
        elements = on.shard.tokens * row.outputs
        whole = BF16 * elements
        one = on.call_s("all-gather", group, whole)
        gathered = on.call_s("all-gather", group, gathered_bytes(on.shard) * elements)
        inputs_gradient, weights_gradient = on.gradients_s(column)
        forward = self._ring_s(on, column.rows, column.outputs, column.inputs, gathered) + self._scattered_s(on, one)
        backward = self._ring_s(on, row.rows, row.inputs, row.outputs, gathered)
        backward += self._beside_s(on, inputs_gradient, gathered) + self._beside_s(on, weights_gradient, one)
        return Seconds(forward, backward, Collective("all-gather", group, whole, one, 2, 3))

    def _ring_s(self, on: Machine, rows: float, outputs: float, inputs: float, one: float) -> float:
        ranks = on.shard.tp
        part = on.gemm_s(rows / ranks, outputs, inputs)
        left = (ranks - 1) * max(0.0, one / (ranks - 1) - part)
        slowed = on.profile.overlap_interference * (one - left)
        return ranks * part + left + slowed - on.gemm_s(rows, outputs, inputs)

    def _scattered_s(self, on: Machine, one: float) -> float:
        rows, outputs, inputs = self.row.rows, self.row.outputs, self.row.inputs
        part = on.gemm_s(rows / SCATTER_SPLITS, outputs, inputs) / _left_to_gemms(on)
        sent = one / SCATTER_SPLITS
        return part + (SCATTER_SPLITS - 1) * max(part, sent) + sent - on.gemm_s(rows, outputs, inputs)

    def _beside_s(self, on: Machine, product_s: float, one: float) -> float:
        return max(one, product_s / _left_to_gemms(on)) - product_s


def _left_to_gemms(on: Machine) -> float:
    return 1.0 - USER_BUFFER_SMS / on.gpu.sm_count


def gathered_bytes(shard: Shard) -> int:
    """Return the bytes of an element that user buffers gather."""
    return 1 if shard.is_low_precision else BF16


def user_buffer_bytes(shard: Shard, hidden: int) -> float:
    """Return the device memory of user buffers, which torch does not see (TE `userbuffers-host.cpp`, cuMemCreate)."""
    if not shard.user_buffers:
        return 0.0
    return shard.tokens * hidden * float(GATHER_BUFFERS * gathered_bytes(shard) + SCATTER_BUFFERS * BF16)
