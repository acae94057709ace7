"""Keys of a user's file that go along with its job whatever plan is chosen, since memory and speed ignore them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from topoplan.specs.job import Job

if TYPE_CHECKING:
    from topoplan.reading.values import Keys


def common(keys: Keys, _: Job) -> Mapping[str, Any]:
    """Return the keys of a spec's job that transformers' trainers share."""
    names = keys.value("dataset")
    found: dict[str, Any] = {
        "dataset": ",".join(map(str, names)) if isinstance(names, list) else names,
        "learning_rate": keys.number("learning_rate"),
        "epochs": keys.number("num_train_epochs"),
    }
    return {key: value for key, value in found.items() if value is not None}
