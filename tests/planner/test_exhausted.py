"""Out of memory is a measurement: the message's figures, possible reasons, and what fits once it has been learned."""

from dataclasses import replace
from typing import Any

import pytest

from tests.samples import make_spec
from topoplan.errors import InputError
from topoplan.planner.exhausted import Ended, exhausted_words, read_exhausted
from topoplan.planner.learn import learn_from, reordered
from topoplan.planner.plan import Plan
from topoplan.planner.predict import predict
from topoplan.planner.search import rank
from topoplan.specs.gpu_profile import profile_of
from topoplan.specs.profile import OwnProfile
from topoplan.units import GIB

SPEC = make_spec(nodes=1)
NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried} GiB. GPU 3 has a total capacity of 79.10 GiB"
    " of which 1.29 GiB is free. {others}Including non-PyTorch memory, this process has {used} GiB memory in use. Of"
    " the allocated memory {live} GiB is allocated by PyTorch, and {held} is reserved by PyTorch but unallocated. If"
    " reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)
BACKWARD = ('  File "/x/transformers/trainer.py", line 3782, in training_step', "    self.accelerator.backward(loss)")


def message(
    live: float = 70.0, *, tried: float = 4.0, held: str = "1.50 GiB", others: str = "", used: float = 75.0
) -> str:
    return NEW.format(tried=tried, live=live, held=held, others=others, used=used)


def log(text: str, *traceback: str, rank: int = 3) -> str:
    bar = "[default3]: 12%|#2   | 12/100 [00:30<03:00,  2.00s/it]"
    return "\n".join([bar, *(f"[rank{rank}]: {line}" for line in (*traceback, text))])


@pytest.fixture(scope="module")
def plan() -> Plan:
    found = predict(SPEC, {"backend": "mca", "tp": 4, "micro_batch_size": 1})
    return replace(found, trainer="llamafactory")


@pytest.mark.parametrize(
    ("text", "tried", "live", "held", "others"),
    [
        (message(), 4.0, 70.0, 1.5, 0.0),
        (message(held="512.00 MiB", others="Process 77 has 20.00 GiB memory in use. "), 4.0, 70.0, 0.5, 20.0),
        # Of torch 2.0 and 2.1 (carolchenyx/MGFN issue 35): the memory of the process is not stated.
        (
            "CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a total capacty of 6.00 GiB of which 0 bytes is"
            " free. Of the allocated memory 2.93 GiB is allocated by PyTorch, and 2.30 GiB is reserved by PyTorch but"
            " unallocated.",
            1.7,
            2.93,
            2.3,
            0.0,
        ),
        # Of torch 1 (hiyouga/LlamaFactory issue 182)
        (
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 50.00 MiB (GPU 0; 31.75 GiB total"
            " capacity; 5.22 GiB already allocated; 44.69 MiB free; 5.22 GiB reserved in total by PyTorch) If reserved",
            50 / 1024,
            5.22,
            0.0,
            0.0,
        ),
    ],
)
def test_the_messages_of_pytorch_are_read(text: str, tried: float, live: float, held: float, others: float) -> None:
    found = read_exhausted(log(text))
    read = (found.tried_bytes, found.allocated_bytes, found.held_bytes, found.others_bytes)
    assert [one / GIB for one in read] == pytest.approx([tried, live, held, others])
    assert (found.rank, found.step) == (3, 12)


@pytest.mark.parametrize(
    ("traceback", "moment"),
    [
        (BACKWARD, "backward"),
        (("    self.optimizer.step()", '  File "/x/torch/optim/adamw.py", line 9, in step'), "the optimizer step"),
        (('  File "/x/m.py", line 1, in forward', "    loss = F.cross_entropy(a, b)"), "the loss"),
        (
            ('  File "/x/trainer.py", line 1, in evaluation_loop', '  File "/x/m.py", line 1, in forward'),
            "an evaluation",
        ),
        (("    model = AutoModel.from_pretrained(path)",), "loading the model"),
        (("?",), ""),
    ],
)
def test_the_traceback_says_at_which_moment_it_was(traceback: tuple[str, ...], moment: str) -> None:
    found = read_exhausted(log(message(), *traceback))
    assert found.moment == moment


def test_a_log_without_the_figures_is_none() -> None:
    assert (
        read_exhausted("RuntimeError: CUDA error: out of memory\nCUDA out of memory. Tried to allocate 2 GiB.") is None
    )


def words(plan: Plan, text: str, *traceback: str) -> str:
    found = read_exhausted(log(text, *traceback))
    assert found is not None
    return " / ".join(exhausted_words(SPEC, plan, found))


def test_it_is_told_with_how_far_it_is_from_the_prediction_and_why_that_may_be(plan: Plan) -> None:
    live = plan.memory.allocated_bytes / GIB
    said = words(plan, message(74.0), *BACKWARD)
    assert "out of memory on GPU 3 of rank 3, in backward and after step 12: 4.0 GiB more did not fit beside" in said
    assert f"{live:.1f} GiB are predicted of tp4-pp1-dp2-mbs1" in said
    assert "samples may be longer than planned" in said
    assert "with that learnt, " in said
    held = words(plan, message(0.9 * live, held="9.00 GiB"), *BACKWARD)
    assert "torch held back 9.0 GiB" in held
    assert "longer than planned" not in held
    assert "other processes hold 20.0 GiB" in words(plan, message(others="Process 7 has 20.00 GiB memory in use. "))
    assert "15.0 GiB of the process are not torch's" in words(plan, message(60.0, held="1.00 GiB", used=76.0))
    assert "nothing is learnt of the plan" in words(plan, message(), "AutoModel.from_pretrained(path)")


def test_a_plan_that_ran_out_of_memory_does_not_fit_by_the_next_prediction(plan: Plan) -> None:
    assert plan.fits
    found = read_exhausted(log(message(74.0), *BACKWARD))
    learnt = learn_from([], [Ended(spec=SPEC, plan=plan, found=found, name="log")])
    assert learnt.time is None
    taught = replace(SPEC, profile=learnt.profile)
    again = predict(taught, plan.layout)
    assert again.memory.reserved_bytes >= found.needed_bytes * (1 - 1e-3)
    assert not again.fits
    (measured,) = learnt.profile.calibrated.measured
    assert (measured.plan, measured.needs_at_least_gib) == (plan.id, 79.5)
    ranking = rank(taught)
    assert plan.id not in {layout.id for layout in ranking.plans.layouts}
    assert f"{plan.id} ran out of memory on this cluster, and is left out" in reordered(ranking)


def taught_by(plan: Plan, text: str) -> OwnProfile:
    found = read_exhausted(log(text, *BACKWARD))
    assert found is not None
    return learn_from([], [Ended(spec=SPEC, plan=plan, found=found, name="log")]).profile


@pytest.mark.parametrize(
    ("form", "switch", "smaller"),
    [
        (
            {"backend": "mca", "tp": 4, "pp": 2, "micro_batch_size": 2},
            {"overlap_grad_reduce": False},
            {"micro_batch_size": 1},
        ),
        (
            {"backend": "deepspeed", "zero_stage": 3, "micro_batch_size": 2},
            {"expandable_segments": True},
            {"recompute": "full"},
        ),
    ],
)
def test_tensors_beyond_the_prediction_are_learnt_as_tensors_and_no_setting_of_the_allocator_removes_them(
    form: dict[str, Any], switch: dict[str, Any], smaller: dict[str, Any]
) -> None:
    plan = predict(SPEC, form)
    live = 1.4 * plan.memory.allocated_bytes / GIB
    profile = taught_by(plan, message(live - 4.0, held="1.00 GiB"))
    assert set(profile.constants) == {"tensors_beyond"}
    taught = replace(SPEC, profile=profile)
    assert predict(taught, form).memory.allocated_bytes / GIB == pytest.approx(live, rel=2e-3)
    assert predict(taught, form).memory.band > plan.memory.band  # a contradiction makes no prediction more certain
    assert predict(taught, {**form, **switch}).memory.allocated_bytes / GIB >= live * (1 - 2e-3)
    assert predict(taught, {**form, **smaller}).memory.allocated_bytes / GIB < live
    assert "tensors that come and go counted " in " ".join(predict(taught, form).warnings)


def test_what_the_allocator_held_is_learnt_apart_from_the_tensors(plan: Plan) -> None:
    live = plan.memory.allocated_bytes / GIB
    profile = taught_by(plan, message(live - 5.0, held=f"{0.3 * live:.2f} GiB"))
    assert set(profile.constants) == {"fragmentation"}
    assert profile.constants["fragmentation"] == pytest.approx((live - 1.0 + 0.3 * live) / live - 1.0, abs=1e-3)
    assert profile.constants["fragmentation"] > profile_of(SPEC.cluster.gpu).fragmentation
    assert not taught_by(plan, message(0.8 * live, held="0.10 GiB")).constants


def test_what_another_process_or_another_moment_took_teaches_nothing(plan: Plan) -> None:
    others = "Process 7 has 20.00 GiB memory in use. "
    for text, line in ((message(others=others), BACKWARD[1]), (message(), '  File "/x/m.py", line 1, in load_model')):
        found = read_exhausted(log(text, line))
        assert found is not None
        with pytest.raises(InputError, match="nothing is learnt of it, because of"):
            learn_from([], [Ended(spec=SPEC, plan=plan, found=found, name="log")])


def test_cards_of_other_makers_say_the_same() -> None:
    found = read_exhausted(message().replace("CUDA out of", "HIP out of"))
    assert found.needed_bytes == pytest.approx(75.5 * GIB)
