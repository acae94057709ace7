"""The engines, one per line."""

from __future__ import annotations

from topoplan.engines.engine import Engine
from topoplan.on_demand import OnDemand

ENGINES: OnDemand[Engine] = OnDemand(
    "topoplan.engines.megatron.engine:MEGATRON",
    "topoplan.engines.data_parallel.engine:DATA_PARALLEL",
)


_ENGINE_OF: dict[str, Engine] = {}
"""Engines that have been looked up, by backend."""


def engine_of(backend: str) -> Engine:
    """Return the engine that trains the layouts of a backend. Raises KeyError if there is none."""
    if backend not in _ENGINE_OF:
        # Stop at the first engine that has the backend, so that the others need not be imported.
        found = next((engine for engine in ENGINES if backend in engine.backends), None)
        if found is None:
            raise KeyError(backend)
        _ENGINE_OF[backend] = found
    return _ENGINE_OF[backend]
