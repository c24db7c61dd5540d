"""One of several ranks fails; the others end soon, with a message that names it."""

import re

import pytest
from support.forked_ranks import Forker

pytestmark = pytest.mark.system

RANKS = 3
CASE = "support.failing_ranks:main"
FOREVER = 600.0  # seconds; a test whose limit is below does not wait for it


@pytest.fixture(scope="module")
def forker():
    with Forker() as started:
        yield started


@pytest.fixture
def run(forker, tmp_path):
    def started(way, place, ranks, **options):
        """Ends of the run in which `ranks` fail; at the limit, who still runs is killed."""
        limit = options.pop("limit", 60)
        return forker.run(CASE, tmp_path, RANKS, way, place, ranks, *options.values(), limit=limit)

    return started


def lines(end):
    return [line for line in end.said.splitlines() if re.match(r"(\[rank \d\] )?rank \d ", line)]


def assert_others_tell(ends, rank, message):
    """All ranks but this one ended with code 1 and the message, and left nothing behind."""
    for other, end in enumerate(ends):
        assert not end.left
        if other != rank:
            assert end.code == 1, end.said
            assert re.search(message, lines(end)[-1])


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_that_raises_is_named_with_its_step_and_error(run, rank):
    ends = run("raise", "training", [rank], timeout=FOREVER)
    assert_others_tell(ends, rank, f"rank {rank} failed at step 3: ValueError: no such label; see")
    assert ends[rank].code == 1
    assert lines(ends[rank]) == []


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_that_is_killed_is_named(run, rank):
    ends = run("kill", "training", [rank], timeout=FOREVER)
    assert_others_tell(ends, rank, f"rank {rank} ended without a word, last heard of at step")
    assert ends[rank].code == -9


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_that_hangs_is_named_with_its_place_and_ends_too(run, rank):
    ends = run("sleep", "training", [rank], timeout=4.0)
    message = rf"rank {rank} has kept the others waiting for \d s at step 3, in .*failing_ranks.py"
    assert_others_tell(ends, rank, message)
    assert ends[rank].code == 1
    assert "time.sleep(1000)" in ends[rank].said


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_stands_still_is_named(run, rank):
    """It can't end by itself; who started it kills it, as torchrun, srun and Lightning do."""
    ends = run("stop", "training", [rank], timeout=4.0, limit=15)
    assert_others_tell(
        ends, rank, rf"rank {rank} (was last heard of at step \d, \d s ago|.*stands still)"
    )
    assert ends[rank].code is None


PLACES = [(rank, place) for rank in (0, 2) for place in ("data", "loader", "validation", "fid")]


@pytest.mark.parametrize(("rank", "place"), [*PLACES, (0, "save")])
def test_ranks_raise_anywhere(run, rank, place):
    ends = run("raise", place, [rank], timeout=FOREVER)
    assert_others_tell(ends, rank, f"rank {rank} failed at step .: ValueError: no such label; see")


@pytest.mark.parametrize(("rank", "place"), [*PLACES, (0, "save")])
def test_ranks_die_anywhere(run, rank, place):
    ends = run("kill", place, [rank], timeout=FOREVER)
    # One that dies before the ranks could meet is only missed.
    missed = "|has not come to the start of the run" if place in ("data", "loader") else ""
    assert_others_tell(ends, rank, f"rank {rank} (ended without a word{missed})")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["loader", "validation", "fid", "save"])
def test_ranks_hang_anywhere(run, place):
    ends = run("sleep", place, [0], timeout=4.0)
    assert_others_tell(ends, 0, "rank 0 has kept the others waiting")
    assert ends[0].code == 1


@pytest.mark.slow
@pytest.mark.parametrize("way", ["kill", "raise", "sleep"])
@pytest.mark.parametrize("rank", [0, 1])
def test_loading_processes_end_with_their_rank(run, way, rank):
    """Also those that the others' ranks have, and the message does not wait for them."""
    ends = run(way, "training", [rank], timeout=4.0, workers=2)
    assert_others_tell(ends, rank, f"rank {rank} ")


@pytest.mark.slow
def test_loading_processes_that_are_stuck_are_ended(run):
    """By the rank whose main thread waits for them."""
    ends = run("sleep", "worker", [1], timeout=4.0, workers=2)
    assert_others_tell(ends, 1, "rank 1 has kept the others waiting for . s")
    assert ends[1].code == 1


@pytest.mark.slow
@pytest.mark.parametrize("timeout", [4.0, FOREVER])
def test_ranks_that_work_alone_for_long_are_not_taken_for_dead(run, timeout):
    """All generate for longer than the timeout; nobody waits for another."""
    ends = run("work", "fid", None, timeout=timeout)
    assert [end.code for end in ends] == [0] * RANKS
    assert [lines(end) for end in ends] == [[]] * RANKS


@pytest.mark.parametrize(("way", "code"), [("leave", 75), ("interrupt", 1)])
@pytest.mark.parametrize("place", ["training", "validation", "loader", "data"])
def test_an_end_on_purpose_is_no_failure(run, way, code, place):
    ends = run(way, place, None, timeout=FOREVER)
    assert [end.code for end in ends] == [code] * RANKS
    assert [lines(end) for end in ends] == [[]] * RANKS


@pytest.mark.parametrize("rank", range(RANKS))
def test_ranks_that_one_leaves_behind_tell_so(run, rank):
    ends = run("leave", "training", [rank], timeout=FOREVER)
    message = rf"rank {rank} left at step 3 \(SystemExit: 75\) without the others; see its output"
    assert_others_tell(ends, rank, message)
    assert ends[rank].code == 75


def test_ranks_that_make_the_same_mistake_tell_only_that(run):
    ends = run("raise", "loader", None, timeout=FOREVER)
    for end in ends:
        assert end.code == 1
        assert end.said.rstrip().endswith("ValueError: no such label")
        assert lines(end) == []


@pytest.mark.slow
def test_when_the_collectives_time_out_first_the_rank_that_hung_is_named(run):
    ends = run("sleep", "training", [1], timeout=None, workers=0, collectives=12)
    assert_others_tell(ends, 1, "rank 1 has kept the others waiting for 1. s at step 3")
