"""`swift rollout`, the server that generates for a trainer: its own arguments, and whether the trainer finds it.

Sources, at ms-swift 4.6.0: `swift/arguments/deploy_args.py`, `swift/rlhf_trainers/args_mixin.py` (vllm_server_host,
vllm_server_port). It starts no training, and so it is no launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from topoplan.reading.finding import Finding
from topoplan.reading.launch_facts import LOCAL_ADDRESS, certain_text
from topoplan.reading.launches import source_of
from topoplan.reading.processes import launch_of
from topoplan.reading.setup import Configuration, Setup, Variable
from topoplan.reading.starters import base_name
from topoplan.reading.values import as_whole, value_of
from topoplan.trainers.around import UNKNOWN, context_of
from topoplan.trainers.relations import read_relations
from topoplan.trainers.swift.reading import MEGATRON, SWIFT
from topoplan.trainers.swift.rules.table import RULES

_RELATIONS = read_relations(__package__, "rollout_relations.toml")
_PORT = 8000
"""Default of both sides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    configuration: Configuration
    gpus: frozenset[str]
    """The visible GPUs; empty if they are not known."""


def findings(setup: Setup) -> Iterator[Finding]:
    """Report servers that do not start, and a trainer beside one that does not go with it."""
    servers = list(_servers(setup))
    refused, unwise = RULES["swift-refused-together"], RULES["swift-refused-together.unwise"]
    for server in servers:
        around = {**context_of(setup, server.configuration), "visible": len(server.gpus) or UNKNOWN}
        yield from _RELATIONS.findings(refused, server.configuration, around, unwise=unwise)
    trainers = [
        one
        for one in setup.of(SWIFT.trainer, MEGATRON.trainer)
        if one.get("vllm_mode") == "server" and one.get("vllm_server_base_url") is None
    ]
    if len(servers) == len(trainers) == 1:  # otherwise it is open which belong together
        yield from _together(setup, servers[0], trainers[0])


def _servers(setup: Setup) -> Iterator[_Server]:
    for script in setup.scripts:
        for command in script.unwrapped_commands:
            words = command.words
            if len(words) < 2 or base_name(words[0].text) != SWIFT.command or words[1].text != "rollout":
                continue
            source = source_of(words[2:], name=script.part.name, has_file=False)
            configuration = Configuration(trainer=SWIFT.trainer, part=script.part, source=source, from_command=True)
            seen = command.environment.variables() if command.environment else ()
            visible = next((one for one in reversed(seen) if one.name == "CUDA_VISIBLE_DEVICES"), None)
            yield _Server(configuration=configuration, gpus=_gpus(visible))


def _gpus(visible: Variable | None) -> frozenset[str]:
    return frozenset(one.strip() for one in (certain_text(visible) or "").split(",") if one.strip())


def _together(setup: Setup, server: _Server, trainer: Configuration) -> Iterator[Finding]:
    """Report a port at which no server listens, and GPUs that both use."""
    ports, own = value_of(trainer, "vllm_server_port") or _PORT, value_of(server.configuration, "port") or _PORT
    wanted = [as_whole(one) for one in (ports if isinstance(ports, list) else [ports])]
    port, file = as_whole(own), server.configuration.part.name
    if port is not None and None not in wanted and port not in wanted:
        rule = RULES["swift-rollout-beside-trainer"]
        yield rule.at(trainer, "vllm_server_port", wanted=wanted[0], port=port, file=file)
    launch, host = launch_of(setup, trainer), value_of(trainer, "vllm_server_host")
    visible = launch.variable("CUDA_VISIBLE_DEVICES") if launch else None
    both = sorted(server.gpus & _gpus(visible))
    if launch is not None and both and isinstance(host, str) and LOCAL_ADDRESS.fullmatch(host):
        yield RULES["swift-rollout-beside-trainer.gpus"].on(launch, visible, gpus=", ".join(both), file=file)
