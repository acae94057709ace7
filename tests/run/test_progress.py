"""The trainer's own lines show its progress; on recorded output, and on lines that users have posted."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.samples import make_plan, make_spec
from topoplan.run.progress import Progress, Status
from topoplan.trainers.log import may_match
from topoplan.trainers.registry import TRAINERS

RECORDED = Path(__file__).parent / "recorded"
BAR = "[default0]:  3%|▎         | {step}/{total} [{clock}<06:20,  3.90s/it]"
LOG = "{{'loss': {loss}, 'grad_norm': 1.4, 'learning_rate': 2e-05, 'epoch': 0.01}}"


def read(name: str, progress: Progress, node: int = 0) -> list[Status]:
    """Return what is shown while recorded output arrives."""
    shown = []
    for line in (RECORDED / f"progress-{name}.txt").read_text(encoding="utf-8").splitlines():
        at_s, _, text = line.partition(" ")
        if status := progress.feed(node, text, float(at_s)):
            shown.append(status)
    return shown


def clock(time_s: float) -> str:
    minutes, seconds = divmod(int(time_s), 60)
    return f"{minutes:02d}:{seconds:02d}"


def test_a_recorded_run_with_a_bar_is_followed_to_its_end() -> None:
    progress = Progress(step_s=0.25, band_s=(0.2, 0.35), tokens_per_step=1000, total_steps=40, world_size=2)
    shown = read("bar", progress)
    last = shown[-1]
    assert (last.step, last.total_steps, last.loss, last.left_s) == (40, 40, 1.05, 0)
    assert [status.step for status in shown] == sorted(status.step for status in shown)
    assert last.step_s == pytest.approx(0.3, rel=0.05)
    assert last.ratio == pytest.approx(1.2, rel=0.05)
    assert last.in_band is True
    assert last.tokens_per_s == pytest.approx(1000 / 0.3, rel=0.05)
    assert last.tokens_per_s_per_gpu == pytest.approx(500 / 0.3, rel=0.05)


def test_the_bar_of_an_evaluation_and_of_the_data_are_not_the_training() -> None:
    shown = read("bar", Progress())
    assert {status.total_steps for status in shown} == {40}


def test_a_run_that_goes_on_from_a_checkpoint_starts_at_its_step() -> None:
    shown = read("bar-25", Progress(total_steps=40))
    assert shown[0].step == 26
    assert (shown[-1].step, shown[-1].loss) == (40, 1.05)
    # 40 - 26 steps in 4.5 s, and not 40.
    assert shown[-1].step_s == pytest.approx(0.3, rel=0.2)


def test_without_a_bar_the_losses_are_counted() -> None:
    shown = read("printer", Progress(total_steps=40))
    assert (shown[-1].step, shown[-1].loss, shown[-1].total_steps) == (40, 1.05, 40)
    assert shown[-1].step_s == pytest.approx(0.3, rel=0.05)


def test_the_bar_and_the_lines_of_ms_swift_are_followed_to_their_end() -> None:
    shown = read("swift", Progress(step_s=0.1, band_s=(0.09, 0.13), tokens_per_step=1000, total_steps=44, world_size=2))
    assert {status.total_steps for status in shown} == {40}, "as the trainer counts them"
    assert [status.step for status in shown] == sorted(status.step for status in shown)
    last = shown[-1]
    assert (last.step, last.loss, last.left_s) == (40, 0.2379, 0)
    assert last.step_s == pytest.approx(0.11, rel=0.1)
    assert last.tokens_per_s_per_gpu == pytest.approx(500 / 0.11, rel=0.1)


def test_a_log_of_ms_swift_that_is_read_at_once_is_timed_by_its_own_clock() -> None:
    line = "{{'loss': '1.5', 'global_step/max_steps': '{step}/99', 'elapsed_time': '{clock}', 'remaining_time': '9s'}}"
    progress = Progress()
    for step, elapsed in enumerate(("59m 58s", "1h 0m 40s", "1h 1m 22s", "1d 0h 2m 4s"), start=1):
        progress.feed(0, line.format(step=step, clock=elapsed), 0.1 * step)
        if step == 3:
            assert progress.status().step_s == 42.0
    assert (progress.status().step, progress.status().total_steps) == (4, 99)


def test_megatron_sft_prints_its_steps_on_the_last_node() -> None:
    progress = Progress()
    for step in (1, 2, 3):
        clock = f"{step}m {step}s"
        line = f"[default7]:{{'loss': 2.5, 'grad_norm': 1.0, 'iteration': '{step}/50', 'elapsed_time': '{clock}'}}"
        status = progress.feed(3, line, 61.0 * step)
    assert (status.step, status.total_steps, status.loss, status.step_s) == (3, 50, 2.5, 61.0)


def test_the_lines_that_ray_passes_on_from_trinity_are_read() -> None:
    shown = read("trinity", Progress(tokens_per_step=1000, total_steps=12, world_size=4))
    assert [status.step for status in shown] == list(range(1, 13))
    last = shown[-1]
    assert (last.loss, last.total_steps, last.left_s) == (1.4, 12, 0), "sft_loss, and not what is left of it by scaling"
    assert last.step_s == pytest.approx(0.5, rel=0.05)
    assert last.tokens_per_s_per_gpu == pytest.approx(500, rel=0.05)


def test_losses_are_counted_by_node_as_every_node_prints_them_without_a_bar() -> None:
    progress = Progress(total_steps=100, logging_steps=10)
    for round_ in range(3):
        for node in range(4):
            progress.feed(node, LOG.format(loss=2.0 - round_ / 10), 40.0 * round_)
    status = progress.status()
    assert (status.step, status.loss, status.step_s, status.left_s) == (30, 1.8, 4.0, 280.0)


@pytest.mark.parametrize(
    ("line", "loss"),
    [
        (LOG.format(loss=1.832), 1.832),
        ("[default7]:{'loss': '1.832', 'grad_norm': '1.4', 'learning_rate': '2e-05', 'epoch': '0.01'}", 1.832),
        ("[rank0]: " + LOG.format(loss=-0.5), -0.5),
        ("\x1b[32m" + LOG.format(loss="1.2e-05") + "\x1b[0m", 1.2e-05),
        # hiyouga/LlamaFactory#8261, and its log with the web UI
        (
            "{'loss': 3.5534, 'grad_norm': 1.4142135381698608, 'learning_rate': 2.0454545454545457e-06, 'epoch': 0.01}",
            3.5534,
        ),
        (
            "[INFO|2026-01-01 10:00:00] callbacks:143 >> {'loss': 0.9123, 'learning_rate': 2.0000e-05, 'epoch': 0.10}",
            0.9123,
        ),
        ('{"current_steps": 10, "total_steps": 100, "loss": 1.5, "lr": 2e-05, "epoch": 0.1}', 1.5),
    ],
)
def test_losses_are_read_in_all_their_forms(line: str, loss: float) -> None:
    status = Progress().feed(0, line, 1.0)
    assert status.loss == loss


def test_a_loss_that_is_no_number_is_shown_as_that() -> None:
    status = Progress().feed(0, LOG.format(loss="nan"), 1.0)
    assert math.isnan(status.loss)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{'eval_loss': 2.5, 'eval_runtime': 0.2, 'epoch': 0.5}",
        "{'train_runtime': 12.3, 'train_loss': 2.01, 'epoch': 1.0}",
        "Running tokenizer on dataset (num_proc=16):  12%|█▏        | 12000/100000 [00:12<01:20, 1099.2 examples/s]",
        "Loading checkpoint shards: 100%|██████████| 4/4 [00:12<00:00,  3.1s/it]",
        "the loss was 1.2",
        "Val:  10%|█         | 1/10 [00:01<00:09,  1.0it/s]",
        "Evaluate:  10%|█         | 1/10 [00:01<00:09,  1.0it/s]",
        "{'train_runtime': '1.3', 'train_loss': '4.7', 'epoch': '2', 'global_step/max_steps': '10/10'}",
        "  0%|          | 0/4686 [00:00<?, ?it/s]",
    ],
)
def test_other_lines_say_nothing(line: str) -> None:
    assert Progress().feed(0, line, 1.0) is None


def test_the_logs_own_file_says_steps_and_their_number() -> None:
    status = Progress().feed(0, '{"current_steps": 10, "total_steps": 100, "loss": 1.5, "percentage": 10.0}', 1.0)
    assert (status.step, status.total_steps) == (10, 100)


def test_the_same_state_is_told_once() -> None:
    progress = Progress()
    line = BAR.format(step=3, total=100, clock="00:12")
    assert progress.feed(0, line, 12.0) is not None
    assert progress.feed(0, line, 12.1) is None
    assert progress.feed(3, line, 12.2) is None


def test_the_time_of_a_step_is_the_median_so_that_one_checkpoint_does_not_count() -> None:
    progress = Progress(total_steps=100)
    at_s = 0.0
    for step in range(1, 12):
        at_s += 60.0 if step == 6 else 3.0
        progress.feed(0, BAR.format(step=step, total=100, clock=clock(at_s)), at_s)
    assert progress.status().step_s == 3.0
    assert progress.status().left_s == 89 * 3.0


def test_the_first_step_does_not_count() -> None:
    progress = Progress(total_steps=100)
    for step, at_s in ((0, 0.0), (1, 90.0), (2, 93.0), (3, 96.0)):
        progress.feed(0, BAR.format(step=step, total=100, clock=clock(at_s)), at_s)
    assert progress.status().step_s == 3.0


def test_an_old_log_that_is_read_again_is_timed_by_the_bars_clock() -> None:
    progress = Progress(total_steps=100)
    for step in range(1, 90):
        progress.feed(0, BAR.format(step=step, total=100, clock=clock(3 * step)), 1000.0 + step / 1000)
    assert progress.status().step_s == pytest.approx(3.0)


def test_lines_that_were_held_up_by_a_cut_do_not_change_the_pace() -> None:
    progress = Progress(total_steps=1000)
    for step in range(1, 61):
        printed_s = 3.0 * step
        held_s = 90.0 if 60 < printed_s < 90 else printed_s
        progress.feed(0, BAR.format(step=step, total=1000, clock=clock(printed_s)), held_s)
    assert progress.status().step_s == pytest.approx(3.0)


def test_lines_that_were_written_before_they_arrived_are_not_timed_by_their_arrival() -> None:
    progress = Progress(step_s=0.5, band_s=(0.4, 0.6), total_steps=300)
    for _ in range(30):
        progress.feed(0, LOG.format(loss=2.0), None)
    for at_s in (0.4, 0.9, 1.4, 1.9, 2.2):
        progress.feed(0, LOG.format(loss=2.0), at_s)
    status = progress.status()
    assert (status.step, status.step_s, status.in_band, status.left_s) == (35, None, None, None)
    progress.feed(0, LOG.format(loss=2.0), 2.4)
    assert progress.status().step_s == pytest.approx(0.4)


def test_lines_that_were_written_before_they_arrived_are_timed_by_their_own_clock() -> None:
    progress = Progress(total_steps=300)
    for step in range(1, 6):
        progress.feed(0, BAR.format(step=step, total=300, clock=clock(0.8 * step)), None)
    # Counted from its arrival, a step would take 1.2 s.
    progress.feed(0, BAR.format(step=6, total=300, clock=clock(0.8 * 6)), 0.4)
    progress.feed(0, BAR.format(step=9, total=300, clock=clock(0.8 * 9)), 2.8)
    assert progress.status().step_s is None
    progress.feed(0, BAR.format(step=26, total=300, clock=clock(0.8 * 26)), 16.4)
    assert progress.status().step_s == pytest.approx(0.8)


def test_the_plans_number_of_steps_tells_the_bar_of_the_training() -> None:
    progress = Progress(total_steps=50)
    progress.feed(0, BAR.format(step=700, total=900, clock="00:05"), 5.0)
    progress.feed(0, BAR.format(step=1, total=50, clock="00:09"), 9.0)
    assert (progress.status().step, progress.status().total_steps) == (1, 50)
    progress.feed(0, BAR.format(step=800, total=900, clock="00:05"), 10.0)
    assert (progress.status().step, progress.status().total_steps) == (1, 50)


def test_the_trainer_knows_the_number_of_steps_better_than_the_plan() -> None:
    progress = Progress(total_steps=4686)
    progress.feed(0, BAR.format(step=1, total=4688, clock="00:03"), 3.0)
    assert progress.status().total_steps == 4688


def test_the_numbers_of_a_plan_are_what_it_is_measured_against() -> None:
    spec, plan = make_spec(samples=640, epochs=1.0, global_batch_size=64, seq_len=4096), make_plan()
    status = Progress.of(spec, plan).status()
    assert (status.total_steps, status.predicted_step_s) == (10, plan.time.step_s)
    assert status.predicted_band_s == plan.time.band_s
    assert (status.step, status.loss, status.step_s, status.in_band) == (0, None, None, None)


def test_a_run_that_is_ended_before_the_trainer_would_end_it_is_counted_to_that_step() -> None:
    progress = Progress(total_steps=40, ends_at=20)
    for step in (1, 3, 11):
        progress.feed(0, BAR.format(step=step, total=40, clock=clock(3 * step)), 3.0 * step)
    status = progress.status()
    assert (status.step, status.total_steps, status.left_s) == (11, 20, 27.0)
    progress.feed(0, BAR.format(step=21, total=40, clock=clock(63)), 63.0)
    assert (progress.status().total_steps, progress.status().left_s) == (21, 0)


def test_slower_than_the_band_is_said() -> None:
    progress = Progress(step_s=3.0, band_s=(2.9, 3.4), total_steps=10)
    for step in (1, 2, 3):
        progress.feed(0, BAR.format(step=step, total=10, clock=clock(4 * step)), 4.0 * step)
    assert progress.status().in_band is False
    assert progress.status().ratio == pytest.approx(4 / 3)


def test_the_end_of_a_very_long_line_is_read() -> None:
    status = Progress().feed(0, "x" * 10**6 + "\r  5%|▌  | 5/100 [00:12<06:20,  3.9s/it]", 1.0)
    assert status.step == 5


def test_lines_that_are_passed_over_hold_nothing_that_a_trainer_prints() -> None:
    lines = [line for file in RECORDED.glob("progress-*.txt") for line in file.read_text(encoding="utf-8").splitlines()]
    logs = [trainer.log for trainer in TRAINERS]
    forms = {one for log in logs for one in (log.loss, log.bar, log.step_time, log.data_time, log.reserved, log.aside)}
    found = {form.pattern for form in forms if form and any(form.search(line) for line in lines)}
    assert len(found) >= 7
    assert not [line for line in lines if not may_match(line) and any(form and form.search(line) for form in forms)]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.one_of(
                st.text(max_size=80),
                st.builds(
                    "'loss': {}{}".format, st.text(alphabet="0123456789.e-+naif'", max_size=12), st.text(max_size=3)
                ),
                st.builds(
                    " {}%|{}| {}/{} [{}:{}<{}".format,
                    *[st.integers(0, 10**15) | st.text(max_size=3) for _ in range(7)],
                ),
                st.builds(
                    BAR.format, step=st.integers(0, 10**12), total=st.integers(0, 10**12), clock=st.just("00:03")
                ),
            ),
            st.floats(0, 1e9),
        ),
        max_size=8,
    )
)
def test_no_text_ends_it(fed: list[tuple[int, str, float]]) -> None:
    progress = Progress(step_s=3.0, band_s=(2.0, 4.0), tokens_per_step=100, total_steps=10, world_size=8)
    for node, line, at_s in fed:
        progress.feed(node, line, at_s)
    progress.status()
