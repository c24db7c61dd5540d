import random

import pytest

from lit_diffusion.callbacks.rank_watch.verdict import (
    PATIENCE,
    RankVerdict,
    RankWord,
    SeenRank,
    rank_verdict,
    waiting,
)

TIMEOUT = 60.0
NOW = 1000.0
LATE = PATIENCE + 2


def rank(heard=NOW, still=0.0, collectives=40, **word):
    return SeenRank(
        heard, RankWord(9, 17, collectives, still, **{"where": "train.py:3 (step)", **word})
    )


def ended(how, over=0.0, said="ValueError: bad", **word):
    return rank(ended=how, over=over, said=said, **word)


def found(*ranks, now=NOW):
    return rank_verdict(dict(enumerate(ranks)), now, TIMEOUT)


def test_ranks_that_run_or_are_done_are_no_failure():
    assert found(rank(), rank(), ended("done"), ended("left")) is None


def test_the_rank_that_failed_first_is_named():
    later, first = ended("failed"), ended("failed", 1.0, "OSError: disk full")
    assert found(rank(), later, first) == RankVerdict(
        2, "rank 2 failed at step 17: OSError: disk full; see its output."
    )


@pytest.mark.parametrize("how", ["failed", "gone", "left", "lost"])
def test_of_several_that_ended_alike_the_first_is_named(how):
    assert found(rank(), ended(how, 61.0), ended(how, 99.0)).rank == 2
    assert found(ended(how, 99.0), ended(how, 61.0), rank()).rank == 0


def test_of_several_that_are_silent_the_longest_is_named():
    silent = [rank(heard=NOW - seconds) for seconds in (61, 99)]
    assert found(rank(), *silent).rank == 2
    assert found(ended("gone"), *silent).rank == 0


def test_a_failure_outweighs_what_it_did_to_the_others():
    assert found(ended("lost", 9.0), ended("gone", 9.0), ended("failed")).rank == 2
    assert found(ended("lost", 9.0), ended("gone")).rank == 1


def test_a_silent_rank_is_named_after_the_timeout():
    assert found(rank(), rank(heard=NOW - TIMEOUT)) is None
    text = found(rank(), rank(heard=NOW - TIMEOUT - 1)).text
    assert text.startswith("rank 1 was last heard of at step 17, 61 s ago")


def test_a_rank_that_never_came_is_named():
    absent = SeenRank(NOW - 61)
    text = "rank 1 has not come to the start of the run in 61 s"
    assert found(rank(), absent).text.startswith(text)


def test_the_rank_that_others_wait_for_is_named_with_its_place():
    waits = rank(collectives=41, still=61.0)
    assert found(waits, rank(still=300.0), waits) == RankVerdict(
        1,
        "rank 1 has kept the others waiting for 61 s at step 17, in train.py:3 (step); see its "
        "output.",
    )


def test_of_those_that_are_waited_for_the_one_furthest_behind_is_named():
    ranks = [rank(collectives=41 + i, still=99.0) for i in (0, 1)]
    assert found(*ranks, rank(still=99.0)).rank == 2


@pytest.mark.parametrize(
    "ranks",
    [
        [rank(still=5000.0), rank(still=5000.0)],  # all work alone, as in an FID
        [rank(still=5000.0), rank(collectives=41, still=59.0)],  # waited for, not too long
        [rank(still=59.0), rank(collectives=99, still=5000.0)],  # only just fell behind
        [rank(still=5000.0), ended("done", 5000.0, collectives=41, still=5000.0)],
    ],
)
def test_a_rank_that_works_for_long_is_not_taken_for_dead(ranks):
    assert found(*ranks) is None


def test_waiting_counts_from_when_the_first_of_the_others_had_to():
    ahead = {1: rank(collectives=41, still=30.0), 2: rank(collectives=42, still=20.0)}
    assert waiting({0: rank(still=300.0), **ahead}, 0, NOW) == 30
    assert waiting({0: rank(still=25.0), **ahead}, 0, NOW) == 25
    assert waiting({0: rank(), **ahead}, 1, NOW) == 20
    assert waiting({0: rank(), **ahead}, 2, NOW) == 0


def test_a_broken_connection_is_blamed_on_who_is_known_to_have_caused_it():
    soon = ended("lost")
    late = ended("lost", LATE, "RuntimeError: [gloo] reset", collectives=41, still=LATE)
    assert found(soon, rank()) is None
    behind = rank(still=99.0)
    assert found(late, rank(), behind).text.startswith("rank 2 has kept the others waiting for 7")
    assert found(late, SeenRank(NOW - LATE)).text.startswith("rank 1 has not come")
    assert found(late, rank(heard=NOW - LATE)).text.startswith("rank 1 was last heard of")
    assert found(late, ended("left", said="SystemExit: 1")).text == (
        "rank 1 left at step 17 (SystemExit: 1) without the others; see its output."
    )
    alone = found(late, rank(collectives=41)).text
    assert alone.startswith("rank 0 left at step 17 (RuntimeError: [gloo] reset) without the")


def test_a_rank_that_left_may_leave_the_others_behind_only_for_the_timeout():
    assert found(rank(), ended("left", TIMEOUT + 1)).rank == 1
    assert found(ended("done"), ended("left", TIMEOUT + 1)) is None


def some_ranks(numbers):
    """Ranks in any state that may be."""
    ends = ["", "", "", "failed", "gone", "left", "lost", "done"]
    return [
        rank(
            NOW - numbers.uniform(0, 2 * TIMEOUT),
            numbers.uniform(0, 2 * TIMEOUT),
            numbers.randrange(40, 43),
            ended=numbers.choice(ends),
            over=numbers.uniform(0, 2 * TIMEOUT),
        )
        for _ in range(numbers.randrange(2, 6))
    ]


@pytest.mark.parametrize("seed", range(200))
def test_whatever_is_known_the_verdict_is_fair(seed):
    numbers = random.Random(seed)
    ranks = some_ranks(numbers)
    verdict = found(*ranks)
    assert verdict is None or ranks[verdict.rank].word.ended != "done"
    # It does not depend on numbers, nor on what the clock shows.
    order = numbers.sample(range(len(ranks)), len(ranks))
    other = found(*(ranks[i] for i in order))
    assert (other and order[other.rank]) == (verdict and verdict.rank)
    shifted = [SeenRank(seen.heard + 500, seen.word) for seen in ranks]
    assert found(*shifted, now=NOW + 500) == verdict
    # Waiting longer takes nothing back.
    assert verdict is None or found(*ranks, now=NOW + 30) is not None


@pytest.mark.parametrize("seed", range(50))
def test_ranks_that_beat_and_move_are_never_blamed(seed):
    numbers = random.Random(seed)
    ranks = [
        rank(NOW - numbers.uniform(0, 3), numbers.uniform(0, 50), numbers.randrange(40, 43))
        for _ in range(5)
    ]
    assert found(*ranks) is None
