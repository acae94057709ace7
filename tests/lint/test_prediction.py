"""The keys that lead from a configuration to the best plan of its backend."""

import pytest

from tests.reading.setups import all_of, configuration, swift_zero2
from topoplan.lint.compare import predict_configuration
from topoplan.lint.prediction import Prediction
from topoplan.lint.prediction_target import PredictionTarget
from topoplan.specs.cluster import Cluster


def test_changes_lead_to_the_best_plan_of_the_same_backend(a100s: Cluster) -> None:
    text = (
        "model_name_or_path: Qwen/Qwen3-8B\nstage: sft\nfinetuning_type: full\nbf16: true\n{}"
        "per_device_train_batch_size: {}\ngradient_accumulation_steps: {}\ndisable_gradient_checkpointing: {}\n"
    )
    one = configuration(text.format("deepspeed: ds_z3_offload_config.json\n", 1, 4, "false"))
    prediction, _ = predict_configuration(one, all_of(one), PredictionTarget(cluster=a100s))
    keys = {change.key: change.best for change in prediction.changes}
    assert keys["deepspeed"] == "ds_z2_config.json"
    assert keys["disable_gradient_checkpointing"] is True

    better = configuration(
        text.format(
            "deepspeed: ds_z2_config.json\n",
            keys.get("per_device_train_batch_size", 1),
            keys.get("gradient_accumulation_steps", 4),
            "true",
        )
    )
    again, _ = predict_configuration(better, all_of(better), PredictionTarget(cluster=a100s))
    assert again.plan.tokens_per_s_per_gpu == pytest.approx(prediction.best_of_backend.tokens_per_s_per_gpu)
    assert again.changes == ()


def test_ms_swift_has_names_of_its_own(a100s: Cluster) -> None:
    one, where = swift_zero2(model="Qwen/Qwen3-8B", deepspeed="zero3_offload", max_length=2048)
    prediction, _ = predict_configuration(one, where, PredictionTarget(cluster=a100s))

    keys = {change.key: (change.now, change.best) for change in prediction.changes}
    assert keys["deepspeed"] in (("zero3_offload", "zero1"), ("zero3_offload", "zero2"))
    assert keys["gradient_checkpointing"] == (True, False)


def test_without_a_plan_nothing_changes() -> None:
    assert Prediction(configuration=configuration("a: 1\n")).changes == ()
    assert Prediction(configuration=configuration("a: 1\n")).speedup is None
