import os
import signal

import pytest

from topoplan.cli.interrupts import Interrupts


def test_after_those_that_are_spared_ctrl_c_does_as_told() -> None:
    with Interrupts(spared=1, then=signal.default_int_handler) as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.count == 1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_is_counted_and_nothing_else_happens() -> None:
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.count == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
