import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bed.bed import Bed, new_key
from tests.bed.logins import hostname, log_in, refused
from topoplan.errors import HostError
from topoplan.remote.identities import Access, NewKey
from topoplan.remote.ssh import connect, open_jump
from topoplan.remote.ssh_config import Target


class TestLoggingIn:
    def test_ends_on_the_host_that_was_named(self, cables: Bed) -> None:
        for name in ("alpha", "beta"):
            with log_in(cables.target(name)) as connection:
                assert hostname(connection) == name
                assert connection.is_alive
            assert not connection.is_alive

    def test_works_with_every_kind_of_host_key(self, bed: Bed, tmp_path: Path) -> None:
        for kind, bits in (("rsa", "2048"), ("ecdsa", "256")):
            key = tmp_path / kind
            subprocess.run(["ssh-keygen", "-q", "-t", kind, "-b", bits, "-N", "", "-f", key], check=True)
            bed.restart("beta", options=[f"HostKey {key}"])
            # The host has an ed25519 key too, which is preferred by default; only this one is known.
            known = tmp_path / f"known-{kind}"
            known.write_text(f"{bed['beta'].key_name} {key.with_suffix('.pub').read_text()}")
            with log_in(bed.target("beta", user_known_hosts_files=(known,))) as connection:
                assert connection.run(["true"], deadline_s=30).code == 0
        bed.restart("beta")

    def test_says_nothing_on_the_terminal_or_in_the_log(
        self, bed: Bed, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(0):
            log_in(bed.target("alpha")).close()
            refused(bed.target("alpha", identity_files=()))
        assert capfd.readouterr() == ("", "")
        assert not caplog.records


class TestTheKeyOfTheHost:
    def unknown(self, bed: Bed, tmp_path: Path, **changes: object) -> Target:
        return bed.target("alpha", user_known_hosts_files=(tmp_path / "dot-ssh" / "known_hosts",), **changes)

    def test_that_is_unknown_is_refused_with_its_fingerprint(self, bed: Bed, tmp_path: Path) -> None:
        error = refused(self.unknown(bed, tmp_path))
        file = tmp_path / "key.pub"
        file.write_text(bed["alpha"].public_key)
        shown = subprocess.run(["ssh-keygen", "-l", "-f", file], capture_output=True, text=True).stdout.split()[1]
        assert error.problem == "key-unknown"
        assert f"ssh-ed25519 {shown}" in error.what
        for way in (f"ssh {bed.user}@alpha", "ssh-keyscan", "--accept-new"):
            assert way in error.remedy
        assert not (tmp_path / "dot-ssh").exists()

    def test_that_is_new_is_noted_once_when_that_is_asked_for(self, bed: Bed, tmp_path: Path) -> None:
        new: list[NewKey] = []
        access = Access(accept_new=True, on_new_key=new.append)
        target = self.unknown(bed, tmp_path)
        for _ in range(2):
            log_in(target, access).close()
        log_in(target).close()
        lines = target.user_known_hosts_files[0].read_text().splitlines()
        assert lines == [f"{bed['alpha'].key_name} {bed['alpha'].public_key}"]
        assert [(one.host, one.file) for one in new] == [("alpha", target.user_known_hosts_files[0])]
        assert new[0].key.fingerprint.startswith("SHA256:")
        assert target.user_known_hosts_files[0].stat().st_mode & 0o77 == 0

    def test_is_noted_where_the_configuration_says_so(self, bed: Bed, tmp_path: Path) -> None:
        target = self.unknown(bed, tmp_path, strict_host_key_checking="accept-new", hash_known_hosts=True)
        log_in(target).close()
        assert target.user_known_hosts_files[0].read_text().startswith("|1|")
        log_in(replace(target, strict_host_key_checking="yes")).close()
        # OpenSSH's own client finds what was written here.
        command = ["ssh-keygen", "-F", bed["alpha"].key_name, "-f", target.user_known_hosts_files[0]]
        assert subprocess.run(command, capture_output=True).returncode == 0

    @pytest.mark.parametrize("accept_new", [False, True])
    def test_that_has_changed_is_refused(self, bed: Bed, tmp_path: Path, accept_new: bool) -> None:
        known = tmp_path / "known hosts"
        other = new_key(tmp_path / "other")
        known.write_text(f"# a comment\n{bed['alpha'].key_name} {other}\n")
        target = bed.target("alpha", user_known_hosts_files=(known,), strict_host_key_checking="no")
        error = refused(target, Access(accept_new=accept_new))
        assert error.problem == "key-changed"
        assert f"{known}:2" in error.what
        assert error.what.count("SHA256:") == 2
        assert f"ssh-keygen -R {shlex.quote(bed['alpha'].key_name)} -f '{known}'" in error.remedy
        assert known.read_text().count("\n") == 2

    def test_that_has_changed_while_the_host_was_set_up_anew(self, bed: Bed) -> None:
        before = bed["beta"].public_key
        bed.restart("beta", new_key=True)
        assert bed["beta"].public_key != before
        assert refused(bed.target("beta")).problem == "key-changed"
        bed.known_hosts.write_text(bed.known_hosts.read_text().replace(before, bed["beta"].public_key))
        log_in(bed.target("beta")).close()

    def test_that_is_revoked_is_refused(self, bed: Bed, tmp_path: Path) -> None:
        known = tmp_path / "known"
        key = f"{bed['alpha'].key_name} {bed['alpha'].public_key}\n"
        known.write_text(f"{key}@revoked * {bed['alpha'].public_key}\n")
        error = refused(bed.target("alpha", user_known_hosts_files=(known,)), Access(accept_new=True))
        assert error.problem == "key-revoked"

    def test_may_be_known_under_an_alias(self, bed: Bed, tmp_path: Path) -> None:
        known = tmp_path / "known"
        known.write_text(f"the-alias {bed['alpha'].public_key}\n")
        target = bed.target("alpha", user_known_hosts_files=(known,))
        assert refused(target).problem == "key-unknown"
        log_in(replace(target, host_key_alias="the-alias")).close()


class TestJumpHosts:
    @pytest.mark.parametrize("jumps", [("inside", "jump"), ("far", "jump", "gate")])
    def test_lead_to_networks_that_they_alone_reach(self, cables: Bed, jumps: tuple[str, ...]) -> None:
        refused(cables.target(jumps[0]), deadline_s=0.5)
        with log_in(cables.target(*jumps)) as connection:
            assert hostname(connection) == jumps[0]

    def test_are_left_when_the_last_connection_through_them_is_closed(self, bed: Bed) -> None:
        jump = open_jump(bed.target("inside", "jump"), Access())
        both = [connect(bed.target(name, "jump"), Access(), through=jump) for name in ("inside", "inside2")]
        jump.release()
        both[0].close()
        assert jump.connection.is_alive
        assert both[1].run(["true"], deadline_s=30).code == 0
        both[1].close()
        assert not jump.connection.is_alive

    def test_are_named_when_they_are_the_reason(self, bed: Bed, tmp_path: Path) -> None:
        target = bed.target("inside", jumps=(bed.target("jump", user_known_hosts_files=()),))
        with pytest.raises(HostError, match=r"^jump: its key is unknown") as caught:
            log_in(target)
        assert caught.value.host == "jump"

    def test_may_forward_nothing(self, bed: Bed) -> None:
        error = refused(bed.target("alpha", "closed"))
        assert (error.problem, error.what) == ("proxy", "jump host closed does not forward connections")

    def test_may_not_reach_the_host(self, bed: Bed) -> None:
        error = refused(bed.target("inside", jumps=(bed.target("jump"),), port=9))
        assert error.problem == "unreachable"
        assert "jump host jump cannot reach port 9" in error.what

    def test_may_lead_to_a_host_that_does_not_answer(self, cables: Bed) -> None:
        target = cables.target("inside", "jump")
        jump = open_jump(target, Access())
        with cables.partition("jump", "inside"), pytest.raises(HostError, match="through jump host jump") as caught:
            connect(target, Access(), through=jump, deadline_s=0.5)
        jump.release()
        assert caught.value.problem == "timeout"
