"""Supervises one node's job, in concert with the supervisors of the other nodes.

Runs on a host with Python 3.6 or later. The first process of the job starts this program before the script, and signals
to it how the script ended.

The supervisors meet at the master port before the trainer listens there: node 0 accepts the others, closes the port and
keeps their connections. Each then reports how its job ended, and node 0 forwards failures. A connection that breaks
without a message counts as a failure too: everything was killed there, or the machine is gone. A supervisor that learns
of a failure ends its own job some time later. The client, which knows more, may do so earlier, and ranks may write what
they see. If only this program is killed, that is not a failure: another process holds the connections too and restarts
it.
"""

import contextlib
import json
import os
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

PROGRAM = globals()["PROGRAM"]
"""The source of this program, as a JSON string."""
LEADER, TICKS, BOOT, *INHERITED = sys.argv[1:]
"""`LEADER`, `TICKS` and `BOOT` identify the first process of the job: its process id, start time and boot. `INHERITED`
are the connections that a killed predecessor of this program left, each with the name of its node; usually empty.
"""
CONFIG = json.loads(sys.stdin.readline())
NAME = "node-%02d"
OWN_NAME = NAME % CONFIG["node"]
WELL, FAILED = "well", "failed"
SIGNALS = signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP
TRY_S = 0.1
LOOK_S = 1.0
LONGEST_BYTES = 1000
"""Upper limit for the bytes of one line."""


HOLDER = """
read -r over || eval "exec $COMMAND" < <(printf '%s\\n' "$PROGRAM" "$CONFIG")
"""
"""Shell program that holds the connections. Standard input tells when this program ends by itself; otherwise it is
restarted.
"""


class JobOver(Exception):  # noqa: N818  no error
    """The job has ended, or is being ended."""


class Peer:
    """A connection to the supervisor of another node. Each message is a line: a keyword and its subject."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self.connection, self.name = connection, name
        self.rest = b""

    def greeting(self, limit_s: float) -> "list[str]":
        """Return the words of the peer's first line; raises OSError if none comes."""
        self.connection.settimeout(limit_s)
        found = b""
        while not found.endswith(b"\n"):
            byte = self.connection.recv(1)
            if not byte or len(found) > LONGEST_BYTES:
                raise ConnectionError
            found += byte
        return found.decode(errors="replace").split()

    def read(self) -> "list[tuple[str, str]]":
        """Return the lines that have arrived, each as its first word and the rest; raises OSError at the end."""
        self.connection.settimeout(0.0)
        data = self.connection.recv(LONGEST_BYTES)
        if not data or len(self.rest) > LONGEST_BYTES:
            raise ConnectionError
        *lines, self.rest = (self.rest + data).split(b"\n")
        return [line.decode(errors="replace").partition(" ")[::2] for line in lines]

    def send(self, *words: str) -> None:
        """Send a line, if the peer is still there."""
        with contextlib.suppress(OSError):
            self.connection.settimeout(1.0)
            self.connection.sendall(" ".join(words).encode() + b"\n")

    def enable_keepalive(self) -> None:
        """Enable TCP keepalive, which detects a machine that is gone and keeps firewalls open."""
        options = {
            "SO_KEEPALIVE": 1,
            "TCP_KEEPIDLE": 15,
            "TCP_KEEPINTVL": 15,
            "TCP_USER_TIMEOUT": 1000 * CONFIG["lost_s"],
        }
        for name, value in options.items():
            level = socket.SOL_SOCKET if name.startswith("SO_") else socket.IPPROTO_TCP
            with contextlib.suppress(OSError, AttributeError):
                self.connection.setsockopt(level, getattr(socket, name), int(value))


def listener() -> socket.socket:
    """Return a listening socket at the master port.

    SO_REUSEADDR on both sides lets the trainer bind the port once this socket is closed.
    """
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        with contextlib.suppress(OSError):
            made = socket.socket(family)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            made.bind((address, CONFIG["port"]))
            made.listen(CONFIG["nodes"])
            return made
    raise ConnectionError


def accept_peers() -> "list[Peer]":
    """Accept the supervisors of all other nodes, as node 0; fewer if some do not come in time."""
    found = {}  # type: dict[str, Peer]
    end = time.monotonic() + CONFIG["meet_s"]
    with listener() as server:
        while len(found) < CONFIG["nodes"] - 1 and time.monotonic() < end:
            server.settimeout(max(0.01, end - time.monotonic()))
            with contextlib.suppress(OSError, ValueError, IndexError):  # a stranger may say anything
                peer = Peer(server.accept()[0], "")
                token, *node = peer.greeting(LOOK_S)
                if token == CONFIG["token"]:
                    peer.name = NAME % int(node[0])
                    found[peer.name] = peer
    for peer in found.values():
        peer.send("go")
    return list(found.values())


def join_node_0() -> "list[Peer]":
    """Connect to node 0; an empty list if it does not accept this node."""
    end = time.monotonic() + CONFIG["meet_s"]
    while time.monotonic() < end:
        try:
            peer = Peer(socket.create_connection((CONFIG["address"], CONFIG["port"]), LOOK_S), NAME % 0)
        except OSError:
            time.sleep(TRY_S)
            continue
        with contextlib.suppress(OSError):
            peer.send(CONFIG["token"], str(CONFIG["node"]))
            if peer.greeting(CONFIG["meet_s"] + LOOK_S) == ["go"]:
                return [peer]
        break
    return []


def log_line(text: str) -> None:
    """Write a line to the log of the job."""
    sys.stderr.write(f"topoplan: {text}\n")
    sys.stderr.flush()


def leader_exists(pid: str) -> bool:
    """Whether the first process of the job exists, even as a zombie."""
    try:
        os.kill(int(pid), 0)
    except OSError:
        return False
    return True


def start_holder(peers: "list[Peer]") -> "subprocess.Popen[bytes]":
    """Start the process that holds the connections too."""
    held = {peer.connection.fileno(): peer.name for peer in peers}
    words = Path("/proc/self/cmdline").read_text().split("\0")[: -1 - len(INHERITED)]
    words += [f"{number}:{name}" for number, name in held.items()]
    own = {"COMMAND": " ".join(map(shlex.quote, words)), "PROGRAM": PROGRAM, "CONFIG": json.dumps(CONFIG)}
    return subprocess.Popen(
        ["bash", "-c", HOLDER],
        stdin=subprocess.PIPE,
        pass_fds=list(held),
        env={**os.environ, **own},
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS),
    )


def inherited_peers() -> "list[Peer]":
    """Return the peers whose connections were handed over by the previous supervisor."""
    pairs = (one.split(":") for one in INHERITED)
    return [Peer(socket.socket(fileno=int(number)), name) for number, name in pairs]


def recorded_end() -> str:
    """Return how the job ended according to its own record, if no signal has told; empty if there is no record."""
    with contextlib.suppress(OSError):
        code = Path(".topoplan", "exit").read_text().split()[:1]
        return WELL if code == ["0"] else f"{FAILED} {OWN_NAME} failed"
    return ""


def end_job(why: str) -> None:
    """Start the program that ends the job, and with it this supervisor; the program itself is not part of the job."""
    place = Path("/")
    with contextlib.suppress(OSError):
        place = Path.cwd()
        (place / ".topoplan" / "stopped").write_text(f"{why}\n")
    environment = {name: value for name, value in os.environ.items() if name != "TOPOPLAN_RUN"}
    words = [str(place), *CONFIG["stop_words"], LEADER, TICKS, BOOT]
    subprocess.call(
        ["setsid", "--fork", "bash", "-c", CONFIG["stop"], "bash", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )


class Supervisor:
    """The supervisor of this node."""

    def __init__(self, peers: "list[Peer]") -> None:
        self.selector = selectors.DefaultSelector()
        self.peers = peers
        for peer in peers:
            peer.enable_keepalive()
            self.selector.register(peer.connection, selectors.EVENT_READ, peer)
        self.why = ""
        self.end_at = 0.0

    def drop(self, peer: Peer) -> None:
        """Close the connection to a peer from which nothing more comes."""
        self.selector.unregister(peer.connection)
        peer.connection.close()

    def on_failure(self, why: str) -> None:
        """Handle the failure of a node; only the first one counts."""
        if self.why:
            return
        self.why, self.end_at = why, time.monotonic() + CONFIG["end_after_s"]
        for peer in self.peers:
            peer.send(FAILED, why)

    def listen(self, peer: Peer) -> None:
        """Handle what a peer has sent."""
        try:
            lines = peer.read()
        except BlockingIOError:
            return
        except OSError:
            self.drop(peer)
            self.on_failure(f"{peer.name} is gone")
            return
        for word, rest in lines:
            if word == WELL:
                self.drop(peer)
                return
            if word == FAILED:
                self.on_failure(rest)

    def watch(self) -> None:
        """Watch until the job has ended, or until no peer is left."""
        is_ending = False
        while leader_exists(LEADER) and (self.why or self.selector.get_map()):
            for key, _ in self.selector.select(LOOK_S):
                self.listen(key.data)
            if self.why and not is_ending and time.monotonic() >= self.end_at:
                is_ending = True
                log_line(
                    f"{self.why}; no client stopped this node within {CONFIG['end_after_s']:g} s, so it is stopped now"
                )
                end_job(self.why)


def on_signal(number: int, frame: object) -> None:
    """Signal handler: the first process tells how the job ended; any other signal ends this program with the job."""
    for one in SIGNALS:
        # Not SIG_IGN: Python complains in the log if another signal has arrived together with this one.
        signal.signal(one, lambda number, frame: None)
    how = "failed" if number == signal.SIGUSR2 else "was stopped"
    raise JobOver(WELL if number == signal.SIGUSR1 else f"{FAILED} {OWN_NAME} {how}")


def supervise(peers: "list[Peer]") -> int:
    """Watch with the peers until the job has ended, then tell them how."""
    holder = None
    try:
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        # A signal during this start would leave nobody who could tell the holder that this program ends by itself.
        with contextlib.suppress(OSError):
            holder = start_holder(peers)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        Supervisor(peers).watch()
        word = recorded_end()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    except JobOver as over:
        word = str(over)
    for peer in peers if word else ():
        peer.send(word)
    with contextlib.suppress(OSError, JobOver):
        if holder is not None:
            holder.communicate(b"over\n")
    return 0


def main() -> int:
    """Meet the other supervisors, then go on in a forked process, whose id is written to standard output."""
    for one in SIGNALS:
        signal.signal(one, on_signal)
    peers = []  # type: list[Peer]
    try:
        if INHERITED:
            return supervise(inherited_peers())
        with contextlib.suppress(OSError):
            peers = accept_peers() if CONFIG["node"] == 0 else join_node_0()
        if len(peers) < (CONFIG["nodes"] - 1 if CONFIG["node"] == 0 else 1):
            log_line(
                "not all nodes connected to each other in time; if one fails, the others may not notice by themselves"
            )
        if not peers:
            return 0
        # Signals are kept pending until the fork is ready: on a busy machine the job may have ended by then.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        own = os.fork()
        if own:
            os.write(1, b"%d" % own)
            os._exit(0)
    except JobOver:
        return 128 + signal.SIGTERM
    return supervise(peers)


sys.exit(main())
