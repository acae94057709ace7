import getpass
import os
from pathlib import Path

import pytest

from tests.bed.bed import Bed
from topoplan.errors import InputError
from topoplan.remote.identities import Access
from topoplan.remote.ssh import connect
from topoplan.remote.ssh_config import SshConfig, Target
from topoplan.specs.cluster import Host


@pytest.fixture(autouse=True)
def _needs_ssh() -> None:
    import shutil

    if shutil.which("ssh") is None:
        pytest.skip("no ssh here to read configurations with")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    (tmp_path / ".ssh").mkdir()
    return tmp_path


def target(home: Path, text: str, address: str = "node0", **keys: object) -> Target:
    (home / ".ssh" / "config").write_text(text)
    return SshConfig().target(Host(address=address, **keys))  # type: ignore[arg-type]


def refused(home: Path, text: str, address: str = "node0") -> str:
    with pytest.raises(InputError) as caught:
        target(home, text, address)
    return str(caught.value)


class TestWithoutAConfiguration:
    def test_the_defaults_are_those_of_ssh(self, home: Path) -> None:
        found = SshConfig().target(Host(address="node0"))
        assert (found.name, found.hostname, found.user, found.port) == ("node0", "node0", getpass.getuser(), 22)
        assert home / ".ssh" / "id_ed25519" in found.identity_files
        assert found.user_known_hosts_files[0] == home / ".ssh" / "known_hosts"
        assert (found.jumps, found.proxy_command, found.agent, found.identities_only) == ((), None, None, False)
        assert found.strict_host_key_checking == "ask"

    def test_no_ssh_is_needed(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(home))
        found = SshConfig().target(Host(address="node0", user="u", port=2222))
        assert (found.hostname, found.user, found.port, found.name) == ("node0", "u", 2222, "node0:2222")
        assert found.identity_files == tuple(home / ".ssh" / key for key in ("id_ed25519", "id_ecdsa", "id_rsa"))
        assert found.user_known_hosts_files == (home / ".ssh" / "known_hosts",)

    def test_the_agent_is_that_of_the_environment(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent")
        assert target(home, "").agent == Path("/run/agent")
        assert target(home, "IdentityAgent none").agent is None
        assert target(home, "IdentityAgent /run/mine").agent == Path("/run/mine")
        monkeypatch.setenv("ELSEWHERE", "/run/other")
        assert target(home, "IdentityAgent $ELSEWHERE").agent == Path("/run/other")


class TestAConfiguration:
    def test_says_what_the_spec_does_not(self, home: Path) -> None:
        text = (
            "Host node*\n  HostName 10.0.0.7\n  User trainer\n  Port 2200\n  ConnectTimeout 7\n  HashKnownHosts yes\n"
        )
        found = target(home, text)
        assert (found.name, found.hostname, found.user, found.port) == ("node0", "10.0.0.7", "trainer", 2200)
        assert (found.connect_timeout_s, found.hash_known_hosts) == (7, True)
        assert target(home, text, address="other").port == 22

    def test_gives_way_to_the_spec(self, home: Path) -> None:
        text = "Host node0\n  User trainer\n  Port 2200\nMatch user me\n  HostKeyAlias mine\n"
        found = target(home, text, user="me", port=22)
        assert (found.user, found.port, found.name) == ("me", 22, "node0:22")
        assert found.host_key_alias == "mine"

    def test_of_an_ipv6_address_keeps_its_port_apart(self, home: Path) -> None:
        found = target(home, "", address="[fe80::1]", port=24)
        assert (found.name, found.alias, found.hostname, found.port) == ("[fe80::1]:24", "fe80::1", "fe80::1", 24)

    def test_names_keys_with_tokens(self, home: Path) -> None:
        text = "IdentityFile ~/keys/%r@%h:%p\nIdentityFile /%%/%n\nIdentitiesOnly yes\nHostName real\nUser u\nPort 23\n"
        found = target(home, text)
        assert found.identity_files == (home / "keys/u@real:23", Path("/%/node0"))
        assert found.identities_only

    def test_may_include_others(self, home: Path) -> None:
        (home / "more").write_text("Host node0\n  Port 2201\nHost else\n  Port 1\n")
        text = f"Host node0\n  Include {home}/mo*\n  User after\nHost *\n Port 9\n"
        found = target(home, text)
        assert (found.port, found.user) == (2201, "after")

    def test_may_run_a_command_to_decide_as_ssh_does(self, home: Path) -> None:
        text = f'Match host node0 exec "touch {home}/ran; test %h = node0"\n  Port 2202\nMatch exec false\n  User no\n'
        found = target(home, text)
        assert (found.port, found.user) == (2202, getpass.getuser())
        assert (home / "ran").exists()

    def test_may_name_known_hosts(self, home: Path) -> None:
        text = "UserKnownHostsFile ~/a /b\nGlobalKnownHostsFile /c\nStrictHostKeyChecking accept-new\nHostKeyAlias x\n"
        found = target(home, text)
        assert found.user_known_hosts_files[1:] == (Path("/b"),)
        assert found.global_known_hosts_files == (Path("/c"),)
        assert (found.strict_host_key_checking, found.key_name) == ("accept-new", "x")
        assert target(home, "UserKnownHostsFile none").user_known_hosts_files == ()
        assert target(home, "StrictHostKeyChecking off").strict_host_key_checking == "no"

    def test_may_be_another_file(self, home: Path) -> None:
        other = home / "other config"
        other.write_text("Port 2203\n")
        (home / ".ssh" / "config").write_text("Port 1\n")
        assert SshConfig(other).target(Host(address="node0")).port == 2203

    def test_that_is_not_there_is_named(self, home: Path) -> None:
        with pytest.raises(InputError, match="gone: cannot be read: No such file"):
            SshConfig(home / "gone")

    def test_with_a_mistake_is_named_with_what_ssh_says(self, home: Path) -> None:
        message = refused(home, "Host *\n  Prot 22\n")
        assert message.startswith(f"{home}/.ssh/config: ssh cannot use it for host node0: ")
        assert "line 2: Bad configuration option: prot" in message
        assert message.endswith("try: ssh -G node0")

    def test_needs_ssh_to_be_read(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(home))
        assert "no `ssh` on this machine" in refused(home, "Port 1\n")

    def test_that_takes_too_long_is_named(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("topoplan.remote.ssh_config._READ_S", 0.3)
        assert "did not finish reading it" in refused(home, 'Match exec "sleep 3"\n  Port 1\n')


class TestJumpHosts:
    def test_have_settings_of_their_own(self, home: Path) -> None:
        text = "Host node*\n ProxyJump u@one:2201,two\nHost one\n HostName 10.0.0.1\n User no\nHost two\n User second\n"
        one, two = target(home, text).jumps
        assert (one.hostname, one.user, one.port) == ("10.0.0.1", "u", 2201)
        assert (two.hostname, two.user, two.port) == ("two", "second", 22)

    def test_may_be_behind_another_one(self, home: Path) -> None:
        text = "Host node*\n  ProxyJump inner\nHost inner\n  ProxyJump outer\nHost outer\n  ProxyCommand nc %h %p\n"
        found = target(home, text)
        assert [hop.name for hop in found.jumps] == ["outer", "inner"]
        assert found.jumps[0].proxy_command == "nc outer 22"
        assert found.proxy_command is None

    def test_are_the_same_for_all_hosts_that_name_them(self, home: Path) -> None:
        (home / ".ssh" / "config").write_text("Host node*\n  ProxyJump one\n")
        found = SshConfig().targets([Host(address=f"node{index}") for index in range(12)])
        assert list(found) == [f"node{index}" for index in range(12)]
        assert len({each.jumps for each in found.values()}) == 1

    def test_may_be_turned_off(self, home: Path) -> None:
        assert target(home, "Host node0\n  ProxyJump none\nHost *\n  ProxyJump one\n").jumps == ()

    def test_in_a_circle_are_refused(self, home: Path) -> None:
        message = refused(home, "Host node0\n  ProxyJump one\nHost one\n  ProxyJump two\nHost two\n  ProxyJump one\n")
        assert "jump hosts lead in a circle: node0 -> one -> two -> one; see ProxyJump" in message
        # ssh itself detects the shortest cycle.
        assert "host bastion: jumphost loop via bastion" in refused(home, "Host *\n  ProxyJump bastion\n")

    @pytest.mark.parametrize(
        ("jump", "expected"),
        [
            ("[fe80::1]:2222", ("fe80::1", 2222)),
            ("[fe80::1]", ("fe80::1", 22)),
            ("ssh://me@host:23/", ("host", 23)),
        ],
    )
    def test_may_be_written_in_several_ways(self, home: Path, jump: str, expected: tuple[str, int]) -> None:
        hop = target(home, f"Host node0\n  ProxyJump {jump}\n").jumps[0]
        assert (hop.hostname, hop.port) == expected


class TestProxyCommands:
    def test_know_where_they_lead(self, home: Path) -> None:
        found = target(
            home, "Host node0\n  HostName real\n  ProxyCommand nc -x 'a b' %h %p %r %%\n", user="me", port=24
        )
        assert found.proxy_command == "nc -x 'a b' real 24 me %"
        assert target(home, "Host node0\n  ProxyCommand none\nHost *\n  ProxyCommand x\n").proxy_command is None


def test_a_host_of_the_bed_is_reached_by_its_alias(bed: Bed, home: Path) -> None:
    host, jump = bed["inside"], bed["jump"]
    (home / ".ssh" / "config").write_text(
        f"Host worker\n  HostName {host.address}\n  Port {host.port}\n  ProxyJump gateway\n"
        f"Host gateway\n  HostName {jump.address}\n  Port {jump.port}\n"
        f"Host *\n  User {bed.user}\n  IdentityFile {bed.key}\n  UserKnownHostsFile {bed.known_hosts}\n"
    )
    found = SshConfig().target(Host(address="worker"))
    with connect(found, Access(), deadline_s=30) as connection:
        assert connection.name == "worker"
        assert connection.run(["true"], deadline_s=30).code == 0
    assert os.environ["HOME"] == str(home)
