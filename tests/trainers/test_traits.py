"""Which traits a case has: the backend's usual ones, or the trainer's own."""

from dataclasses import replace

import pytest

from tests.engines.data_parallel.samples import small_spec
from topoplan.trainers.case import case_of
from topoplan.trainers.registry import traits_of
from topoplan.trainers.traits import FINE_TUNING, HUGGING_FACE, MCA, MEGATRON, PACKED_APART, SHARDED
from topoplan.trainers.trinity.traits import TRINITY

USUAL = {"megatron": MEGATRON, "mca": MCA, **SHARDED}


@pytest.mark.parametrize("trainer", [None, "llamafactory", "swift"])
@pytest.mark.parametrize("backend", USUAL)
def test_most_trainers_do_as_is_usual_behind_a_backend(trainer: str | None, backend: str) -> None:
    own = PACKED_APART if trainer == "swift" else USUAL
    usual = FINE_TUNING if trainer and backend == "megatron" else own.get(backend, USUAL[backend])
    assert traits_of(replace(small_spec(), trainer=trainer), backend) is usual


def test_adapters_are_predicted_as_the_trainer_computes_that_writes_their_files() -> None:
    spec = small_spec(finetuning="lora")
    assert traits_of(spec, "megatron") is traits_of(replace(spec, trainer="swift"), "megatron") is FINE_TUNING


def test_trinity_has_its_own_loss_padding_and_optimizer() -> None:
    spec = small_spec()
    assert case_of(spec, "fsdp2").traits is HUGGING_FACE
    assert case_of(replace(spec, trainer="trinity"), "fsdp2").traits is TRINITY
    assert TRINITY.loss.backward_bytes < HUGGING_FACE.loss.backward_bytes
    assert TRINITY.padding.removed
    assert not HUGGING_FACE.padding.removed


def test_megatrons_trainers_have_no_eager_loss() -> None:
    assert MCA.loss is None
