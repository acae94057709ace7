"""Which rank is at another place in the program than the others."""

import pytest

from topoplan.run.stacks import main_threads, outlying_ranks, stack_lines, with_missing_ranks

WAITS = ["all_reduce (distributed_c10d.py:3252)", "wrapper (c10d_logger.py:83)", "step (train.py:20)"]
ELSE = ["read (data.py:7)", "fetch (data.py:12)", "step (train.py:18)"]
SYNC = ["synchronize (streams.py:9)", "item (train.py:30)", "step (train.py:20)"]


@pytest.mark.parametrize(
    ("stacks", "apart"),
    [
        ({0: WAITS, 1: WAITS, 2: ELSE, 3: WAITS}, (2,)),
        ({0: WAITS, 1: ELSE}, (1,)),
        ({0: WAITS, 1: ELSE, 2: ELSE}, (1, 2)),
        ({0: SYNC, 1: SYNC, 2: ELSE}, (2,)),
        ({0: SYNC, 1: ELSE}, ()),
        ({0: WAITS, 1: [one.replace(":20", ":21") for one in WAITS]}, ()),
        ({0: WAITS, 1: []}, ()),
        (with_missing_ranks({0: WAITS, 1: WAITS, 3: WAITS}, range(4)), (2,)),
        (with_missing_ranks({0: [], 1: []}, range(4)), (2, 3)),
        (with_missing_ranks({}, range(4)), ()),
        ({}, ()),
    ],
)
def test_the_rank_that_the_others_wait_for_is_in_no_collective(
    stacks: dict[int, list[str]], apart: tuple[int, ...]
) -> None:
    assert outlying_ranks(stacks) == apart


SAID = b"""topoplan:rank=1
Process 87: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 87 (idle)
    wait_for_data (data.py:3)
    <module> (train.py:5)
topoplan:rank=0
Process 86: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 91 (active+gil): "QueueFeederThread"
    wait (threading.py:320)
Thread 86 (idle): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:9)
topoplan:rank=2
Error: Failed to open process 90
topoplan:rank=3
topoplan:life=T
Process 91: python train.py
Thread 91 (idle): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:9)
topoplan:rank=4
topoplan:life=S
"""


def test_of_what_py_spy_says_the_main_threads_are_read() -> None:
    assert main_threads(SAID) == {
        1: ["wait_for_data (data.py:3)", "<module> (train.py:5)"],
        0: ["all_reduce (torch/distributed/distributed_c10d.py:9)"],
        2: [],
        3: ["stopped by a signal", "all_reduce (torch/distributed/distributed_c10d.py:9)"],
        4: [],
    }
    assert outlying_ranks(main_threads(SAID)) == (3,)


def test_those_that_are_elsewhere_come_first_and_with_more_of_where_they_are() -> None:
    assert list(stack_lines({0: WAITS, 1: WAITS, 2: ELSE})) == [
        "rank 2: read (data.py:7)",
        "  in fetch (data.py:12)",
        "  in step (train.py:18)",
        "ranks 0, 1: all_reduce (distributed_c10d.py:3252)",
        "  in wrapper (c10d_logger.py:83)",
    ]
