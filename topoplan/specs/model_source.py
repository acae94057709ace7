"""Find a model: in the catalog, in a local directory or file, or on the Hugging Face hub."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from topoplan import catalog
from topoplan.errors import ModelError, SpecError
from topoplan.specs import known
from topoplan.specs.config_json import model_from_config
from topoplan.specs.json_source import json_value
from topoplan.specs.model import Model
from topoplan.specs.source import MAX_SPEC_BYTES, below, is_held, is_there, read_text

_PAGE = re.compile(r"https?://[^/]+/(?:models/)?(?P<id>[^/?#]+/[^/?#]+)")
"""The web page of a model on a hub."""
_EXPECTED = "expected a Hugging Face config.json"


def _read_config(path: Path, name: str) -> Mapping[str, Any]:
    """Read the object in a config.json; `name` names the file in messages."""
    try:
        config = json_value(read_text(path, most_bytes=MAX_SPEC_BYTES), name=name)
    except SpecError as error:
        raise ModelError(error.what, where=error.where, expected=_EXPECTED) from None
    if not isinstance(config, dict):
        raise ModelError("is not a JSON object", where=name, expected=_EXPECTED)
    return config


def _name_in(config: Mapping[str, Any]) -> str:
    """Return the name of a model without a directory: the one recorded when its config was saved."""
    saved = config.get("_name_or_path")
    return (saved.rstrip("/").rpartition("/")[2] if isinstance(saved, str) else "") or "model"


# Timeout of the hub's first answer, so that a machine without a network does not keep the user waiting.
_HUB_TIMEOUT_S = 5.0


def _download_config(reference: str) -> Path | str:
    """Return the hub's config.json in the local cache, or why there is none."""
    try:
        import urllib.error  # imported late: slower to import than everything else together
        import urllib.request

        import huggingface_hub as hub  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return "huggingface_hub is not installed, so the hub was not asked"
    try:
        cached = hub.try_to_load_from_cache(reference, "config.json")
        if isinstance(cached, str):
            return Path(cached)
        if not hub.constants.HF_HUB_OFFLINE:
            # The client retries a failed request for 20 s or more; one plain request first shows whether the hub
            # answers.
            request = urllib.request.Request(hub.constants.ENDPOINT, method="HEAD")
            with contextlib.suppress(urllib.error.HTTPError):  # any answer shows that the hub is reachable
                urllib.request.urlopen(request, timeout=_HUB_TIMEOUT_S).close()
        return Path(hub.hf_hub_download(reference, "config.json", etag_timeout=_HUB_TIMEOUT_S))
    except Exception as error:  # the client passes on errors of several HTTP libraries
        said = str(getattr(error, "reason", error)).strip().splitlines()
        reason = said[0].rstrip(".") if said else type(error).__name__
        return f"the Hugging Face hub did not give its config.json ({reason})"


def load_model(reference: str, *, base: Path, default_positions: int | None = None) -> Model:
    """Load the model that a spec names: a catalog name, a directory with config.json, a config file, or a hub id.

    Relative paths start at `base`, the directory of the spec file. The hub is tried last, and only if huggingface_hub
    is installed; what is in its cache is not requested again. Raises ModelError, which says what was tried.
    """
    if not reference.strip():
        raise ModelError("no model is named", expected="expected a catalog name, a directory or a config.json")
    if match := _PAGE.match(reference):
        what, remedy = f"{reference!r} is the address of a page", f"write {match['id']}"
        raise ModelError(what, expected="expected a name, a directory or a config.json", remedy=remedy)
    if catalog.knows_model(reference):
        return known.model(reference)
    path = below(base, reference)
    file = path / "config.json" if is_there(path, Path.is_dir) else path
    if is_there(file):
        directory, where = (None, file.name) if is_held(file) else (file.parent.resolve(), str(file))
        config = _read_config(file, where)
        name = _name_in(config) if directory is None else directory.name
        return model_from_config(
            config,
            name=name if file.name == "config.json" else file.stem,
            where=where,
            default_positions=default_positions,
            config_path=None if directory is None else str(directory),
        )
    if file != path:
        raise ModelError("has no config.json", where=str(path), expected="expected a Hugging Face model directory")
    if reference.endswith(".json") or reference.startswith((".", "/", "~")) or reference.count("/") > 1:
        raise ModelError(f"model {reference!r} was not found", where=str(file), expected="expected an existing file")
    unknown = catalog.unknown_model(reference)
    if reference.count("/") != 1:
        raise unknown
    answer = _download_config(reference)
    if isinstance(answer, str):
        tried = f"there is no directory {path}, and {answer}"
        expected = "; ".join(filter(None, (unknown.expected, tried)))
        raise ModelError(unknown.what, expected=expected, remedy="download the model's config.json and give its path")
    return model_from_config(
        _read_config(answer, str(answer)),
        name=reference,
        where=f"{reference}/config.json",
        default_positions=default_positions,
    )
