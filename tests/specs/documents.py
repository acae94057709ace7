"""Small run documents, for checks across several values."""

from typing import Any

import pytest

from topoplan.errors import InputError
from topoplan.specs.load import spec_from_document
from topoplan.specs.spec import Spec

JOB = {"seq_len": 4096, "global_batch_size": 64}
BOX = {"gpu": "h100-sxm-80gb", "nodes": 4, "gpus_per_node": 8, "nvlink_bandwidth": "900GB/s", "ib_bandwidth": "400Gb/s"}
QWEN = "Qwen/Qwen3-8B"


def spec_of(cluster: dict[str, Any], model: str = QWEN, **job: Any) -> Spec:
    return spec_from_document({"cluster": cluster, "model": {"name": model}, "job": {**JOB, **job}}, where="run:1")


def refusal(cluster: dict[str, Any], model: str = QWEN, *, kind: type[InputError] = InputError, **job: Any) -> str:
    """Return the error message about a document, without the document's name."""
    with pytest.raises(kind) as error:
        spec_of(cluster, model, **job)
    assert str(error.value).startswith("run:1: ")
    return str(error.value).removeprefix("run:1: ")
