"""Build the parts of a report that need run folders: settings, stability, samples, and caveats."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from lit_diffusion.files import check_regular
from lit_diffusion.lab.compare.curves import Arm, loss_stability
from lit_diffusion.lab.compare.plots import SamplePicture
from lit_diffusion.lab.compare.run_folders import (
    PROTOCOL,
    Record,
    Run,
    Selection,
    by_arm,
    differing_settings,
    sampling_of,
)
from lit_diffusion.lab.compare.statistics import holm, welch
from lit_diffusion.lab.compare.tables import Table, evenly_spaced, format_fid, format_p

_SAMPLE_COLUMNS = 3


def arms_of(selection: Selection) -> list[Arm]:
    """List the arms of the selected runs with their curves, the baseline first."""
    names = sorted(selection.arms, key=lambda name: name != selection.baseline)
    metric = selection.metric
    base = [point for run in selection.arms[selection.baseline] for point in run.points(metric)]
    due = sorted({point["step"] for point in base})
    return [
        Arm(name, tuple(run.curve(metric, due) for run in selection.arms[name])) for name in names
    ]


def protocol_facts(selection: Selection) -> dict[str, str]:
    """List the settings of the FID measurement, by name."""
    record = selection.last_record(selection.baseline)
    names = (*PROTOCOL, "ema_decay", "seeds", "reference", "floor", "floor_images")
    facts = {name: record.get(name) for name in names}
    facts |= {f"sampling {name}": value for name, value in (record.get("sampling") or {}).items()}
    return {name: _as_text(value) for name, value in facts.items() if value is not None}


def _as_text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


# Caveats


def notes_on_runs(selection: Selection, arms: Sequence[Arm]) -> list[str]:
    """List caveats about the numbers, as sentences."""
    notes = []
    tuned: dict[str, list[str]] = {}
    for name, runs in selection.arms.items():
        if data := runs[0].config.get("tuned_on"):
            tuned.setdefault(str(data), []).append(name)
    record = selection.last_record(selection.baseline)
    if tuned:
        listed = "; ".join(f"{', '.join(names)} on {data}" for data, names in tuned.items())
        by = ", ".join(str(record[key]) for key in ("protocol", "reference") if key in record)
        notes.append(f"Tuned: {listed}." + f" FID here is by {by}." * bool(by))
    base = sampling_of(record)
    for name in selection.arms:
        sampling = sampling_of(selection.last_record(name))
        if changed := [key for key in sampling if key in base and sampling[key] != base[key]]:
            listed = "; ".join(f"{key} {sampling[key]}, not {base[key]}" for key in changed)
            is_sampler = not {*changed} <= {"process", "ema_decay"}  # those are part of training
            caveat = " A gain may come from the sampler, not from the training." * is_sampler
            notes.append(
                f"{name} draws its samples in another way than {selection.baseline}: {listed}."
                f"{caveat}"
            )
    lengths = {arm.name: arm.curves[0].steps[-1] for arm in arms}
    last = lengths[arms[0].name]
    if others := [f"{name} for {end:,.0f}" for name, end in lengths.items() if end != last]:
        notes.append(
            f"{arms[0].name} was trained for {last:,.0f} steps, but {', '.join(others)}. Compare "
            "steps to the target, not last FIDs."
        )
    for runs in selection.arms.values():
        notes += [note for run in runs for note in _notes_on_run(run, selection.metric)]
    return notes


def _notes_on_run(run: Run, metric: str) -> list[str]:
    notes = []
    nan_steps = sorted({point["step"] for point in run.points(metric) if point["value"] is None})
    if run.diverged:
        notes.append("its training diverged, so it has no FID from then on")
    elif nan_steps:
        steps = ", ".join(f"{step:,}" for step in nan_steps)
        notes.append(f"the FID is not finite at step {steps}")
    if changes := differing_settings(run.first_config, run.config):
        what = "; ".join(f"{name} {old!r}, then {new!r}" for name, (old, new) in changes.items())
        notes.append(f"it was resumed with other settings: {what}")
    return [f"{run.path}: {note}." for note in notes]


# Tables


def settings_table(selection: Selection) -> Table | None:
    """Make a table of settings in which arms differ from the baseline; None if no arm differs."""
    base = selection.arms[selection.baseline][0].config
    configs = {name: runs[0].config for name, runs in selection.arms.items()}
    rows = [
        (name, key, _as_text(old), _as_text(new))
        for name, config in configs.items()
        if base and config
        for key, (old, new) in differing_settings(base, config).items()
    ]
    caption = "Settings in which an arm differs from the baseline, except seeds and paths."
    heads = ("arm", "setting", selection.baseline, "this arm")
    return Table(caption, heads, tuple(rows)) if rows else None


def training_table(runs: Iterable[Run]) -> Table | None:
    """Count the runs of each arm that diverged or had loss spikes; None if no run logged a loss."""
    rows, intervals = [], set[int]()
    for arm, members in by_arm(runs).items():
        logged = [run.train_losses for run in members if run.train_losses[0]]
        intervals |= {min(b - a for a, b in pairwise(steps)) for steps, _ in logged if steps[1:]}
        stabilities = [loss_stability(losses) for _, losses in logged]
        diverged = sum(each.diverged for each in stabilities)
        spiking = sum(each.spikes > 0 and not each.diverged for each in stabilities)
        counts = (len(logged), diverged, spiking)
        if logged:
            rows.append((arm, *map(str, counts), f"{diverged + spiking} of {len(logged)}"))
    every = " or ".join(map(str, sorted(intervals)))
    caption = f"""From the training loss, logged every {every} steps. Runs that are left out above
        are included. Diverged: the loss was not finite, did not come down from its last spike, or
        was higher at the end than at the beginning. Spiking: the loss jumped above twice the median
        of the (at most 20) losses before, and came down again."""
    heads = ("arm", "runs", "diverged", "spiking", "unstable")
    return Table(caption, heads, tuple(rows)) if rows else None


# Last FIDs, with the best width of the average for each arm (`evaluate --ema`)

_SCORE_FIELDS = ("step", "seeds", *(name for name in PROTOCOL if name not in ("metric", "weights")))

FIDsByWidth = Mapping[float, float]


def widths_table(selection: Selection) -> tuple[Table | None, list[str]]:
    """Make a table of each arm's last FID at its best EMA width, measured by `evaluate --ema`.

    Returns:
        The table, and notes on arms whose FIDs were measured differently or are missing. If no run
        has FIDs from `evaluate --ema`, the result is (None, []).
    """
    base = selection.baseline
    scores = {name: [fids_by_width(run) for run in runs] for name, runs in selection.arms.items()}
    protocol, _ = scores[base][0]
    arms = {
        name: fids
        for name, each in scores.items()
        if protocol
        and all(other == protocol for other, _ in each)
        and _common_widths(fids := [fids for _, fids in each])
    }
    notes = []
    if any(fids for each in scores.values() for _, fids in each) and len(arms) < len(scores):
        others = ", ".join(name for name in scores if name not in arms)
        notes = [
            f"Not all seeds have FIDs of evaluate --ema comparable with {base}'s in: {others}."
        ]
    if base not in arms or len(arms) == 1:
        return None, notes
    names = sorted(arms, key=lambda name: name != base)
    at_best = {name: best_widths(arms[name]) for name in names}
    logs = {name: [math.log(fid) for _, fid in pairs] for name, pairs in at_best.items()}
    tests = [welch(logs[name], logs[base]) for name in names[1:]]
    ps = [None, *holm([test.p if test else None for test in tests])]  # the baseline comes first
    rows = [
        (
            name,
            ", ".join(f"{width:g}" for width in sorted({width for width, _ in at_best[name]})),
            ", ".join(f"{width:g}" for width in _common_widths(arms[name])),
            str(len(arms[name])),
            format_fid(math.exp(fmean(logs[name]))),
            f"{math.exp(fmean(logs[name]) - fmean(logs[base])):.2f}",
            format_p(p),
        )
        for name, p in zip(names, ps, strict=True)
    ]
    caption = """Last FIDs by evaluate --ema, geometric means over seeds. The width for a seed is
        the width with the lowest mean log FID of the other seeds of its arm, so the choice does not
        use the FID of the seed itself. An arm with one seed has no other seeds, so its FID looks
        better than it is. p: Welch's t test on log FID, corrected (Holm)."""
    heads = ("arm", "width", "measured widths", "seeds", "FID", f"over {base}'s", "p")
    return Table(caption, heads, tuple(rows)), notes


def fids_by_width(run: Run) -> tuple[Record, FIDsByWidth]:
    """Find the FIDs that `evaluate --ema` measured at the last step of a run.

    If the settings of these FIDs differ, only the FIDs with the most common settings are used.

    Returns:
        The settings of the measurement, and the FIDs by width of the EMA.
    """
    records = [record for record in run.width_records if (record.get("value") or 0) > 0]
    last = [r for r in records if r["step"] == max(record["step"] for record in records)]
    if not last:
        return {}, {}
    keys = [({name: r.get(name) for name in _SCORE_FIELDS}, r.get("sampling")) for r in last]
    usual = max(keys, key=keys.count)
    pairs = zip(last, keys, strict=True)
    fids = {
        float(r["weights"].removeprefix("power_")): r["value"] for r, key in pairs if key == usual
    }
    return usual[0], fids


def best_widths(fids: Sequence[FIDsByWidth]) -> list[tuple[float, float]]:
    """Choose for each seed the EMA width that is best for the other seeds of its arm.

    Returns:
        (width, FID) of each seed.

    Example:
        >>> best_widths([{0.05: 1.0, 0.1: 2.0}, {0.05: 4.0, 0.1: 3.0}])
        [(0.1, 2.0), (0.05, 4.0)]
    """
    pairs = []
    for k, seed_fids in enumerate(fids):
        others = [*fids[:k], *fids[k + 1 :]] or [seed_fids]
        means = {w: fmean(math.log(other[w]) for other in others) for w in _common_widths(fids)}
        width = min(means, key=lambda w: means[w])
        pairs.append((width, seed_fids[width]))
    return pairs


def _common_widths(fids: Sequence[FIDsByWidth]) -> list[float]:
    """Widths that were scored for every seed, ascending."""
    return sorted(set.intersection(*map(set, fids)))


# Samples


def sample_pictures(selection: Selection, arms: Sequence[Arm]) -> list[SamplePicture]:
    """Collect images of samples from all arms, at steps at which all arms have images.

    Preferred are runs with a training seed that all arms share, and images that were generated with
    the weights whose FID is compared. The list is empty if an arm has no images.
    """
    candidates = {arm.name: [run for run in selection.arms[arm.name] if run.grids] for arm in arms}
    if not all(candidates.values()):
        return []
    seeds = set.intersection(*({run.seed for run in runs} for runs in candidates.values()))
    runs = {
        arm: min(runs, key=lambda run: (run.seed not in seeds, run.seed))
        for arm, runs in candidates.items()
    }
    shared = sorted(set.intersection(*(set(run.grids) for run in runs.values())))
    weights = selection.last_record(selection.baseline).get("weights")
    keys = [key for key in shared if key[1] == weights]
    keys = keys or [key for key in shared if key[1] == shared[0][1]]
    return [
        SamplePicture(arm, key[0], check_regular(run.grids[key]).read_bytes(), run.seed, key[1])
        for arm, run in runs.items()
        for key in evenly_spaced(keys, _SAMPLE_COLUMNS)
    ]
