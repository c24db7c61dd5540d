"""The tables of docs/results/digits-advice.md: advice_tables.py RUNS.

RUNS holds <arm>/seed-<n>, an arm being a piece of advice joined with a factor of the lr. Printed as
Markdown:
- advice left in or out: FID at the end, its ratio to the baseline's (Welch on logs, 95%; p after
  Holm) and by seed (paired t), and how many runs were unstable at 1, 3 and 10 times the lr, which
  is the best of the optimizer;
- constant beta1 crossed with the lr: FID at the end.
"""

import argparse
import math
import re
from collections import defaultdict
from statistics import fmean, geometric_mean, stdev

from lit_diffusion.analysis.by_seed import Paired, paired
from lit_diffusion.analysis.speedup import Welch, holm, welch
from lit_diffusion.analysis.stability import stability
from lit_diffusion.analysis.wording import fid_text, p_text
from lit_diffusion.commands.experiment import Run, find_runs

Cells = dict[tuple[str, float], list[Run]]
ADVICE = {
    "baseline": "Adam, warm-up, no clipping, EMA, noise prediction, cosine betas",
    "no-warmup": "no warm-up",
    "clip": "gradients clipped to a norm of 1",
    "adamw": "AdamW (weight decay 0.01)",
    "sgd": "SGD, momentum 0.9",
    "rmsprop": "RMSprop",
    "no-ema": "no EMA",
    "x0": "x0 prediction, unweighted",
    "velocity": "velocity prediction",
    "linear": "linear betas",
}
BETAS = ("0", "0.5", "0.8", "0.9", "0.95", "0.99")


def cell(arm: str) -> tuple[str, float]:
    """Advice and factor of the lr of an arm: clip+lr-x3 is ("clip", 3).

    Raises:
        ValueError: for an arm that the tables have no place for.
    """
    parts = arm.split("+")
    factors = [float(found[1]) for p in parts if (found := re.search(r"-x([\d.]+)$", p))]
    names = [re.sub(r"-x[\d.]+$", "", p) for p in parts if not p.startswith("lr-x")]
    name = names[0] if names else "baseline"
    known = name in ADVICE or name.removeprefix("beta1-") in BETAS
    if not known or len(names) > 1 or len(factors) > 1 or (name == "sgd" and "+lr-x" in arm):
        raise ValueError(f"{arm} is no piece of advice with a factor of its lr.")
    return name, factors[0] if factors else 1.0


def cells(runs: list[Run]) -> Cells:
    """The runs by advice and factor.

    Raises:
        ValueError: for a seed that is there twice, and a run that did not end and did not diverge.
    """
    found: Cells = defaultdict(list)
    for run in runs:
        at = cell(run.arm)
        if run.seed in [other.seed for other in found[at]]:
            raise ValueError(f"{run.path}: its seed is there twice.")
        if math.isinf(last_fid(run)) and not run.diverged:
            raise ValueError(f"{run.path} did not end.")
        found[at].append(run)
    return found


def last_fid(run: Run) -> float:
    """The geometric mean over all sets of samples at the last step; infinite without an FID."""
    at_end = [record["value"] for record in run.records if record["step"] == run.max_steps]
    return geometric_mean(at_end) if at_end and None not in at_end else math.inf


def fids(runs: list[Run]) -> str:
    values = [last_fid(run) for run in runs]
    kept = [value for value in values if math.isfinite(value)]
    if not kept:
        return "-"
    told = fid_text(fmean(kept), stdev(kept) if kept[1:] else None)
    return told if kept == values else f"{told} ({len(kept)} of {len(values)})"


def unstable(runs: list[Run]) -> str:
    """Diverged and spiking runs of all, as in compare's table."""
    found = [stability(run.train_losses[1]) for run in runs]
    if not found:
        return ""
    bad = sum(not one.stable for one in found)
    diverged = sum(one.diverged for one in found)
    return f"{bad} of {len(found)}" + (f" ({diverged} diverged)" if diverged else "")


def against(runs: list[Run], baseline: list[Run]) -> tuple[Welch | None, Paired | None]:
    """Last FIDs beside those of the baseline, and by seed; None where a run has none."""
    own, other = ({run.seed: last_fid(run) for run in group} for group in (runs, baseline))
    if not all(map(math.isfinite, (*own.values(), *other.values()))):
        return None, None
    shared = sorted(own.keys() & other.keys())
    logs = [[math.log(fid) for fid in fids.values()] for fids in (own, other)]
    return welch(*logs), paired([own[seed] for seed in shared], [other[seed] for seed in shared])


def ratio(ratio: float, low: float, high: float) -> str:
    return f"{ratio:.2f} [{low:.2f}, {high:.2f}]"


def row(*texts: str) -> None:
    print("| " + " | ".join(texts) + " |")


def advice_table(found: Cells) -> None:
    tests = {name: against(found[name, 1], found["baseline", 1]) for name in list(ADVICE)[1:]}
    told = {name: test.p for name, (test, _) in tests.items() if test}
    corrected = dict(zip(told, holm(list(told.values())), strict=True))
    heads = ("arm", "what differs", "FID", "over the baseline's", "p (Holm)", "by seed")
    row(*heads, "FID at 3x", "10x", "unstable at 1x", "3x", "10x")
    row(*["---"] * 11)
    for name, text in ADVICE.items():
        test, pairs = tests.get(name, (None, None))
        first = (
            ratio(*(math.exp(d) for d in (test.difference, test.low, test.high))) if test else "-"
        )
        by_seed = ratio(pairs.ratio, pairs.low, pairs.high) if pairs else "-"
        p = p_text(corrected.get(name))
        each = [found[name, factor] for factor in (1, 3, 10)]
        row(
            name, text, fids(each[0]), first, p, by_seed, *map(fids, each[1:]), *map(unstable, each)
        )


def momentum_table(found: Cells) -> None:
    row("beta1", "FID at 0.3x", "1x", "3x", "unstable at 0.3x", "3x")
    row(*["---"] * 6)
    for beta in BETAS:
        name = "baseline" if beta == "0.9" else f"beta1-{beta}"
        each = [found[name, factor] for factor in (0.3, 1, 3)]
        row(beta, *map(fids, each), *map(unstable, (each[0], each[2])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+")
    found = cells(find_runs(parser.parse_args().runs))
    advice_table(found)
    print()
    momentum_table(found)


if __name__ == "__main__":
    main()
