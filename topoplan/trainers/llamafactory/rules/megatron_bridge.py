"""What LLaMA-Factory's Megatron Bridge path (USE_MEGATRON_BRIDGE=1) refuses or does contrary to expectation.

Sources, at LLaMA-Factory main of August 2026 (0.9.6.dev0, ff6d4d12e): `hparams/parser.py`
(`_validate_megatron_bridge_parallel_args`, get_train_args), `hparams/megatron_bridge_args.py`,
`train/megatron_bridge/workflow.py` and `config_builder.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from topoplan.catalog.packages import releases
from topoplan.reading.finding import Finding
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import flag
from topoplan.trainers.llamafactory.key_list import templates
from topoplan.trainers.llamafactory.reading import MODEL_KEY
from topoplan.trainers.llamafactory.rules.table import RULES
from topoplan.trainers.models import model_at_hand
from topoplan.units import shown


def bridge_findings(setup: Setup, configuration: Configuration) -> Iterator[Finding]:
    """Report on a configuration that Megatron Bridge trains, or that asks for it."""
    switch = "use_megatron_bridge"
    if setup.training_path(configuration) != "bridge":
        if flag(configuration, switch) and setup.training_path(configuration) == "plain":
            yield RULES["bridge-not-asked-for"].at(configuration, switch)
        return
    yield RULES["bridge-not-judged"].at(
        configuration, switch if switch in configuration.source.data else None, release=releases()[-1].name
    )
    model = model_at_hand(configuration.get(MODEL_KEY), configuration.part)
    if model is not None and model.model_type not in templates().bridge_model_types:
        yield RULES["bridge-model-type"].at(
            configuration,
            "model_name_or_path",
            model_type=model.model_type,
            model_types=", ".join(templates().bridge_model_types),
        )
    target = configuration.get("lora_target")
    if target not in (None, "all") and configuration.get("finetuning_type", "lora") == "lora":
        yield RULES["bridge-lora-target"].at(configuration, "lora_target", target=shown(target))
