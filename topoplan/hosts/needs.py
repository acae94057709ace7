"""What a run needs on its hosts: paths, port, packages and sizes, derived from its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from topoplan.bundle.node_script import master_port
from topoplan.catalog.packages import packages
from topoplan.operators.params import parameter_count
from topoplan.planner.plan import Plan
from topoplan.specs.cluster import Host
from topoplan.specs.spec import Spec
from topoplan.trainers.registry import writer_of
from topoplan.trainers.requirements import Requirement
from topoplan.trainers.trainer import DATASET_TO_FILL_IN, TrainerFiles, TrainerRun

_WEIGHT_BYTES = 2  # bf16; the trainer reads no quantized weights


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNeeds:
    """What a run needs on every host."""

    run: TrainerRun
    """The trainer's paths, absolute or relative to the working directory, its packages and its checkpoints."""
    model_bytes: int
    master_port: int
    gpu_bytes: float
    """Predicted peak usage of the fullest GPU, as nvidia-smi shows it."""
    host_bytes: float
    """Pinned host memory of a node, for what is offloaded to it."""
    earlier_runs: Mapping[str, str] = field(default_factory=dict)
    """By address of a host: the id of the newest run of this machine that may still be running there."""

    @property
    def has_dataset(self) -> bool:
        """Whether the spec names a data set; if not, train.yaml has a placeholder."""
        return self.run.dataset != DATASET_TO_FILL_IN


def needs_of(
    spec: Spec,
    plan: Plan,
    edited: Mapping[str, Any] | None = None,
    trainer: str | None = None,
    *,
    own: TrainerFiles | None = None,
) -> RunNeeds:
    """Return the needs of a plan's bundle. Raises what `bundle.bundle.generate` raises.

    `edited` are the keys of its train.yaml, and `own` the trainer's files, if they exist already.
    """
    _, way = writer_of(spec, plan.layout, trainer)
    own = own or way.written(spec, plan.layout)
    run = way.run(spec, plan.layout, {**own.values, **(edited or {})})
    if all(one.package.name != "transformers" for one in run.requirements):
        run = replace(run, requirements=(*run.requirements, Requirement(package=packages()["transformers"])))
    return RunNeeds(
        run=run,
        model_bytes=_WEIGHT_BYTES * parameter_count(spec.model),
        master_port=master_port(spec, own),
        gpu_bytes=plan.memory.device_bytes,
        host_bytes=plan.memory.host_bytes,
    )


def path_on(host: Host, path: str) -> str | None:
    """Return the absolute path on a host; None for a relative path if the spec names no working directory, as the run
    then starts in a new and empty one."""
    if path.startswith("/"):
        return path
    return None if host.workdir is None else str(PurePosixPath(host.workdir, path))


def paths_on(host: Host, needs: RunNeeds | None) -> tuple[str, ...]:
    """Return all paths to check on a host."""
    wanted = [host.workdir]
    if needs is not None:
        directories = filter(None, (needs.run.model_dir, needs.run.dataset_dir, needs.run.output_dir))
        wanted += [path_on(host, directory) for directory in directories]
    return tuple(dict.fromkeys(path for path in wanted if path is not None))


def python_on(host: Host) -> str | None:
    """Return the Python that the node script starts on a host; None stands for the first python3 on PATH."""
    return None if host.venv is None else str(PurePosixPath(host.venv, "bin", "python"))
