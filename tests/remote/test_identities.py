import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import paramiko
import pytest

from tests.bed.bed import Bed, new_key
from tests.bed.logins import log_in, refused
from tests.waiting import LIMIT_S
from topoplan.errors import HostError
from topoplan.remote.connection import Connection
from topoplan.remote.fanout import connect_all
from topoplan.remote.identities import Access
from topoplan.remote.ssh import connect


class TestWhoWeAre:
    @pytest.fixture
    def agent(self, tmp_path: Path) -> Iterator[Path]:
        # Socket paths have to be short.
        place = Path("/tmp") / f"topoplan-agent-{os.getpid()}-{tmp_path.name[-8:]}"
        process = subprocess.Popen(["ssh-agent", "-D", "-a", place], stdout=subprocess.DEVNULL)
        with socket.socket(socket.AF_UNIX) as trial:
            while process.poll() is None and trial.connect_ex(str(place)) != 0:
                time.sleep(0.01)
        yield place
        process.terminate()
        process.wait()
        place.unlink(missing_ok=True)

    def give(self, agent: Path, *keys: Path) -> None:
        command = ["ssh-add", "-q", *keys]
        subprocess.run(command, check=True, env={**os.environ, "SSH_AUTH_SOCK": str(agent)}, capture_output=True)

    def test_a_wrong_key_is_named(self, bed: Bed, tmp_path: Path) -> None:
        new_key(tmp_path / "wrong")
        error = refused(bed.target("alpha", identity_files=(tmp_path / "wrong", tmp_path / "missing")))
        assert error.problem == "auth"
        assert str(tmp_path / "wrong") in error.what
        assert "1 key" in error.what
        assert "ssh-copy-id" in error.remedy

    def test_no_key_at_all(self, bed: Bed) -> None:
        assert "no key" in refused(bed.target("alpha", identity_files=())).what

    def test_keys_of_the_agent_are_used(self, bed: Bed, agent: Path) -> None:
        self.give(agent, bed.key)
        log_in(bed.target("alpha", agent=agent, identity_files=())).close()

    def test_an_agent_is_asked_again_where_its_keys_did_not_do(
        self, bed: Bed, agent: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("topoplan.remote.identities._AGENT_AGAIN_S", 0)
        access, target = Access(), bed.target("alpha", agent=agent, identity_files=())
        with pytest.raises(HostError, match="no key to log in with"):
            connect(target, access, deadline_s=30)
        self.give(agent, bed.key)
        connect(target, access, deadline_s=30).close()

    def test_one_agent_serves_many_logins_at_once(self, bed: Bed, agent: Path) -> None:
        self.give(agent, bed.key)
        access = Access()
        target = bed.target("alpha", agent=agent, identity_files=())
        failures: list[HostError] = []

        def once() -> None:
            try:
                log_in(target, access).close()
            except HostError as error:
                failures.append(error)

        threads = [threading.Thread(target=once) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures

    def test_too_many_keys_of_the_agent_are_named_with_the_remedy(self, bed: Bed, agent: Path, tmp_path: Path) -> None:
        wrong = [tmp_path / f"wrong{index}" for index in range(3)]
        for key in wrong:
            new_key(key)
        self.give(agent, *wrong)
        target = bed.target("strict", agent=agent, identity_files=())
        error = refused(target)
        assert error.problem == "auth"
        assert "hung up after 2 keys" in error.what
        assert "IdentitiesOnly" in error.remedy
        # The named key is offered first, or alone, even if only the agent has its private half.
        named = replace(target, identity_files=(bed.key,), identities_only=True)
        log_in(named).close()
        self.give(agent, bed.key)
        public = shutil.copy(bed.key.with_suffix(".pub"), tmp_path / "only-public.pub")
        log_in(replace(target, identity_files=(Path(public),))).close()

    def test_a_connection_that_ends_during_the_login_is_lost_and_tried_again(
        self, bed: Bed, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        really, cuts = paramiko.Transport.auth_publickey, iter((True, True, False))

        def cut(transport: paramiko.Transport, *arguments: Any) -> Any:
            if next(cuts):
                bed.end_sessions("alpha")
            return really(transport, *arguments)

        monkeypatch.setattr(paramiko.Transport, "auth_publickey", cut)
        error = refused(bed.target("alpha"))
        assert (error.problem, error.what) == ("lost", "the connection was lost while logging in")
        connection = connect_all({"alpha": bed.target("alpha")}, Access(), deadline_s=LIMIT_S)["alpha"]
        assert isinstance(connection, Connection)
        connection.close()

    def test_an_agent_that_is_not_there_is_named(self, bed: Bed, tmp_path: Path) -> None:
        log_in(bed.target("alpha", agent=tmp_path / "gone")).close()
        error = refused(bed.target("alpha", agent=tmp_path / "gone", identity_files=()))
        assert str(tmp_path / "gone") in error.what

    def test_an_agent_that_does_not_answer_is_not_waited_for(
        self, bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("topoplan.remote.identities._AGENT_S", 0.2)
        place = tmp_path / "stuck"
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(place))
            server.listen()
            log_in(bed.target("alpha", agent=place)).close()
            assert "no answer" in refused(bed.target("alpha", agent=place, identity_files=())).what

    @pytest.fixture
    def sealed(self, bed: Bed, tmp_path: Path) -> Iterator[Path]:
        key = tmp_path / "sealed"
        public = new_key(key, "open sesame")
        allowed = bed.directory / "authorized_keys"
        before = allowed.read_text()
        allowed.write_text(before + public + "\n")
        yield key
        allowed.write_text(before)

    def test_the_passphrase_of_a_key_is_asked_for_once(self, bed: Bed, sealed: Path) -> None:
        questions: list[str] = []

        def ask(question: str) -> str:
            questions.append(question)
            return "wrong" if len(questions) == 1 else "open sesame"

        access = Access(ask=ask)
        for name in ("alpha", "bare"):
            log_in(bed.target(name, identity_files=(sealed,)), access).close()
        assert questions == [f"Passphrase of {sealed}: "] * 2
        assert "sesame" not in repr(access)

    def test_the_time_for_an_answer_does_not_count(self, bed: Bed, sealed: Path) -> None:
        def ask(question: str) -> str:
            time.sleep(deadline_s)
            return "open sesame"

        deadline_s = 5.0
        log_in(bed.target("alpha", identity_files=(sealed,)), Access(ask=ask), deadline_s=deadline_s).close()

    def test_a_passphrase_that_nobody_knows_is_never_shown(self, bed: Bed, sealed: Path) -> None:
        target = bed.target("alpha", identity_files=(sealed,))
        wrong = refused(target, Access(ask=lambda question: "not this one"))
        assert "the passphrase was wrong" in wrong.what
        assert "not this one" not in str(wrong)
        assert "no passphrase was given" in refused(target, Access(ask=lambda question: None)).what
        assert "could not be asked for" in refused(target).what

    def test_other_keys_are_tried_before_anything_is_asked(self, bed: Bed, sealed: Path) -> None:
        log_in(bed.target("alpha", identity_files=(sealed, bed.key))).close()

    def test_a_host_that_wants_more_than_a_key(self, bed: Bed) -> None:
        for option in ("AuthenticationMethods publickey,password", "PubkeyAuthentication no"):
            with bed.restarted("beta", "PasswordAuthentication yes", option):
                error = refused(bed.target("beta"))
            assert error.problem == "auth"
            assert "requires password" in error.what

    def test_a_certificate_beside_the_key_is_used(self, bed: Bed, tmp_path: Path) -> None:
        authority, mine = tmp_path / "authority", tmp_path / "mine"
        new_key(authority)
        new_key(mine)
        sign = ["ssh-keygen", "-q", "-s", authority, "-I", "me", "-n", bed.user, mine.with_suffix(".pub")]
        subprocess.run(sign, check=True, capture_output=True)
        with bed.restarted("beta", f"TrustedUserCAKeys {authority}.pub"):
            log_in(bed.target("beta", identity_files=(mine,))).close()
