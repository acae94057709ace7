"""Findings on predictions."""

import re
from dataclasses import replace

import pytest

from tests.reading.setups import all_of, configuration, launch
from topoplan.lint.compare import predict_configuration
from topoplan.lint.prediction import Prediction
from topoplan.lint.prediction_findings import prediction_findings, process_findings
from topoplan.lint.prediction_target import PredictionTarget
from topoplan.reading.finding import Finding
from topoplan.reading.processes import Processes
from topoplan.specs.cluster import Cluster

TEXT = (
    "model_name_or_path: Qwen/Qwen3-8B\nstage: sft\nfinetuning_type: full\nbf16: true\n"
    "deepspeed: ds_z3_config.json\nper_device_train_batch_size: {}\n"
)


def told(cluster: Cluster, micro_batch: int, more: str = "") -> tuple[Prediction, dict[str, Finding]]:
    one = configuration(TEXT.format(micro_batch) + more)
    prediction, findings = predict_configuration(one, all_of(one), PredictionTarget(cluster=cluster))
    return prediction, {finding.rule: finding for finding in findings}


def test_what_another_backend_gains_is_told_beside_the_own_one(a100s: Cluster) -> None:
    prediction, found = told(a100s, 1)
    finding = found["plan-slower"]

    assert prediction.best.layout.backend == "mca"
    assert f"{prediction.best.id} (backend mca) instead of zero3-dp8-mbs1-full" in finding.why
    assert f"the best with deepspeed is {prediction.best_of_backend.id}" in finding.why
    assert "set deepspeed: ds_z" in finding.remedy
    assert "`topoplan generate --pin backend=mca`" in finding.remedy


def test_the_best_of_its_backend_is_not_told_to_change(a100s: Cluster) -> None:
    prediction, _ = told(a100s, 1)
    same = replace(prediction, plan=prediction.best_of_backend)
    (finding,) = prediction_findings(same)

    assert finding.rule == "plan-slower"
    assert finding.why.endswith("with deepspeed none is faster than this one")
    assert finding.remedy.startswith("`topoplan generate --pin backend=mca`")


def test_a_best_plan_of_the_same_id_is_not_told_to_replace_itself(a100s: Cluster) -> None:
    prediction, _ = told(a100s, 1)
    assert prediction.plan is not None
    faster = replace(prediction.plan, tokens_per_s_per_gpu=2 * prediction.plan.tokens_per_s_per_gpu)
    (finding,) = prediction_findings(replace(prediction, best=faster, best_of_backend=faster))

    assert finding.why.startswith(f"{faster.id} with other switches, with the same global batch")


def test_what_does_not_fit_has_its_parts_and_the_keys_that_do(a100s: Cluster) -> None:
    prediction, found = told(a100s, 32, "disable_gradient_checkpointing: true\ncutoff_len: 8192\n")
    finding = found["plan-does-not-fit"]

    assert prediction.plan is not None
    assert (finding.severity, finding.line) == ("warning", 5)
    assert ": with 8,192 a GPU needs " in finding.what
    # ZeRO-3 on 8 cards: 2, 2 and 12 bytes for each of 8.19e9 parameters
    assert "1.9 GiB weights, 1.9 GiB gradients, 11.4 GiB optimizer" in finding.why
    assert " fits on these GPUs: set deepspeed: ds_z2_config.json" in finding.remedy
    assert "plan-slower" not in found


def test_samples_of_any_length_are_told_up_to_which_they_fit(a100s: Cluster) -> None:
    _, found = told(a100s, 32, "disable_gradient_checkpointing: true\ncutoff_len: 8192\n")
    longest = int(re.findall(r"may not fit above ([\d,]+) tokens", found["plan-does-not-fit"].what)[0].replace(",", ""))

    assert (
        "plan-does-not-fit" not in told(a100s, 32, f"disable_gradient_checkpointing: true\ncutoff_len: {longest}\n")[1]
    )
    _, over = told(a100s, 32, f"disable_gradient_checkpointing: true\ncutoff_len: {longest + 8}\n")
    assert over["plan-does-not-fit"].severity == "warning"


@pytest.mark.parametrize(
    ("keys", "gpus", "severity", "words"),
    [
        ("packing: true\ncutoff_len: 8192\n", 8, "error", "does not fit: "),  # every sequence is full
        ("cutoff_len: 512\n", 1, "error", "does not fit: "),  # the states alone exceed the memory
        ("packing: true\ncutoff_len: 512\n", 8, "warning", "may not fit: "),  # within the prediction's error band
    ],
)
def test_it_is_an_error_where_even_the_least_is_over(
    a100s: Cluster, keys: str, gpus: int, severity: str, words: str
) -> None:
    cluster = replace(a100s, gpus_per_node=gpus, nvlink_domain_gpus=gpus)
    finding = told(cluster, 16, f"disable_gradient_checkpointing: true\n{keys}")[1]["plan-does-not-fit"]

    assert (finding.severity, finding.what[: len(words)]) == (severity, words)
    assert "how long the samples are" not in finding.why


@pytest.mark.parametrize(
    ("gpus", "severity", "remedy"),
    [(5, "note", "start 1 node with 8 processes"), (16, "error", "start 1 node with 8 processes")],
)
def test_other_numbers_of_processes_are_told(a100s: Cluster, gpus: int, severity: str, remedy: str) -> None:
    (finding,) = process_findings(Processes(launch=launch(), nodes=1, gpus_per_node=gpus), a100s)

    assert (finding.rule, finding.severity) == ("launch-other-cluster", severity)
    assert finding.remedy.startswith(remedy)
    assert list(process_findings(Processes(launch=launch(), nodes=1, gpus_per_node=8), a100s)) == []
