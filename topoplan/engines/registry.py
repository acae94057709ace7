"""The engines, one a line."""

from __future__ import annotations

from topoplan.engines.engine import Engine
from topoplan.on_demand import OnDemand

ENGINES: OnDemand[Engine] = OnDemand(
    "topoplan.engines.megatron.engine:MEGATRON",
    "topoplan.engines.data_parallel.engine:DATA_PARALLEL",
)


class _ByBackend(dict[str, Engine]):
    """The engines that were asked for."""

    def __missing__(self, backend: str) -> Engine:
        for engine in ENGINES:
            if backend in engine.backends:
                self[backend] = engine
                return engine
        raise KeyError(backend)


_ENGINE_OF = _ByBackend()


def engine_of(backend: str) -> Engine:
    """The engine that trains the layouts of a backend."""
    return _ENGINE_OF[backend]
