"""Run the same work on many hosts concurrently. A failed host is data in the result and does not affect the others."""

from __future__ import annotations

import contextlib
import random
import resource
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from topoplan.errors import HostError, HostProblem
from topoplan.remote.connection import Connection
from topoplan.remote.identities import Access
from topoplan.remote.ssh import CONNECT_S, Jump, connect, open_jump
from topoplan.remote.ssh_config import Target
from topoplan.remote.waiting import Deadline
from topoplan.units import in_seconds

T = TypeVar("T")

_FILES = 8192
AT_ONCE = 32
AT_ONCE_PER_JUMP = 8
"""Number of concurrent logins behind one jump host, because its sshd serves them all."""
_AGAIN = ("banner", "lost")
"""Problems that may be gone soon: an sshd drops some of many pending logins (MaxStartups), a network loses packets."""
_PAUSE_S = 0.3


def connect_all(
    targets: Mapping[str, Target],
    access: Access,
    *,
    deadline_s: float = CONNECT_S,
    on_done: Callable[[str, Connection | HostError], None] = lambda name, result: None,
) -> dict[str, Connection | HostError]:
    """Log in to all targets; the result is in their order. The caller closes the connections.

    Targets with the same jump hosts share one connection to them. A host that hangs up while others log in is retried
    until its deadline. `on_done` is called for each host as it is done, one call at a time.
    """
    _allow_files()
    groups: dict[tuple[Target, ...], list[str]] = defaultdict(list)
    for name, target in targets.items():
        groups[target.jumps].append(name)
    logins = _Logins(on_done)

    def one(name: str, jump: Jump | None) -> None:
        logins.add(
            name, retried(lambda left_s: connect(targets[name], access, deadline_s=left_s, through=jump), deadline_s)
        )

    def group(names: list[str]) -> None:
        """Log in to the targets behind the same jump hosts."""
        jump = retried(lambda left_s: open_jump(targets[names[0]], access, deadline_s=left_s), deadline_s)
        if isinstance(jump, HostError):
            for name in names:
                what = f"jump host {jump.host}: {jump.what}"
                logins.add(name, HostError(what, host=name, problem=jump.problem, remedy=jump.remedy))
            return
        try:
            _each(names, lambda name: one(name, jump), AT_ONCE_PER_JUMP)
        finally:
            if jump is not None:
                jump.release()

    direct = groups.pop((), [])
    work = [*(partial(group, names) for names in groups.values()), *(partial(one, name, None) for name in direct)]
    try:
        _each(work, lambda job: job(), AT_ONCE)
    except BaseException:
        logins.give_up()
        raise
    return {name: logins.results[name] for name in targets}


def _allow_files() -> None:
    """Raise the limit of open files as far as allowed: each host takes some, and some systems set it to 256."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class _Logins:
    """The results of logins, reported one at a time."""

    def __init__(self, on_done: Callable[[str, Connection | HostError], None]) -> None:
        self.results: dict[str, Connection | HostError] = {}
        self._on_done = on_done
        self._telling = threading.Lock()
        self._given_up = False

    def add(self, name: str, result: Connection | HostError) -> None:
        with self._telling:
            if not self._given_up:
                self.results[name] = result
                self._on_done(name, result)
            elif isinstance(result, Connection):
                result.close()

    def give_up(self) -> None:
        """Close all connections, and those that are still to come."""
        with self._telling:
            self._given_up = True
        for result in self.results.values():
            if isinstance(result, Connection):
                result.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The results of logging in to hosts, by name."""

    results: Mapping[str, Connection | HostError]

    @property
    def connections(self) -> dict[str, Connection]:
        """Connections to the hosts that accepted the login."""
        return {name: one for name, one in self.results.items() if isinstance(one, Connection)}

    @property
    def errors(self) -> dict[str, HostError]:
        """Errors of the hosts that could not be reached."""
        return {name: one for name, one in self.results.items() if isinstance(one, HostError)}

    def ask(self, job: Callable[[str, Connection], T], *, deadline_s: float) -> dict[str, T | HostError]:
        """Return the results of `run_on_all` for the connected hosts, and the login errors of the others."""
        given = run_on_all(self.connections, job, deadline_s=deadline_s)
        return {name: one if isinstance(one, HostError) else given[name] for name, one in self.results.items()}


@contextlib.contextmanager
def logged_in(targets: Mapping[str, Target], access: Access) -> Iterator[Hosts]:
    """Log in to all targets; the connections are closed at the end."""
    hosts = Hosts(results=connect_all(targets, access))
    try:
        yield hosts
    finally:
        for connection in hosts.connections.values():
            connection.close()


def run_on_all(
    connections: Mapping[str, Connection], job: Callable[[str, Connection], T], *, deadline_s: float
) -> dict[str, T | HostError]:
    """Run `job` for each host, all concurrently, and return the results in the order of `connections`.

    The connection of a job that is not done by the deadline is closed, which ends what the job waits for. Raises any
    exception of a job other than HostError.
    """
    results: dict[str, T | HostError] = {}
    deadline = Deadline(deadline_s)

    def one(name: str) -> None:
        try:
            result: T | HostError = job(name, connections[name])
        except HostError as error:
            result = error
        if deadline.left_s > 0:
            results[name] = result

    def late() -> None:
        for name in connections.keys() - results.keys():
            connections[name].close()

    alarm = threading.Timer(deadline_s, late)
    alarm.daemon = True
    alarm.start()
    try:
        _each(list(connections), one, len(connections))
    finally:
        alarm.cancel()
    for name in connections.keys() - results.keys():
        what = f"not done within {in_seconds(deadline_s)}"
        results[name] = HostError(what, host=name, problem="deadline", remedy="check what is still running there")
    return {name: results[name] for name in connections}


def retried(attempt: Callable[[float], T], deadline_s: float, *, also: Collection[HostProblem] = ()) -> T | HostError:
    """Call `attempt` until it succeeds, fails for good or the time is over. Pauses grow, with random jitter.

    `also` are further problems that may be gone a moment later.
    """
    deadline = Deadline(deadline_s)
    pause_s = _PAUSE_S
    while True:
        try:
            return attempt(deadline.left_s)
        except HostError as error:
            pause = random.uniform(0.5, 1.5) * pause_s
            if error.problem not in {*_AGAIN, *also} or deadline.left_s < 2 * pause:
                return error
            time.sleep(pause)
            pause_s *= 1.6


def _each(items: Iterable[T], job: Callable[[T], None], at_once: int) -> None:
    """Call `job` for each item, in threads that do not keep the program from ending: Ctrl-C returns immediately.

    Raises the first exception of a job; no further job is started then.
    """
    waiting = deque(items)
    lock = threading.Condition()
    running = 0
    failure: BaseException | None = None

    def work() -> None:
        nonlocal running, failure
        while True:
            with lock:
                if not waiting or failure is not None:
                    running -= 1
                    lock.notify_all()
                    return
                item = waiting.popleft()
            try:
                job(item)
            except BaseException as error:
                with lock:
                    failure = failure or error

    running = min(len(waiting), at_once)
    for _ in range(running):
        threading.Thread(target=work, daemon=True).start()
    with lock:
        try:
            while running:
                lock.wait()
        except BaseException:
            waiting.clear()
            raise
    if failure is not None:
        raise failure
