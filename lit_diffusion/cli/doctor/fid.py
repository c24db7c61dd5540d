"""Whether the FIDs of a run are measured, and mean something."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from lit_diffusion.callbacks.fid import FIDEvaluation
from lit_diffusion.cli.doctor.plan import Plan
from lit_diffusion.cli.doctor.report import Finding, count, note, ok, warning
from lit_diffusion.metrics.extractors import FIDProtocol, InceptionV3Compat


@dataclass(frozen=True)
class Extractor:
    """The network of an FID protocol, or why there is none; None is what is not known."""

    network: nn.Module | None = None
    num_features: int | None = None
    fault: str | None = None


def extractor_of(protocol: FIDProtocol) -> Extractor:
    """The network of a protocol, or what is known without its weights."""
    try:
        protocol.check()
        network = protocol.build()
        return Extractor(network, int(network.num_features))  # type: ignore[arg-type]
    except (OSError, ValueError) as error:
        known = 2048 if isinstance(protocol, InceptionV3Compat) else None
        return Extractor(None, known, str(error))


def check_evaluation(
    evaluation: FIDEvaluation, num_features: int | None, plan: Plan
) -> list[Finding]:
    """When a FID is measured, and whether on more images than its extractor has features."""
    found, samples = [*_check_occasions(evaluation, plan)], evaluation.num_samples
    splits = {"train": plan.num_images, "val": plan.held_out}
    fewest = min(samples, splits.get(evaluation.reference) or samples)
    if num_features is not None and fewest <= num_features:
        which = "num_samples" if fewest == samples else "the real images"
        text = f"{which}, {fewest:,}, must exceed the {num_features:,} features of the extractor: "
        text += "below, an FID is mostly bias; compare it with its floor only."
        found.append(warning("FID", text))
    times = plan.times(evaluation.every_n_steps)
    if found or not times:
        return found
    every = f"every {plan.interval(evaluation.every_n_steps):,.0f} steps"
    return [ok("FID", f"{count(times, 'time')}, {every}, of {samples:,} samples")]


def _check_occasions(evaluation: FIDEvaluation, plan: Plan) -> Iterator[Finding]:
    times, every = plan.times(evaluation.every_n_steps), plan.interval(evaluation.every_n_steps)
    if times is None or not plan.length:
        return
    if times == 0:
        but = ", but for the end" if evaluation.repeats_at_end else ""
        how = "due after validations" if not every else f"due every {every:,.0f} steps"
        fix = "validate more often, or set a lower every_n_steps of FIDEvaluation"
        text = f"never measured{but}: {how}, and {plan.steps_to_go:,} are to be done; {fix}."
        yield warning("FID", text)
        return
    assert every is not None
    left = plan.length - math.floor(plan.length / every + 1e-9) * every
    if left >= 1 and not evaluation.repeats_at_end:
        text = f"the last is of step {plan.length - left:,.0f}; the final weights, of step "
        yield note("FID", f"{text}{plan.length:,}, get none: {every:,.0f} does not divide it.")
