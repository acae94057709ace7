"""Recognition of Trinity-RFT's files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topoplan.reading.recognizer import SURE, Recognizer

_BLOCKS = frozenset(["algorithm", "buffer", "cluster", "explorer", "model", "monitor", "synchronizer", "trainer"])


def _claim(data: Mapping[str, Any], _known: int) -> float:
    if "actor_rollout_ref" in data:
        return 0.0  # a file of verl itself; Trinity-RFT has this key under trainer.trainer_config
    model = data.get("model")
    blocks = {key for key in _BLOCKS & data.keys() if isinstance(data[key], dict)}
    return SURE if len(blocks) >= 2 or (isinstance(model, dict) and "model_path" in model) else 0.0


TRINITY = Recognizer(
    trainer="trinity",
    package="trinity-rft",
    claim=_claim,
    model_keys=("model.model_path",),
    names=("trinity",),
    rule_name_of=lambda text, module: (
        "trinity" if text == "trinity" or (module and text == "trinity.cli.launcher") else ""
    ),
    programs="trinity",
    command="trinity",
    methods="run",
    file_options=("config",),
    program_substring="trinity",
)
