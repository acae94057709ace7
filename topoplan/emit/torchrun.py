"""The script of one node: checks, environment, and one torchrun with a static rendezvous.

Form: `python -m torch.distributed.run ... -m llamafactory.launcher train.yaml`. LLaMA-Factory's launcher.py calls
`run_exp` when it is run as a module, and `read_args` takes argv[1] as the YAML; `llamafactory-cli train` under torchrun
would start torchrun once more in each rank. The static rendezvous keeps node ranks as planned (c10d sorts by address).
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import topoplan
from topoplan.emit.nccl import node_environment
from topoplan.emit.templating import render
from topoplan.emit.trainer_facts import is_hub_id, resumable
from topoplan.emit.trainer_yaml import DATASET_TO_FILL_IN, TrainerFile
from topoplan.errors import SpecError
from topoplan.layout.layout import Layout
from topoplan.specs.spec import Spec

HIJACKERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", "NPROC_PER_NODE"),
    *("RDZV_ID", "MIN_NNODES", "MAX_NNODES", "MAX_RESTARTS", "FORCE_TORCHRUN"),
    *("USE_RAY", "USE_KT", "USE_MEGATRON_BRIDGE", "ALLOW_EXTRA_ARGS"),
)
"""Variables that change what torchrun, transformers or LLaMA-Factory's launcher do; scripts unset them first."""

# Below 32768, where Linux begins to hand out ports to outgoing connections (net.ipv4.ip_local_port_range).
_FIRST_PORT, _PORTS = 20000, 10000


def script_name(node: int) -> str:
    """File name of a node's script."""
    return f"node-{node:02d}.sh"


def master_port(spec: Spec, trainer: TrainerFile) -> int:
    """One port for all nodes, the same whenever the same plan is written, and mostly another for another plan."""
    hosts = [host.address for host in spec.cluster.hosts]
    digest = hashlib.sha256(json.dumps([trainer.run_name, spec.cluster.name, hosts]).encode()).digest()
    return _FIRST_PORT + int.from_bytes(digest[:4], "big") % _PORTS


def master_address(spec: Spec) -> str | None:
    """Address of node 0; None when the spec names no hosts, and whoever starts the scripts has to say it."""
    if spec.cluster.nodes == 1:
        return "127.0.0.1"
    return spec.cluster.hosts[0].address if spec.cluster.hosts else None


def node_script(spec: Spec, layout: Layout, trainer: TrainerFile, node: int) -> str:
    """The bash script that starts node number `node`."""
    cluster = spec.cluster
    host = cluster.hosts[node] if cluster.hosts else None
    workdir, venv = (host.workdir, host.venv) if host is not None else (None, None)
    for path, field in ((workdir, "workdir"), (venv, "venv")):
        if path is not None and not path.startswith("/"):
            raise SpecError(f"{path!r} is not absolute", where=f"hosts[{node}].{field}", expected="expected /like/this")
    values = trainer.values
    context: dict[str, Any] = {
        "version": topoplan.__version__,
        "script": script_name(node),
        "node": node,
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "workdir": workdir,
        "venv": venv,
        "model_dir": values["model_name_or_path"],
        "hub_id": spec.model.name if spec.model.config_path is None and is_hub_id(spec.model.name) else None,
        "dataset_dir": local_dataset_dir(trainer),
        "output_dir": str(values["output_dir"]),
        "modules": needed_modules(trainer),
        "resumable": resumable(spec, layout),
        "dataset_placeholder": DATASET_TO_FILL_IN if values["dataset"] == DATASET_TO_FILL_IN else None,
        "master_addr": master_address(spec),
        "master_port": master_port(spec, trainer),
        "hijackers": HIJACKERS,
        "environment": node_environment(spec, layout, node),
        "rdma": cluster.nodes > 1 and cluster.fabric.kind != "ethernet",
        "log_dir": f"logs/{trainer.run_name}/{script_name(node).removesuffix('.sh')}",
    }
    words = (workdir, venv, *(context[key] for key in ("model_dir", "dataset_dir", "output_dir", "master_addr")))
    quoted = [*filter(None, words), *(variable.value for variable in context["environment"])]
    context["has_dollars"] = any(char in word for word in quoted for char in "$`")
    return render("node.sh.j2", context)


def needed_modules(trainer: TrainerFile) -> tuple[str, ...]:
    """What the trainer imports, and each rank would report the lack of in its own time."""
    engine = () if trainer.values.get("transformer_impl") == "local" else ("transformer_engine",)
    return ("torch", "llamafactory", "mcore_adapter", "megatron", *engine)


def local_dataset_dir(trainer: TrainerFile) -> str | None:
    """The directory with dataset_info.json; None when the data comes from a hub or an earlier tokenising."""
    directory = str(trainer.values["dataset_dir"])
    if directory == "ONLINE" or directory.startswith("REMOTE:") or trainer.values.get("tokenized_path"):
        return None
    return directory
