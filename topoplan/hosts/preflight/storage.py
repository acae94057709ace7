"""Checks of directories: present, writable, the same everywhere, and large enough."""

from __future__ import annotations

import re

from topoplan.hosts.facts import PathFacts
from topoplan.hosts.needs import path_on
from topoplan.hosts.preflight.fleet import Fleet, Node, names
from topoplan.hosts.result import Result, failure, ok, skipped, warning
from topoplan.trainers.trainer import Checkpoints
from topoplan.units import format_gib

_NETWORK = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "weka", "gluster", "juicefs", "pvfs", "orangefs")
"""File systems that several hosts can mount, by the beginning of their type after `fuse.`: nfs4, fuse.juicefs, smb3."""
_WHOLE = 0.95
"""Fraction of the weights' size: shards take slightly more, an interrupted download less."""


def workdir(fleet: Fleet, node: Node) -> Result | None:
    """Row 10: a working directory that is missing, or belongs to somebody else."""
    path = node.host.workdir
    if path is None:
        return None
    facts = node.facts.paths.get(path)
    if facts is None:
        return _unknown(node, path)
    if not facts.exists:
        return failure(f"no {path}", "make it, or correct workdir in the spec")
    if facts.is_writable is False:
        return failure(f"{path} is not writable", "change its owner or mode, or name another workdir in the spec")
    return ok(path)


def model(fleet: Fleet, node: Node) -> Result | None:
    """Row 10: the model is on every node, complete, and the same: ranks with other weights silently train garbage."""
    if fleet.needs is None:
        return None
    directory = fleet.needs.run.model_dir
    found = _there(node, directory, "model", "copy the model there (the bundle's README.md has the command)")
    if isinstance(found, Result):
        return found
    if found.size_bytes is not None and found.size_bytes < _WHOLE * fleet.needs.model_bytes:
        return warning(
            f"{format_gib(found.size_bytes)} in {found.path}, and the weights take"
            f" {format_gib(fleet.needs.model_bytes)} in bf16",
            "see that all shards are there and none is quantized",
        )
    if others := _unlike(fleet, node, directory):
        return failure(f"{found.path} has other files than on {others}", "copy the same model to all hosts")
    return ok(_content(found))


def data(fleet: Fleet, node: Node) -> Result | None:
    """Row 10: the data is on every node, and the same."""
    if fleet.needs is None:
        return None
    if not fleet.needs.has_dataset:
        return failure("train.yaml names no data set", "set job.dataset in the spec and generate the bundle again")
    directory = fleet.needs.run.dataset_dir
    if directory is None:
        return None
    found = _there(node, directory, "dataset_dir", "copy the data there, with its dataset_info.json")
    if isinstance(found, Result):
        return found
    if others := _unlike(fleet, node, directory):
        return warning(
            f"{found.path} has other files than on {others}", "copy the same data to all hosts: each node reads its own"
        )
    return ok(_content(found))


def output(fleet: Fleet, node: Node) -> Result | None:
    """Checkpoints go to a place that is writable and empty."""
    if fleet.needs is None:
        return None
    directory = fleet.needs.run.output_dir
    found = _path(node, directory)
    if found is None:
        if path_on(node.host, directory) is not None:
            return _unknown(node, directory)
        return warning(
            f"checkpoints go into the run's own directory, {directory}", "name an absolute output_dir on shared storage"
        )
    if found.is_writable is False:
        return failure(f"{found.path} is not writable", "change its owner or mode, or name another output_dir")
    if found.exists and found.files:
        return warning(*_in_use(found, fleet.needs.run.checkpoints))
    return ok(f"{found.path}, {found.file_system or 'writable'}")


def output_shared(fleet: Fleet, node: Node) -> Result | None:
    """Checkpoints go to a place that all nodes share; otherwise their parts end up on the disks of different nodes."""
    if fleet.needs is None or fleet.cluster.nodes < 2:
        return None
    directory = fleet.needs.run.output_dir
    found = _path(node, directory)
    if found is None:
        return None if path_on(node.host, directory) is None else _unknown(node, directory)
    if _is_shared(fleet, node, directory):
        return ok(f"{found.mount}, {found.file_system}")
    kind = found.file_system or "unknown storage"
    where = f"{kind}, but not shared by all hosts" if _is_network(found) else f"{kind}, the host's own"
    return warning(
        f"{directory} is on {where}: each node keeps its part of a checkpoint",
        "name an output_dir on storage that all hosts mount, or gather the parts afterwards",
    )


def disk(fleet: Fleet, node: Node) -> Result | None:
    """Space for the checkpoints (trainers/checkpoint_size.py): all of it on shared storage, or the node's own part."""
    if fleet.needs is None:
        return None
    directory, checkpoint = fleet.needs.run.output_dir, fleet.needs.run.checkpoint
    found = _path(node, directory)
    if found is None:
        return None if path_on(node.host, directory) is None else _unknown(node, directory)
    if found.free_bytes is None:
        return skipped(f"free space of {found.path} is not known")
    share = 1 if _is_shared(fleet, node, directory) else fleet.cluster.nodes
    first = (checkpoint.final_bytes if checkpoint.at_once == 0 else checkpoint.total_bytes) / share
    most = (checkpoint.final_bytes + (checkpoint.at_once or 2) * checkpoint.total_bytes) / share
    if checkpoint.at_once == 0:
        most = first
    of = "a checkpoint" if share == 1 else "this node's part of a checkpoint"
    words = f"{format_gib(found.free_bytes)} free"
    remedy = "free space, save less (save_total_limit, save_only_model), or name another output_dir"
    if found.free_bytes < first:
        return failure(f"{words}, and {of} takes {format_gib(first)}", remedy)
    if found.free_bytes < most:
        count = "as many as are kept take" if checkpoint.at_once else "two and the weights at the end take"
        return warning(f"{words}: enough for {of} of {format_gib(first)}, and {count} {format_gib(most)}", remedy)
    return ok(words)


def _in_use(found: PathFacts, checkpoints: Checkpoints) -> tuple[str, str]:
    """Return what an output directory with files holds and what that means, and the remedy.

    The node scripts look for checkpoints by the same names; which of them is complete is found at the start.
    """
    what = f"{found.path} holds {_files(found.files or 0)}"
    name = re.compile(re.escape(checkpoints.directories) + "[0-9]+")
    steps = None if found.numbered is None else [one for one in found.numbered if name.fullmatch(one)]
    if steps == []:
        return f"{what} and no checkpoint: there is nothing to go on from", "clear it or name another for this run"
    if steps:
        steps.sort(key=lambda one: int(one.removeprefix(checkpoints.directories)))
        count = "1 checkpoint" if len(steps) == 1 else f"{len(steps)} checkpoints"
        what = f"{what} with {count}, {'' if len(steps) == 1 else 'the last '}{steps[-1]}"
    if not checkpoints.resumable:
        return f"{what}: checkpoints of this layout cannot be resumed from", "move them away"
    which = "the last complete one" if steps else "a complete checkpoint in it"
    remedy = "clear it or name another, to start anew in any case"
    return f"{what}: the run goes on from {which}, and without one starts anew", remedy


def _path(node: Node, directory: str) -> PathFacts | None:
    path = path_on(node.host, directory)
    return None if path is None else node.facts.paths.get(path)


def _unknown(node: Node, path: str) -> Result:
    return node.not_reported("paths", f"the host does not report what is at {path}")


def _there(node: Node, directory: str, key: str, remedy: str) -> PathFacts | Result:
    path = path_on(node.host, directory)
    if path is None:
        return failure(
            f"{directory} is relative to the working directory, and the spec names none",
            f"give workdir under hosts in the spec, or an absolute path for the {key}",
        )
    facts = node.facts.paths.get(path)
    if facts is None:
        return _unknown(node, path)
    if not facts.exists:
        return failure(f"no {path}", remedy)
    if facts.files == 0:
        return failure(f"{path} is empty", remedy)
    return facts


def _unlike(fleet: Fleet, node: Node, directory: str) -> str:
    """Return the hosts with other files there, if this host's files differ from most; otherwise empty."""

    def digest(one: Node) -> str | None:
        facts = _path(one, directory)
        return (facts.fingerprint or None) if facts is not None and facts.exists else None

    return names(fleet.majority_against(node, digest))


def _is_network(facts: PathFacts) -> bool:
    kind = facts.file_system.lower().removeprefix("fuse.")
    return kind.startswith(_NETWORK)


def _is_shared(fleet: Fleet, node: Node, directory: str) -> bool:
    """Whether all hosts have mounted the same network file system there."""
    found = [_path(one, directory) for one in fleet.nodes]
    mounts = {(one.mount, one.file_system) if one is not None and _is_network(one) else None for one in found}
    return len(mounts) == 1 and None not in mounts


def _content(facts: PathFacts) -> str:
    return facts.path if facts.files is None else f"{facts.path}, {_files(facts.files)}"


def _files(count: int) -> str:
    return f"{count} file{'' if count == 1 else 's'}"
