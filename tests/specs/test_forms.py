from typing import Any

import pytest

from topoplan.errors import InputError, SpecError, UnitError
from topoplan.specs.forms import SpecForm
from topoplan.specs.mistakes import check_form
from topoplan.specs.source import KeyPath

JOB = {"seq_len": 4096, "global_batch_size": 64}


def _place(path: KeyPath) -> str:
    return "spec.yaml:7"


def _check(**keys: Any) -> SpecForm:
    return check_form(SpecForm, {"gpu": "h100-sxm-80gb", "nodes": 4, **keys}, _place)


def _refused(kind: type[InputError] = SpecError, **keys: Any) -> str:
    with pytest.raises(kind) as error:
        _check(**keys)
    message = str(error.value)
    assert message.startswith("spec.yaml:7: ")
    assert "pydantic" not in message
    return message.removeprefix("spec.yaml:7: ")


def test_quantities_become_base_units() -> None:
    form = _check(
        nvlink_bandwidth="900GB/s",
        ib_bandwidth="400Gb/s",
        host_memory="2TB",
        pcie_bandwidth="64GB/s",
        fabric={"latency": "5us"},
    )
    assert form.nvlink_bandwidth == 900e9
    assert form.ib_bandwidth == 50e9
    assert form.host_memory == 2 * 10**12
    assert form.pcie_bandwidth == 64e9
    assert form.fabric is not None
    assert form.fabric.latency_s == 5e-6


def test_a_rate_without_unit_says_what_to_write() -> None:
    message = _refused(UnitError, nvlink_bandwidth=900)
    assert message == "nvlink_bandwidth: 900 has no unit; write 900GB/s (bytes) or 900Gb/s (bits)"


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [
        ("nvlink_bandwidth", "900TB/s", "did you mean 900GB/s?"),
        ("nvlink_bandwidth", "1MB/s", "far below what exists"),
        ("ib_bandwidth", "400GB/s", "did you mean 400Gb/s?"),
        ("ib_bandwidth", "400Tb/s", "did you mean 400Gb/s?"),
        ("ib_bandwidth", "400gb/s", "ambiguous"),
        ("host_memory", "2MB", "far below what exists"),
        ("pcie_bandwidth", "64TB/s", "did you mean 64GB/s?"),
    ],
)
def test_a_rate_beyond_all_hardware_names_the_likely_slip(key: str, value: str, meant: str) -> None:
    assert meant in _refused(UnitError, **{key: value})


@pytest.mark.parametrize("value", ["100Gb/s", "200Gb/s", "800Gb/s", "1.6Tb/s", "1Gb/s", "50GB/s"])
def test_every_network_that_is_sold_is_accepted(value: str) -> None:
    assert _check(ib_bandwidth=value).ib_bandwidth


def test_tflops_name_their_unit_in_the_key_so_a_number_will_do() -> None:
    block = {"name": "x", "memory": "80GB", "memory_bandwidth": "3TB/s"}
    assert _check(gpu={**block, "bf16_tflops": 989}).gpu.bf16_flops == 989e12
    assert _check(gpu={**block, "bf16_tflops": "989TFLOPS"}).gpu.bf16_flops == 989e12
    assert "far above" in _refused(UnitError, gpu={**block, "bf16_tflops": 989e12})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"nodes": 0}, "nodes: 0 is out of range; expected a whole number from 1 to 131072"),
        ({"nodes": -4}, "nodes: -4 is out of range; expected a whole number from 1 to 131072"),
        ({"nodes": 10**7}, "nodes: 10000000 is out of range; expected a whole number from 1 to 131072"),
        ({"nodes": 4.5}, "nodes: 4.5 is not a whole number; expected a whole number from 1 to 131072"),
        ({"nodes": "four"}, "nodes: 'four' is not a whole number; expected a whole number from 1 to 131072"),
        ({"nodes": True}, "nodes: true is not a whole number; expected a whole number from 1 to 131072"),
        ({"nodes": float("nan")}, "nodes: nan is not a whole number; expected a whole number from 1 to 131072"),
        ({"nodes": [4]}, "nodes: a list is not a whole number; expected a whole number from 1 to 131072"),
        ({"gpus_per_node": 1000}, "gpus_per_node: 1000 is out of range; expected a whole number from 1 to 144"),
        (
            {"margin": 8},
            "margin: 8 is out of range; expected a fraction below one half, such as 8% or 0.08; did you mean 8%?",
        ),
        ({"margin": "-1%"}, "margin: '-1%' is out of range; expected a fraction below one half, such as 8% or 0.08"),
        ({"gpu": 5}, "gpu: 5 is not a block of keys; expected a name or `key: value` lines"),
        ({"job": "fast"}, "job: 'fast' is not a block of keys; expected `key: value` lines"),
        ({"model": {"config": "x"}}, "model.config: 'x' is not a block of keys; expected `key: value` lines"),
        ({"hosts": "node0"}, "hosts: 'node0' is not a list; expected one item a line, each behind `- `"),
        (
            {"fabric": {"kind": "ib"}},
            "fabric.kind: 'ib' is not a choice; expected infiniband, roce, efa, tcpxo or ethernet",
        ),
        (
            {"fabric": {"oversubscription": 0.5}},
            "fabric.oversubscription: 0.5 is out of range; expected a number from 1 to 64",
        ),
    ],
)
def test_a_wrong_value_says_what_was_expected(keys: dict[str, Any], message: str) -> None:
    assert _refused(**keys) == message


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"seq_len": 10**9}, "job.seq_len: 1000000000 is out of range"),
        ({"seq_len": 0}, "job.seq_len: 0 is out of range"),
        ({"seq_len": "4k"}, "job.seq_len: '4k' is not a whole number"),
        ({"global_batch_size": -64}, "job.global_batch_size: -64 is out of range"),
        ({"precision": "bf61"}, "did you mean 'bf16'?"),
        ({"finetuning": "Full"}, "did you mean 'full'?"),
        ({"stage": "rm"}, "job.stage: 'rm' is not a choice; expected pt, sft or dpo"),
        ({"packing": "maybe"}, "job.packing: 'maybe' is not a switch; expected true or false"),
        ({"packing": 1}, "job.packing: 1 is not a switch; expected true or false"),
        ({"epochs": 0}, "job.epochs: 0 is out of range"),
        ({"learning_rate": 2e5}, "job.learning_rate: 200000.0 is out of range"),
        ({"learning_rate": "nan"}, "job.learning_rate: 'nan' is not a number"),
        ({"samples": 0}, "job.samples: 0 is out of range"),
        ({"dataset": "a\nb"}, "job.dataset: 'a\\nb' is not usable"),
        ({"template": "a b"}, "job.template: 'a b' is not usable"),
        ({"dataset_dir": ""}, "job.dataset_dir: is empty"),
        ({"dataset": False}, "job.dataset: false is not text"),
        ({"trainer": [1]}, "job.trainer: a list is not a block of keys"),
        ({"pin": {"tp": 0}}, "job.pin.tp: 0 is out of range"),
        ({"pin": {"recompute": "some"}}, "job.pin.recompute: 'some' is not a choice"),
        ({"pin": {"recompute": {"modules": "core_atn"}}}, "job.pin.recompute.modules: 'core_atn' is not usable"),
    ],
)
def test_a_wrong_job_value_says_what_was_expected(job: dict[str, Any], message: str) -> None:
    assert message in _refused(job={**JOB, **job})


@pytest.mark.parametrize(("value", "expected"), [("8%", 0.08), ("8 %", 0.08), (0.08, 0.08), ("0.08", 0.08), (0, 0.0)])
def test_a_margin_is_a_percentage_or_a_fraction(value: object, expected: float) -> None:
    assert _check(margin=value).margin == pytest.approx(expected)


@pytest.mark.parametrize("number", [10**350, -(10**350), 10**5000, "9" * 399], ids=range(4))
def test_numbers_beyond_all_range_are_refused_everywhere(number: object) -> None:
    block = {"name": "x", "memory": "80GB", "memory_bandwidth": "3TB/s"}
    assert _refused(nodes=number)
    assert _refused(margin=number)
    assert _refused(UnitError, ib_bandwidth=number)
    assert _refused(UnitError, gpu={**block, "bf16_tflops": number})
    assert _refused(job={**JOB, "learning_rate": number})


@pytest.mark.parametrize(("value", "expected"), [("2e-5", 2e-5), (2e-5, 2e-5), ("1.0e-4", 1e-4)])
def test_a_learning_rate_may_be_text_as_yaml_1_1_reads_it(value: object, expected: float) -> None:
    job = _check(job={**JOB, "learning_rate": value}).job
    assert job is not None
    assert job.learning_rate == expected


def test_whole_numbers_may_be_written_with_an_exponent() -> None:
    job = _check(job={**JOB, "samples": "1e5"}).job
    assert job is not None
    assert job.samples == 100_000


@pytest.mark.parametrize(
    ("word", "expected"), [("no", False), ("Yes", True), ("off", False), ("true", True), (False, False)]
)
def test_a_switch_takes_the_words_of_yaml_1_1_too(word: object, expected: bool) -> None:
    job = _check(job={**JOB, "packing": word}).job
    assert job is not None
    assert job.packing is expected


@pytest.mark.parametrize("name", ["a/b", "..", "a b", "-x", "x" * 65, "a\nb", "", "né", "a\x1b[31m"])
def test_a_name_that_could_not_name_a_directory_is_refused(name: str) -> None:
    assert _refused(name=name).startswith("name: ")


@pytest.mark.parametrize("value", [False, True, 5, 2.5, [], {}])
def test_a_name_that_yaml_took_for_something_else_is_refused(value: object) -> None:
    assert "name: " in _refused(name=value)


def test_a_key_without_value_counts_as_left_out() -> None:
    assert _check(nvlink_bandwidth=None, fabric=None, env=None) == _check()


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"tensor_model_parallel_size": 4}, "is part of the layout; hold it with `pin: {tp: ...}` in `job`"),
        ({"cutoff_len": 4096}, "is the job's `seq_len`; set `seq_len` in `job` instead"),
        ({"model_name_or_path": "x"}, "is the spec's `model`"),
        ({"hub_token": "x"}, "looks like a secret"),
        ({"a b": 1}, "is not a key of the trainer"),
        ({"x": float("inf")}, "is not a finite number"),
        ({"additional_configs": {"x": [1, float("nan")]}}, "holds an infinite number or a NaN"),
    ],
)
def test_trainer_keys_that_topoplan_writes_itself_are_refused(trainer: dict[str, Any], message: str) -> None:
    assert message in _refused(job={**JOB, "trainer": trainer})


def test_other_trainer_keys_pass_through_as_they_are() -> None:
    trainer = {"save_steps": 500, "report_to": "none", "additional_configs": {"x": [1, None]}, "new_tokens": "a"}
    job = _check(job={**JOB, "trainer": trainer}).job
    assert job is not None
    assert job.trainer == trainer


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "MY_PASSWORD", "AWS_SECRET_ACCESS_KEY"])
def test_a_secret_in_the_environment_is_refused(name: str) -> None:
    assert _refused(env={name: "x"}).startswith(f"env.{name}: looks like a secret")


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"env": {"https_proxy": "http://me:hunter22@proxy:3128"}}, "env.https_proxy"),
        ({"env": {"X": "hf_hunter22" + "a" * 30}}, "env.X"),
        ({"job": {**JOB, "trainer": {"monitor": {"args": [{"api_key": "hunter22"}]}}}}, "job.trainer.monitor"),
        ({"slurm": {"export": "ALL,HF_TOKEN=hunter22"}}, "slurm.export"),
    ],
)
def test_secrets_by_their_value_and_nested_ones_are_refused_with_the_right_way(
    change: dict[str, Any], where: str
) -> None:
    message = _refused(**change)
    assert message.startswith(f"{where}: ")
    assert "`secrets: [HF_TOKEN]`" in message
    assert "hunter22" not in message


def test_secrets_are_names_alone() -> None:
    assert _check(secrets=["HF_TOKEN", "WANDB_API_KEY", "HF_TOKEN"]).secrets == ("HF_TOKEN", "WANDB_API_KEY")
    assert _check(secrets="HF_TOKEN, B").secrets == ("HF_TOKEN", "B")
    for wrong in (["HF_TOKEN", "X=hunter22"], {"HF_TOKEN": "hunter22"}, ["hf_" + "hunter22" * 5], ["TOPOPLAN_RUN"]):
        message = _refused(secrets=wrong)
        assert message.startswith("secrets: ")
        assert "hunter22" not in message


def test_environment_variables_become_text_unless_they_are_ambiguous() -> None:
    assert _check(env={"NCCL_IB_GID_INDEX": 3, "NCCL_IB_PKEY": "1"}).env == {
        "NCCL_IB_GID_INDEX": "3",
        "NCCL_IB_PKEY": "1",
    }
    assert _refused(env={"X": True}) == "env.X: true is not text; put it in quotes"
    assert "is not usable" in _refused(env={"X": "a\nb"})
    assert "is not a variable's name" in _refused(env={"X;rm": "a"})


def test_options_of_sbatch_are_checked_one_by_one() -> None:
    assert _check(slurm={"partition": "gpu", "time": 90, "mem_per_gpu": "9G", "requeue": True, "qos": None}).slurm == {
        "partition": "gpu",
        "time": "90",
        "mem-per-gpu": "9G",
        "requeue": True,
    }
    assert _refused(slurm="gpu").startswith("slurm: 'gpu' is not a block of keys; expected options of sbatch")
    assert _refused(slurm={"nodes": 2}) == "slurm.nodes: is the spec's `nodes`; set `nodes` instead"
    assert _refused(slurm={"p": "gpu"}).startswith("slurm.p: is not an option of sbatch")
    assert _refused(slurm={"a-b": "1", "a_b": "2"}) == "slurm.a_b: is given twice; keep one of them"


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
    assert "hosts[0]" in _refused(hosts=[host])


def test_a_host_may_be_an_address_alone() -> None:
    hosts = _check(hosts=["10.0.0.1", "fe80::1%eth0", {"address": "n", "hcas": "mlx5_0:1,mlx5_1"}]).hosts
    assert hosts is not None
    assert [host.address for host in hosts] == ["10.0.0.1", "fe80::1%eth0", "n"]
    assert hosts[2].hcas == ("mlx5_0:1", "mlx5_1")
