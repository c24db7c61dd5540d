"""What is odd about the length of a run, its batches and its validation."""

from collections.abc import Iterator

from lit_diffusion.cli.doctor.plan import Plan
from lit_diffusion.cli.doctor.report import Finding, count, note, ok, problem, warning


def check_length(plan: Plan, is_chosen: bool = True) -> Finding:
    """Whether, and after what, the run ends: if no length is chosen, Lightning's 1,000 epochs."""
    topic = "length"
    if plan.steps is None:
        return note(topic, "not known: a time ends it, or epochs of unknown length.")
    if plan.length is None:
        text = "never stops: max_steps and max_epochs are both -1; set --trainer.max_steps=N."
        return warning(topic, text)
    if plan.length == 0:
        text = "no step is made: max_steps, max_epochs or limit_train_batches is 0; raise it."
        return problem(topic, text)
    if plan.steps_to_go == 0:
        text = f"nothing is left: the checkpoint is at step {plan.start_step:,} of {plan.length:,}"
        return problem(topic, f"{text}; raise --trainer.max_steps.")
    if not is_chosen:
        text = f"Lightning's own 1,000 epochs, {_length(plan)}; set --trainer.max_steps=N."
        return warning(topic, text)
    return ok(topic, _length(plan))


def _length(plan: Plan) -> str:
    assert plan.length is not None
    text = count(plan.length, "optimizer step")
    if plan.start_step:
        text += f", {plan.start_step:,} of them done"
    if plan.images_seen is not None:
        text += f" = {plan.images_seen:,} images"
    if plan.epochs is not None and plan.num_images:
        epochs = f"{plan.epochs:,.0f}" if plan.epochs >= 100 else f"{plan.epochs:.3g}"
        text += f" = {epochs} epochs of {plan.num_images:,}"
    return text


def check_batch(plan: Plan) -> Iterator[Finding]:
    """How many images make an optimizer step."""
    if plan.global_batch is None:
        return
    parts = [f"{plan.batch_size:,}"]
    if plan.ranks > 1:
        parts.append(count(plan.ranks, "rank"))
    if plan.accumulate > 1:
        parts.append(f"{plan.accumulate} accumulated")
    product = f" = {' x '.join(parts)}" if len(parts) > 1 else ""
    yield ok("batch", f"{plan.global_batch:,} images an optimizer step{product}")


def check_accumulation(interval: object, accumulate: int) -> Iterator[Finding]:
    """Whether validation comes between the batches of a step, where it counts batches."""
    if accumulate == 1 or not isinstance(interval, int):
        return
    text = f"val_check_interval={interval:,} counts batches, "
    if interval % accumulate:
        text += f"and {accumulate} make a step: validation comes between the batches of one; take "
        yield warning("accumulation", f"{text}a multiple of {accumulate}.")
    else:
        text += f"every {interval // accumulate:,} optimizer steps; all else counts steps."
        yield note("accumulation", text)


def check_validation(plan: Plan) -> Iterator[Finding]:
    """Whether validation runs when one would think."""
    times, every = plan.times(None), plan.steps_between_validations
    if not every or times is None:
        return
    if times == 0:
        text = f"never runs: it is due every {every:,.0f} optimizer steps, and "
        text += f"{plan.steps_to_go:,} are to be done; lower --trainer.val_check_interval."
        yield warning("validation", text)
    elif plan.val_batches == 1 and plan.batches_per_epoch != 1:
        text = "val_check_interval=1 is after every batch; 1.0 is after every epoch."
        yield warning("validation", text)
    else:
        images = "" if plan.val_images is None else f" on {plan.val_images:,} images"
        yield ok("validation", f"{count(times, 'time')}, every {every:,.0f} steps{images}")
