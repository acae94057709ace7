"""What a ranking assumes because its spec does not say."""

from __future__ import annotations

from topoplan.specs.cluster import Cluster
from topoplan.units import format_bit_rate, format_byte_rate


def machine_note(cluster: Cluster) -> str:
    """Return a sentence on values taken from the GPU's usual machine; empty if the spec states all that matter."""
    if not cluster.assumed:
        return ""
    nvlink, nics = cluster.nvlink_bytes_per_s, cluster.nics_per_node
    is_usual = cluster.pcie_bytes_per_s == cluster.gpu.pcie_bytes_per_s
    pcie = f" (PCIe of {format_byte_rate(cluster.pcie_bytes_per_s)} each way)" if is_usual else ""
    words = {
        "gpus_per_node": f"{cluster.gpus_per_node} GPUs per node",
        "nvlink_bandwidth": f"NVLink of {format_byte_rate(2 * nvlink)} per GPU" if nvlink else f"no NVLink{pcie}",
        "ib_bandwidth": f"NICs of {format_bit_rate(cluster.nic_bytes_per_s)}",
        "nics_per_node": f"{nics} NIC{'s' if nics > 1 else ''} per node",
    }
    said = ", ".join(words[key] for key in cluster.assumed if key != "gpu")
    if not said:
        return f"assumed: the GPU is {cluster.gpu.name}"
    has_nvlink = nvlink and "nvlink_bandwidth" in cluster.assumed
    none = "; if the GPUs communicate over PCIe, set nvlink_bandwidth: none" if has_nvlink else ""
    return f"assumed, as usual for machines with {cluster.gpu.name}: {said}{none}"
