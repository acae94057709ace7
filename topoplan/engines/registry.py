"""The engines, one a line."""

from __future__ import annotations

from topoplan.engines.data_parallel.engine import DataParallel
from topoplan.engines.engine import Engine
from topoplan.engines.megatron.engine import Megatron

ENGINES: tuple[Engine, ...] = (
    Megatron(),
    DataParallel(),
)

_ENGINE_OF = {backend: engine for engine in ENGINES for backend in engine.backends}


def engine_of(backend: str) -> Engine:
    """The engine that trains the layouts of a backend."""
    return _ENGINE_OF[backend]
