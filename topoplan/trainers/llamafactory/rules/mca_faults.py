"""Known faults of packages that the layouts of LLaMA-Factory's Megatron path meet."""

from __future__ import annotations

from collections.abc import Iterator

from topoplan.reading.finding import Finding
from topoplan.reading.setup import Setup
from topoplan.trainers.fault_rules import fault_findings
from topoplan.trainers.llamafactory.fewest_gpus import UNKNOWN_MODEL, spec_and_layout
from topoplan.trainers.llamafactory.reading import MODEL_KEY
from topoplan.trainers.models import model_at_hand


def findings(setup: Setup) -> Iterator[Finding]:
    """Those of each configuration, on the fewest GPUs that its degrees allow."""
    for configuration in setup.of("llamafactory"):
        if setup.uses_mca(configuration):
            model = model_at_hand(configuration.get(MODEL_KEY), configuration.part)
            asked = spec_and_layout(configuration, model or UNKNOWN_MODEL)
            if asked is not None:
                yield from fault_findings(setup, configuration, *asked)
