"""The script of one node: checks, environment, and the trainer's start command, usually a single torchrun."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import topoplan
from topoplan.bundle.fabric import fabric_needs
from topoplan.bundle.whole import INCOMPLETE
from topoplan.errors import SpecError
from topoplan.layout.layout import Layout
from topoplan.specs.passed_on import HIJACKERS
from topoplan.specs.spec import Spec
from topoplan.trainers.environment import node_environment
from topoplan.trainers.models import is_hub_id
from topoplan.trainers.templating import render
from topoplan.trainers.trainer import DATASET_TO_FILL_IN, MAIN_FILE, TrainerFiles, TrainerRun, TrainingPath

# Below 32768, the first port that Linux gives to outgoing connections (net.ipv4.ip_local_port_range).
_FIRST_PORT, _PORTS = 20000, 10000


GOES_ON = "the trainer resumes from"
"""The words on standard error before the last complete checkpoint, whose name ends in its step number."""


def script_name(node: int) -> str:
    """Return the file name of a node's script."""
    return f"node-{node:02d}.sh"


def master_port(spec: Spec, trainer: TrainerFiles) -> int:
    """Return one port for all nodes, stable for a plan and usually different for different plans."""
    hosts = [host.address for host in spec.cluster.hosts]
    digest = hashlib.sha256(json.dumps([trainer.run_name, spec.cluster.name, hosts]).encode()).digest()
    return _FIRST_PORT + int.from_bytes(digest[:4], "big") % _PORTS


def master_address(spec: Spec) -> str | None:
    """Return the address of node 0; None if the spec names no hosts, so that it must be given at the start."""
    if spec.cluster.nodes == 1:
        return "127.0.0.1"
    return spec.cluster.hosts[0].address if spec.cluster.hosts else None


def node_script(
    spec: Spec, layout: Layout, training_path: TrainingPath, trainer: TrainerFiles, run: TrainerRun, node: int
) -> str:
    """Return the bash script that starts node number `node`."""
    cluster = spec.cluster
    host = cluster.hosts[node] if cluster.hosts else None
    workdir, venv = (host.workdir, host.venv) if host is not None else (None, None)
    for path, field in ((workdir, "workdir"), (venv, "venv")):
        if path is not None and not path.startswith("/"):
            raise SpecError(f"{path!r} is not absolute", where=f"hosts[{node}].{field}", expected="expected /like/this")
    context: dict[str, Any] = {
        "version": topoplan.__version__,
        "script": script_name(node),
        "node": node,
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "workdir": workdir,
        "venv": venv,
        "run": run,
        "files": tuple(trainer.files),
        "main_file": MAIN_FILE,
        "incomplete": INCOMPLETE,
        "goes_on": GOES_ON,
        "hub_id": spec.model.name if spec.model.config_path is None and is_hub_id(spec.model.name) else None,
        "to_fill_in": run.to_fill_in if run.dataset == DATASET_TO_FILL_IN else None,
        "placeholder": DATASET_TO_FILL_IN,
        "master_addr": master_address(spec),
        "master_port": master_port(spec, trainer),
        "hijackers": HIJACKERS,
        "needs": fabric_needs(cluster),
        "environment": node_environment(cluster, run.environment, node),
        "secrets": cluster.secrets,
        "rdma": cluster.nodes > 1 and cluster.fabric.uses_rdma,
        "log_dir": f"logs/{trainer.run_name}/{script_name(node).removesuffix('.sh')}",
        "start": training_path.start(spec, layout, node),
    }
    if taken := {*HIJACKERS, *(variable.name for variable in context["environment"])} & set(cluster.secrets):
        raise SpecError(f"{min(taken)} is set or unset by the scripts themselves", where="secrets")
    words = (workdir, venv, run.model_dir, run.dataset_dir, *run.dataset_files, run.output_dir, context["master_addr"])
    quoted = [*filter(None, words), *(variable.value for variable in context["environment"])]
    quoted += [path for need in context["needs"] for path in need.paths]
    context["has_dollars"] = any(char in word for word in quoted for char in "$`")
    return render("node.sh.j2", context)
