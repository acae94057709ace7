"""The engines, one a line."""

from __future__ import annotations

from topoplan.engines.engine import Engine
from topoplan.on_demand import OnDemand

ENGINES: OnDemand[Engine] = OnDemand(
    "topoplan.engines.megatron.engine:MEGATRON",
    "topoplan.engines.data_parallel.engine:DATA_PARALLEL",
)


_ENGINE_OF: dict[str, Engine] = {}
"""Those that were asked for."""


def engine_of(backend: str) -> Engine:
    """The engine that trains the layouts of a backend. Raises KeyError where there is none."""
    if backend not in _ENGINE_OF:
        # No further than the one that has it: others need not be imported.
        found = next((engine for engine in ENGINES if backend in engine.backends), None)
        if found is None:
            raise KeyError(backend)
        _ENGINE_OF[backend] = found
    return _ENGINE_OF[backend]
