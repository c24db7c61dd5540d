"""What is odd about a plan before a step of it is trained: functions from facts to findings."""

import math
from collections.abc import Iterable

from lit_diffusion.doctor.plan import Average, Course, Evaluation, LRSchedule, Plan
from lit_diffusion.doctor.report import (
    Finding,
    count,
    has_problem,
    note,
    ok,
    problem,
    share,
    warning,
)

LAGGING = 0.1
"""Half-life of an average, as a share of the run, from which its lag is told."""

LONG_WARMUP = 0.2
"""Share of the run from which a warm-up of the lr is called long."""


def check_plan(plan: Plan) -> list[Finding]:
    """All that the plan alone tells."""
    if plan.steps == 0:
        return check_length(plan)
    return [
        *check_length(plan),
        *check_batches(plan),
        *check_validation(plan),
        *check_evaluations(plan),
        *(finding for average in plan.averages for finding in check_average(average, plan)),
        *check_lr(plan),
        *(finding for course in plan.courses for finding in check_course(course, plan)),
    ]


# How long


def check_length(plan: Plan) -> list[Finding]:
    """Whether, and after what, the run ends."""
    topic = "length"
    if plan.is_endless:
        text = "never stops: max_steps and max_epochs are both -1; set --trainer.max_steps=N."
        return [warning(topic, text)]
    if plan.steps is None:
        return [note(topic, "not known: how many batches make an epoch is not known.")]
    if plan.steps == 0:
        return [problem(topic, "no step is made: max_steps or max_epochs is 0; raise it.")]
    if plan.steps_to_go == 0:
        text = f"nothing is left: the checkpoint is at step {plan.start_step:,} of {plan.steps:,}"
        return [problem(topic, f"{text}; raise --trainer.max_steps.")]
    if plan.max_steps == -1 and plan.max_epochs is None:
        text = f"Lightning's own 1,000 epochs, {_told_length(plan)}; set --trainer.max_steps=N."
        return [warning(topic, text)]
    return [ok(topic, _told_length(plan))]


def _told_length(plan: Plan) -> str:
    assert plan.steps is not None
    text = count(plan.steps, "optimizer step")
    if plan.start_step:
        text += f", {plan.start_step:,} of them done"
    if plan.images_seen is not None:
        text += f" = {plan.images_seen:,} images"
    if plan.epochs is not None and plan.num_images:
        epochs = f"{plan.epochs:,.0f}" if plan.epochs >= 100 else f"{plan.epochs:.3g}"
        text += f" = {epochs} epochs of {plan.num_images:,}"
    return text


def check_batches(plan: Plan) -> list[Finding]:
    """How many images make a step, and what then is counted in what."""
    if plan.global_batch is None:
        return []
    if plan.batches_per_epoch == 0:
        text = f"{plan.num_images:,} images make no batch of {plan.batch_size:,} for each of "
        text += f"{count(plan.ranks or 1, 'rank')}; lower batch_size"
        return [problem("batch", f"{text}, or raise the share of limit_train_batches.")]
    parts = [f"{plan.batch_size:,}"]
    if plan.ranks is not None and plan.ranks > 1:
        parts.append(count(plan.ranks, "rank"))
    if plan.accumulate > 1:
        parts.append(f"{plan.accumulate} accumulated")
    told = f"{plan.global_batch:,} images an optimizer step"
    if len(parts) > 1:
        told += f" = {' x '.join(parts)}"
    return [ok("batch", told), *_check_accumulation(plan)]


def _check_accumulation(plan: Plan) -> Iterable[Finding]:
    if plan.accumulate == 1:
        return
    interval = plan.val_interval
    if plan.val_epochs is None and isinstance(interval, int):
        if interval % plan.accumulate:
            yield warning(
                "accumulation",
                f"val_check_interval={interval:,} counts batches, and {plan.accumulate} make a "
                f"step: validation comes between the batches of one; take a multiple of "
                f"{plan.accumulate}.",
            )
        else:
            yield note(
                "accumulation",
                f"val_check_interval={interval:,} counts batches, every "
                f"{interval // plan.accumulate:,} optimizer steps; all else counts steps.",
            )
    if plan.batches_per_epoch and (rest := plan.batches_per_epoch % plan.accumulate):
        yield note(
            "accumulation",
            f"the last step of an epoch has {rest} of {plan.accumulate} batches: "
            f"{plan.batches_per_epoch:,} batches an epoch are no multiple.",
        )


# Validation and FID


def check_validation(plan: Plan) -> list[Finding]:
    """Whether validation runs when one would think."""
    interval, per_epoch = plan.val_interval, plan.batches_per_epoch
    if plan.val_images == 0 or interval is None:
        return []
    is_count = isinstance(interval, int)
    if is_count and plan.val_epochs is not None and per_epoch and interval > per_epoch:
        return [
            problem(
                "validation",
                f"val_check_interval={interval:,} is more than the {per_epoch:,} batches of an "
                "epoch, which Lightning refuses; add --trainer.check_val_every_n_epoch=null to "
                "count batches over epochs.",
            )
        ]
    times = plan.times(None)
    if times == 0:
        return [_never_validates(plan)]
    found = [] if times is None else [ok("validation", _told_validation(plan, times))]
    if is_count and interval == 1:
        text = "val_check_interval=1 is after every batch; 1.0 is after every epoch."
        found = [warning("validation", text)]
    return found


def _never_validates(plan: Plan) -> Finding:
    every = plan.steps_between_validations
    assert every is not None
    return warning(
        "validation",
        f"never runs: it is due every {every:,.0f} optimizer steps, and {plan.steps_to_go:,} are "
        "to be done; lower --trainer.val_check_interval.",
    )


def _told_validation(plan: Plan, times: int) -> str:
    every = plan.steps_between_validations
    images = "" if plan.val_images is None else f" on {plan.val_images:,} images"
    return f"{count(times, 'time')}, every {every:,.0f} steps{images}"


def check_evaluations(plan: Plan) -> list[Finding]:
    """Whether FIDs are measured, and mean something."""
    return [finding for each in plan.evaluations for finding in check_evaluation(each, plan)]


def check_evaluation(evaluation: Evaluation, plan: Plan) -> list[Finding]:
    """When a FID is measured, and on enough images."""
    times = plan.times(evaluation.every_n_steps)
    found = _check_occasions(evaluation, plan, times)
    fewest = min(evaluation.num_samples, evaluation.num_real or evaluation.num_samples)
    if evaluation.num_features is not None and fewest <= evaluation.num_features:
        which = "num_samples" if fewest == evaluation.num_samples else "the real images"
        found.append(
            warning(
                "FID",
                f"{which}, {fewest:,}, must exceed the {evaluation.num_features:,} features of "
                "the extractor: below, an FID is mostly bias; compare it with its floor only.",
            )
        )
    if not found and times:
        every = f"every {_every(evaluation, plan):,.0f} steps"
        found = [
            ok("FID", f"{count(times, 'time')}, {every}, of {evaluation.num_samples:,} samples")
        ]
    return found


def _check_occasions(evaluation: Evaluation, plan: Plan, times: int | None) -> list[Finding]:
    if times is None or plan.steps is None:
        return []
    every = _every(evaluation, plan)
    if times == 0:
        but = ", but for the end" if evaluation.repeats_at_end else ""
        how = "due after validations" if not every else f"due every {every:,.0f} steps"
        fix = "lower every_n_steps of FIDEvaluation"
        if evaluation.every_n_steps is None:
            fix = "validate more often, or give FIDEvaluation every_n_steps"
        text = f"never measured{but}: {how}, and {plan.steps_to_go:,} are to be done; {fix}."
        return [warning("FID", text)]
    assert every is not None
    left = plan.steps - math.floor(plan.steps / every + 1e-9) * every
    if left >= 1 and not evaluation.repeats_at_end:
        return [
            note(
                "FID",
                f"the last is of step {plan.steps - left:,.0f}; the final weights, of step "
                f"{plan.steps:,}, get none: {every:,.0f} does not divide it.",
            )
        ]
    return []


def _every(evaluation: Evaluation, plan: Plan) -> float | None:
    return evaluation.every_n_steps or plan.steps_between_validations


# Averages


def half_life(decay: float) -> float:
    """Optimizer steps in which the weight of the past halves.

    Example:
        >>> round(half_life(0.9999))
        6931
    """
    return math.log(0.5) / math.log(decay) if decay > 0 else 0.0


def half_life_at(average: Average, decay: float, steps: int) -> float:
    """Half-life at the end of a run of so many steps, which a warm-up limits."""
    if not average.warmup:
        return half_life(decay)
    return half_life(min(decay, (1 + steps) / (10 + steps)))


def check_average(average: Average, plan: Plan) -> list[Finding]:
    """Whether averages follow the weights closely enough for the length of the run."""
    if plan.steps is None:
        return []
    return [_check_decay(average, decay, plan.steps, plan) for decay in average.decays]


def _check_decay(average: Average, decay: float, steps: int, plan: Plan) -> Finding:
    half = half_life_at(average, decay, steps)
    part = half / steps if steps else math.inf
    told = f"half-life of {decay:g} is {half:,.0f} steps{_images(half, plan)}"
    if half < half_life(decay):
        told += f" at the end of warm-up (later {half_life(decay):,.0f})"
    told += f", {share(part)} of the run"
    start = 0.0 if average.warmup else decay**steps
    if start > 0.01:
        return warning(
            "EMA",
            f"{told}: at its end {share(start)} of the average are still the initial, random "
            f"weights; set warmup: true, or a decay of at most {_decay_for(steps)}.",
        )
    if part > LAGGING:
        return warning(
            "EMA",
            f"{told}: samples lag that far behind; a decay of {_decay_for(steps)} or less has 5%.",
        )
    if decay == 0:
        return note("EMA", "a decay of 0 averages nothing: the weights are those of the last step.")
    if half < 5:
        return note("EMA", f"{told}: hardly an average.")
    return _check_first_look(average, decay, plan) or ok("EMA", told)


def _check_first_look(average: Average, decay: float, plan: Plan) -> Finding | None:
    """Without warm-up, the random start is in the first numbers."""
    every = [plan.steps_between_validations, *(e.every_n_steps for e in plan.evaluations)]
    first = min((step for step in every if step), default=None)
    if first is None or average.warmup or (start := decay**first) < 0.1:
        return None
    return note(
        "EMA",
        f"without warmup, {share(start)} of the average of {decay:g} are random weights at the "
        f"first look, step {first:,.0f}, and 1% at step {math.log(0.01) / math.log(decay):,.0f}.",
    )


def _images(steps: float, plan: Plan) -> str:
    return "" if plan.global_batch is None else f" ({steps * plan.global_batch:,.0f} images)"


def _decay_for(steps: int) -> str:
    """A decay whose half-life is a twentieth of the run, rounded down to a usual one."""
    wanted = 0.5 ** (20 / max(steps, 1))
    usual = (0.9, 0.95, 0.99, 0.995, 0.999, 0.9995, 0.9999, 0.99995, 0.99999)
    return f"{max((decay for decay in usual if decay <= wanted), default=0.5):g}"


# What changes over the run


def check_lr(plan: Plan) -> list[Finding]:
    """Whether the schedule of the lr is as long as the run."""
    if plan.lr is None:
        return []
    steps, lr = plan.steps, plan.lr
    if lr.fault is not None:
        return [problem("lr", f"{lr.name} fails: {lr.fault}")]
    if steps is None:
        return [_check_endless_lr(plan)] if plan.is_endless else []
    found = _check_warmup(lr, steps)
    if lr.length is not None and lr.length != steps and not has_problem(found):
        found.append(_check_lr_end(plan, lr.length, steps))
    if found:
        return found
    if lr.warmup_steps is None:
        return [note("lr", f"{lr.name}; whether it warms up is not known.")]
    warm = f"{lr.warmup_steps:,} steps ({share(lr.warmup_steps / steps)}) of warm-up"
    return [ok("lr", f"{lr.name}, {warm if lr.warmup_steps else 'without warm-up'}")]


def _check_warmup(lr: LRSchedule, steps: int) -> list[Finding]:
    if not lr.warmup_steps or lr.warmup_steps <= LONG_WARMUP * steps:
        return []
    told = f"the warm-up of {lr.name}, {lr.warmup_steps:,} steps, is "
    if lr.warmup_steps >= steps:
        text = f"{told}all of the run of {steps:,}; make it shorter."
        return [problem("lr", text)]
    text = f"{told}{share(lr.warmup_steps / steps)} of the run of {steps:,}; 1 to 10% is usual."
    return [warning("lr", text)]


def _check_endless_lr(plan: Plan) -> Finding:
    assert plan.lr is not None
    if not plan.lr.follows_run:
        return ok("lr", f"{plan.lr.name}, then constant for ever")
    text = f"{plan.lr.name} falls until the end of the run, which has none; pass total_steps."
    return problem("lr", text)


def _check_lr_end(plan: Plan, length: int, steps: int) -> Finding:
    assert plan.lr is not None
    if length < steps:
        text = f"{plan.lr.name} is over at step {length:,}: the other {steps - length:,} steps"
        after = f"train at {plan.lr.final_factor:g} of the lr"
        if plan.lr.name == "CosineAnnealingLR":
            after = "let the lr rise again"
        return warning("lr", f"{text} {after}; make it as long as the run, {steps:,}.")
    return warning(
        "lr",
        f"{plan.lr.name} is made for {length:,} steps, and the run stops at {steps:,}, before the "
        "lr is down; make them equal.",
    )


def check_course(course: Course, plan: Plan) -> list[Finding]:
    """Whether a curriculum or decay fits the length of the run."""
    name, steps = course.name, plan.steps
    if course.length is None:
        if not plan.is_endless:
            return []
        text = "follows the length of the run, which has none; pass total_steps."
        return [problem(name, text)]
    if steps is None:
        return []
    if course.length > steps:
        text = f"takes {course.length:,} steps, and the run ends at {steps:,}: it gets to "
        return [warning(name, f"{text}{share(steps / course.length)} of its way; shorten it.")]
    part = share(course.length / steps)
    if course.length < 0.01 * steps:
        text = f"is over after {course.length:,} steps, {part} of the run"
        return [note(name, f"{text}: is it made for a shorter one?")]
    return [ok(name, f"{course.length:,} steps, {part} of the run")]
