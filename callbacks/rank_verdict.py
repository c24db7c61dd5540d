"""Which rank is to blame when several wait for each other: a rule over what is known of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

PATIENCE = 3.0
"""Seconds that a rank whose connection broke leaves for the cause to be heard of."""

LONG = 10.0
"""Seconds of waiting after which a broken connection is blamed on who was waited for."""


@dataclass
class Seen:
    """What is known of a rank, in seconds on the clock of who watches.

    Args:
        heard: when it last said anything; before that, when the watch began.
        here: whether it has come to the start of the run.
        step: optimizer steps that it has done.
        collectives: that it has entered; who has entered fewer is waited for.
        moved: when that number last grew.
        where: its main thread is.
        ended: how it left the run: "failed" by itself, "lost" the others, "left" on purpose,
            "done", "gone" without a word; "" while it runs.
        said: of its end.
        since: when it ended.
    """

    heard: float
    here: bool = False
    step: int = 0
    collectives: int = 0
    moved: float = 0.0
    where: str = ""
    ended: str = ""
    said: str = ""
    since: float = 0.0

    def beat(self, now: float, step: int, collectives: int, where: str) -> None:
        """Note a sign of life."""
        if not self.here or collectives != self.collectives:
            self.moved = now
        self.heard, self.here = now, True
        self.step, self.collectives, self.where = step, collectives, where

    def end(self, now: float, ended: str, said: str = "") -> None:
        """Note an end; the first one counts."""
        if not self.ended:
            self.ended, self.said, self.since = ended, said, now


class Verdict(NamedTuple):
    """Who is to blame, and the message that says so."""

    rank: int
    text: str


def verdict(ranks: Sequence[Seen], now: float, timeout: float) -> Verdict | None:
    """Who has ended the run for all; None while nobody has.

    Args:
        ranks: what is known of each.
        now: on the same clock.
        timeout: seconds that a rank may be silent or waited for.

    Example:
        >>> ranks = [Seen(heard=9.0, here=True, step=17, collectives=40) for _ in range(2)]
        >>> verdict(ranks, now=9.0, timeout=60.0)
        >>> ranks[1].end(9.0, "failed", "ValueError: no such label")
        >>> verdict(ranks, now=9.0, timeout=60.0)
        Verdict(rank=1, text='rank 1 failed at step 17: ValueError: no such label; see its output.')
    """
    return (
        _ended(ranks, "failed")
        or _ended(ranks, "gone")
        or _overdue(ranks, now, timeout)
        or _behind_lost_contact(ranks, now)
    )


def _ended(ranks: Sequence[Seen], how: str) -> Verdict | None:
    found = [(seen.since, rank) for rank, seen in enumerate(ranks) if seen.ended == how]
    if not found:
        return None
    rank = min(found)[1]
    return Verdict(rank, _END[how](rank, ranks[rank]))


def gone(rank: int, step: int) -> str:
    """That a rank ended without a word."""
    return (
        f"rank {rank} ended without a word, last heard of at step {step}: killed, crashed or out "
        "of memory; see its output and the system's log."
    )


def unanswered(rank: int) -> str:
    """That the store in which a rank was to be met is not there."""
    return (
        f"rank {rank} ended without a word, or stands still, before the ranks could meet; see its "
        "output and the system's log."
    )


def left(rank: int, step: int, said: str) -> str:
    """That a rank ended on purpose, alone."""
    return f"rank {rank} left at step {step} ({said}) without the others; see its output."


_END = {
    "failed": lambda rank, seen: (
        f"rank {rank} failed at step {seen.step}: {seen.said}; see its output."
    ),
    "gone": lambda rank, seen: gone(rank, seen.step),
    "left": lambda rank, seen: left(rank, seen.step, seen.said),
    "lost": lambda rank, seen: (
        f"rank {rank} lost the others at step {seen.step}: {seen.said}; none of them said why."
    ),
}


def _overdue(ranks: Sequence[Seen], now: float, timeout: float) -> Verdict | None:
    """Who has been silent, waited for, or away from ranks that still run, for too long."""
    running = [rank for rank, seen in enumerate(ranks) if not seen.ended]
    for rank in running:
        if now - ranks[rank].heard > timeout:
            return Verdict(rank, silent(rank, ranks[rank], now))
    for rank in running:
        if (seconds := waiting(ranks, rank, now)) > timeout:
            return Verdict(rank, _waited_for(rank, ranks[rank], seconds))
    away = [seen for seen in ranks if seen.ended == "left" and now - seen.since > timeout]
    return _ended(ranks, "left") if running and away else None


def _behind_lost_contact(ranks: Sequence[Seen], now: float) -> Verdict | None:
    """Why a rank lost the others, when its patience has come to an end."""
    if not any(seen.ended == "lost" and now - seen.since > PATIENCE for seen in ranks):
        return None
    for rank, seen in enumerate(ranks):
        if not seen.ended and (not seen.here or now - seen.heard > LONG):
            return Verdict(rank, silent(rank, seen, now))
        if not seen.ended and (seconds := waiting(ranks, rank, now)) > LONG:
            return Verdict(rank, _waited_for(rank, seen, seconds))
    return _ended(ranks, "left") or _ended(ranks, "lost")


def waiting(ranks: Sequence[Seen], rank: int, now: float) -> float:
    """Seconds for which others have been in a collective that `rank` has not come to."""
    mine = ranks[rank]
    ahead = [r.moved for r in ranks if r.here and r.collectives > mine.collectives]
    return now - max(mine.moved, min(ahead)) if mine.here and ahead else 0.0


def silent(rank: int, seen: Seen, now: float) -> str:
    """That nothing is heard of a rank."""
    seconds = f"{now - seen.heard:.0f} s"
    if not seen.here:
        return f"rank {rank} has not come to the start of the run in {seconds}; see its output."
    return (
        f"rank {rank} was last heard of at step {seen.step}, {seconds} ago: stopped, stuck, or its "
        f"machine is lost; see its output."
    )


def _waited_for(rank: int, seen: Seen, seconds: float) -> str:
    return (
        f"rank {rank} has kept the others waiting for {seconds:.0f} s at step {seen.step}, in "
        f"{seen.where or 'an unknown place'}; see its output."
    )
