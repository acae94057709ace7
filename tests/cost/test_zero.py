"""ZeRO's states against the figures of its paper."""

from __future__ import annotations

import pytest

from topoplan.cost.zero import zero_states

BILLION = 1e9


# Figure 1 of the paper: 7.5B parameters, 64 GPUs, K = 12, in GB.
@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_four_rows_of_the_papers_figure_come_out(stage: int, gigabytes: float) -> None:
    states = zero_states(7.5 * BILLION, stage=stage, gpus=64)

    assert states.gpu_bytes / 1e9 == pytest.approx(gigabytes, abs=0.05)
    assert states.host_bytes == 0


def test_a_30b_model_under_stage_2_on_five_gpus_needs_its_weights_whole() -> None:
    states = zero_states(30_532_122_624, stage=2, gpus=5)

    assert states.weights_bytes == 2 * 30_532_122_624
    assert states.gradients_bytes == pytest.approx(12.21e9, rel=1e-3)
    assert states.optimizer_bytes == pytest.approx(73.28e9, rel=1e-3)


def test_one_gpu_holds_everything_in_every_stage() -> None:
    assert {zero_states(BILLION, stage=stage, gpus=1).gpu_bytes for stage in (0, 1, 2, 3)} == {16 * BILLION}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_offloaded_optimizer_moves_its_gradients_along(stage: int) -> None:
    states = zero_states(8 * BILLION, stage=stage, gpus=8, offload_optimizer=True)

    assert (states.gradients_bytes, states.optimizer_bytes) == (0, 0)
    assert states.weights_bytes == 2 * BILLION * (8 if stage < 3 else 1)
    assert states.host_bytes == 14 * BILLION


def test_parameters_are_offloaded_in_stage_3_alone() -> None:
    whole = zero_states(8 * BILLION, stage=3, gpus=8, offload_optimizer=True, offload_param=True)

    assert (whole.gpu_bytes, whole.host_bytes) == (0, 16 * BILLION)
    assert zero_states(BILLION, stage=2, gpus=8, offload_param=True) == zero_states(BILLION, stage=2, gpus=8)


def test_frozen_weights_have_neither_gradient_nor_state() -> None:
    states = zero_states(8 * BILLION, stage=2, gpus=4, trained=0)

    assert states.gpu_bytes == states.weights_bytes == 16 * BILLION


@pytest.mark.parametrize(("stage", "gpus"), [(4, 8), (2, 0)])
def test_what_does_not_exist_is_refused(stage: int, gpus: int) -> None:
    with pytest.raises(ValueError, match=f"stage {stage} on {gpus} GPUs"):
        zero_states(BILLION, stage=stage, gpus=gpus)
