from __future__ import annotations

from tests.reading.setups import make_setup
from topoplan.trainers.llamafactory.key_list import known_keys, plain_keys
from topoplan.trainers.llamafactory.rules.keys import RENAMED, key_of, keys_of


def test_the_path_decides_which_keys_there_are() -> None:
    plain, megatron = make_setup("stage: sft"), make_setup("tensor_model_parallel_size: 2")
    assert keys_of(plain, plain.configurations[0]) is plain_keys()
    assert keys_of(megatron, megatron.configurations[0]) is known_keys()


def test_an_old_name_leads_to_the_key_of_today() -> None:
    setup = make_setup("evaluation_strategy: steps")
    key = key_of(setup, setup.configurations[0], "evaluation_strategy")
    assert key is not None
    assert key.name == "eval_strategy"
    assert not RENAMED.keys() & (known_keys().keys() | plain_keys().keys())
    assert set(RENAMED.values()) <= plain_keys().keys()


def test_fp8_alone_does_not_make_it_a_megatron_job() -> None:
    setup = make_setup("fp8: true")
    assert not setup.uses_mca(setup.configurations[0])
