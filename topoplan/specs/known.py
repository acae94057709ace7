"""The catalog's GPUs and models, as the objects that a spec holds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from topoplan import catalog
from topoplan.specs.cluster import Cluster
from topoplan.specs.config_json import model_from_config
from topoplan.specs.gpu import Gpu
from topoplan.specs.model import Model

_MIB = 2**20
_GIGA = 1e9
_TERA = 1e12


def _flops(row: Mapping[str, Any], key: str) -> float | None:
    return row[key] * _TERA if row[key] is not None else None


@lru_cache(maxsize=64)
def gpu(name: str) -> Gpu:
    """Return the GPU of a full or short catalog name. Raises SpecError, with the closest known name."""
    key, row = catalog.gpu_row(catalog.gpu_name(name))
    return Gpu(
        name=key,
        architecture=row["architecture"],
        memory_bytes=row["memory_mib"] * _MIB,
        memory_bytes_per_s=row["memory_gb_per_s"] * _GIGA,
        bf16_flops=row["bf16_tflops"] * _TERA,
        fp16_flops=row["fp16_tflops"] * _TERA,
        fp8_flops=_flops(row, "fp8_tflops"),
        fp4_flops=_flops(row, "fp4_tflops"),
        sm_count=row["sm_count"],
        nvlink_bytes_per_s=row["nvlink_gb_per_s_both_ways"] / 2 * _GIGA,
        nvlink_domain_gpus=row["nvlink_domain_gpus"],
        pcie_bytes_per_s=row["host_link_gb_per_s_each_way"] * _GIGA,
        gpus_per_node=row["gpus_per_node"],
        nics_per_node=row["nics_per_node"],
        nic_bytes_per_s=row["nic_gbit_per_s"] / 8 * _GIGA,
        source=row["source"],
    )


def machines(card: Gpu, nodes: int, gpus_per_node: int, name: str = "") -> Cluster:
    """Return a cluster of machines with the links of the card's usual machine, each a single NVLink domain."""
    return Cluster(
        name=name,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        gpu=card,
        nvlink_bytes_per_s=card.nvlink_bytes_per_s,
        nvlink_domain_gpus=gpus_per_node,
        pcie_bytes_per_s=card.pcie_bytes_per_s,
        nics_per_node=card.nics_per_node,
        nic_bytes_per_s=card.nic_bytes_per_s,
    )


def gpu_of_driver(name: str, memory_bytes: int | None) -> Gpu | None:
    """Return the GPU whose driver name is `name` (`NVIDIA H100 80GB HBM3`), or None.

    Cards with the same name come with different amounts of memory: if `memory_bytes` differs by more than a tenth, it
    is another card.
    """
    short = re.sub(r"^(?:NVIDIA |Tesla )+", "", name.strip())
    for key, row in catalog.gpu_table().items():
        if short in row["driver_names"]:
            usual = row["memory_mib"] * _MIB
            if memory_bytes is None or abs(memory_bytes - usual) <= usual / 10:
                return gpu(key)
    return None


@lru_cache(maxsize=256)
def _model(published_name: str) -> Model:
    config = catalog.model_config(published_name)
    return model_from_config(config, name=published_name, where=f"catalog: {published_name}")


def model(name: str) -> Model:
    """Return the model of a Hugging Face id, in any case, with or without organization. Raises ModelError."""
    return _model(catalog.published_name(name))
