"""Commands in a container or on another machine: what they reach from there, and whether the next one waits for them.

Sources: docker-run(1), ssh(1).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from topoplan.lint.rules.launch_table import RULES
from topoplan.reading.finding import Finding
from topoplan.reading.launch_facts import certain_count, nodes_of, setting_of
from topoplan.reading.processes import processes_of
from topoplan.reading.setup import Launch, Setup
from topoplan.reading.words import is_open

_LIKE_DOCKER = ("docker", "podman", "nerdctl")
_NETWORK = re.compile(r"--net(?:work)?|-p|-P|--publish(?:-all)?")
_SHARED_MEMORY = re.compile(r"--ipc|--shm-size")
_DETACHES = re.compile(r"(?<!\S)-[A-Za-z]*f[A-Za-z]*(?!\S)[^|]*\||\|.*(?<!\S)(?:-[a-z]*d[a-z]*|--detach)(?!\S)")
"""Options of ssh, and behind a bar those of `docker run`, with which they do not wait for the command."""
_LOOP = re.compile(r"^\s*(?:for|while|until)\b", re.MULTILINE)
_DONE = re.compile(r"(?:^|;)\s*done\b", re.MULTILINE)
_BACKGROUND = re.compile(r"(?<![&>|])&(?![&>\d])")


def findings(setup: Setup) -> Iterator[Finding]:
    """Report containers that other processes cannot reach, and nodes that are started one after another."""
    for launch in setup.launches:
        yield from _container(setup, launch)
        yield from _in_a_loop(launch)
    yield from _in_turn(setup)


def _container(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report what `docker run` leaves at its default, a network and a shared memory of the container's own."""
    words = launch.words_of(*_LIKE_DOCKER)
    if words is None or "run" not in words or any(word.startswith(("$", "`", "@")) for word in words):
        return
    program = next(one for one in launch.wrappers if one in _LIKE_DOCKER)
    options = {word.partition("=")[0] for word in words}
    nodes, started = nodes_of(launch), processes_of(launch)
    if nodes is not None and nodes > 1 and not any(map(_NETWORK.fullmatch, options)):
        yield RULES["launch-container-network"].on(launch, program=program, nodes=nodes)
    is_alone = started.nodes == started.gpus_per_node == 1
    if not is_alone and not any(map(_SHARED_MEMORY.fullmatch, options)) and "/dev/shm" not in " ".join(words):
        yield RULES["launch-container-memory"].on(launch, program=program)


def _is_waited_for(launch: Launch) -> bool:
    """Whether a script goes on only when ssh has ended, and ssh only when the command has."""
    options = " ".join([*(launch.words_of("ssh") or ()), "|", *(launch.words_of(*_LIKE_DOCKER) or ())])
    detaches = {"tmux", "screen"}.intersection(launch.wrappers) or _DETACHES.search(options)
    return "ssh" in launch.wrappers and not launch.background and not detaches


def _in_a_loop(launch: Launch) -> Iterator[Finding]:
    """Report a loop over nodes that waits for each of them."""
    rank, lines = setting_of(launch, "node_rank"), launch.part.text.split("\n")
    before, with_it = ("\n".join(lines[:end]) for end in (launch.first_line - 1, launch.last_line))
    if rank is None or not is_open(rank.value) or nodes_of(launch) == 1 or not _is_waited_for(launch):
        return
    if len(_LOOP.findall(with_it)) <= len(_DONE.findall(before)):
        return
    rest = "\n".join(lines[launch.first_line - 1 :])
    end = _DONE.search(rest)
    if not _BACKGROUND.search(rest[: rest.find("\n", end.end())] if end else rest):
        yield RULES["launch-in-turn"].on(launch)


def _in_turn(setup: Setup) -> Iterator[Finding]:
    """Report a node that is waited for before the next one is started."""
    for first, second in pairwise(setup.launches):
        if first.part is not second.part or first.part.label or not _is_waited_for(first):
            continue
        ranks = {certain_count(setting_of(one, "node_rank")) for one in (first, second)}
        nodes = {nodes_of(one) for one in (first, second)}
        if len(ranks - {None}) == 2 and len(nodes) == 1 and nodes.isdisjoint((None, 1)):
            yield RULES["launch-in-turn"].on(first)
