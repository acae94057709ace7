"""topoplan: parallel layouts for LLM fine-tuning on GPU clusters, ranked by predicted memory and speed.

spec = topoplan.load_spec("cluster_specs/h100-4x8.yaml")
result = topoplan.rank(spec)                        # .plans, .rejected, .counts
plan = topoplan.predict(spec, layout={"tp": 4, "pp": 1})
bundle = topoplan.generate(spec, result.plans[0])   # {relative path: text}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from topoplan.bundle.bundle import generate
    from topoplan.errors import (
        HostError,
        InputError,
        LayoutError,
        ModelError,
        NoLayoutFitsError,
        OutputError,
        SpecError,
        TopoplanError,
        UnitError,
    )
    from topoplan.planner.predict import predict
    from topoplan.planner.search import rank
    from topoplan.specs.load import load_spec

__version__ = "0.1.0"

__all__ = [
    "HostError",
    "InputError",
    "LayoutError",
    "ModelError",
    "NoLayoutFitsError",
    "OutputError",
    "SpecError",
    "TopoplanError",
    "UnitError",
    "__version__",
    "generate",
    "load_spec",
    "predict",
    "rank",
]

# Exported functions -> modules, imported on first use so that `import topoplan` and `topoplan --help` stay fast.
_HOME = {
    "generate": "topoplan.bundle.bundle",
    "load_spec": "topoplan.specs.load",
    "predict": "topoplan.planner.predict",
    "rank": "topoplan.planner.search",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOME.get(name, "topoplan.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
