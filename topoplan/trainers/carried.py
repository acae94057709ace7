"""What of a person's file goes along with its job, whichever plan is taken, beside what memory and speed depend on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topoplan.reading.values import Keys
from topoplan.specs.job import Job


def common(keys: Keys, _: Job) -> Mapping[str, Any]:
    """Keys of a spec's job that transformers' trainers name alike."""
    names = keys.value("dataset")
    found: dict[str, Any] = {
        "dataset": ",".join(map(str, names)) if isinstance(names, list) else names,
        "learning_rate": keys.number("learning_rate"),
        "epochs": keys.number("num_train_epochs"),
    }
    return {key: value for key, value in found.items() if value is not None}
