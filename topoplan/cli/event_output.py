"""The output of watching a run, on the terminal or as lines of JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from topoplan.cli.interrupts import Interrupts
from topoplan.cli.live_output import LiveOutput

if TYPE_CHECKING:
    from topoplan.remote.identities import Access
    from topoplan.run.events import Event


class EventOutput:
    """Shows events as they come: the nodes' output on standard output, topoplan's messages on standard error, and the
    training progress below them. As JSON, everything goes to standard output."""

    def __init__(self, schema: str | None = None) -> None:
        """`schema` is the schema name of the JSON objects; None selects text."""
        self._schema = schema
        self._output = LiveOutput(keep_status=schema is None)

    @property
    def reader_has_left(self) -> bool:
        """Whether the reader of standard output has closed it (`| head`)."""
        return self._output.reader_has_left

    def tell(self, event: Event) -> None:
        """Show an event. Thread-safe."""
        from topoplan.report.session import OUTPUT, event_text, event_to_json

        output = self._output
        if self._schema is not None:
            text = event_to_json(event, self._schema)
            output.lines(text) if event.kind in OUTPUT else output.message(text, stdout=True)
        elif event.status is not None:
            output.show(event.status)
        elif event.kind in OUTPUT:
            output.lines(event_text(event))
        else:
            output.message(event_text(event))

    def access(self, *, accept_new: bool) -> Access:
        """Return the SSH credentials, with new host keys reported as events."""
        from topoplan.cli.ssh_options import access
        from topoplan.run.events import Event

        who = access(accept_new=accept_new)
        who.on_new_key = lambda new: self.tell(
            Event(
                kind="new-key",
                text=f"{new.host}: new host key {new.key.fingerprint} noted in {new.file}",
                data={"host": new.host, "fingerprint": new.key.fingerprint},
            )
        )
        return who

    def end(self, document: Mapping[str, Any], lines: Iterable[str], code: int, interrupts: Interrupts) -> None:
        """Report how the run ended, and flush the output. A user who interrupts the flush exits with `code`."""
        if self._schema is not None:
            self._output.message(json.dumps(document), stdout=True)
        else:
            for line in lines:
                self._output.message(line)
        while not self._output.close(limit_s=1.0):
            if interrupts.wants_out:
                # A halted terminal (Ctrl-S) must not hold up a user who wants to leave; nor may the final flush.
                os._exit(code)
