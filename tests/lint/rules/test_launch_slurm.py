"""Launch scripts of Slurm jobs."""

from __future__ import annotations

import pytest

from tests.reading.setups import setup_of
from topoplan.lint.rules import launch_slurm

JOB = "#!/bin/bash\n#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=1\nhead=$(hostname -s)\n"
TORCHRUN = (
    "torchrun --nnodes 4 --nproc_per_node 8 --node_rank {rank} --master_addr $head -m llamafactory.launcher a.yaml"
)


def rules_of(script: str) -> list[tuple[str, int | None]]:
    return [(one.rule, one.line) for one in launch_slurm.findings(setup_of(script))]


@pytest.mark.parametrize(
    "command",
    [
        "srun bash -c 'torchrun --nnodes 4 --nproc_per_node 8 --node_rank $SLURM_NODEID a.py'",
        'srun bash -c "torchrun --nnodes 4 --nproc_per_node 8 --node_rank \\$SLURM_NODEID --master_addr $head a.py"',
        "srun bash -c 'NODE_RANK=$SLURM_PROCID llamafactory-cli train a.yaml'",
        "srun torchrun --nnodes 4 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint $head:29500 a.py",
        "torchrun --standalone --nproc_per_node 8 a.py",
        "srun --ntasks=1 --nodes=1 -w n1 torchrun --nnodes 4 --nproc_per_node 8 --node_rank 1 a.py",
        "ssh n1 torchrun --nnodes 4 --nproc_per_node 8 --node_rank 1 a.py",
    ],
)
def test_scripts_that_start_each_node_once_with_a_rank_of_its_own_are_left_alone(command: str) -> None:
    assert rules_of(JOB + command + "\n") == []


@pytest.mark.parametrize("nodes", ["4", "$SLURM_NNODES", "${SLURM_JOB_NUM_NODES}"])
def test_without_srun_only_the_first_node_starts(nodes: str) -> None:
    command = f"torchrun --nnodes {nodes} --nproc_per_node 8 --node_rank 0 a.py\n"

    assert rules_of(JOB + command) == [("launch-slurm-first-node", 5)]
    assert rules_of(command) == []


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("srun " + TORCHRUN.format(rank="$SLURM_NODEID"), 5),
        ('srun bash -c "' + TORCHRUN.format(rank="${SLURM_PROCID}") + '"', 5),
        ("export NNODES=4 NODE_RANK=$SLURM_NODEID\nsrun llamafactory-cli train a.yaml", 5),
        ("export NODE_RANK=$SLURM_NODEID\nsrun bash -c 'NNODES=4 swift sft --model a'", 5),
        ("srun accelerate launch --num_machines 4 \\\n  --machine_rank $SLURM_NODEID a.py", 6),
    ],
)
def test_the_number_of_a_node_that_the_script_puts_in_place_is_zero_everywhere(command: str, line: int) -> None:
    assert rules_of(JOB + command + "\n") == [("launch-slurm-node-rank", line)]


@pytest.mark.parametrize(
    ("job", "options", "found"),
    [
        ("#SBATCH -N 2\n#SBATCH --ntasks-per-node=8\n", "", True),
        ("#SBATCH -N 2\n#SBATCH --ntasks-per-node=8\n", "--ntasks-per-node=1", False),
        ("#SBATCH --nodes=2\n", "-n 16", True),
        ("#SBATCH --nodes=2\n", "--ntasks=2", False),
        ("#SBATCH --nodes=2\n", "", False),
    ],
)
def test_tasks_of_a_node_that_each_start_all_its_processes_are_told(job: str, options: str, found: bool) -> None:
    rendezvous = "--nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint n0:29500"
    script = f"#!/bin/bash\n{job}srun {options} torchrun {rendezvous} a.py\n"

    assert bool(rules_of(script)) is found
    assert all(rule == "launch-slurm-tasks" for rule, _ in rules_of(script))
