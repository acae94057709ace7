"""The accepted values of a spec, and the messages for others. Values are given as `--set key=value`."""

from pathlib import Path
from typing import Any

import pytest

from topoplan.errors import InputError, UnitError
from topoplan.specs.draft import Draft
from topoplan.specs.forms import SpecForm
from topoplan.specs.mistakes import check_form
from topoplan.specs.source import Source

SPEC = {"gpu": "h100-sxm-80gb", "nodes": 4, "job": {"seq_len": 4096, "global_batch_size": 64}}
OWN_GPU = {"name": "x", "memory": "80GB", "memory_bandwidth": "3TB/s"}


def check(**keys: Any) -> SpecForm:
    return check_form(SpecForm, {**SPEC, **keys}, lambda path: "spec.yaml:7")


def refused(**keys: Any) -> str:
    with pytest.raises(InputError) as error:
        check(**keys)
    assert str(error.value).startswith("spec.yaml:7: ")
    return str(error.value).removeprefix("spec.yaml:7: ")


def set_to(assignment: str) -> SpecForm:
    draft = Draft(Source(name="spec", data=SPEC), base=Path())
    draft.override(assignment)
    return draft.document().form


RIGHT = [
    ("nvlink_bandwidth=900GB/s", 900e9),
    *((f"ib_bandwidth={rate}", None) for rate in ("100Gb/s", "200Gb/s", "800Gb/s", "1.6Tb/s", "1Gb/s", "50GB/s")),
    ("ib_bandwidth=400Gb/s", 50e9),
    ("host_memory=2TB", 2 * 10**12),
    ("pcie_bandwidth=64GB/s", 64e9),
    ("margin=8%", 0.08),
    ("margin='8 %'", 0.08),
    ("margin=0.08", 0.08),
    ("margin='0.08'", 0.08),
    ("margin=0", 0.0),
    ("job.learning_rate='2e-5'", 2e-5),
    ("job.learning_rate=1.0e-4", 1e-4),
    ("job.samples='1e5'", 100_000),
    ("job.seq_len=32k", 32_768),
    ("job.seq_len=1M", 1_048_576),
    ("job.seq_len=4096", 4096),
    ("job.epochs=3", 3.0),
    ("job.packing=no", False),
    ("job.packing=Yes", True),
    ("job.packing=off", False),
    ("job.packing='true'", True),
    ("job.lora_target=q_proj,v_proj", ("q_proj", "v_proj")),
    ("env.NCCL_IB_GID_INDEX=3", {"NCCL_IB_GID_INDEX": "3"}),
    ("env.NCCL_IB_PKEY='1'", {"NCCL_IB_PKEY": "1"}),
    ("secrets=HF_TOKEN, B", ("HF_TOKEN", "B")),
    ("secrets=[HF_TOKEN, WANDB_API_KEY, HF_TOKEN]", ("HF_TOKEN", "WANDB_API_KEY")),
    ("slurm={partition: gpu, time: 90, requeue: true}", {"partition": "gpu", "time": "90", "requeue": True}),
    ("slurm={mem_per_gpu: 9G, qos: null}", {"mem-per-gpu": "9G"}),
    ("software={python: '3.12'}", {"python": "3.12"}),
]


@pytest.mark.parametrize(("assignment", "value"), RIGHT)
def test_a_value_becomes_what_it_means(assignment: str, value: Any) -> None:
    form = set_to(assignment)
    *blocks, key = assignment.partition("=")[0].split(".")
    block = getattr(form, blocks[0]) if blocks else form
    found = block if isinstance(block, dict) else getattr(block, key)
    assert found == value if value is not None else found


def test_a_quantity_that_is_refused_is_an_error_of_units() -> None:
    with pytest.raises(UnitError):
        set_to("ib_bandwidth=400")


def test_tflops_name_their_unit_in_the_key_so_a_number_will_do() -> None:
    assert check(gpu={**OWN_GPU, "bf16_tflops": 989}).gpu.bf16_flops == 989e12
    assert check(gpu={**OWN_GPU, "bf16_tflops": "989TFLOPS"}).gpu.bf16_flops == 989e12
    assert "far above" in refused(gpu={**OWN_GPU, "bf16_tflops": 989e12})


@pytest.mark.parametrize("number", [10**350, -(10**350), 10**5000, "9" * 399], ids=range(4))
def test_numbers_beyond_all_range_are_refused_everywhere(number: object) -> None:
    for key in ("nodes", "margin", "ib_bandwidth"):
        assert refused(**{key: number})
    assert refused(gpu={**OWN_GPU, "bf16_tflops": number})
    assert refused(job={**SPEC["job"], "learning_rate": number})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "name", ["a/b", "..", "a b", "-x", "x" * 65, "a\nb", "", "né", "a\x1b[31m", False, True, 5, 2.5, [], {}]
)
def test_a_name_that_could_not_name_a_directory_is_refused(name: object) -> None:
    assert refused(name=name).startswith("name: ")


def test_a_key_without_value_counts_as_left_out() -> None:
    assert check(nvlink_bandwidth=None, fabric=None, env=None) == check()


def test_other_trainer_keys_pass_through_as_they_are() -> None:
    trainer = {"save_steps": 500, "report_to": "none", "additional_configs": {"x": [1, None]}, "new_tokens": "a"}
    job = check(job={**SPEC["job"], "trainer": trainer}).job  # type: ignore[dict-item]
    assert job.trainer == trainer


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"env": {"https_proxy": "http://me:hunter22@proxy:3128"}}, "env.https_proxy"),
        ({"env": {"X": "hf_hunter22" + "a" * 30}}, "env.X"),
        ({"job": {**SPEC["job"], "trainer": {"monitor": {"args": [{"api_key": "hunter22"}]}}}}, "job.trainer.monitor"),  # type: ignore[dict-item]
        ({"slurm": {"export": "ALL,HF_TOKEN=hunter22"}}, "slurm.export"),
    ],
)
def test_secrets_by_their_value_and_nested_ones_are_refused_with_the_right_way(
    change: dict[str, Any], where: str
) -> None:
    message = refused(**change)
    assert message.startswith(f"{where}: ")
    assert "`secrets: [HF_TOKEN]`" in message
    assert "hunter22" not in message


@pytest.mark.parametrize(
    "wrong", [["HF_TOKEN", "X=hunter22"], {"HF_TOKEN": "hunter22"}, ["hf_" + "hunter22" * 5], ["TOPOPLAN_RUN"]]
)
def test_secrets_are_names_alone(wrong: object) -> None:
    message = refused(secrets=wrong)
    assert message.startswith("secrets: ")
    assert "hunter22" not in message


@pytest.mark.parametrize(
    "host",
    [
        "-oProxyCommand=x",
        "user@host",
        "a b",
        {"address": "a", "user": "-x"},
        {"address": "a", "port": 70000},
        {"address": "a", "workdir": "relative/path"},
        {"address": "a", "venv": "/x\ny"},
        {"address": "a", "hcas": ["mlx5_0;x"]},
        {"address": "a", "socket_interface": "eth0 eth1"},
        {"user": "x"},
    ],
)
def test_a_host_that_ssh_or_a_script_could_misread_is_refused(host: object) -> None:
    assert "hosts[0]" in refused(hosts=[host])


def test_a_host_may_be_an_address_alone() -> None:
    hosts = check(hosts=["10.0.0.1", "fe80::1%eth0", {"address": "n", "hcas": "mlx5_0:1,mlx5_1"}]).hosts
    assert [host.address for host in hosts] == ["10.0.0.1", "fe80::1%eth0", "n"]
    assert hosts[2].hcas == ("mlx5_0:1", "mlx5_1")
