"""Read the directory that `topoplan generate` wrote as something that can be launched: its plan, hosts and files.

plan.json is authoritative: hosts.json and the scripts are generated from it and must still agree with it about the
hosts. Other edits are up to the user (the data set in train.yaml, a line in a script): they are reported, not refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import topoplan
from topoplan.bundle.bundle import HOSTS_FILE, HOSTS_SCHEMA, files_of, hosts_document
from topoplan.bundle.draft import Draft
from topoplan.bundle.node_script import script_name
from topoplan.bundle.plan_file import RecordedPlan, draft_again, read_plan_file
from topoplan.bundle.whole import (
    EditedScript,
    digest,
    edited_scripts,
    is_script,
    mixture,
    refuse_incomplete,
    refuse_lacking,
    refuse_links,
    refuse_unusable,
)
from topoplan.bundle.write import MANIFEST, listed
from topoplan.errors import InputError, SpecError, TopoplanError, nearest
from topoplan.layout.forms import layout_from_dict, layout_to_dict
from topoplan.planner.predict import predict
from topoplan.specs.cluster import Cluster, Host
from topoplan.specs.json_source import parse_json
from topoplan.specs.source import KeyPath, Source, dotted, read_text, shown_path
from topoplan.trainers.trainer import MAIN_FILE, PLAN_FILE
from topoplan.units import named, shown

_MOST_BYTES = 100_000_000
_REMEDY = "name the directory that `topoplan generate` wrote"
_AGAIN = "change the spec, and write the bundle again with `topoplan generate`"
_MOST_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleNode:
    """One machine of the run, and the script it is to start."""

    node: int
    """Number of the node, from 0: its `--node_rank`."""
    host: Host
    script: str

    @property
    def name(self) -> str:
        """The node's name, such as `node-00`, as used for scripts, logs and prefixes."""
        return self.script.removesuffix(".sh")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A bundle that can be launched."""

    directory: Path
    draft: Draft
    """What the bundle was made from: spec, plan, and the trainer's own files."""
    nodes: tuple[BundleNode, ...]
    files: Mapping[str, bytes]
    """Content by name of all files that a node may need; `files_of` selects those for one node."""
    edited: tuple[str, ...] = ()
    """Files that differ from what `topoplan generate` wrote."""
    notes: tuple[str, ...] = ()
    """Sentences on what the user should know before starting this bundle."""

    @property
    def has_hosts(self) -> bool:
        """Whether the plan names its hosts; otherwise, those of `nodes` are placeholders."""
        return bool(self.draft.spec.cluster.hosts)

    @property
    def run(self) -> str:
        """Name of the run: model and layout, as in the trainer's `run_name`."""
        return self.draft.trainer.run_name

    def files_of(self, node: BundleNode) -> dict[str, bytes]:
        """Return the files for one node: its own script, and the files for all nodes."""
        scripts = {one.script for one in self.nodes} - {node.script}
        return {name: data for name, data in self.files.items() if name not in scripts}


def read_bundle(directory: str | Path, *, may_lack_hosts: bool = False) -> Bundle:
    """Return the bundle in a directory. With `may_lack_hosts`, a plan without hosts gets placeholders (HOST-00).

    Raises SpecError for a directory without a complete bundle, for a plan without hosts otherwise, and for a hosts.json
    that contradicts plan.json; also whatever `read_plan_file` raises for a plan.json that cannot be read.
    """
    directory = _bundle_directory(Path(directory))
    name = shown_path(directory)
    refuse_links(directory, (PLAN_FILE, MANIFEST))
    known = listed(directory)
    recorded = read_plan_file(directory)
    hosts, hostless = _hosts(recorded.spec.cluster, directory)
    if hostless and not may_lack_hosts:
        raise hostless
    draft = draft_again(recorded)
    texts = files_of(draft)
    refuse_links(directory, texts)
    nodes = tuple(BundleNode(node=node, host=host, script=script_name(node)) for node, host in enumerate(hosts))
    refuse_lacking(directory, [*(node.script for node in nodes), MAIN_FILE, HOSTS_FILE])
    fresh = {file: text.encode() for file, text in texts.items()}
    files = {file: _content(directory / file) for file in fresh if (directory / file).is_file()}
    refuse_unusable(directory, files, fresh)
    if mixed := mixture(directory, files, fresh, known):
        raise SpecError(mixed[0], where=name, remedy=mixed[1])
    refuse_incomplete(directory)
    if listed(directory) != known:
        raise SpecError("was written again while it was read", where=name, remedy="run the command again")
    _compare(_read_hosts(directory / HOSTS_FILE), hosts_document(draft))
    edited = [file for file, data in files.items() if data != fresh[file] and digest(data) not in known.get(file, ())]
    of_this_version = recorded.version == topoplan.__version__
    scripts = edited_scripts(files, texts) if of_this_version else ()
    others = [file for file in edited if not (of_this_version and is_script(texts[file]))]
    return Bundle(
        directory=directory,
        draft=draft,
        nodes=nodes,
        files=files,
        edited=tuple(dict.fromkeys((*edited, *(script.name for script in scripts)))),
        notes=(*([str(hostless)] if hostless else []), *_notes(recorded, others, scripts)),
    )


def _bundle_directory(directory: Path) -> Path:
    """Return the directory that contains the plan. Raises SpecError if there is none."""
    name = shown_path(directory)
    refuse_incomplete(directory)
    if directory.is_file() and directory.name == PLAN_FILE:
        return directory.parent
    if not directory.is_dir():
        others = (entry.name for entry in _siblings(directory) if entry != directory and entry.is_dir())
        remedy = nearest(directory.name, others)
        if directory.exists():
            made = f"of a spec `topoplan generate {name}` makes one"
            raise SpecError("is a file, not a bundle", where=name, remedy=remedy or made)
        raise SpecError("no such directory", where=name, remedy=remedy or _REMEDY)
    if not (directory / PLAN_FILE).exists():
        within = sorted(entry.parent.name for entry in directory.glob(f"*/{PLAN_FILE}"))[:_MOST_NAMED]
        remedy = f"it holds bundles: {', '.join(within)}" if within else _REMEDY
        raise SpecError(f"is not a bundle: no {PLAN_FILE}", where=name, remedy=remedy)
    return directory


def _hosts(cluster: Cluster, directory: Path) -> tuple[tuple[Host, ...], SpecError | None]:
    """Return the hosts of the plan, or placeholders and the error for a plan without hosts."""
    if cluster.hosts:
        return cluster.hosts, None
    error = SpecError(
        f"its plan names no hosts, and {cluster.nodes} {'is' if cluster.nodes == 1 else 'are'} needed",
        where=str(shown_path(directory / PLAN_FILE)),
        remedy="add `hosts: [{address: 10.0.0.1, user: ..., workdir: ..., venv: ...}, ...]` to the spec, one for"
        " each node in the order of their numbers, and write the bundle again with `topoplan generate`",
    )
    return tuple(Host(address=f"HOST-{node:02d}", user="USER") for node in range(cluster.nodes)), error


def _siblings(path: Path) -> list[Path]:
    try:
        return list(path.parent.iterdir())
    except (OSError, ValueError):
        return []


def _content(path: Path) -> bytes:
    read_text(path, most_bytes=_MOST_BYTES, wanted=_REMEDY)  # raises the error for a file that is not text
    return path.read_bytes()


def _notes(recorded: RecordedPlan, edited: list[str], scripts: Sequence[EditedScript]) -> Iterator[str]:
    if edited:
        yield f"{named(edited)} changed since topoplan wrote the bundle; launched as found"
    alike: dict[str, list[str]] = {}
    for script in scripts:
        alike.setdefault(script.summary, []).append(script.name)
    for summary, names in alike.items():
        are = "is" if len(names) == 1 else "are"
        yield f"{named(names)} {are} not what topoplan writes for this plan, and will be started as found: {summary}"
    if recorded.version != topoplan.__version__:
        yield "edits of scripts are detected only by the bundle's list of digests"
    yield from recorded.notes
    if recorded.scheduler is not None:
        yield f"it was also written for {recorded.scheduler}"


# hosts.json ----------------------------------------------------------------------------------------------------------


def _read_hosts(path: Path) -> Source:
    hosts = parse_json(read_text(path, most_bytes=_MOST_BYTES, wanted=_REMEDY), name=shown_path(path), remedy=_REMEDY)
    if hosts.data.get("schema") != HOSTS_SCHEMA:
        raise SpecError(
            f"schema: {shown(hosts.data.get('schema'))}",
            where=hosts.place(("schema",)),
            expected=f"expected {HOSTS_SCHEMA}",
        )
    return hosts


def _compare(hosts: Source, planned: Mapping[str, Any]) -> None:
    """Refuse a hosts.json that contradicts the plan, from which the scripts were made."""
    nodes = hosts.data.get("nodes")
    if not isinstance(nodes, list) or len(nodes) != len(planned["nodes"]):
        count = len(nodes) if isinstance(nodes, list) else "no"
        raise SpecError(
            f"{count} nodes, and plan.json has {len(planned['nodes'])}", where=hosts.place(("nodes",)), remedy=_AGAIN
        )
    blocks: list[tuple[KeyPath, Any, Mapping[str, Any]]] = [
        *((("nodes", index), *pair) for index, pair in enumerate(zip(nodes, planned["nodes"], strict=True))),
        ((), hosts.data, {"run": planned["run"]}),
        (("master",), hosts.data.get("master"), planned["master"]),
    ]
    for path, found, plan in blocks:
        for key, wanted in plan.items():
            value = found.get(key) if isinstance(found, dict) else None
            if value != wanted:
                what = f"{dotted((*path, key))} is {shown(value)}, and plan.json says {shown(wanted)}"
                raise SpecError(what, where=hosts.place((*path, key)), remedy=_AGAIN)
        if unknown := [key for key in found if path[:1] == ("nodes",) and key not in plan]:
            what = f"unknown key {shown(unknown[0])} in `{dotted(path)}`"
            raise SpecError(what, where=hosts.place((*path, unknown[0])), remedy=_AGAIN)


# --nodes, --exclude --------------------------------------------------------------------------------------------------


def choose_nodes(bundle: Bundle, nodes: Iterable[str] = (), exclude: Iterable[str] = ()) -> None:
    """Check that a selection of hosts keeps all that the plan needs: the scripts contain the number of nodes.

    An entry is a number (`0`), a range (`0-3`), a name (`node-00`) or an address; entries may be separated by commas.
    Raises InputError for one that names no host, and for a selection that leaves some out, with what would fit.
    """
    wanted = _numbers(bundle, nodes, "--nodes")
    without = _numbers(bundle, exclude, "--exclude")
    every = {node.node for node in bundle.nodes}
    chosen = sorted((wanted or every) - without)
    if len(chosen) == len(every):
        return
    where = "--exclude" if without else "--nodes"
    cluster = bundle.draft.spec.cluster
    left_out = [bundle.nodes[node].host.address for node in sorted(every - set(chosen))]
    if not chosen:
        raise InputError("no host is left", where=where, expected=f"expected all {len(every)}")
    count, fitting = _fitting(bundle, [bundle.nodes[node].host for node in chosen])
    leave_out = f"set `nodes: {len(chosen)}` and leave these hosts out in the spec"
    if count == len(chosen):
        remedy = f"{leave_out}, and write a bundle for it with `topoplan generate`"
    else:
        remedy = f"for another layout, {leave_out}, and see `topoplan rank`"
        if count:
            remedy = f"set `nodes: {count}` and keep so many of the hosts in the spec; {remedy}"
    raise InputError(
        f"{len(chosen)} of {len(every)} hosts (without {named(left_out)}):"
        f" the layout is for {cluster.world_size} GPUs on {len(every)} nodes",
        where=where,
        expected=fitting,
        remedy=remedy,
    )


def _numbers(bundle: Bundle, texts: Iterable[str], option: str) -> set[int]:
    found: set[int] = set()
    for word in (part.strip() for text in texts for part in text.split(",")):
        by_name = {key: node.node for node in bundle.nodes for key in (node.host.address, node.name)}
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", word)
        if word in by_name:
            found.add(by_name[word])
        elif match and int(match[1]) <= int(match[2] or match[1]) < len(bundle.nodes):
            found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
        else:
            last = len(bundle.nodes) - 1
            raise InputError(
                f"{shown(word)} is not one of the bundle's hosts",
                where=option,
                expected=f"expected an address, a number from 0 to {last} or a range such as 0-{last}",
                remedy=nearest(word, by_name),
            )
    return found


_FOLLOW_THE_NODES = ("dp", "gradient_accumulation_steps")


def _fitting(bundle: Bundle, hosts: Sequence[Host]) -> tuple[int, str]:
    """Return how many of the hosts the same splits would fit on, 0 for none, and a phrase that says so."""
    spec, layout = bundle.draft.spec, bundle.draft.plan.layout
    form = {key: value for key, value in layout_to_dict(layout).items() if key not in _FOLLOW_THE_NODES}
    degrees = {key: degree for key, degree in asdict(layout.degrees).items() if key != "dp" and degree not in (1, None)}
    splits = ", ".join(f"{key} {degree}" for key, degree in degrees.items()) or "this layout"
    for count in range(len(hosts), 0, -1):
        cluster: Cluster = replace(spec.cluster, nodes=count, hosts=tuple(hosts[:count]))
        try:
            plan = predict(replace(spec, cluster=cluster), layout_from_dict(form, cluster, spec.model, spec.job))
        except TopoplanError:
            continue
        if plan.fits:
            return count, f"{splits} would fit {count} node{'s' if count != 1 else ''} with dp {plan.layout.dp}"
    return 0, f"no smaller number of nodes takes {splits} with a global batch of {spec.job.global_batch_size}"
