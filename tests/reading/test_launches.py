"""Commands that start training."""

import pytest

from topoplan.errors import SpecError
from topoplan.reading.launches import deepspeed_file, launches
from topoplan.reading.parts import Part
from topoplan.reading.setup import Launch
from topoplan.reading.shell import read_script
from topoplan.trainers.recognizers import recognizers


def all_of(text: str) -> list[Launch]:
    return list(launches(read_script(Part(kind="shell", name="run.sh", text=text), recognizers()), recognizers()))


def one(text: str) -> Launch:
    (launch,) = all_of(text)
    return launch


def options(launch: Launch) -> dict[str, str]:
    return {name: option.value for name, option in launch.options.items()}


def test_torchrun_options_in_both_spellings_and_flags_without_a_value() -> None:
    launch = one("torchrun --nproc-per-node=8 --nnodes 2 --standalone -t 3 -m pkg.train --lr 1")
    assert options(launch) == {"nproc_per_node": "8", "nnodes": "2", "standalone": "", "tee": "3", "module": ""}
    assert (launch.starter, launch.program, launch.arguments) == ("torchrun", "pkg.train", ("--lr", "1"))


@pytest.mark.parametrize(
    ("command", "starter", "called", "program"),
    [
        ("python -m torch.distributed.run --nnodes 2 a.py", "torchrun", "torch.distributed.run", "a.py"),
        ('"$py" -m torch.distributed.run a.py', "torchrun", "torch.distributed.run", "a.py"),
        ("python3 -u -m torch.distributed.launch --use_env a.py", "torchrun", "torch.distributed.launch", "a.py"),
        ("deepspeed --num_gpus 8 a.py --b", "deepspeed", "deepspeed", "a.py"),
        ("accelerate launch --multi_gpu --num_processes 8 a.py", "accelerate", "accelerate launch", "a.py"),
        ("/opt/bin/torchrun $(which llamafactory-cli) train a.yaml", "torchrun", "torchrun", "llamafactory-cli"),
        ("torchrun -m llamafactory.launcher a.yaml", "torchrun", "torchrun", "llamafactory.launcher"),
        ("torchrun /x/llamafactory/launcher.py a.yaml", "torchrun", "torchrun", "llamafactory.launcher"),
        ("llamafactory-cli train a.yaml", "", "", "llamafactory-cli"),
        ("lmf train a.yaml", "", "", "llamafactory-cli"),
        ("python src/train.py a.yaml", "", "", "src/train.py"),
        ("swift sft --model a", "", "", "swift"),
        ("megatron rlhf --model a", "", "", "megatron"),
        ("python swift/cli/sft.py --model a", "", "", "swift.cli.sft"),
    ],
)
def test_the_usual_ways_to_start(command: str, starter: str, called: str, program: str) -> None:
    launch = one(command)
    assert (launch.starter, launch.called, launch.program) == (starter, called, program)


def test_behind_a_file_quotes_of_yaml_come_off_a_value_too() -> None:
    launch = one("llamafactory-cli train a.yaml \"deepspeed='${here//x/y}/ds.json'\" run_name=\"'12'\" seed=3")
    assert launch.configuration.source.data == {"deepspeed": "${here//x/y}/ds.json", "run_name": "12", "seed": 3}


@pytest.mark.parametrize(
    "command",
    [
        "echo torchrun a.py",
        "pip install deepspeed",
        "llamafactory-cli chat a.yaml",
        "swift infer --model a",
        "python -c 'import torch'",
        "torchrun --help",
        "accelerate config",
        "python setup.py install",
    ],
)
def test_other_commands_are_no_launches(command: str) -> None:
    assert all_of(command) == []


def test_the_file_and_the_overrides_behind_it() -> None:
    launch = one("llamafactory-cli train a.yaml learning_rate=2e-5 bf16=true")
    assert launch.config_file == "a.yaml"
    assert launch.configuration.trainer == "llamafactory"
    assert launch.configuration.source.data == {"learning_rate": 2e-5, "bf16": True}


def test_arguments_become_a_configuration_with_types_and_lines() -> None:
    launch = one("swift sft \\\n --model org/a \\\n --dataset 'x#1' y \\\n --bf16 --lr 1e-4 --x -5 --kw '{\"a\": 1}'")
    configuration = launch.configuration
    assert configuration.from_command
    assert configuration.source.data == {
        "model": "org/a",
        "dataset": ["x#1", "y"],
        "bf16": True,
        "lr": 1e-4,
        "x": -5,
        "kw": {"a": 1},
    }
    assert [configuration.line(key) for key in ("model", "dataset", "x")] == [2, 3, 4]


def test_wrappers_are_looked_through() -> None:
    text = (
        "nohup torchrun a.py > log 2>&1 &\n"
        "srun --nodes 2 -n 2 bash -c 'torchrun --node_rank $SLURM_NODEID b.py'\n"
        'ssh -p 22 host "cd /x && A=1 torchrun c.py"\n'
        "docker run --gpus all -e NCCL_DEBUG=INFO image torchrun d.py\n"
        "sudo -E env B=2 numactl --membind 0 torchrun e.py\n"
    )
    found = all_of(text)
    assert [launch.arguments == () and launch.program for launch in found] == ["a.py", "b.py", "c.py", "d.py", "e.py"]
    assert [launch.wrappers for launch in found] == [
        ("nohup",),
        ("srun", "bash"),
        ("ssh",),
        ("docker",),
        ("sudo", "env", "numactl"),
    ]
    assert found[0].background
    assert [{one.name: one.value for one in launch.variables} for launch in found[2:]] == [
        {"A": "1"},
        {"NCCL_DEBUG": "INFO"},
        {"B": "2"},
    ]
    assert [launch.first_line for launch in found] == [1, 2, 3, 4, 5]


def test_the_deepspeed_file_of_any_program() -> None:
    assert deepspeed_file(one("torchrun a.py --deepspeed ds.json")) == "ds.json"
    assert deepspeed_file(one("deepspeed a.py --deepspeed_config=b.json")) == "b.json"
    assert deepspeed_file(one("swift sft --deepspeed zero2")) == ""


def test_reading_changes_nothing_that_was_read() -> None:
    text = "export A=1\nenv B=2 torchrun a.py\nssh host 'export C=3; torchrun b.py'\n"
    script = read_script(Part(kind="shell", name="run.sh", text=text), recognizers())
    assert [one.name for one in script.variables] == ["A", "B", "C"]
    assert list(launches(script, recognizers())) == list(launches(script, recognizers()))
    assert [one.name for one in script.variables] == ["A", "B", "C"]


def test_more_launches_than_one_job_has_are_refused() -> None:
    with pytest.raises(SpecError, match=r"run.sh:201: starts training more than 200 times"):
        all_of("torchrun a.py\n" * 300)
