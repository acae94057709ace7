import pytest

from topoplan.errors import HostError, HostProblem
from topoplan.run.events import Event
from topoplan.run.reachability import REMIND_S, REPORT_AFTER_S, Reachability, duration_text, looks_offline


class Seen:
    """A `Reachability` of some hosts with a manual clock, and its events."""

    def __init__(self, count: int = 3) -> None:
        self.now_s, self.events = 1000.0, list[Event]()
        self.names = [f"n{node}" for node in range(count)]
        self.sight = Reachability(
            {name: f"gpu-{name}" for name in self.names}, self.events.append, clock=lambda: self.now_s
        )

    def mark_unreachable(self, *names: str, problem: HostProblem = "timeout") -> None:
        for name in names:
            self.sight.mark_unreachable(name, HostError("no answer", host=name, problem=problem))

    def after(self, seconds: float, *, any_seen: bool = True, silent_s: float = 0.0) -> list[Event]:
        """Return the events of a period with eight checks per second."""
        self.events.clear()
        running = {name: silent_s for name in self.names if name not in self.sight._outages}
        for _ in range(round(seconds * 8)):
            self.now_s += 0.125
            self.sight.look(any_seen=any_seen, running=running)
        return list(self.events)

    def texts(self, seconds: float, **looking: object) -> list[str]:
        return [event.text for event in self.after(seconds, **looking)]  # type: ignore[arg-type]


def test_what_heals_at_once_is_not_worth_a_word() -> None:
    seen = Seen()
    seen.mark_unreachable("n0", "n1", "n2")
    assert seen.texts(REPORT_AFTER_S - 1, any_seen=False) == []
    for name in seen.names:
        seen.sight.mark_reachable(name)
    assert seen.texts(100) == []


def test_a_host_is_told_once_and_then_rarely_with_the_time_and_what_its_peers_do() -> None:
    seen = Seen()
    seen.mark_unreachable("n1")
    first = seen.after(REPORT_AFTER_S + 1)
    assert [event.text for event in first] == [
        "gpu-n1 is unreachable (no answer); its job may still be running there. Retrying"
    ]
    assert (first[0].kind, first[0].node, first[0].data["state"]) == ("connection", "n1", "lost")
    assert seen.texts(REMIND_S) == [
        "gpu-n1 has been unreachable for 63 s (no answer); n0, n2 still run; waiting for it"
    ]
    assert len(seen.texts(7 * 3600)) == 10  # 2, 4, 8, 16 and 32 minutes later, then every hour
    assert seen.texts(3600, silent_s=700)[0].endswith(
        "n0, n2 still run but wrote nothing for 11 min; waiting for it until Ctrl-C"
    )
    seen.events.clear()
    seen.sight.mark_reachable("n1")
    assert seen.events[0].text.startswith("connected to gpu-n1 again after 8 h")
    assert seen.events[0].data["state"] == "back"


def test_when_no_host_is_seen_this_machine_is_offline_and_no_host_is_named() -> None:
    seen = Seen()
    seen.mark_unreachable("n2")
    seen.after(1)
    seen.mark_unreachable("n0", "n1")
    assert [(event.kind, event.node, event.data["state"], event.text) for event in seen.after(10, any_seen=False)] == [
        (
            "connection",
            "",
            "offline",
            "this machine seems to be offline: none of the 3 hosts is reachable (no answer); the run may still be"
            " going on there. Retrying",
        )
    ]
    assert seen.texts(REMIND_S, any_seen=False) == ["this machine still seems to be offline, for 64 s now (no answer)"]
    seen.events.clear()
    for name in seen.names:
        seen.sight.mark_reachable(name)
    assert [event.text for event in seen.events] == ["this machine is online again after 71 s"]


def test_hosts_that_answer_without_letting_us_in_are_named_though_none_is_seen() -> None:
    seen = Seen()
    seen.mark_unreachable(*seen.names, problem="refused")
    assert [event.node for event in seen.after(10, any_seen=False)] == seen.names
    assert seen.sight.offline_s == 0


def test_the_time_offline_counts_against_no_host() -> None:
    seen = Seen()
    seen.mark_unreachable(*seen.names)
    seen.after(100, any_seen=False)
    assert seen.sight.offline_s == pytest.approx(100)
    assert seen.sight.unreachable_s("n0") == 0
    seen.sight.mark_reachable("n0")
    seen.after(5)
    assert seen.sight.offline_s == 0
    assert seen.sight.unreachable_s("n1") == pytest.approx(5)
    # It is reported, because the others were back while it was not.
    assert [event.node for event in seen.events if event.data.get("state") == "lost"] == ["n1", "n2"]


def test_of_a_single_host_nobody_can_tell_which_side_is_gone() -> None:
    seen = Seen(count=1)
    seen.mark_unreachable("n0")
    [text] = seen.texts(10, any_seen=False)
    assert text.startswith("this machine may be offline: its only host is unreachable (no answer)")


def test_results_look_offline_where_no_host_of_several_answers() -> None:
    silent = {name: HostError("x", host=name, problem="timeout") for name in "ab"}
    refused = HostError("x", host="c", problem="refused")
    assert looks_offline(silent)
    assert not looks_offline(silent | {"c": refused})
    assert not looks_offline(silent | {"c": 1})
    assert not looks_offline({"a": silent["a"]})


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.25, "0.2 s"), (5.9, "5 s"), (119, "119 s"), (120, "2 min"), (3600, "1 h"), (3725, "1 h 2 min")],
)
def test_ages_are_rounded_down(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
