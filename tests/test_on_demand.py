"""A sequence whose items are imported one by one."""

import json

import pytest

from topoplan.on_demand import OnDemand


def test_what_nobody_comes_to_is_not_imported() -> None:
    some = OnDemand[object]("json:dumps", "json:loads", "topoplan.no_such_module:ONE")
    assert len(some) == 3
    assert next(iter(some)) is json.dumps
    assert some[:2] == (json.dumps, json.loads)
    assert json.loads in some
    with pytest.raises(ModuleNotFoundError):
        list(some)
