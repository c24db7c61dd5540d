"""What a report tells of run folders besides their curves: settings, samples, and what is odd."""

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from lit_diffusion.lab.compare.comparison import HEADLINE_SEEDS, Arm, by_images, images_a_step
from lit_diffusion.lab.compare.curves import Curve, sampling_spread
from lit_diffusion.lab.compare.found_runs import PROTOCOL, Run, sampling_of, settings_that_differ
from lit_diffusion.lab.compare.report.report import SamplePicture
from lit_diffusion.lab.compare.report.tables import Table, spread_out
from lit_diffusion.lab.compare.report.wording import fid_text
from lit_diffusion.lab.compare.selection import Selection
from lit_diffusion.lab.compare.stability import Stability, stability

_COLUMNS = 3  # of sample grids
_SETTINGS = 12  # of an arm
_OF_TRAINING = ("process", "ema_decay")  # the rest of how samples are drawn is the sampler's


def arms_of(selection: Selection) -> list[Arm]:
    """Curves of the selected runs, the baseline's first."""
    names = sorted(selection.arms, key=lambda name: name != selection.baseline)
    metric = selection.metric
    base = [point for run in selection.arms[selection.baseline] for point in run.points(metric)]
    due = sorted({point["step"] for point in base})
    return [
        Arm(name, tuple(run.curve(metric, due) for run in selection.arms[name])) for name in names
    ]


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
    few = [f"{arm.name} {len(arm.curves)}" for arm in arms if len(arm.curves) < HEADLINE_SEEDS]
    told = []
    if few:
        told.append(
            f"Fewer than {HEADLINE_SEEDS} seeds, the least for a headline: {', '.join(few)}."
        )
    told += [*_unequal_lengths(arms), _images(arms)]
    for name, changed in _resampled(selection).items():
        what = "; ".join(f"{key} {own}, not {base}" for key, (own, base) in changed.items())
        told.append(f"{name} draws its samples in another way: {what}.")
    if sampling_spread(curve for arm in arms for curve in arm.curves) is None:
        told.append(
            "How far an FID depends on the samples is not known: no run repeats its last FID with "
            "others, as FIDEvaluation(repeats_at_end=2) does."
        )
    for arm in arms:
        for run, curve in _pairs(selection, arm):
            told += _notes_of(run, curve, selection.metric)
    return told


def alerts(selection: Selection) -> list[str]:
    """What a reader should know together with the headline."""
    told = _tuned(selection)
    resampled = _resampled(selection)
    others = [name for name, changed in resampled.items() if changed.keys() - {*_OF_TRAINING}]
    if not others:
        return told
    who = others[0] if len(others) == 1 else f"{len(others)} arms"
    return [
        *told,
        f"Other samplers than {selection.baseline}'s in {who}: a gain may be the sampler's, not "
        "the training's.",
    ]


def _tuned(selection: Selection) -> list[str]:
    """What the numbers of arms were tuned on, beside what FID is by here."""
    arms = dict[str, list[str]]()
    for name, runs in selection.arms.items():
        arms.setdefault(str(runs[0].config.get("tuned_on") or ""), []).append(name)
    told = "; ".join(f"{', '.join(names)} on {what}" for what, names in arms.items() if what)
    point = selection.arms[selection.baseline][0].points(selection.metric)[-1]
    by = f"{point.get('protocol')}, {point.get('reference')}"
    return [f"Tuned: {told}. FID here is by {by}."] if told else []


def _pairs(selection: Selection, arm: Arm) -> Iterable[tuple[Run, Curve]]:
    return zip(selection.arms[arm.name], arm.curves, strict=True)


def _notes_of(run: Run, curve: Curve, metric: str) -> list[str]:
    told = []
    if run.diverged:
        told.append("its training diverged, so it has no FID from then on")
    elif lost := sorted({*curve.steps} - {*curve.finite[0]}):
        told.append(f"the FID is not finite at step {_steps_text(lost)}")
    if others := run.ignored(metric):
        told.append(f"{others} of its evaluations, measured in another way, are ignored")
    if twice := run.measured_twice(metric):
        told.append(f"its FIDs of step {_steps_text(twice)} differ; the last one counts")
    if changed := settings_that_differ(run.first_config, run.config):
        what = "; ".join(f"{name} {old!r}, then {new!r}" for name, (old, new) in changed.items())
        told.append(f"it was resumed with other settings: {what}")
    return [f"{run.path}: {text}." for text in told]


def _steps_text(steps: Sequence[float]) -> str:
    more = f" and {len(steps) - 5} more" * (len(steps) > 5)
    return ", ".join(f"{step:,.0f}" for step in steps[:5]) + more


def _unequal_lengths(arms: Sequence[Arm]) -> list[str]:
    (base, steps), *others = ((arm.name, arm.curves[0].steps) for arm in arms)
    other = [f"{name} for {own[-1]:,.0f}" for name, own in others if own[-1] != steps[-1]]
    rare = [
        f"{name} {len(own)} times" for name, own in others if own[-1] == steps[-1] and own != steps
    ]
    told = []
    if other:
        what = f"Trained for another number of steps than {base}'s {steps[-1]:,.0f}"
        told.append(f"{what}: {', '.join(other)}. Compare steps to the target, not last FIDs.")
    if rare:
        what = f"Evaluated at other steps than {base}, {len(steps)} times"
        told.append(f"{what}: {', '.join(rare)}. The lowest of more FIDs is lower by chance.")
    return told


def _resampled(selection: Selection) -> dict[str, dict[str, tuple[Any, Any]]]:
    """How an arm's samples were drawn and how the baseline's, of arms where something differs."""
    ways = {
        name: sampling_of(runs[0].points(selection.metric)[-1])
        for name, runs in selection.arms.items()
    }
    base = ways[selection.baseline]
    found = {
        name: {key: (way[key], base[key]) for key in way if way[key] != base.get(key, way[key])}
        for name, way in ways.items()
    }
    return {name: changed for name, changed in found.items() if changed}


def settings_table(selection: Selection) -> Table | None:
    """What each arm changes; None where the configs do not say."""
    base = selection.arms[selection.baseline][0].config
    configs = {name: runs[0].config for name, runs in selection.arms.items()}
    rows = []
    for name, config in configs.items():
        changed = settings_that_differ(base, config) if base and config else {}
        shown = list(changed.items())[:_SETTINGS]
        rows += [(name, key, _shown(old), _shown(new)) for key, (old, new) in shown]
        if len(changed) > len(shown):
            rows.append((name, f"and {len(changed) - len(shown)} more", "", ""))
    heads = ("arm", "setting", selection.baseline, "this arm")
    caption = "Settings in which an arm differs from the baseline, but for seeds and paths."
    return Table(caption, heads, tuple(rows), text_columns=heads[1:]) if rows else None


def runs_table(selection: Selection, arms: Sequence[Arm], target: float) -> Table:
    """A row a run."""
    rows = [
        (
            arm.name,
            curve.seed,
            f"{curve.steps[-1]:,.0f}",
            str(curve.crossing(target)),
            fid_text(curve.fids[-1]),
            fid_text(curve.best),
            f"{float(loss):.4g}" if (loss := run.last_logged.get("val/loss")) else "-",
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


def training_table(runs: Iterable[Run]) -> Table | None:
    """Which arms' training losses diverged or spiked; None where no run logged them."""
    found: dict[str, list[Stability]] = {}
    gaps: set[int] = set()
    for run in runs:
        steps, losses = run.train_losses
        if losses:
            found.setdefault(run.arm, []).append(stability(losses))
            gaps |= {min(later - step for step, later in pairwise(steps))} if steps[1:] else set()
    every = " or ".join("every step" if n == 1 else f"every {n:,}th step" for n in sorted(gaps))
    rows = []
    for arm, of_arm in found.items():
        diverged = sum(run.diverged for run in of_arm)
        spiking = sum(run.spikes > 0 and not run.diverged for run in of_arm)
        counts = (len(of_arm), diverged, spiking)
        rows.append((arm, *map(str, counts), f"{diverged + spiking} of {len(of_arm)}"))
    caption = (
        f"From the training loss of {every or 'one step'}, with runs that take no part above. "
        "Diverged: the loss was not finite, did not come back from a jump, or ended above where it "
        "began. Spiking: it jumped above twice the median of the up to 20 such losses before, and "
        "came back."
    )
    heads = ("arm", "runs", "diverged", "spiking", "unstable")
    return Table(caption, heads, tuple(rows)) if rows else None


def sample_pictures(selection: Selection, names: Sequence[str]) -> list[SamplePicture]:
    """Pictures of all arms at equal steps, from one training seed that all have if there is one.

    They are of the weights that the FIDs are of, if there are such pictures.
    """
    held = {name: [run for run in selection.arms[name] if run.grids] for name in names}
    if not all(held.values()):
        return []
    seeds = set.intersection(*({run.seed for run in runs} for runs in held.values()))
    chosen = {
        arm: min(runs, key=lambda run: (run.seed not in seeds, run.seed))
        for arm, runs in held.items()
    }
    shared = sorted(set.intersection(*(set(run.grids) for run in chosen.values())))
    first = selection.arms[selection.baseline][0].points(selection.metric)[-1]
    of_fid = [key for key in shared if key[1] == first.get("weights")]
    keys = of_fid or [key for key in shared if key[1] == shared[0][1]]
    return [
        SamplePicture(arm, key[0], run.grids[key].read_bytes(), run.seed, key[1])
        for arm, run in chosen.items()
        for key in spread_out(keys, _COLUMNS)
    ]


def notes_on_samples(selection: Selection, pictures: Sequence[SamplePicture]) -> list[str]:
    """Why there are no pictures, though some arm has them, or what sets them apart."""
    lacking = [arm for arm, runs in selection.arms.items() if not any(run.grids for run in runs)]
    if len(lacking) == len(selection.arms):
        return []
    if not pictures:
        why = f"no run of {', '.join(lacking)} holds pictures of them"
        unequal = "the arms hold none of equal steps and weights"
        return [f"No samples are shown, as {why if lacking else unequal}."]
    seeds = {picture.arm: picture.seed for picture in pictures}
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
    rates = {arm.name: images_a_step(arm) for arm in arms}
    if None in rates.values():
        return "Images seen are not recorded in all runs, so arms are compared by steps only."
    if by_images(arms) is None:
        rate = next(iter(rates.values()))
        return f"Every arm sees {rate:,.0f} images a step, so speed-ups by images are the same."
    told = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
    return f"Images a step differ between arms: {told}. See the comparison by images seen."
