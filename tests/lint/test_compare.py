"""A configuration compared with the best plan of its job."""

from typing import Any

import pytest

from tests.reading.setups import FULL_YAML, all_of, configuration, launch, mca, setup_of
from tests.samples import no_search
from topoplan.lint.compare import predict_configuration
from topoplan.lint.prediction import Prediction
from topoplan.lint.prediction_findings import A_LITTLE_FASTER
from topoplan.lint.prediction_target import PredictionTarget
from topoplan.planner.plan import Ranking
from topoplan.planner.search import rank
from topoplan.reading.finding import Finding
from topoplan.reading.setup import Configuration, Setup
from topoplan.specs.cluster import Cluster
from topoplan.specs.load import load_cluster, load_spec
from topoplan.specs.source import parse_value
from topoplan.specs.spec import Spec
from topoplan.trainers.llamafactory.mca import trainer_file


@pytest.fixture(scope="module")
def one_node() -> Cluster:
    return load_cluster("cluster_specs/h100-4x8.yaml", overrides=["nodes=1"])


@pytest.fixture(scope="module")
def article(h100s: Cluster) -> tuple[Prediction, dict[str, Finding]]:
    return compared(configuration(FULL_YAML), h100s)


@pytest.fixture(scope="module")
def ranking() -> Ranking:
    return rank(load_spec("cluster_specs/h100-4x8.yaml", overrides=["nodes=1"]))


def compared(
    one: Configuration, cluster: Cluster | None, where: Setup | None = None, **options: Any
) -> tuple[Prediction, dict[str, Finding]]:
    prediction, found = predict_configuration(one, where or all_of(one), PredictionTarget(cluster=cluster, **options))
    return prediction, {finding.rule: finding for finding in found}


def test_the_articles_scheme_fits_and_is_slower_than_the_best_plan(
    article: tuple[Prediction, dict[str, Finding]],
) -> None:
    prediction, found = article

    assert prediction.best is not None
    assert prediction.plan.id == "tp4-pp1-dp8-mbs1-nosp"
    assert prediction.plan.fits
    assert prediction.speedup is not None
    assert prediction.speedup > 1.15
    assert found.keys() == {"plan-slower"}
    finding = found["plan-slower"]
    assert finding.severity == "warning"
    assert finding.what == f"the best plan for this job on these GPUs is {prediction.speedup - 1:.0%} faster"
    assert (
        prediction.best.layout.dp
        * prediction.best.layout.micro_batch_size
        * (prediction.best.layout.gradient_accumulation_steps)
        == 64
    )  # the global batch is kept


def test_the_remedy_leads_to_the_best_plan_when_it_is_typed(
    h100s: Cluster, article: tuple[Prediction, dict[str, Finding]]
) -> None:
    prediction, found = article
    assert prediction.best is not None
    keys = dict(one.split(": ") for one in found["plan-slower"].remedy.removeprefix("set ").split(", "))
    changed = dict(configuration(FULL_YAML).source.data)
    changed |= {key: parse_value(value, name="") for key, value in keys.items()}
    text = "".join(
        f"{key}: {str(value).lower() if isinstance(value, bool) else value}\n" for key, value in changed.items()
    )

    again, left = compared(configuration(text), h100s)

    assert again.plan.layout == prediction.best.layout
    assert left == {}
    assert again.changes == ()
    # the fused rotary embedding has no kernel for micro-batches of multimodal positions
    assert keys["apply_rope_fusion"] == "false"


def test_the_plan_that_generate_writes_is_found_to_be_right(ranking: Ranking) -> None:
    one = configuration(trainer_file(ranking.spec, ranking.plans[0].layout).text)
    prediction, found = compared(one, ranking.spec.cluster)

    assert found == {}
    assert prediction.speedup == pytest.approx(1.0)


def test_what_does_not_fit_is_an_error_with_the_stage_and_the_gib(h100s: Cluster) -> None:
    one = mca(model_name_or_path="Qwen/Qwen2.5-72B", tensor_model_parallel_size=8, cutoff_len=8192)
    prediction, found = compared(one, h100s)

    finding = found["plan-does-not-fit"]
    assert finding.severity == "error"
    assert finding.what.startswith("does not fit: stage 0 needs ")
    assert "GiB too much" in finding.what
    assert not prediction.plan.fits
    assert prediction.best.fits
    assert " pipeline_model_parallel_size: " in finding.remedy
    assert "plan-slower" not in found


def test_an_illegal_layout_has_no_plan_and_still_a_best_one(one_node: Cluster) -> None:
    prediction, _ = compared(mca(expert_model_parallel_size=2), one_node)

    assert prediction.plan is None
    assert prediction.reason.startswith("the layout breaks rule experts")
    assert prediction.best is not None
    assert prediction.changes


def test_degrees_that_leave_the_batch_open_are_compared_with_nothing(one_node: Cluster) -> None:
    """The accumulations are of two replicas and a third of another: no plan has the batch of the file."""
    prediction, found = compared(mca(tensor_model_parallel_size=3), one_node, search=no_search)

    assert "layout-world-size" in found
    assert prediction.reason.startswith("the layout breaks rule world-size")
    assert (prediction.translation, prediction.best, prediction.no_best) == (None, None, "")


def test_a_job_that_fits_nowhere_is_said_once() -> None:
    small = load_cluster("cluster_specs/rtx4090-2x8-pcie.yaml", overrides=["nodes=1"])
    one = mca(model_name_or_path="Qwen/Qwen2.5-72B", tensor_model_parallel_size=8, use_distributed_optimizer=True)
    prediction, found = compared(one, small)

    assert found.keys() == {"plan-does-not-fit"}
    assert found["plan-does-not-fit"].severity == "error"
    assert "nothing else fits on these GPUs" in found["plan-does-not-fit"].remedy
    assert prediction.best is None
    assert prediction.changes == ()


def test_small_gains_are_not_worth_a_word(ranking: Ranking) -> None:
    second = next(plan for plan in ranking.plans[1:] if plan.layout.recompute.granularity == "none")
    one = configuration(trainer_file(ranking.spec, second.layout).text)
    prediction, found = compared(one, ranking.spec.cluster)

    assert prediction.speedup is not None
    assert ("plan-slower" in found) == (prediction.speedup - 1 >= A_LITTLE_FASTER)


@pytest.mark.parametrize(
    ("options", "severity"),
    [({"nnodes": "8", "nproc_per_node": "8"}, "error"), ({"nproc_per_node": "8"}, "note")],
)
def test_a_command_for_another_cluster_is_told(h100s: Cluster, options: dict[str, str], severity: str) -> None:
    one = mca(use_distributed_optimizer=True)
    start = launch("llamafactory-cli", "train", "train.yaml", options=options)
    prediction, found = compared(one, h100s, all_of(one, launches=(start,)), search=no_search)

    finding = found["launch-other-cluster"]
    assert (finding.severity, finding.part, finding.line) == (severity, start.part, 3)
    assert finding.what.endswith("and h100-4x8 has 4 x 8")
    assert prediction.plan.layout.world_size == (32 if severity == "error" else 8)


@pytest.mark.parametrize(
    ("cluster", "keys", "what", "remedy"),
    [
        ("a100-1x8", {"fp8": "e4m3", "fp8_recipe": "delayed"}, "has no fp8", "remove fp8 and fp8_recipe"),
        ("v100", {"bf16": "true"}, "has no bf16", "set fp16: true in place of bf16"),
    ],
)
def test_a_precision_that_the_card_lacks_is_told_in_the_files_own_keys(
    cluster: str, keys: dict[str, str], what: str, remedy: str
) -> None:
    overrides = ["gpu=v100-sxm-32gb"] if cluster == "v100" else []
    _, found = compared(mca(**keys), load_cluster("cluster_specs/a100-1x8.yaml", overrides=overrides))

    finding = found["trainer-refuses"]
    assert what in finding.what
    assert finding.remedy == remedy
    assert finding.line is not None


def test_a_model_that_the_trainer_does_not_take_is_an_error(h100s: Cluster) -> None:
    prediction, found = compared(mca(model_name_or_path="openai/gpt-oss-20b"), h100s)

    assert found["trainer-refuses"].severity == "error"
    assert "gpt_oss" in found["trainer-refuses"].what
    assert prediction.plan is None


def test_too_few_samples_for_a_step_are_an_error(one_node: Cluster) -> None:
    one = mca(dataset="a", max_samples=100, gradient_accumulation_steps=2, use_distributed_optimizer=True)
    _, found = compared(one, one_node, search=no_search)

    assert found["samples-below-batch"].what == "100 samples at most, and one step needs 128"
    assert found["samples-below-batch"].severity == "error"


def test_what_cannot_be_read_has_a_reason_and_no_finding(one_node: Cluster) -> None:
    prediction, found = compared(mca(model_name_or_path="/data/final"), one_node)

    assert found == {}
    assert "was not found" in prediction.reason
    named, _ = compared(mca(model_name_or_path="/data/final"), one_node, model="Qwen/Qwen3-8B", search=no_search)
    assert named.plan is not None


def test_without_a_cluster_nothing_is_searched() -> None:
    def search(spec: Spec) -> Ranking:
        raise AssertionError(spec)

    prediction, found = compared(configuration(FULL_YAML), None, search=search)

    assert found == {}
    assert prediction.plan is None


def test_the_best_plan_of_samples_kept_apart_can_be_written(h100s: Cluster) -> None:
    prediction, _ = compared(mca(neat_packing=True, cutoff_len=65536, use_distributed_optimizer=True), h100s)

    assert prediction.best.layout.cp == 1
    assert prediction.changes


def test_tensor_parallel_across_nodes_is_a_warning_of_the_files_alone(h100s: Cluster) -> None:
    command = "NNODES={} NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-32B --dataset a --max_length 4096{}"
    for nodes, degree, expected in ((4, 16, ["warning"]), (4, 8, []), ("$N", 16, [])):
        where = setup_of(command.format(nodes, f" --tensor_model_parallel_size {degree}"))
        prediction, found = compared(where.configurations[0], None, where)
        told = [one for one in found.values() if one.rule == "layout-tp-in-nvlink-domain"]
        assert [one.severity for one in told] == expected
    where = setup_of(command.format(4, " --tensor_model_parallel_size 16"))
    prediction, _ = compared(where.configurations[0], h100s, where)
    assert prediction.reason.startswith("layouts outside rule tp-in-nvlink-domain run, but are not predicted: tp 16 >")
