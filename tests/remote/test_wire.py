import shlex
import socket
import threading
import time

import pytest

from tests.bed.bed import Bed
from tests.bed.logins import children, log_in, refused
from tests.waiting import LIMIT_S


class TestTheWayThere:
    def test_a_name_without_an_address(self, bed: Bed) -> None:
        error = refused(bed.target("alpha", hostname="no-such-host.invalid"), deadline_s=15)
        assert error.problem in ("unresolved", "timeout")
        assert "no-such-host.invalid" in error.what
        assert "alias" in error.remedy

    def test_a_name_service_that_does_not_answer(self, bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
        really = socket.getaddrinfo
        hold = threading.Event()

        def stuck(host: str, *args: object, flags: int = 0, **more: object) -> object:
            if not flags:
                hold.wait(2 * LIMIT_S)
            return really(host, *args, flags=flags, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(socket, "getaddrinfo", stuck)
        started = time.monotonic()
        error = refused(bed.target("alpha", hostname="localhost"), deadline_s=0.3)
        took_s = time.monotonic() - started
        hold.set()
        assert error.problem == "timeout"
        assert took_s < LIMIT_S

    def test_a_port_where_nothing_listens(self, bed: Bed) -> None:
        error = refused(bed.target("alpha", port=9))
        assert (error.problem, error.what) == ("refused", f"nothing listens on port 9 of {bed['alpha'].address}")
        assert "sshd" in error.remedy

    def test_a_host_that_is_cut_off(self, cables: Bed) -> None:
        cables.cut("beta")
        try:
            started = time.monotonic()
            error = refused(cables.target("beta"), deadline_s=0.3)
            assert error.problem in ("timeout", "unreachable")
            assert time.monotonic() - started < LIMIT_S
            assert error.remedy
        finally:
            cables.heal("beta")

    def test_the_time_of_the_configuration_if_that_is_shorter(self, bed: Bed) -> None:
        with bed.frozen("beta"):
            started = time.monotonic()
            assert refused(bed.target("beta", connect_timeout_s=0.3), deadline_s=2 * LIMIT_S).problem == "timeout"
            assert time.monotonic() - started < LIMIT_S

    def test_an_sshd_that_does_not_answer(self, bed: Bed) -> None:
        with bed.frozen("beta"):
            started = time.monotonic()
            error = refused(bed.target("beta"), deadline_s=4)
            assert time.monotonic() - started < LIMIT_S
        assert error.problem == "timeout"
        assert "no SSH banner" in error.what
        assert "overloaded" in error.remedy

    def test_something_else_than_an_ssh_server(self, bed: Bed) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:

            def talk() -> None:
                for greeting in (b"HTTP/1.1 400 Bad Request\r\n\r\n", b"Exceeded MaxStartups\r\n", b""):
                    client, _ = server.accept()
                    client.recv(100)
                    client.sendall(greeting)
                    client.close()

            thread = threading.Thread(target=talk, daemon=True)
            thread.start()
            target = bed.target("alpha", hostname="127.0.0.1", port=server.getsockname()[1])
            web = refused(target, deadline_s=LIMIT_S)
            assert web.problem == "protocol"
            assert "is not an SSH server, it sent 'HTTP/1.1 400 Bad Request'" in web.what
            for _ in range(2):
                hung_up = refused(target, deadline_s=LIMIT_S)
                assert hung_up.problem == "banner"
                assert "MaxStartups" in hung_up.remedy
            thread.join()

    def test_a_server_without_a_common_algorithm(self, bed: Bed) -> None:
        with bed.restarted("beta", "Ciphers chacha20-poly1305@openssh.com"):
            error = refused(bed.target("beta"))
        assert error.problem == "protocol"
        assert error.remedy


class TestProxyCommand:
    def test_is_the_connection(self, bed: Bed) -> None:
        before = children()
        # ssh itself is the proxy, with a helper process of its own: both have to be gone afterwards.
        proxy = shlex.join(bed.ssh("jump", "-W", f"{bed['inside'].address}:{bed['inside'].port}"))
        with log_in(bed.target("inside", proxy_command=proxy)) as connection:
            assert connection.run(["true"], deadline_s=LIMIT_S).code == 0
            assert len(children()) == len(before) + 1
        assert children() == before

    def test_says_why_it_failed(self, bed: Bed) -> None:
        before = children()
        error = refused(bed.target("alpha", proxy_command="sh -c 'echo no way through >&2; exit 3'"))
        assert error.problem == "proxy"
        assert "no way through" in error.what
        assert children() == before

    def test_that_hangs_is_ended(self, bed: Bed) -> None:
        before = children()
        started = time.monotonic()
        assert refused(bed.target("alpha", proxy_command="sleep 60"), deadline_s=0.3).problem == "timeout"
        assert time.monotonic() - started < LIMIT_S
        assert children() == before
