"""Messages about a global batch that does not divide."""

from __future__ import annotations

from topoplan.units import multiples_around


def undivided(batch: int, micro_batch: int, dp: int) -> str | None:
    """Return the failed equation of a batch that ranks cannot share evenly, or None."""
    rest = batch % (micro_batch * dp)
    return f"global_batch_size {batch} % (micro_batch_size {micro_batch} * dp {dp}) = {rest}" if rest else None


def batch_remedy(batch: int, micro_batch: int, dp: int) -> str:
    """Return the nearest batches that divide, and the largest smaller micro-batch with which the given batch does."""
    smaller = next((size for size in range(micro_batch - 1, 0, -1) if batch % (size * dp) == 0), None)
    micro = f", or micro_batch_size to {smaller}" if smaller else ""
    return f"set global_batch_size to {multiples_around(batch, micro_batch * dp)}{micro}"
