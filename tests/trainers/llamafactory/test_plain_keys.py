"""The user's trainer keys for LLaMA-Factory without Megatron."""

from tests.bundle.samples import QWEN3_VL_8B, make_spec_and_plan
from topoplan.trainers.llamafactory.key_list import plain_keys
from topoplan.trainers.llamafactory.plain import written_keys
from topoplan.trainers.llamafactory.user_keys import fixed_values


def test_every_key_that_the_plan_decides_is_one_of_the_trainer() -> None:
    for backend in ("ddp", "deepspeed", "fsdp2"):
        for finetuning in ("full", "freeze", "lora", "qlora"):
            spec, plan = make_spec_and_plan(model=QWEN3_VL_8B, backend=backend, job={"finetuning": finetuning})
            assert fixed_values(spec, written_keys(spec, plan.layout)).keys() <= plain_keys().keys()
