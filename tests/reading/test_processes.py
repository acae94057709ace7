"""How many GPUs a command starts, for every launcher."""

from dataclasses import replace
from typing import Any

import pytest

from tests.reading.setups import all_of, configuration, launch, mca
from topoplan.reading.processes import launch_of, processes_for, processes_of


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ({"options": {"nnodes": "4", "nproc_per_node": "8"}}, (4, 8)),
        ({"options": {}}, (1, 1)),  # torchrun's own defaults
        ({"options": {"nnodes": "1:4", "nproc_per_node": "gpu"}}, (4, None)),
        ({"options": {"nproc_per_node": "auto"}, "variables": {"CUDA_VISIBLE_DEVICES": "0,1,2"}}, (1, 3)),
        ({"options": {"nproc_per_node": "$GPUS"}, "variables": {"GPUS": "8"}}, (1, 8)),
        ({"options": {"nproc_per_node": "${GPUS:-4}"}}, (1, 4)),
        ({"options": {"nproc_per_node": "$A"}, "variables": {"A": "$A"}}, (1, None)),
        ({"starter": "", "variables": {"NNODES": "2", "NPROC_PER_NODE": "8"}}, (2, 8)),
        ({"starter": ""}, (1, None)),
        ({"starter": "", "variables": {"CUDA_VISIBLE_DEVICES": "0,1"}}, (1, 2)),
        ({"starter": "", "program": "swift"}, (1, 1)),
        ({"starter": "deepspeed", "options": {"num_gpus": "4"}}, (1, 4)),
        ({"starter": "deepspeed", "options": {"include": "localhost:0,1,5"}}, (1, 3)),
        ({"starter": "deepspeed", "options": {"hostfile": "hosts"}}, (None, None)),
        ({"starter": "accelerate", "options": {"num_machines": "2", "num_processes": "16"}}, (2, 8)),
        ({"starter": "accelerate", "options": {}}, (1, None)),
        ({"starter": "accelerate", "options": {"config_file": "not-here.yaml", "num_processes": "8"}}, (None, None)),
    ],
)
def test_machines_and_processes_of_a_command(command: dict[str, Any], expected: tuple[int | None, int | None]) -> None:
    found = processes_of(launch(command.pop("program", "llamafactory-cli"), **command))

    assert (found.nodes, found.gpus_per_node) == expected


def test_the_command_of_a_file_is_the_one_that_names_it() -> None:
    one = mca()
    named = launch("llamafactory-cli", "train", "conf/train.yaml", options={"nproc_per_node": "4"})
    other = launch("llamafactory-cli", "train", "other.yaml", options={"nproc_per_node": "2"})

    assert launch_of(all_of(one, launches=(other, named)), one) is named
    assert launch_of(all_of(one, launches=(other,)), one) is other  # the only one of its trainer
    assert processes_for(all_of(one), one) is None


def test_the_keys_of_a_command_belong_to_that_command_alone() -> None:
    text = configuration("model: Qwen/Qwen3-8B\n", trainer="swift", from_command=True)

    assert launch_of(all_of(text, launches=(launch("swift", "sft"),)), text) is None
    assert launch_of(all_of(text, launches=(own := launch("swift", "sft", of=text),)), text) is own


def test_words_name_machines_and_gpus() -> None:
    assert processes_of(launch(options={"nnodes": "4", "nproc_per_node": "8"})).words == "4 x 8 GPUs"
    assert processes_of(launch(starter="deepspeed", options={"hostfile": "h"})).words == "some nodes x all GPUs"


def test_accelerates_file_says_what_its_options_leave_out() -> None:
    one = configuration("model_name_or_path: Qwen/Qwen3-8B\n")
    file = configuration("distributed_type: FSDP\nnum_machines: 2\nnum_processes: 16\n", trainer="accelerate")

    def processes(**options: str) -> tuple[int | None, int | None]:
        start = replace(launch("src/train.py", starter="accelerate", options=options, of=one), starter_file=file)
        found = processes_for(all_of(one, file, launches=(start,)), one)
        return found.nodes, found.gpus_per_node

    assert processes() == (2, 8)
    assert processes(num_processes="4", num_machines="1") == (1, 4)
    assert processes(num_processes="8") == (2, 4)
    assert processes(num_machines="4") == (4, 4)
