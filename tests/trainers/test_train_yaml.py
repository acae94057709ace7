"""Defaults in every trainer's files if the spec says nothing."""

from dataclasses import replace

import pytest

from tests.bundle.samples import CLUSTER
from topoplan.trainers.train_yaml import loaders, save_steps, warmup_steps, workers


@pytest.mark.parametrize(("steps", "warmup", "saves"), [(None, 20, 200), (1, 1, 1), (12, 1, 3), (1000, 30, 200)])
def test_warm_up_is_three_percent_and_a_run_is_saved_five_times(steps: int | None, warmup: int, saves: int) -> None:
    assert (warmup_steps(steps), save_steps(steps)) == (warmup, saves)


@pytest.mark.parametrize(
    ("cores", "tokenise", "load"), [(None, 16, 4), (1, 1, 1), (8, 8, 1), (32, 16, 2), (256, 16, 4)]
)
def test_processes_are_no_more_than_the_cores_and_half_of_them_load(
    cores: int | None, tokenise: int, load: int
) -> None:
    cluster = replace(CLUSTER, cpu_cores=cores)
    assert cluster.gpus_per_node == 8
    assert (workers(cluster), loaders(cluster)) == (tokenise, load)
