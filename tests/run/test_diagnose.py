"""The first failure is distinguished from its consequences, on recorded output and on messages from public threads."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoplan.run.attempts import RETRYABLE_KINDS
from topoplan.run.causes import CAUSES
from topoplan.run.diagnose import Diagnosis, diagnose

RECORDED = Path(__file__).parent / "recorded"


def tails_of(name: str) -> dict[int, list[str]]:
    files = sorted(RECORDED.glob(f"{name}-node-*.txt"))
    return {int(file.stem[-1]): file.read_text(encoding="utf-8").splitlines() for file in files}


def blamed(*arguments: Any, **options: Any) -> Diagnosis:
    found = diagnose(*arguments, **options)
    assert found is not None
    return found


def diagnosed(name: str, **options: Any) -> Diagnosis:
    """Diagnose with node 0 ending first, as is usual when another node is to blame."""
    tails = tails_of(name)
    return blamed(tails, dict.fromkeys(tails, 1), {node: float(node) for node in tails}, **options)


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("exception", "exception", "ValueError: the number of heads is odd: 7 (train.py, line 11)"),
        ("exit", "exit", "rank 3 ended with exit code 3"),
        ("sigkill", "killed", "rank 3 was killed (SIGKILL)"),
        ("segv", "crash", "rank 3 was ended by SIGSEGV"),
        ("file", "file", "/data/llama/tokenizer.json"),
        ("module", "module", "flash_attn_of_another_age"),
        ("importname", "version", "torch has no nothing_of_the_kind"),
        ("memory", "host-memory", "40000000000000 bytes more were refused"),
        ("full", "disk-full", "the disk is full"),
        ("save", "disk-full", "a checkpoint could not be written completely"),
        ("permission", "permission", "Permission denied: /root/out.txt"),
        ("cuda", "no-gpu", "torch sees no GPU there"),
        ("shm", "shm", "/dev/shm is full"),
    ],
)
def test_the_rank_that_failed_is_blamed_and_not_the_node_that_ended_first(name: str, kind: str, words: str) -> None:
    found = diagnosed(name)
    assert (found.node, found.rank, found.kind, found.certain) == (1, 3, kind, True)
    assert words in found.cause
    assert found.remedy
    assert found.evidence
    assert not any("closed by peer" in line for line in found.evidence)


@pytest.mark.parametrize(
    ("name", "node", "kind", "words"),
    [
        ("port", 0, "port", "port 33001 is taken on node 0"),
        ("alone", 0, "rendezvous", "only 1/2 nodes joined within 6 s"),
        ("rendezvous", 1, "rendezvous", "node 0 did not answer on 127.0.0.1 port 33002"),
        ("sigterm", 0, "terminated", "stopped from outside, by signal 15"),
    ],
)
def test_trouble_of_torchrun_itself_names_no_rank(name: str, node: int, kind: str, words: str) -> None:
    found = diagnosed(name, ranks_per_node=2)
    assert (found.node, found.rank, found.kind) == (node, None, kind)
    assert words in found.cause


def test_a_taken_port_explains_why_others_did_not_reach_node_0() -> None:
    tails = tails_of("rendezvous") | tails_of("port")
    found = blamed(tails, {0: 1, 1: 1}, {0: 9.0, 1: 1.0})
    assert (found.node, found.kind) == (0, "port")


def test_a_key_that_the_trainer_does_not_know_is_named() -> None:
    found = diagnosed("lf-key")
    assert (found.node, found.rank, found.kind) == (0, 0, "key")
    assert found.cause == "the trainer does not know ['overwrite_output'] in train.yaml"


def test_a_model_that_was_looked_for_on_the_hub_is_missing() -> None:
    assert diagnosed("lf-model").kind == "model"


def test_the_evidence_of_an_exception_is_its_deepest_frame_and_its_message() -> None:
    assert diagnosed("exception").evidence == (
        '  File "/data/run/train.py", line 11, in <module>',
        '    if mode == "exception": raise ValueError("the number of heads is odd: 7")',
        "ValueError: the number of heads is odd: 7",
    )


@pytest.mark.parametrize(
    "lines",
    [
        # The first of very many frames is not among the last lines.
        ["    f(n + 1)", *['  File "/x/train.py", line 3, in f', "    f(n + 1)"] * 3],
        ["\u256d\u2500 Traceback (most recent call last) \u256e", "\u2502 /x/train.py:3 in f", "\u2570"],
    ],
    ids=["without its beginning", "drawn by rich"],
)
def test_an_exception_is_known_however_its_traceback_is_shown(lines: list[str]) -> None:
    end = "ValueError: shapes differ: " + "7, " * 1000 + "8"
    found = blamed({0: [*lines, end, "bye"]}, {0: 1})
    assert (found.kind, found.cause[:26]) == ("exception", "ValueError: shapes differ:")


def test_the_evidence_of_an_exit_without_words_is_the_last_line_of_that_rank_and_torchruns_report() -> None:
    assert diagnosed("exit").evidence == ("giving up", "torchrun: rank 3, exitcode 3 (pid: 5193)")


NCCL_TIMEOUT = (
    "[default{local}]:[rank{rank}]:[E602 11:17:52.399340163 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=2847, OpType=ALLREDUCE, NumelIn=19, NumelOut=19, "
    "Timeout(ms)=600000) ran for 600080 milliseconds before timing out."
)
TOLD_OF_IT = (
    "[default1]:[rank3]:[E602 11:17:53.1 ProcessGroupNCCL.cpp:1375] [PG ID 0 PG GUID 0(default_pg) Rank 3] Received a "
    "dump signal due to a collective timeout from  rank 0 and we will try our best to dump the debug info."
)
GONE = "[default1]:[rank3]: torch.distributed.DistBackendError: NCCL error: ncclRemoteError: a remote process exiting"


def waits(*ranks: int) -> list[str]:
    return ["[default0]:step 7", *(NCCL_TIMEOUT.format(local=rank % 2, rank=rank) for rank in ranks)]


@pytest.mark.parametrize(
    ("tails", "codes", "node", "rank", "kind"),
    [
        (tails_of("hang"), {0: 1, 1: 1}, 1, 3, "hang"),
        ({0: waits(0, 1), 1: waits(2)}, {0: 1}, 1, 3, "hang"),
        ({0: waits(0, 1), 1: [*waits(2), TOLD_OF_IT, GONE]}, {0: 1, 1: 1}, 1, 3, "hang"),
        ({0: waits(0), 1: ["[default1]:step 7"]}, {0: 1}, 0, 0, "nccl-timeout"),  # others may follow
        ({0: waits(0, 1), 1: []}, {0: 134}, 1, None, "hang"),
        ({0: waits(0, 1), 1: waits(2, 3)}, {0: 1, 1: 1}, 0, 0, "nccl-timeout"),
        ({0: ["Timed out waiting 5000ms for recv operation to complete"], 1: ["step 7"]}, {0: 1}, 1, None, "hang"),
        ({0: waits(0, 1), 1: [*waits(2), "[default1]:[rank3]: MemoryError"]}, {0: 1, 1: 1}, 1, 3, "host-memory"),
    ],
)
def test_of_a_timeout_the_rank_is_blamed_that_did_not_wait(
    tails: dict[int, list[str]], codes: dict[int, int], node: int, rank: int | None, kind: str
) -> None:
    found = blamed(tails, codes, {0: 1.0, 1: 2.0}, ranks_per_node=2)
    assert (found.node, found.rank, found.kind) == (node, rank, kind)
    assert found.certain == (kind == "host-memory")


def test_nothing_has_failed_while_nothing_has_ended() -> None:
    assert diagnose({0: ["step 1"], 1: []}, {}) is None
    assert diagnose({0: ["Traceback (most recent call last):", "ValueError: caught"]}, {0: 0}) is None


def test_a_rank_that_fell_over_is_seen_before_torchrun_has_stopped_the_others() -> None:
    lines = tails_of("exception")[1]
    upto = next(place for place, line in enumerate(lines) if "closing signal" in line)
    found = blamed({0: tails_of("exception")[0], 1: lines[:upto]}, {0: 1})
    assert (found.node, found.rank, found.kind) == (1, 3, "exception")


def test_a_node_that_is_lost_explains_errors_on_the_way_to_it() -> None:
    tails = {0: tails_of("exception")[0], 1: ["[default0]:step 4"]}
    found = blamed(tails, {0: 1}, {0: 1.0, 1: 20.0}, {1: "no answer for 20 s"})
    assert (found.node, found.rank, found.kind) == (1, None, "lost")
    assert "no answer for 20 s" in found.cause
    assert found.evidence == ("step 4",)


def test_a_crash_explains_more_than_a_node_that_is_lost_later() -> None:
    found = blamed(tails_of("exception"), {0: 1, 1: 1}, {0: 3.0, 1: 1.0}, {0: "no answer"})
    assert (found.node, found.kind) == (1, "exception")


def test_what_a_node_script_says_is_the_cause_and_the_remedy() -> None:
    lines = [
        "node-02.sh: note: memory locking is limited to 64 KiB; RDMA may fail (memlock in limits.conf)",
        "node-02.sh: /opt/venv/bin/python lacks torch, megatron; install it there, or activate the environment first",
    ]
    found = blamed({2: lines}, {2: 2})
    assert (found.node, found.rank, found.kind) == (2, None, "script")
    assert found.cause == "/opt/venv/bin/python lacks torch, megatron"
    assert found.remedy == "install it there, or activate the environment first"
    # A trainer that ends with the same code was not kept from starting, whatever the script printed before.
    for said in (lines[:1], [*lines, "train.py: error: unrecognized arguments: --fp12"]):
        assert blamed({2: said}, {2: 2}).kind != "script"


BAR = "[default0]: 11%|#1 | {step}/900 [00:10<13:00,  1.00it/s]"


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        (
            ["wandb: ERROR [Errno 28] No space left on device", *[BAR.format(step=step) for step in (7, 8, 10)]],
            "killed",
        ),
        # A rank that goes on alone gets no further than the point at which the others are waited for.
        (
            ["wandb: ERROR [Errno 28] No space left on device", *[BAR.format(step=step) for step in (7, 8, 9)]],
            "disk-full",
        ),
        (
            [
                BAR.format(step=3),
                "Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__ at 0x7f>",
                "Traceback (most recent call last):",
                "AssertionError: can only test a child process",
                *[BAR.format(step=step) for step in range(4, 90)],
            ],
            "killed",
        ),
    ],
)
def test_what_training_went_on_after_was_not_the_end(lines: list[str], kind: str) -> None:
    assert blamed({0: lines}, {0: 137}).kind == kind


@pytest.mark.parametrize(("code", "kind"), [(137, "killed"), (-9, "killed"), (143, "terminated"), (139, "crash")])
def test_a_signal_that_ended_the_whole_script_is_known_by_its_code(code: int, kind: str) -> None:
    found = blamed({0: ["step 3"]}, {0: code})
    assert (found.kind, found.rank, found.evidence) == (kind, None, ("step 3",))


def test_that_memory_ran_out_is_not_claimed_of_a_killed_rank_and_it_may_be_started_again() -> None:
    found = diagnosed("sigkill")
    assert found.cause == (
        "rank 3 was killed (SIGKILL), and it is not known whether by the kernel, because host memory ran out"
    )
    assert "dmesg" in found.remedy
    assert found.kind in RETRYABLE_KINDS


@pytest.mark.parametrize(
    "line",
    [
        "Out of memory: Killed process 4711 (python) total-vm:1kB",
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null)",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0. Some of the step tasks have been OOM Killed.",
    ],
)
def test_a_log_that_says_that_memory_ran_out_is_believed_and_nothing_is_started_again(line: str) -> None:
    tails = tails_of("sigkill")
    found = blamed({node: [*lines, line] if node == 1 else lines for node, lines in tails.items()}, {0: 1, 1: 137})
    assert (found.kind, found.cause) == ("host-memory", "host memory ran out")
    assert found.kind not in RETRYABLE_KINDS


def test_a_node_that_left_no_exit_code_is_blamed_and_not_those_that_lost_it() -> None:
    tails = {0: tails_of("exception")[0], 1: ["[default0]:step 4"]}
    found = blamed(tails, {0: 1, 1: None}, {0: 1.0, 1: 2.0})
    assert (found.node, found.rank, found.kind, found.evidence) == (1, None, "killed", ("step 4",))


def test_without_any_words_the_exit_code_is_the_cause() -> None:
    found = blamed({3: []}, {0: 0, 3: 17})
    assert (found.node, found.cause) == (3, "the node's script ended with exit code 17")


def test_among_equals_the_first_to_end_is_blamed() -> None:
    tails = {node: ["ValueError: No valid config found in Qwen/Qwen3-8B"] for node in range(3)}
    found = blamed(tails, dict.fromkeys(tails, 1), {0: 3.0, 1: 1.0, 2: 2.0})
    assert found.node == 1


def test_the_rank_follows_from_the_local_one() -> None:
    lines = ["[default5]:torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB."]
    found = blamed({3: lines}, {3: 1}, ranks_per_node=8)
    assert found.rank == 29


THREADS = [line.split(" | ") for line in (RECORDED / "threads.txt").read_text(encoding="utf-8").splitlines()[3:]]


@pytest.mark.parametrize(("source", "kind", "words", "line"), THREADS)
def test_words_that_people_have_reported_are_known(source: str, kind: str, words: str, line: str) -> None:
    found = blamed({0: ["[default0]:loading", f"[default0]:{line}", "[default0]:"]}, {0: 1}, ranks_per_node=1)
    assert (found.kind, found.rank) == (kind, 0)
    assert words in found.cause
    assert "%s" not in found.cause + found.remedy
    assert "{" not in found.cause + found.remedy
    assert any(line[-40:] in each or each in line for each in found.evidence)


def test_every_kind_of_cause_has_a_line_that_leads_to_it() -> None:
    seen = {kind for _, kind, *_ in THREADS} | {"file", "module", "permission", "disk-full", "no-gpu"}
    seen |= {"terminated", "gpu-busy", "gpu-kind", "nccl-version", "template"}
    assert {cause.kind for cause in CAUSES} <= seen


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable", "gpu-busy"),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "gpu-kind"),
        ("RuntimeError: CUDA error: invalid device ordinal", "no-gpu"),
        ("ImportError: libtorch_cuda.so: undefined symbol: ncclCommRegister", "nccl-version"),
        ("ValueError: Template qwen9 does not exist.", "template"),
        ("OSError: [Errno 122] Disk quota exceeded", "disk-full"),
    ],
)
def test_rarer_words_are_known_too(line: str, kind: str) -> None:
    found = blamed({0: [line]}, {0: 1})
    assert found.kind == kind


def test_nccls_last_error_says_more_than_the_exception_above_it() -> None:
    lines = [
        "[rank3]: Traceback (most recent call last):",
        '[rank3]:   File "/opt/train.py", line 1, in <module>',
        "[rank3]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:317, unhandled system error",
        "[rank3]: ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
        "[rank3]: Last error:",
        "[rank3]: Error while creating shared memory segment /dev/shm/nccl-EoOvZr (size 7340384)",
    ]
    found = blamed({0: lines}, {0: 1})
    assert (found.kind, found.rank) == ("shm", 3)


def test_the_text_of_a_program_in_a_traceback_is_not_taken_for_its_message() -> None:
    lines = [
        "Traceback (most recent call last):",
        '  File "parser.py", line 126, in get_dataset_list',
        '    raise ValueError(f"Undefined dataset {name} in {DATA_CONFIG}.")',
        "KeyError: 'other'",
    ]
    found = blamed({0: lines}, {0: 1})
    assert (found.kind, found.cause) == ("exception", "KeyError: 'other' (parser.py, line 126)")


def test_of_a_chain_of_unknown_exceptions_the_last_is_shown() -> None:
    lines = [
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in f',
        "KeyError: 'inner'",
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        "Traceback (most recent call last):",
        '  File "b.py", line 2, in g',
        "RuntimeError: outer",
    ]
    found = blamed({0: lines}, {0: 1})
    assert found.cause == "RuntimeError: outer (b.py, line 2)"


def test_escape_sequences_and_long_lines_do_not_reach_the_report() -> None:
    found = blamed({0: ["\x1b[31mValueError: No valid config found in \x1b[0m" + "x" * 5000]}, {0: 1})
    assert all(len(line) <= 300 and line.isprintable() for line in found.evidence)


lines = st.lists(
    st.one_of(
        st.text(max_size=60),
        st.sampled_from([line for *_, line in THREADS]),
        st.sampled_from(
            ["Traceback (most recent call last):", "[rank1]: Traceback (most recent call last):", "[rank1]: ValueError"]
        ),
        st.sampled_from(
            ["Root Cause (first observed failure):", "  rank : 3 (local_rank: 1)", "  exitcode : -9 (pid: 1)"]
        ),
    ),
    max_size=12,
)


@given(
    st.dictionaries(st.integers(0, 3), lines, max_size=4),
    st.dictionaries(st.integers(0, 3), st.none() | st.integers(-300, 300), max_size=4),
    st.dictionaries(st.integers(0, 3), st.text(max_size=10), max_size=2),
)
def test_whatever_nodes_say_there_is_an_answer_when_one_has_failed(
    tails: dict[int, list[str]], codes: dict[int, int | None], lost: dict[int, str]
) -> None:
    found = diagnose(tails, codes, {}, lost, ranks_per_node=2)
    assert found is not None or not (any(code != 0 for code in codes.values()) or lost)
    if found is not None:
        assert found.cause
        assert found.node in {*tails, *codes, *lost}
