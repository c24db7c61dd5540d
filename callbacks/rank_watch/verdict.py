"""Which rank is to blame when several wait for each other: a rule over what is known of each."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

PATIENCE = 5.0  # seconds for ranks to meet, for a cause to be heard of, for a main thread to end


class RankVerdict(NamedTuple):
    """Who is to blame, and the message that says so."""

    rank: int
    text: str


class RankWord(NamedTuple):
    """What a rank says of itself with every beat."""

    beat: int = 0  # grows; 0 of a rank that has not come to the start of the run
    step: int = 0
    collectives: int = 0  # that it has entered; who has entered fewer is waited for
    still: float = 0.0  # seconds since it entered the last one
    where: str = ""  # its main thread is
    ended: str = ""  # "failed", "gone", "lost" the others, "left" on purpose, or "done"
    said: str = ""  # of its end
    over: float = 0.0  # seconds since its end
    process: str = ""
    verdict: RankVerdict | None = None  # that it knows


class SeenRank(NamedTuple):
    """The last word of a rank, and when it was heard on the clock of who watches."""

    heard: float = 0.0
    word: RankWord = RankWord()


def rank_verdict(ranks: Mapping[int, SeenRank], now: float, timeout: float) -> RankVerdict | None:
    """Who has ended the run for all; None while nobody has.

    A failure outweighs a death, that one a rank that is silent, that one that is waited for, and
    that one that left alone. They have `timeout` seconds, or a few once a rank lost the others.
    """
    lost = [now - heard + word.over for heard, word in ranks.values() if word.ended == "lost"]
    in_doubt = max(lost, default=0.0) > PATIENCE + 1  # in which who is silent is silent for long
    found = [(*f, r) for r in ranks for f in _faults(ranks, r, now, timeout, in_doubt)]
    return RankVerdict(min(found)[3], f"{min(found)[2]}; see its output.") if found else None


def _faults(
    ranks: Mapping[int, SeenRank], rank: int, now: float, timeout: float, in_doubt: bool
) -> Iterator[tuple[int, float, str]]:  # weight, place among those of this weight, text
    heard, word = ranks[rank]
    silence, waits, at = now - heard, waiting(ranks, rank, now), f"at step {word.step}"
    over, limit = silence + word.over, PATIENCE if in_doubt else timeout
    stay = any(seen.word.ended in ("", "lost") for seen in ranks.values())
    if word.ended == "failed":
        yield 0, -over, f"rank {rank} failed {at}: {word.said}"
    elif word.ended == "gone":
        end = f"rank {rank} ended without a word, last heard of {at}"
        yield 1, -over, f"{end}: killed, crashed or out of memory"
    elif word.ended in ("left", "lost") and stay and (in_doubt or over > limit):
        weight = 4 if word.ended == "left" else 5
        yield weight, -over, f"rank {rank} left {at} ({word.said}) without the others"
    elif not word.ended and silence > limit:
        met = f"was last heard of {at}, {silence:.0f} s ago: killed, stopped or stuck"
        absent = f"has not come to the start of the run in {silence:.0f} s"
        yield 2, -silence, f"rank {rank} {met if word.beat else absent}"
    elif not word.ended and waits > limit:
        wait = f"rank {rank} has kept the others waiting for {waits:.0f} s {at}"
        yield 3, word.collectives, f"{wait}, in {word.where or 'an unknown place'}"


def waiting(ranks: Mapping[int, SeenRank], rank: int, now: float) -> float:
    """Seconds for which others have been in a collective that `rank` has not come to."""
    others = [seen for seen in ranks.values() if seen.word.ended in ("", "lost")]
    heard, mine = ranks[rank]
    ahead = [now - h + word.still for h, word in others if word.collectives > mine.collectives]
    return min(now - heard + mine.still, max(ahead)) if mine.beat and ahead else 0.0
