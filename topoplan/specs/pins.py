"""Check the layout keys that a spec pins against its cluster and its batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from topoplan.errors import LayoutError
from topoplan.specs.cluster import Cluster
from topoplan.specs.job import Job
from topoplan.specs.layout_parts import completed_recompute
from topoplan.units import multiples_around

_OF_BATCH = ("dp", "micro_batch_size", "gradient_accumulation_steps")


def check_pin(pin: Mapping[str, Any], cluster: Cluster, job: Job, *, where: Callable[[str], str]) -> None:
    """Raise LayoutError, with the failed equation, for a pin that no layout of this cluster and batch can meet."""

    def fail(key: str, what: str, remedy: str = "") -> NoReturn:
        raise LayoutError(f"pin: {what}", where=where(key), remedy=remedy)

    def product(keys: tuple[str, ...]) -> tuple[int, str, str]:
        """Return value, equation and last key of the product of the pinned keys."""
        pinned = [key for key in keys if key in pin]
        equation = " * ".join(f"{key} {pin[key]}" for key in pinned)
        return math.prod(pin[key] for key in pinned), equation, pinned[-1] if pinned else ""

    def must_divide(keys: tuple[str, ...], total: int, total_words: str, *, is_whole: bool) -> None:
        value, equation, key = product(keys)
        if not key:
            return
        if is_whole and all(key in pin for key in keys) and value != total:
            fail(key, f"{equation} = {value} != {total_words}", f"change one of them, or leave {keys[-1]} out")
        if total % value:
            rest = f"= {total % value}" if " * " not in equation else f"({value}) = {total % value}"
            other = f", or {total_words.split()[0]} {multiples_around(total, value)}" if keys is _OF_BATCH else ""
            fail(key, f"{total_words} % ({equation}) {rest}", f"expected a divisor of {total}{other}")

    domain = max(cluster.nvlink_domain_gpus, cluster.gpus_per_node)
    if pin.get("tp", 1) > domain:
        kind = "the NVLink domain" if cluster.nvlink_domain_gpus >= cluster.gpus_per_node else "one node"
        fail("tp", f"tp {pin['tp']} > {domain} GPUs of {kind}", f"expected tp of at most {domain}")
    gpus = cluster.world_size
    gpus_words = f"{gpus} GPUs ({cluster.nodes} nodes * {cluster.gpus_per_node})"
    must_divide(("tp", "pp", "cp", "dp"), gpus, gpus_words, is_whole=True)
    must_divide(("etp", "ep", "pp"), gpus, gpus_words, is_whole=False)
    batch = job.global_batch_size
    must_divide(_OF_BATCH, batch, f"global_batch_size {batch}", is_whole=True)
    if pin.get("vpp", 1) > 1 and pin.get("pp") == 1:
        fail("vpp", f"vpp {pin['vpp']} > 1 with pp 1", "a virtual pipeline needs pp of at least 2")
    if pin.get("sequence_parallel") and pin.get("tp") == 1:
        fail("sequence_parallel", "sequence_parallel with tp 1", "it splits along the TP group: needs tp of at least 2")
    if pin.get("overlap_param_gather") and pin.get("distributed_optimizer") is False:
        fail("overlap_param_gather", "overlap_param_gather without distributed_optimizer", "leave one of them out")
    try:
        completed_recompute(pin.get("recompute", {}), "")
    except LayoutError as error:
        fail("recompute", f"{error.what}; {error.expected}")
