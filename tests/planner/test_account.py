"""The terms of a plan of either kind."""

from tests.engines.samples import DENSE, spec_of
from tests.planner.sharded_cases import plan_of
from topoplan.planner.account import memory_account, time_account
from topoplan.planner.breakdown import Breakdown
from topoplan.planner.predict import predict
from topoplan.planner.sharded_memory import ShardedBreakdown
from topoplan.planner.sharded_time import ShardedTimeBreakdown
from topoplan.planner.time_breakdown import TimeBreakdown


def test_the_backend_decides_on_the_terms() -> None:
    spec = spec_of(DENSE)
    plan = predict(spec, {"backend": "megatron", "tp": 2})
    assert isinstance(memory_account(spec, plan), Breakdown)
    assert isinstance(time_account(spec, plan), TimeBreakdown)
    spec, plan = plan_of(DENSE, {"backend": "ddp"}, {})
    assert isinstance(memory_account(spec, plan), ShardedBreakdown)
    assert isinstance(time_account(spec, plan), ShardedTimeBreakdown)
