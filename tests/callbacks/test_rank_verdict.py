import pytest

from lit_diffusion.callbacks.rank_verdict import LONG, PATIENCE, Seen, Verdict, verdict, waiting

TIMEOUT = 60.0
NOW = 1000.0


def rank(heard=NOW, collectives=40, moved=NOW, step=17, here=True):
    return Seen(heard, here, step, collectives, moved, where="train.py:3 (step)")


def ended(how, since=NOW, said="ValueError: bad"):
    seen = rank()
    seen.end(since, how, said)
    return seen


def found(*ranks):
    return verdict(ranks, NOW, TIMEOUT)


def test_ranks_that_run_or_are_done_are_no_failure():
    assert found(rank(), rank(), ended("done"), ended("left")) is None


def test_the_rank_that_failed_first_is_named():
    later, first = ended("failed"), ended("failed", NOW - 1, "OSError: disk full")
    assert found(rank(), later, first) == Verdict(
        2, "rank 2 failed at step 17: OSError: disk full; see its output."
    )


def test_a_failure_outweighs_what_it_did_to_the_others():
    assert found(ended("lost", NOW - 9), ended("gone", NOW - 9), ended("failed")).rank == 2
    assert found(ended("lost", NOW - 9), ended("gone")).rank == 1


def test_only_the_first_end_counts():
    seen = ended("left")
    seen.end(NOW, "gone")
    assert seen.ended == "left"


def test_a_silent_rank_is_named_after_the_timeout():
    assert found(rank(), rank(heard=NOW - TIMEOUT)) is None
    text = found(rank(), rank(heard=NOW - TIMEOUT - 1)).text
    assert text.startswith("rank 1 was last heard of at step 17, 61 s ago")


def test_a_rank_that_never_came_is_named():
    absent = Seen(heard=NOW - 61)
    assert found(rank(), absent).text.startswith(
        "rank 1 has not come to the start of the run in 61"
    )


def test_the_rank_that_others_wait_for_is_named_with_its_place():
    waits = rank(collectives=41, moved=NOW - 61)
    assert found(waits, rank(moved=NOW - 300), waits) == Verdict(
        1,
        "rank 1 has kept the others waiting for 61 s at step 17, in train.py:3 (step); see its "
        "output.",
    )


@pytest.mark.parametrize(
    "ranks",
    [
        [rank(moved=NOW - 5000), rank(moved=NOW - 5000)],  # all work alone, as in an FID
        [rank(moved=NOW - 5000), rank(collectives=41, moved=NOW - 59)],  # waited for, not too long
        [rank(moved=NOW - 59), rank(collectives=99, moved=NOW - 5000)],  # only just fell behind
    ],
)
def test_a_rank_that_works_for_long_is_not_taken_for_dead(ranks):
    assert found(*ranks) is None


def test_waiting_counts_from_when_the_first_of_the_others_had_to():
    ahead = rank(collectives=41, moved=NOW - 30), rank(collectives=42, moved=NOW - 20)
    assert waiting([rank(moved=NOW - 300), *ahead], 0, NOW) == 30
    assert waiting([rank(moved=NOW - 25), *ahead], 0, NOW) == 25
    assert waiting([rank(), *ahead], 1, NOW) == 20
    assert waiting([rank(), *ahead], 2, NOW) == 0


def test_a_broken_connection_is_blamed_on_who_is_known_to_have_caused_it():
    soon, late = ended("lost"), ended("lost", NOW - PATIENCE - 1, "RuntimeError: [gloo] reset")
    late.collectives, late.moved = 41, NOW - LONG - 1
    assert found(soon, rank()) is None
    behind = rank(moved=NOW - 99)
    assert found(late, rank(), behind).text.startswith("rank 2 has kept the others waiting for 11")
    assert found(late, Seen(heard=NOW - 1)).text.startswith("rank 1 has not come")
    assert found(late, rank(heard=NOW - LONG - 1)).text.startswith("rank 1 was last heard of")
    assert found(late, ended("left", said="SystemExit: 1")).text == (
        "rank 1 left at step 17 (SystemExit: 1) without the others; see its output."
    )
    assert found(late, rank()).text.startswith("rank 0 lost the others at step 17: RuntimeError")


def test_a_rank_that_left_may_leave_the_others_behind_only_for_the_timeout():
    assert found(rank(), ended("left", NOW - TIMEOUT - 1)).rank == 1
    assert found(ended("done"), ended("left", NOW - TIMEOUT - 1)) is None


def test_a_beat_tells_when_a_rank_last_moved():
    seen = Seen(heard=0.0)
    seen.beat(5.0, 1, 10, "a.py:1 (f)")
    seen.beat(9.0, 1, 10, "a.py:2 (f)")
    assert (seen.heard, seen.moved, seen.where) == (9.0, 5.0, "a.py:2 (f)")
    seen.beat(11.0, 1, 11, "")
    assert seen.moved == 11.0
