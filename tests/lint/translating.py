"""Helper: LLaMA-Factory keys of the Megatron path, translated."""

from typing import Any

from tests.reading.setups import all_of, mca
from topoplan.lint.translate import Translation, translate
from topoplan.specs.cluster import Cluster


def translated(cluster: Cluster, **keys: Any) -> Translation:
    """Return the translation of a train.yaml with these keys on a cluster."""
    one = mca(**keys)
    return translate(one, all_of(one), cluster)
