"""Where a model comes from: the catalog, a directory or file on this machine, or the Hugging Face hub."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from topoplan import catalog
from topoplan.errors import ModelError
from topoplan.specs.config_json import model_from_config
from topoplan.specs.model import Model
from topoplan.specs.source import below


def _read_config(path: Path) -> Mapping[str, Any]:
    """The object in a config.json."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is not UTF-8 text"
        raise ModelError(
            f"cannot be read: {reason}", where=str(path), expected="expected a Hugging Face config.json"
        ) from None
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ModelError(
            f"is not JSON: {error.msg}", where=f"{path}:{error.lineno}", expected="expected a Hugging Face config.json"
        ) from None
    except RecursionError:
        raise ModelError("is not JSON: nested too deep", where=str(path)) from None
    if not isinstance(config, dict):
        raise ModelError("is not a JSON object", where=str(path), expected="expected a Hugging Face config.json")
    return config


def _exists(path: Path) -> bool:
    """Whether there is something to read at `path`; a path that the system refuses to look up is not there."""
    try:
        return path.exists()
    except OSError:
        return False


# Seconds to wait for the hub's first answer; a machine without a network must not keep the user waiting.
_HUB_TIMEOUT_S = 5.0


def _download_config(reference: str) -> Path | str:
    """The hub's config.json in the local cache, or why there is none."""
    try:
        import urllib.error  # only here: they cost more to import than all the rest
        import urllib.request

        import huggingface_hub as hub  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return "huggingface_hub is not installed, so the hub was not asked"
    try:
        cached = hub.try_to_load_from_cache(reference, "config.json")
        if isinstance(cached, str):
            return Path(cached)
        if not hub.constants.HF_HUB_OFFLINE:
            # The client repeats a failed request for 20 s and more; one bare request tells whether to let it.
            request = urllib.request.Request(hub.constants.ENDPOINT, method="HEAD")
            with contextlib.suppress(urllib.error.HTTPError):  # an answer, whatever it says
                urllib.request.urlopen(request, timeout=_HUB_TIMEOUT_S).close()
        return Path(hub.hf_hub_download(reference, "config.json", etag_timeout=_HUB_TIMEOUT_S))
    except Exception as error:  # the client lets through errors of several HTTP libraries
        said = str(getattr(error, "reason", error)).strip().splitlines()
        reason = said[0].rstrip(".") if said else type(error).__name__
        return f"the Hugging Face hub did not give its config.json ({reason})"


def load_model(reference: str, *, base: Path, default_positions: int | None = None) -> Model:
    """The model that a spec names: of the catalog, a directory with config.json, such a file, or a hub id.

    Relative paths start at `base`, the directory of the spec file. The hub is asked last, and only where
    huggingface_hub is installed; what its cache has is not asked for again. Raises ModelError, which says what was
    tried.
    """
    if not reference.strip():
        raise ModelError("no model is named", expected="expected a catalog name, a directory or a config.json")
    if catalog.knows_model(reference):
        return catalog.model(reference)
    path = below(base, reference)
    is_directory = _exists(path) and path.is_dir()
    file = path / "config.json" if is_directory else path
    if is_directory and not _exists(file):
        raise ModelError("has no config.json", where=str(path), expected="expected a Hugging Face model directory")
    if _exists(file):
        directory = file.parent.resolve()
        name = directory.name if file.name == "config.json" else file.stem
        return model_from_config(
            _read_config(file),
            name=name,
            where=str(file),
            default_positions=default_positions,
            config_path=str(directory),
        )
    if reference.endswith(".json") or reference.startswith((".", "/", "~")) or reference.count("/") > 1:
        raise ModelError(f"model {reference!r} was not found", where=str(file), expected="expected an existing file")
    unknown = catalog.unknown_model(reference)
    if reference.count("/") != 1:
        raise unknown
    answer = _download_config(reference)
    if isinstance(answer, str):
        raise ModelError(
            unknown.what,
            expected="; ".join(
                part for part in (unknown.expected, f"there is no directory {path}, and {answer}") if part
            ),
            remedy="download the model's config.json and give its path",
        )
    return model_from_config(
        _read_config(answer), name=reference, where=f"{reference}/config.json", default_positions=default_positions
    )
