"""What can be asked on a page: the fields of its form, with what holds where nothing is typed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from topoplan.planner.view import rounded
from topoplan.specs.spec import Spec

_FIELDS = {
    "gpu": "GPU",
    "nodes": "Nodes",
    "gpus_per_node": "GPUs a node",
    "set.nvlink_bandwidth": "NVLink, such as 900GB/s",
    "set.ib_bandwidth": "A NIC, such as 400Gb/s",
    "set.nics_per_node": "NICs a node",
    "model": "Model, or its path here",
    "seq_len": "Tokens in a sequence",
    "batch": "Sequences in a step",
    "finetuning": "Fine-tuning",
    "set.precision": "Precision",
    "job": "Job, a path here",
    "pin": "Pins, such as tp=4,pp=1",
    "margin": "Margin, such as 5%",
    "backend": "Backend",
    "trainer": "Trainer",
    "overrides": "Other keys, such as samples=10000",
}
"""By the option that a field says, or as `set.KEY` the key of `--set`."""


def form_of(spec: Spec | None, example: Mapping[str, str], known: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The fields, the names that are `known` for some of them, and values to begin with.

    Of a spec the fields are empty, and say what the spec has; without one they hold the example.
    """
    return {
        "fields": [
            {"name": name, "label": label, "known": list(known.get(name, ()))} for name, label in _FIELDS.items()
        ],
        "has": {} if spec is None else {name: str(value) for name, value in _values(spec).items()},
        "example": dict(example) if spec is None else {},
    }


def _values(spec: Spec) -> dict[str, Any]:
    cluster, job = spec.cluster, spec.job
    return {
        "gpu": cluster.gpu.name,
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "set.nics_per_node": cluster.nics_per_node,
        "set.ib_bandwidth": f"{rounded(cluster.nic_bytes_per_s * 8 / 1e9):g}Gb/s",
        "model": spec.model.name,
        "seq_len": job.seq_len,
        "batch": job.global_batch_size,
        "finetuning": job.finetuning,
        "set.precision": job.precision,
    }
