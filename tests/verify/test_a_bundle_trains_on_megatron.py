"""Train with train.yaml, as written for a layout, in LLaMA-Factory on Megatron: mcore_adapter's own loop, models of 0.2
to 0.4 million parameters, one to four processes over Gloo.

`ON_THE_CPU` holds the changes to the file, and megatron_on_cpu.py replaces CUDA. A test whose name says that something
goes wrong expects the fault: if it fails after an update, upstream has fixed it, and the rule or warning that keeps
users from it can be narrowed to older versions. docs/versions.md lists the behavior of each version.
"""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest
import yaml

from tests.verify.llamafactory import ROOT, need_llamafactory
from tests.verify.test_a_bundle_trains import make_data, make_model
from topoplan.bundle.bundle import generate
from topoplan.bundle.trials_job import trial_draft
from topoplan.engines.megatron.states import stage_parameters
from topoplan.planner.plan import Plan
from topoplan.planner.predict import predict
from topoplan.specs.load import spec_from_document
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of


def version_of(package: str) -> tuple[int, int]:
    """Return the major and minor version; (0, 0) if the package is not installed."""
    try:
        major, minor, *_ = importlib.metadata.version(package).split(".")
    except importlib.metadata.PackageNotFoundError:
        return 0, 0
    return int(major), int(minor)


pytestmark = [
    pytest.mark.verify,
    pytest.mark.skipif(sys.platform != "linux", reason="forks after importing the trainer"),
    pytest.mark.skipif(
        importlib.util.find_spec("mcore_adapter") is None,
        reason="mcore_adapter is not installed: make verify-llamafactory MCORE_ADAPTER=ROLL/mcore_adapter",
    ),
]
old_megatron = pytest.mark.skipif(
    version_of("megatron-core") < (0, 18),
    reason="megatron-core below 0.18 frees what a stage is still sending: the test of that",
)
new_torch = pytest.mark.skipif(
    version_of("torch") >= (2, 12), reason="no checkpoint can be saved with torch 2.12 or newer: the test of that"
)

SAMPLES = 24
STEPS = 6
TOLERANCE = 0.005
"""Tolerance of a loss, because bf16 numbers are summed in another order; the losses fall by more than 1."""

ON_THE_CPU = {
    "use_cpu": True,  # otherwise bf16 is refused without a GPU
    "transformer_impl": "local",  # Transformer Engine needs a GPU, and these two need it or their own kernels
    "apply_rope_fusion": False,
    "moe_grouped_gemm": False,
}
NO_CHECKPOINTS = {"save_strategy": "no"}
"""For tests that only look at the losses, so that they run with every torch."""


@dataclass(frozen=True)
class Run:
    """The result of training one train.yaml."""

    spec: Spec
    plan: Plan
    output: Path
    losses: tuple[float, ...]
    """Losses of the optimizer steps in order, including those of an earlier run that was resumed."""
    ranks: tuple[Mapping[str, int], ...]
    """What each process held after its first step, as returned by `held_by` in megatron_on_cpu.py."""


@dataclass(frozen=True)
class Case:
    layout: Mapping[str, Any]
    model: str = "dense"
    keys: Mapping[str, Any] = field(default_factory=NO_CHECKPOINTS.copy)
    global_batch_size: int = 4

    @property
    def single(self) -> str:
        """The name of the run with a single process on the same model and batches."""
        return f"{self.model}-{self.global_batch_size}"

    @property
    def is_steady(self) -> bool:
        """Whether an interleaved pipeline reaches its steady phase, in which sends are overlapped.

        With one micro-batch per stage there is only warm-up (Megatron-LM schedules.py, get_pp_rank_microbatches).
        """
        pp, dp = (self.layout.get(degree, 1) for degree in ("pp", "dp"))
        return self.layout.get("vpp", 1) > 1 and self.global_batch_size > pp * dp


SINGLE = {
    case.single: case
    for case in (*(Case({}, model) for model in ("dense", "tied", "moe")), Case({}, global_batch_size=8))
}
LAYOUTS = {
    "tp2": Case({"tp": 2}),
    "pp2": Case({"pp": 2}),
    "pp2-uneven": Case({"pp": 2, "pipeline_layout": "Et*5|t*3L"}),
    "pp2-vpp2": Case({"pp": 2, "vpp": 2}),
    "pp2-vpp4": Case({"pp": 2, "vpp": 4}),
    "pp2-vpp2-dp2": Case({"pp": 2, "vpp": 2, "dp": 2}),
    "pp2-vpp2-uneven-dp2": Case({"pp": 2, "vpp": 2, "dp": 2, "pipeline_layout": "Et|t*3|t*3|tL"}, global_batch_size=8),
    "pp4-vpp2-one-after-another": Case(
        {"pp": 4, "vpp": 2}, keys={**NO_CHECKPOINTS, "overlap_p2p_comm": False}, global_batch_size=8
    ),
    "dp2": Case({"dp": 2}),
    "tied-pp2": Case({"pp": 2}, "tied"),
    "tied-pp2-vpp2": Case({"pp": 2, "vpp": 2}, "tied"),
    "ep2": Case({"ep": 2, "dp": 2}, "moe"),
    "tp2-ep2": Case({"tp": 2, "ep": 2}, "moe", {**NO_CHECKPOINTS, "save_hf_model": False}),
}


def marks_of(case: Case) -> list[pytest.MarkDecorator]:
    folded = case.layout.get("tp", 1) > 1 and case.layout.get("ep", 1) > 1
    overlapped = case.is_steady and case.keys.get("overlap_p2p_comm", True)
    return [old_megatron] * overlapped + [new_torch] * folded


every_layout = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks_of(case)) for name, case in LAYOUTS.items()]
)


class Train(Protocol):
    def __call__(self, name: str, case: Case, *, ends_in: str = "", keeps_sent: bool = False) -> Run:
        """Train a case; if called again with the same name, resume in its output directory.

        `ends_in` is part of the error of the rank that fails first, if a failure is expected; `keeps_sent` is
        Send.keeps of megatron_on_cpu.py.
        """


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Train]:
    """Train all cases in one process that has imported the trainer."""
    need_llamafactory()
    root = tmp_path_factory.mktemp("megatron")
    make_models(root / "models")
    make_data(root / "data", SAMPLES)
    environment = {
        **os.environ,
        "USE_MCA": "1",
        "DISABLE_VERSION_CHECK": "1",
        "TORCH_COMPILE_DISABLE": "1",  # the fused activation as plain operations, which need no compiler
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HOME": str(root / "cache"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    with (
        (root / "trainer.log").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-m", "tests.verify.megatron_on_cpu"],
            cwd=root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as trainer,
    ):

        def one(name: str, case: Case, *, ends_in: str = "", keeps_sent: bool = False) -> Run:
            spec, plan = planned(root, case)
            folder = root / name
            folder.mkdir(exist_ok=True)
            values = yaml.safe_load(generate(spec, plan)["train.yaml"]) | ON_THE_CPU | case.keys
            values["output_dir"] = str(folder / "saves")
            (folder / "train.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
            for report in folder.glob("*.json"):
                report.unlink()
            request: dict[str, Any] = {"train_yaml": str(folder / "train.yaml"), "processes": spec.cluster.world_size}
            request |= {"folder": str(folder), "keeps_sent": keeps_sent}
            trainer.stdin.write(json.dumps(request) + "\n")
            trainer.stdin.flush()
            answer = trainer.stdout.readline()
            assert answer, (root / "trainer.log").read_text()[-4000:]
            error = json.loads(answer)["error"]
            if (ends_in not in error) if ends_in else error:
                pytest.fail(f"{name} ended in: {error[-4000:] or 'no error'}", pytrace=False)
            reports = sorted(folder.glob("*.json"), key=lambda path: int(path.stem))
            return Run(
                spec=spec,
                plan=plan,
                output=folder / "saves",
                losses=losses_in(folder / "saves" / "trainer_state.json"),
                ranks=tuple(json.loads(path.read_text()) for path in reports),
            )

        yield one
        trainer.stdin.close()


def make_models(root: Path) -> None:
    import transformers

    shape = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
    }
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    for name, config in {
        "dense": transformers.Qwen3Config(**shape, num_hidden_layers=8, tie_word_embeddings=False),
        "tied": transformers.Qwen3Config(**shape, num_hidden_layers=8, tie_word_embeddings=True),
        "moe": transformers.Qwen3MoeConfig(**shape, **experts, num_hidden_layers=4, tie_word_embeddings=False),
    }.items():
        make_model(root / name, config)


def planned(root: Path, case: Case) -> tuple[Spec, Plan]:
    world = 1
    for degree in ("tp", "pp", "dp"):
        world *= case.layout.get(degree, 1)
    document = {
        "cluster": {"gpu": "h100-sxm-80gb", "nodes": 1, "gpus_per_node": world},
        "model": str(root / "models" / case.model),
        "job": {
            "seq_len": 128,
            "global_batch_size": case.global_batch_size,
            "learning_rate": 5e-3,
            "packing": False,
            "dataset": "tiny",
            "dataset_dir": str(root / "data"),
            "samples": SAMPLES,
            "trainer": {
                "max_steps": STEPS,
                "lr_scheduler_type": "constant",
                "dataloader_num_workers": 0,
                "preprocessing_num_workers": 1,
                "ddp_timeout": 200,
            },
        },
    }
    spec = spec_from_document(document, where="a test")
    return spec, predict(spec, case.layout)


def losses_in(state: Path) -> tuple[float, ...]:
    log = json.loads(state.read_text())["log_history"] if state.exists() else []
    return tuple(line["loss"] for line in log if "loss" in line)


@pytest.fixture(scope="module")
def trained(train: Train) -> Callable[[str], Run]:
    """Return the run of a case by its name; it is trained on the first call."""
    done: dict[str, Run] = {}

    def one(name: str) -> Run:
        if name not in done:
            done[name] = train(name, {**SINGLE, **LAYOUTS}[name])
        return done[name]

    return one


@every_layout
def test_a_layout_has_the_losses_of_a_single_process(trained: Callable[[str], Run], name: str) -> None:
    single, split = trained(LAYOUTS[name].single), trained(name)
    assert len(single.losses) == STEPS
    assert single.losses[-1] < single.losses[0] - 1
    assert split.losses == pytest.approx(single.losses, abs=TOLERANCE)


@every_layout
def test_each_rank_holds_what_the_plan_says(trained: Callable[[str], Run], name: str) -> None:
    run = trained(name)
    spec, layout = run.spec, run.plan.layout
    assert len(run.ranks) == layout.world_size
    case = case_of(spec, layout.backend)
    for held in run.ranks:
        stage = held["stage"]
        account = run.plan.memory.by_stage[stage].parts_bytes
        assert held["parameters"] == stage_parameters(case, layout, stage).total
        assert held["weights"] == account["weights"]
        # Tensors start at multiples of 64 elements, and buckets divide by the ranks.
        assert held["gradients"] == pytest.approx(account["gradients"], rel=0.01)
        assert held["gradients"] >= account["gradients"]
        assert held["optimizer"] == pytest.approx(account["optimizer"], rel=0.005)


# Checkpoints ---------------------------------------------------------------------------------------------------------

SAVED = {
    "dp2": Case({"dp": 2}, keys={}),
    "tp2": Case({"tp": 2}, keys={}),
    "pp2-vpp2": Case({"pp": 2, "vpp": 2}, keys={}),
    "ep2": Case({"ep": 2, "dp": 2}, "moe", keys={}),
}


def weights_in(output: Path) -> dict[str, Any]:
    """Return the Hugging Face weights; each stage and each rank of the experts writes separate files."""
    from safetensors.torch import load_file

    return {name: tensor for path in output.glob("*.safetensors") for name, tensor in load_file(path).items()}


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    assert one.keys() == other.keys() != set()
    return [name for name, tensor in one.items() if not tensor.equal(other[name])]


@new_torch
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(case)) for name, case in SAVED.items()])
def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_not_been_interrupted(train: Train, name: str) -> None:
    whole = train(f"saved-{name}", SAVED[name])
    assert len(whole.losses) == STEPS
    weights = weights_in(whole.output)
    *_, earlier, last = sorted(whole.output.glob("checkpoint-*"))
    shutil.rmtree(last)
    again = train(f"saved-{name}", SAVED[name])
    first_step = int(earlier.name.rpartition("-")[2])
    assert 0 < first_step < STEPS
    assert {held["step"] for held in again.ranks} == {first_step}
    assert again.losses == whole.losses
    assert differing(weights, weights_in(again.output)) == []


@pytest.mark.skipif(version_of("torch") < (2, 12), reason="torch below 2.12 takes what the adapter's patch returns")
def test_the_first_checkpoint_ends_in_an_error_with_torch_2_12_and_newer(train: Train) -> None:
    # mcore_adapter patcher.py, patch_torch_validate_global_plan returns a bool; PyTorch issue 187432.
    run = train("first-checkpoint", SAVED["dp2"], ends_in="TypeError: can only join an iterable")
    assert not list(run.output.glob("checkpoint-*/trainer_state.json"))


def test_without_checkpoints_an_overlapped_gather_leaves_a_stale_model(train: Train) -> None:
    # mcore_adapter trainer.py gathers the parameters of the last step in the next one, or before a checkpoint.
    overlapped, plain = (
        train(f"gather-{overlap}", Case({"dp": 2}, keys={**NO_CHECKPOINTS, "overlap_param_gather": overlap}))
        for overlap in (True, False)
    )
    assert overlapped.losses == plain.losses
    weights = weights_in(plain.output)
    assert 0 < len(differing(weights_in(overlapped.output), weights)) < len(weights)


@new_torch
def test_a_gather_that_is_not_overlapped_saves_what_was_trained(train: Train) -> None:
    plain, checkpointed = (
        train(f"trained-{name}", Case({"dp": 2}, keys=keys))
        for name, keys in {"plain": {**NO_CHECKPOINTS, "overlap_param_gather": False}, "checkpointed": {}}.items()
    )
    assert plain.losses == checkpointed.losses
    assert differing(weights_in(plain.output), weights_in(checkpointed.output)) == []


def test_hugging_face_weights_cannot_be_saved_where_etp_differs_from_tp(train: Train) -> None:
    # mcore_adapter models/converter/model_converter.py, _save_moe_hf_state_dict. save_only_model, so that nothing else
    # is saved before.
    keys = {**NO_CHECKPOINTS, "save_hf_model": True, "save_only_model": True}
    error = "gather_tensor_parallel() got an unexpected keyword argument 'is_expert_parallel'"
    train("folded", Case({"tp": 2, "ep": 2}, "moe", keys), ends_in=error)


@new_torch
def test_a_trial_trains_on_made_up_samples_and_saves_nothing_before_its_end(
    train: Train, trained: Callable[[str], Run], tmp_path: Path
) -> None:
    """The trial runs to its end here, at twice its steps, where transformers always saves."""
    known = trained("dp2")
    files = trial_draft(known.spec, known.plan, STEPS, "saves/trials/x", made_up=True).trainer.files
    for name in ("samples/samples.jsonl", "samples/dataset_info.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(files[name])
    keys = {**yaml.safe_load(files["train.yaml"]), "dataset_dir": str(tmp_path / "samples"), **ON_THE_CPU}
    run = train("trial", Case({"dp": 2}, keys=keys))
    log = (run.output / "trainer_log.jsonl").read_text()
    assert [json.loads(line)["current_steps"] for line in log.splitlines()][:STEPS] == [*range(1, STEPS + 1)]
    assert json.loads(log.splitlines()[0])["total_steps"] == 2 * STEPS
    assert [path.name for path in run.output.glob("checkpoint-*")] == [f"checkpoint-{2 * STEPS}"]


# The interleaved schedule --------------------------------------------------------------------------------------------


@pytest.mark.skipif(version_of("megatron-core") >= (0, 18), reason="Megatron-LM PR 4047 is in 0.18")
def test_megatron_core_below_0_18_frees_what_it_is_still_sending(train: Train, trained: Callable[[str], Run]) -> None:
    # With Gloo, losses then vary from run to run, unless sent tensors stay in memory until they have been waited for.
    run = train("freed", LAYOUTS["pp2-vpp2"], keeps_sent=True)
    assert all(held["freed_in_flight"] for held in run.ranks)
    assert run.losses == pytest.approx(trained("dense-4").losses, abs=TOLERANCE)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks_of(case)) for name, case in LAYOUTS.items() if "vpp" in case.layout]
)
def test_nothing_is_freed_while_it_is_sent(trained: Callable[[str], Run], name: str) -> None:
    assert {held["freed_in_flight"] for held in trained(name).ranks} == {0}


def test_interleaving_without_overlapped_sends_trains_on_wrong_data(
    train: Train, trained: Callable[[str], Run]
) -> None:
    # Megatron-LM arguments.py refuses it, mcore_adapter does not.
    run = train("no-overlap", Case({"pp": 2, "vpp": 2}, keys={**NO_CHECKPOINTS, "overlap_p2p_comm": False}))
    right = trained("dense-4").losses
    assert abs(run.losses[0] - right[0]) > 4 * TOLERANCE
    assert run.losses[-1] > right[-1] + 0.5
