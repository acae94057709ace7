"""What a ranking takes for granted that its spec does not say."""

from __future__ import annotations

from topoplan.specs.cluster import Cluster
from topoplan.units import format_bit_rate, format_byte_rate


def links_note(cluster: Cluster) -> str:
    """A sentence on the links that are those of the GPU's usual machine; empty where the spec names all that matter."""
    if not cluster.assumed:
        return ""
    nvlink, nics = cluster.nvlink_bytes_per_s, cluster.nics_per_node
    words = {
        "nvlink_bandwidth": f"NVLink of {format_byte_rate(2 * nvlink)} a GPU" if nvlink else "no NVLink",
        "ib_bandwidth": f"NICs of {format_bit_rate(cluster.nic_bytes_per_s)}",
        "nics_per_node": f"{nics} NIC{'s' if nics > 1 else ''} a node",
    }
    said = ", ".join(words[key] for key in cluster.assumed)
    none = "; where the GPUs talk over PCIe, set nvlink_bandwidth: none" if nvlink else ""
    return f"assumed, as in the usual machine of {cluster.gpu.name}: {said}{none}"
