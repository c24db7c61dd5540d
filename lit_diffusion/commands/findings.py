"""What a report tells of run folders besides their curves: settings, samples, and what is odd."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from lit_diffusion.analysis.comparison import HEADLINE_SEEDS, Arm, images_a_step, same_images_a_step
from lit_diffusion.analysis.curves import Curve, first_crossing, sampling_spread
from lit_diffusion.analysis.report import Grid
from lit_diffusion.analysis.stability import Stability, stability
from lit_diffusion.analysis.tables import Table, spread_out, stability_table
from lit_diffusion.analysis.wording import fid_text
from lit_diffusion.commands.experiment import (
    PROTOCOL,
    Record,
    Run,
    sampling_of,
    settings_that_differ,
)
from lit_diffusion.commands.selection import Selection

_COLUMNS = 3  # of sample grids
_SETTINGS = 12  # of an arm
_OF_TRAINING = ("process", "ema_decay")  # the rest of how samples are drawn is the sampler's
_END_OF_PNG = b"IEND\xaeB`\x82"  # lacking where a run died while it wrote


def arms_of(selection: Selection) -> list[Arm]:
    """Curves of the selected runs, the baseline's first."""
    names = sorted(selection.arms, key=lambda name: name != selection.baseline)
    due = _steps_of(selection.arms[selection.baseline], selection.metric)
    return [
        Arm(name, tuple(curve_of(run, selection.metric, due) for run in selection.arms[name]))
        for name in names
    ]


def _steps_of(runs: Iterable[Run], metric: str) -> list[int]:
    return sorted({point["step"] for run in runs for point in run.points(metric)})


def curve_of(run: Run, metric: str, due: Sequence[int] = ()) -> Curve:
    """The FIDs of a run.

    Args:
        run: with an FID at least.
        metric: name of the FID.
        due: steps that are evaluated in a whole run. Where the training diverged before, the FID
            is NaN there.

    Raises:
        ValueError: for an FID that is not positive.
    """
    points = run.points(metric)
    if run.diverged:
        last = points[-1]
        rate = (last.get("images") or math.nan) / (last["step"] or math.nan)
        points = points + [
            {"step": step, "value": None, "images": None if math.isnan(rate) else rate * step}
            for step in due
            if step > last["step"]
        ]
    images = [point.get("images") for point in points]
    again = [_fid(record) for record in run.repeats(run.points(metric)[-1])]
    try:
        return Curve(
            run.seed,
            tuple(float(point["step"]) for point in points),
            tuple(_fid(point) for point in points),
            None if None in images else tuple(float(seen or 0) for seen in images),
            tuple(again),
        )
    except ValueError as error:
        raise ValueError(f"{run.path}: {error}") from error


def _fid(record: Record) -> float:
    return math.nan if record["value"] is None else float(record["value"])


def protocol_facts(selection: Selection) -> dict[str, str]:
    """How the FIDs were measured, for people."""
    point = selection.arms[selection.baseline][0].points(selection.metric)[-1]
    facts = {
        name: point.get(name)
        for name in (*PROTOCOL, "ema_decay", "seeds", "reference", "floor", "floor_images")
    }
    facts |= {f"sampling {name}": value for name, value in (point.get("sampling") or {}).items()}
    return {name: _shown(value) for name, value in facts.items() if value is not None}


def notes(selection: Selection, arms: Sequence[Arm]) -> list[str]:
    """What a reader should know before believing the figures."""
    runs = [(run, curve) for arm in arms for run, curve in _pairs(selection, arm)]
    told = [note for run, curve in runs for note in _notes_of(run, curve, selection.metric)]
    common = [*_few_seeds(arms), *_unequal_lengths(arms), _images(arms), *_sampling(selection)]
    return common + _no_repeats(arms) + _no_configs(run for run, _ in runs) + told


def alerts(selection: Selection) -> list[str]:
    """What a reader should know together with the headline."""
    others = [name for name, changed in _resampled(selection).items() if changed - {*_OF_TRAINING}]
    if not others:
        return []
    who = others[0] if len(others) == 1 else f"{len(others)} arms"
    return [
        f"Other samplers than {selection.baseline}'s in {who}: a gain may be the sampler's, not "
        "the training's."
    ]


def _pairs(selection: Selection, arm: Arm) -> Iterable[tuple[Run, Curve]]:
    return zip(selection.arms[arm.name], arm.curves, strict=True)


def _notes_of(run: Run, curve: Curve, metric: str) -> list[str]:
    told = []
    if run.diverged:
        told.append(f"{run.path}: its training diverged, so it has no FID from then on.")
    elif lost := curve.non_finite_steps:
        steps = ", ".join(f"{step:,.0f}" for step in lost[:5])
        more = f" and {len(lost) - 5} more" * (len(lost) > 5)
        told.append(f"{run.path}: the FID is not finite at step {steps}{more}.")
    if others := run.ignored(metric):
        told.append(
            f"{run.path}: {others} of its evaluations, measured in another way, are ignored."
        )
    if twice := run.measured_twice(metric):
        steps = ", ".join(f"{step:,}" for step in twice[:5])
        more = f" and {len(twice) - 5} more" * (len(twice) > 5)
        told.append(f"{run.path}: its FIDs of step {steps}{more} differ; the last one counts.")
    if changed := settings_that_differ(run.first_config, run.config):
        what = "; ".join(f"{name} {old!r}, then {new!r}" for name, (old, new) in changed.items())
        told.append(f"{run.path} was resumed with other settings: {what}.")
    return told


def _few_seeds(arms: Sequence[Arm]) -> list[str]:
    few = [f"{arm.name} {len(arm.curves)}" for arm in arms if len(arm.curves) < HEADLINE_SEEDS]
    if not few:
        return []
    return [f"Fewer than {HEADLINE_SEEDS} seeds, the least for a headline: {', '.join(few)}."]


def _no_repeats(arms: Sequence[Arm]) -> list[str]:
    if sampling_spread(curve for arm in arms for curve in arm.curves) is not None:
        return []
    return [
        "How far an FID depends on the samples is not known: no run repeats its last FID with "
        "others, as FIDEvaluation(repeats_at_end=2) does."
    ]


def _no_configs(runs: Iterable[Run]) -> list[str]:
    lacking = [str(run.path) for run in runs if not run.config]
    if not lacking:
        return []
    return [
        "Whether seeds of an arm were configured alike, and what an arm changes, is not known of "
        f"runs without config.yaml: {', '.join(lacking)}."
    ]


def _unequal_lengths(arms: Sequence[Arm]) -> list[str]:
    """Arms whose evaluations are not those of the baseline."""
    base, *others = arms
    told = []
    for arm in others:
        own, expected = arm.curves[0].steps, base.curves[0].steps
        if own[-1] != expected[-1]:
            told.append(
                f"{arm.name} was trained for {own[-1]:,.0f} steps, {base.name} for "
                f"{expected[-1]:,.0f}: compare steps to the target, not last FIDs."
            )
        elif own != expected:
            told.append(
                f"{arm.name} was evaluated {len(own)} times, {base.name} {len(expected)} times, "
                "and not at the same steps: the lowest of more FIDs is lower by chance."
            )
    return told


def _sampling(selection: Selection) -> list[str]:
    """Arms whose samples were drawn in another way."""
    base = _sampled(selection, selection.baseline)
    told = []
    for name, changed in _resampled(selection).items():
        way = _sampled(selection, name)
        what = "; ".join(f"{k} {way[k]}, not {base[k]}" for k in way if k in changed)
        told.append(f"{name} draws its samples in another way: {what}.")
    return told


def _resampled(selection: Selection) -> dict[str, set[str]]:
    """What differs in how an arm's samples were drawn, of arms where something does."""
    base = _sampled(selection, selection.baseline)
    ways = {name: _sampled(selection, name) for name in selection.arms}
    found = {
        name: {key for key in way if key in base and base[key] != way[key]}
        for name, way in ways.items()
    }
    return {name: changed for name, changed in found.items() if changed}


def _sampled(selection: Selection, arm: str) -> Record:
    return sampling_of(selection.arms[arm][0].points(selection.metric)[-1])


def settings_table(selection: Selection) -> Table | None:
    """What each arm changes; None where the configs do not tell."""
    base = selection.arms[selection.baseline][0]
    rows = []
    for name, runs in selection.arms.items():
        changed = settings_that_differ(base.config, runs[0].config) if runs[0].config else {}
        shown = list(changed.items())[:_SETTINGS]
        rows += [(name, key, _shown(old), _shown(new)) for key, (old, new) in shown]
        if len(changed) > len(shown):
            rows.append((name, f"and {len(changed) - len(shown)} more", "", ""))
    if not rows or not base.config:
        return None
    heads = ("arm", "setting", selection.baseline, "this arm")
    caption = "Settings in which an arm differs from the baseline, but for seeds and paths."
    return Table(caption, heads, tuple(rows), text_columns=heads[1:])


def runs_table(selection: Selection, arms: Sequence[Arm], target: float) -> Table:
    """A row a run."""
    rows = [
        (
            arm.name,
            curve.seed,
            f"{curve.steps[-1]:,.0f}",
            str(first_crossing(curve.steps, curve.fids, target)),
            fid_text(curve.fids[-1]),
            fid_text(curve.best),
            _loss(run),
            str(run.path),
        )
        for arm in arms
        for run, curve in _pairs(selection, arm)
    ]
    heads = ("arm", "seed", "steps", "to target", "last FID", "lowest FID", "val/loss", "folder")
    caption = (
        "Every run that takes part. The loss is the last of metrics.csv; between arms with other "
        "losses or weightings it does not compare."
    )
    return Table(caption, heads, tuple(rows), text_columns=("folder",))


def _loss(run: Run) -> str:
    try:
        return f"{float(run.last_logged['val/loss']):.4g}"
    except (KeyError, ValueError):
        return "-"


def steadiness_of(runs: Iterable[Run]) -> Table | None:
    """Which arms' training losses diverged or spiked; None where no run logged them.

    Args:
        runs: all of the experiment, those without FIDs too.
    """
    found: dict[str, list[Stability]] = {}
    gaps: set[int] = set()
    for run in runs:
        steps, losses = run.train_losses
        if losses:
            found.setdefault(run.arm, []).append(stability(losses))
            gaps |= {min(later - step for step, later in pairwise(steps))} if steps[1:] else set()
    if not found:
        return None
    often = " or ".join("every step" if n == 1 else f"every {n:,}th step" for n in sorted(gaps))
    return stability_table(found, often or "one step")


def sample_grids(selection: Selection, names: Sequence[str]) -> list[Grid]:
    """Pictures of all arms at equal steps, from one training seed that all have if there is one.

    They are of the weights that the FIDs are of, if there are such pictures.

    Args:
        selection: of runs.
        names: of the arms, in the order in which they are shown.
    """
    held = {name: [run for run in selection.arms[name] if run.grids] for name in names}
    if not all(held.values()):
        return []
    seeds = [[run.seed for run in runs] for runs in held.values()]
    common = [seed for seed in seeds[0] if all(seed in others for others in seeds)]
    chosen = {
        arm: next((run for run in runs if run.seed in common[:1]), runs[0])
        for arm, runs in held.items()
    }
    shared = sorted(set.intersection(*(set(run.grids) for run in chosen.values())))
    weights = _weights_of(shared, selection)
    steps = spread_out([key for key in shared if key[1] == weights], _COLUMNS)
    pictures = [
        Grid(arm, key[0], run.grids[key].read_bytes(), run.seed, key[1])
        for arm, run in chosen.items()
        for key in steps
    ]
    return [grid for grid in pictures if grid.png.endswith(_END_OF_PNG)]


def _weights_of(pictures: Sequence[tuple[int, str]], selection: Selection) -> str:
    """The FID's own weights; those with the most pictures where it has none."""
    run = selection.arms[selection.baseline][0]
    own = str(run.points(selection.metric)[-1].get("weights"))
    held = Counter(weights for _, weights in pictures)
    return own if own in held or not held else held.most_common(1)[0][0]


def notes_on_samples(selection: Selection, grids: Sequence[Grid]) -> list[str]:
    """Why there are no pictures, though some arm has them, or what sets them apart."""
    lacking = [arm for arm, runs in selection.arms.items() if not any(run.grids for run in runs)]
    if len(lacking) == len(selection.arms):
        return []
    if lacking:
        return [f"No samples are shown, as no run of {', '.join(lacking)} holds pictures of them."]
    if not grids:
        return ["No samples are shown, as the arms hold none of equal steps and weights."]
    seeds = {grid.arm: grid.seed for grid in grids}
    if len(set(seeds.values())) == 1:
        return []
    told = ", ".join(f"{arm} {seed}" for arm, seed in seeds.items())
    return [
        f"The samples are of different training seeds, as the arms have none in common: {told}."
    ]


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _images(arms: Sequence[Arm]) -> str:
    """How many images make a step."""
    rates = {arm.name: images_a_step(arm) for arm in arms}
    if None in rates.values():
        return "Images seen are not recorded in all runs, so arms are compared by steps only."
    if same_images_a_step(arms):
        rate = next(iter(rates.values()))
        return f"Every arm sees {rate:,.0f} images a step, so speed-ups by images are the same."
    told = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
    return f"Images a step differ between arms: {told}. See the comparison by images seen."
