from __future__ import annotations

import os
import signal

from topoplan.cli.interrupts import Interrupts


def test_ctrl_c_is_counted_and_nothing_else_happens() -> None:
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.count == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
