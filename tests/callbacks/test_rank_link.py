"""Hub and members as threads of one process, over real connections and a real store."""

import json
import os
import signal
import socket
import time

import pytest
from torch.distributed import HashStore

from lit_diffusion.callbacks.rank_link import BEAT, Clock, Hub, Line, Member, Progress


class Run:
    """Ranks of a run; `verdicts[rank]` is what each was told."""

    def __init__(self, world_size, timeout=60.0, hub=True):
        self.store, self.timeout = HashStore(), timeout
        self.progress = [Progress(3, 40, "train.py:3 (step)")] * world_size
        self.verdicts, self.warnings = {}, []
        self.hub = Hub(world_size, timeout, self.store) if hub else None
        if hub:
            self.hub.start()

    def member(self, rank):
        def heard(verdict):
            self.verdicts[rank] = verdict

        made = Member(
            rank,
            self.timeout,
            self.store,
            lambda: self.progress[rank],
            heard,
            self.warnings.append,
        )
        made.start()
        return made

    def members(self, *ranks):
        made = [self.member(rank) for rank in ranks]
        until(lambda: all(member._line is not None for member in made))
        time.sleep(BEAT / 5)  # in which the hub hears of them
        return made


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def die(member):
    """What the system does to the connections of a process that is killed."""
    member._line.socket.shutdown(socket.SHUT_RDWR)
    member.finish()


def test_all_hear_of_a_failure_and_its_threads_end():
    run = Run(3)
    members = run.members(0, 1, 2)
    members[1].tell("failed", "ValueError: bad")
    until(lambda: len(run.verdicts) == 3)
    assert {v.text for v in run.verdicts.values()} == {
        "rank 1 failed at step 3: ValueError: bad; see its output."
    }
    for thread in (*members, run.hub):
        thread.join(20)
        assert not thread.is_alive()


def test_the_others_hear_of_a_death():
    run = Run(3)
    _, one, _ = run.members(0, 1, 2)
    die(one)
    until(lambda: {0, 2} <= run.verdicts.keys())
    assert run.verdicts[0].text.startswith("rank 1 ended without a word, last heard of at step 3")


@pytest.mark.parametrize("told", [b"", b'{"kind": "beat", "step": 17}\n'])
def test_the_others_notice_the_death_of_rank_0(told):
    run = Run(2, hub=False)
    with socket.create_server(("127.0.0.1", 0)) as rank_0:
        hub = {"host": "127.0.0.1", "port": rank_0.getsockname()[1], "token": ""}
        run.store.set("hub", json.dumps(hub))
        member = run.member(1)
        connection, _ = rank_0.accept()
        connection.sendall(told)
        connection.shutdown(socket.SHUT_RDWR)
    step = 17 if told else 0
    assert member.wait(20).text.startswith(
        f"rank 0 ended without a word, last heard of at step {step}: killed"
    )


@pytest.mark.parametrize("kind", ["done", "left"])
def test_nobody_is_blamed_when_all_end_on_purpose(kind):
    run = Run(2)
    members = run.members(0, 1)
    for member in members:
        member.tell(kind, "SystemExit: 75")
    for member in members:
        member.finish()
    for thread in (*members, run.hub):
        thread.join(20)
        assert not thread.is_alive()
    assert run.verdicts == {}


def test_a_rank_that_is_left_behind_can_ask_by_whom():
    run = Run(2)
    zero, one = run.members(0, 1)
    zero.tell("left", "SystemExit: 75")
    assert one.wait(20).text.startswith("rank 0 left at step 3 (SystemExit: 75) without the others")


def test_a_rank_that_others_wait_for_is_named_to_all():
    run = Run(2, timeout=2.0)
    run.progress[0] = Progress(3, 41, "train.py:3 (step)")
    run.members(0, 1)
    until(lambda: len(run.verdicts) == 2)
    assert run.verdicts[1].text.startswith("rank 1 has kept the others waiting for 2 s")


def test_a_failure_before_the_hub_is_there_is_told_later():
    run = Run(2, hub=False)
    run.member(1).tell("failed", "OSError: no such folder")
    run.hub = Hub(2, 60.0, run.store)
    run.hub.start()
    run.member(0)
    until(lambda: 0 in run.verdicts)
    assert run.warnings == []
    assert run.verdicts[0].text == (
        "rank 1 failed at step 3: OSError: no such folder; see its output."
    )


def test_a_rank_0_that_never_comes_is_missed():
    run = Run(2, timeout=1.0, hub=False)
    run.member(1)
    until(lambda: run.verdicts)
    assert run.verdicts[1].text.startswith("rank 0 has not come to the start of the run in 1 s")


def test_a_network_that_lets_nothing_through_is_told_and_ends_nothing():
    run = Run(2, timeout=2.0, hub=False)
    with socket.socket() as closed:  # bound, and not listening
        closed.bind(("127.0.0.1", 0))
        hub = {"host": "127.0.0.1", "port": closed.getsockname()[1], "token": ""}
        run.store.set("hub", json.dumps(hub))
        run.member(1).join(20)
    assert "rank 1 is not watched: it can't reach rank 0 at 127.0.0.1:" in run.warnings[0]
    assert run.verdicts == {}


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b'{"token": "x", "rank": 1}\n', b"[]\n", b"x" * 200_000]
)
def test_strangers_are_sent_away(said):
    run = Run(2)
    run.members(0)
    address = json.loads(run.store.get("hub"))
    with socket.create_connection(("127.0.0.1", address["port"])) as stranger:
        stranger.settimeout(20)
        try:
            stranger.sendall(said)
            assert stranger.recv(1) == b""
        except ConnectionError:
            pass
    assert run.verdicts == {}
    run.member(1).tell("failed", "ValueError: bad")
    until(lambda: len(run.verdicts) == 2)  # and the hub is there for its own


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_mistake_in_the_hub_ends_no_run(monkeypatch):
    run = Run(2, timeout=3.0)
    _, one = run.members(0, 1)
    monkeypatch.setattr(run.hub, "_judge", lambda: 1 / 0)
    assert "its hub failed" in one.wait(20).text  # which only who lost rank 0 asks for
    run.hub.join(20)
    time.sleep(4)
    assert run.verdicts == {}
    assert one.is_alive()


def test_a_mistake_in_a_member_ends_no_run(monkeypatch):
    run = Run(2, timeout=3.0)
    _, one = run.members(0, 1)
    monkeypatch.setattr(one, "_listen", lambda line: 1 / 0)
    one.join(20)
    assert not one.is_alive()
    time.sleep(4)
    assert run.verdicts == {}
    assert "rank 1 is watched no more: ZeroDivisionError" in " ".join(run.warnings)


def test_a_line_of_a_stranger_that_nests_without_end_is_an_end():
    ours, theirs = socket.socketpair()
    theirs.sendall(b"[" * 50_000 + b"\n")
    line = Line(ours)
    found = []
    while found == []:
        found = line.read()
    assert found is None


def test_forked_processes_do_not_keep_a_connection_open():
    ours, theirs = socket.socketpair()
    line = Line(ours)
    if (child := os.fork()) == 0:
        time.sleep(60)
        os._exit(0)
    line.socket.close()
    theirs.settimeout(20)
    assert theirs.recv(1) == b""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_message_may_come_in_pieces():
    ours, theirs = socket.socketpair()
    line = Line(ours)
    theirs.sendall(b'{"kind": "be')
    assert line.read() == []
    theirs.sendall(b'at"}\n{"kind": "end"}\n{')
    assert line.read() == [{"kind": "beat"}, {"kind": "end"}]
    theirs.close()
    assert line.read() is None


def test_time_in_which_the_process_stood_still_does_not_count(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = Clock()
    now[0] += 3600
    assert clock.now() == 2 * BEAT
    now[0] += 0.5
    assert clock.now() == 2 * BEAT + 0.5
