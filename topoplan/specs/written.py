"""Write cluster and job as the keys of a spec file, without those whose value a reader would fill in anyway."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields, replace
from typing import Any

from topoplan import catalog
from topoplan.specs import known
from topoplan.specs.build_cluster import usual_sockets
from topoplan.specs.build_job import sequences_of
from topoplan.specs.cluster import USUAL_STORAGE_BYTES_PER_S, Cluster, Fabric, Host
from topoplan.specs.gpu import Gpu
from topoplan.specs.job import ADAPTERS, USUAL_LORA_DROPOUT, Job, usual_learning_rate
from topoplan.specs.kinds import NONE
from topoplan.specs.model import Model
from topoplan.units import format_bit_rate, format_byte_rate, format_seconds

ALWAYS = ("stage", "finetuning", "seq_len", "global_batch_size")
"""Keys of a job that are always written."""

_SAID = ("gpu", "gpus_per_node")
"""Optional keys of a cluster that are always written."""
_TERA = 1e12


def job_keys(job: Job) -> dict[str, Any]:
    """Return the keys of the job. Lengths read from the data set, and their number, are left out, to be read again."""
    written = {name: getattr(job, name) for name in ALWAYS}
    implied = {
        "packing": job.stage == "pt",
        "learning_rate": usual_learning_rate(job.finetuning, job.stage),
        "lora_dropout": USUAL_LORA_DROPOUT if job.finetuning in ADAPTERS else None,
        "lengths": None,
    }
    if job.lengths is not None and job.lengths.rule:
        implied["samples"] = sequences_of(job, job.lengths)
    for own in fields(Job):
        value = getattr(job, own.name)
        if own.name not in written and value != implied.get(own.name, _default(own)) and own.name != "lengths":
            written[own.name] = list(value) if isinstance(value, tuple) else value
    if job.lengths is not None and not job.lengths.rule:
        written["lengths"] = [list(pair) for pair in job.lengths.counts]
    return written


def model_key(model: Model) -> str:
    """Return the name of a model in a spec: its id, or the directory that it was read from."""
    return model.config_path or model.name


def cluster_keys(cluster: Cluster) -> dict[str, Any]:
    """Return the keys of the cluster, except those taken from the GPU's usual machine (see `assumed_keys`)."""
    whole = _cluster_keys(cluster)
    return {key: value for key, value in whole.items() if key in _SAID or key not in cluster.assumed}


def assumed_keys(cluster: Cluster) -> dict[str, Any]:
    """Return the values taken from the GPU's usual machine, as keys of a spec."""
    whole = _cluster_keys(cluster)
    return {key: whole[key] for key in cluster.assumed if key not in _SAID and key in whole}


def _cluster_keys(cluster: Cluster) -> dict[str, Any]:
    nvlink, usual = cluster.nvlink_bytes_per_s, cluster.gpu
    written: dict[str, Any] = {
        "name": cluster.name,
        "gpu": _gpu(cluster.gpu),
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "nvlink_bandwidth": format_byte_rate(2 * nvlink) if nvlink else NONE,
        "ib_bandwidth": format_bit_rate(cluster.nic_bytes_per_s),
        "nics_per_node": cluster.nics_per_node,
    }
    if cluster.gpus_per_node == 1 or (written["gpu"] == usual.name and not (nvlink or usual.nvlink_bytes_per_s)):
        del written["nvlink_bandwidth"]
    if cluster.nodes == 1:
        del written["ib_bandwidth"], written["nics_per_node"]
    if fabric := _given(cluster.fabric):
        written["fabric"] = fabric
    if cluster.pcie_bytes_per_s != usual.pcie_bytes_per_s:
        written["pcie_bandwidth"] = format_byte_rate(cluster.pcie_bytes_per_s)
    if cluster.host_memory_bytes:
        written["host_memory"] = _size(cluster.host_memory_bytes)
    if cluster.storage_bytes_per_s != USUAL_STORAGE_BYTES_PER_S:
        written["storage_bandwidth"] = format_byte_rate(cluster.storage_bytes_per_s)
    written |= {
        key: list(value) if isinstance(value, tuple) else value
        for key in ("cpu_cores", "env", "secrets", "software", "slurm", "margin")
        if (value := getattr(cluster, key))
    }
    if cluster.sockets != usual_sockets(cluster.gpus_per_node, nvlink):
        written["sockets"] = cluster.sockets
    if cluster.hosts:
        written["hosts"] = [_given(host) for host in cluster.hosts]
    return written


def _gpu(gpu: Gpu) -> Any:
    """Return a GPU's catalog name, or a block of figures for a card outside the catalog."""
    if gpu.name not in catalog.gpu_names() or replace(gpu, source="") != replace(known.gpu(gpu.name), source=""):
        figures = {
            "name": gpu.name,
            "architecture": gpu.architecture,
            "memory": _size(gpu.memory_bytes),
            "memory_bandwidth": format_byte_rate(gpu.memory_bytes_per_s),
            "sm_count": gpu.sm_count,
        }
        for kind in ("bf16", "fp16", "fp8", "fp4"):
            if rate := getattr(gpu, f"{kind}_flops"):
                figures[f"{kind}_tflops"] = rate / _TERA
        return figures
    return gpu.name


def _size(amount_bytes: int) -> str:
    """Format memory in whole GB if exact, otherwise in MiB."""
    return f"{amount_bytes // 10**9}GB" if amount_bytes % 10**9 == 0 else f"{amount_bytes // 2**20}MiB"


def _given(block: Fabric | Host) -> dict[str, Any]:
    """Return the keys of a block that differ from their defaults."""
    found = {}
    for own in fields(block):
        value, key = getattr(block, own.name), own.name
        if value != _default(own):
            if key == "latency_s":
                key, value = "latency", format_seconds(value)
            found[key] = list(value) if isinstance(value, tuple) else value
    return found


def _default(own: Field[Any]) -> Any:
    return own.default if own.default_factory is MISSING else own.default_factory()
