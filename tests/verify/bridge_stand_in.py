"""A stand-in for mcore_bridge, which imports kernels of Transformer Engine: every name in it is an empty class."""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import torch


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Anything(name, (_Base,), {})


class _Base(torch.nn.Module):
    def __init__(self, *words: Any, **named: Any) -> None:
        super().__init__()

    def forward(self, *words: Any, **named: Any) -> Any:
        return self


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] == "mcore_bridge":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module: Any = types.ModuleType(spec.name)
        module.__version__ = metadata.version("mcore-bridge")

        def anything(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            made = _Anything(name, (_Base,), {})
            setattr(module, name, made)
            return made

        module.__getattr__ = anything
        found: types.ModuleType = module
        return found

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """Replace mcore_bridge by the stand-in in this process."""
    sys.meta_path.insert(0, _StandIn())
