"""Compose the files of one plan. Pure: the same spec and plan give the same bytes, and nothing is written to disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import topoplan
from topoplan.bundle.draft import Draft, draft_of
from topoplan.bundle.node_script import node_script, script_name
from topoplan.bundle.readme import readme
from topoplan.bundle.slurm import JOB_SCRIPT, job_script
from topoplan.planner.plan import Plan
from topoplan.planner.predict import plan_under
from topoplan.planner.view import spec_to_dict
from topoplan.specs.cluster import Host
from topoplan.specs.spec import Spec
from topoplan.trainers.registry import writer_of, written_by
from topoplan.trainers.trainer import PLAN_FILE
from topoplan.units import file_name

HOSTS_FILE = "hosts.json"
PLAN_SCHEMA = "topoplan.plan/1"
HOSTS_SCHEMA = "topoplan.hosts/1"


def generate(spec: Spec, plan: Plan, scheduler: str | None = None, trainer: str | None = None) -> dict[str, str]:
    """Return relative path -> text: the trainer's files, a script per node, hosts.json, plan.json and README.md.

    `scheduler` is slurm, to add its job script, or none; by default the spec decides (`scheduler_of`). Without a
    `trainer`, the files are those of the first trainer that can run the layout. Raises an InputError that says what the
    trainer cannot do, which user key contradicts the plan, or which name cannot be written into a script.
    """
    writer, _ = writer_of(spec, plan.layout, trainer)
    plan = plan_under(spec, plan, writer.name)
    return files_of(draft_of(spec, plan, scheduler, trainer))


def usual_directory(spec: Spec) -> Path:
    """Return the default directory of a spec's bundle."""
    return Path("generated") / file_name(spec.cluster.name, "cluster")


def files_of(draft: Draft) -> dict[str, str]:
    """Return relative path -> text of all files of a bundle."""
    spec, layout = draft.spec, draft.plan.layout
    files = dict(draft.trainer.files)
    files |= {
        script_name(node): node_script(spec, layout, draft.training_path, draft.trainer, draft.run, node)
        for node in range(spec.cluster.nodes)
    }
    if draft.scheduler is not None:
        files[JOB_SCRIPT] = job_script(draft)
    files[HOSTS_FILE] = _json(hosts_document(draft))
    files[PLAN_FILE] = _json(_plan_document(draft))
    files["README.md"] = readme(draft)
    return files


def _json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def hosts_document(draft: Draft) -> dict[str, Any]:
    """Return the content of hosts.json."""
    spec = draft.spec
    hosts: tuple[Host | None, ...] = spec.cluster.hosts or (None,) * spec.cluster.nodes
    return {
        "schema": HOSTS_SCHEMA,
        "run": draft.trainer.run_name,
        "master": {"address": draft.master_address, "port": draft.master_port},
        "nodes": [
            {
                "node": node,
                **{key: getattr(host, key, None) for key in ("address", "user", "port", "workdir", "venv")},
                "script": script_name(node),
            }
            for node, host in enumerate(hosts)
        ],
    }


def _plan_document(draft: Draft) -> dict[str, Any]:
    prediction = dict(draft.view)
    layout = prediction.pop("layout")
    document = {
        "schema": PLAN_SCHEMA,
        "version": topoplan.__version__,
        "id": prediction.pop("id"),
        "run": draft.trainer.run_name,
        "inputs": spec_to_dict(draft.spec, whole=True),
        "layout": layout,
        "prediction": prediction,
        "trainer_versions": {
            **draft.training_path.versions(),
            **{one.package.name.replace("-", "_"): one.versions for one in draft.run.requirements if one.avoids},
        },
    }
    default, _ = written_by(draft.plan.layout.backend)
    if draft.writer is not default:
        document["trainer"] = draft.writer.name
    return document if draft.scheduler is None else document | {"scheduler": draft.scheduler}
