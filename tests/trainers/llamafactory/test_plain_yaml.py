"""train.yaml and the files beside it, for DeepSpeed, FSDP2 and plain data parallelism."""

from dataclasses import replace
from typing import Any

from tests.bundle.samples import CLUSTER, QWEN3_8B, make_spec_and_plan
from topoplan.trainers.llamafactory.plain import plain_trainer_files

WITH_MEMORY = replace(CLUSTER, host_memory_bytes=2**41)


def test_what_stands_in_the_file_beside_is_a_part_of_the_runs_name() -> None:
    def run(**what: Any) -> str:
        spec, plan = make_spec_and_plan(model=QWEN3_8B, cluster=WITH_MEMORY, backend="deepspeed", **what)
        return plain_trainer_files(spec, plan.layout).run_name.rpartition("-")[2]

    assert run(zero_stage=3) == run(zero_stage=3) != run(zero_stage=2)
    assert run(zero_stage=3, offload_optimizer=True) != run(zero_stage=3)
