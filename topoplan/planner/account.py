"""The accounts of a plan: where its memory and its time go."""

from __future__ import annotations

from topoplan.engines.account import MemoryAccount, TimeAccount
from topoplan.engines.data_parallel import memory_account as sharded_memory
from topoplan.engines.data_parallel import time_account as sharded_time
from topoplan.engines.megatron import memory_account as megatron_memory
from topoplan.engines.megatron import time_account as megatron_time
from topoplan.planner.case import case_of
from topoplan.planner.plan import Plan
from topoplan.specs.spec import Spec


def memory_account(spec: Spec, plan: Plan) -> MemoryAccount:
    """The terms of `plan.memory`, which has to list every stage (`planner.predict.predict`)."""
    account = megatron_memory.memory_account if plan.layout.is_megatron else sharded_memory.memory_account
    return account(case_of(spec, plan.layout.backend), plan.layout, plan.memory)


def time_account(spec: Spec, plan: Plan) -> TimeAccount:
    """The terms of `plan.time`."""
    account = megatron_time.time_account if plan.layout.is_megatron else sharded_time.time_account
    return account(case_of(spec, plan.layout.backend), plan.layout, plan.time)
