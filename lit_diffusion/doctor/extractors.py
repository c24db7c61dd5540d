"""Whether the networks of a run's FIDs are there, and how many features they have."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from lit_diffusion.doctor.machine import in_short
from lit_diffusion.doctor.plan import Plan
from lit_diffusion.doctor.rehearsal import Rehearsal
from lit_diffusion.doctor.report import Finding, problem
from lit_diffusion.metrics.protocols import FIDProtocol, InceptionV3Compat

_INCEPTION_FEATURES = 2048


def protocols_of(cli: Rehearsal) -> list[FIDProtocol]:
    """Of the FIDEvaluation callbacks, in their order."""
    held = [getattr(callback, "protocol", None) for callback in cli.callbacks]
    return [protocol for protocol in held if isinstance(protocol, FIDProtocol)]


@dataclass(frozen=True)
class Extractor:
    """The network of an FID protocol.

    Attributes:
        protocol: of the FID.
        network: None where its weights are not there.
        num_features: None where not known.
        fault: why there is no network.
    """

    protocol: FIDProtocol
    network: nn.Module | None = None
    num_features: int | None = None
    fault: str | None = None


def extractor_of(protocol: FIDProtocol) -> Extractor:
    """The network of a protocol, or what is known without its weights."""
    try:
        protocol.check()
        network = protocol.build()
        return Extractor(protocol, network, int(network.num_features))  # type: ignore[arg-type]
    except (OSError, ValueError) as error:
        known = _INCEPTION_FEATURES if isinstance(protocol, InceptionV3Compat) else None
        return Extractor(protocol, None, known, in_short(error))


def check_extractors(extractors: Iterable[Extractor]) -> Iterator[Finding]:
    """Whether the weights of the FIDs are there."""
    for each in extractors:
        if each.fault is not None:
            yield problem("FID weights", f"{each.protocol.name}: {each.fault}")


def with_features(plan: Plan, extractors: Sequence[Extractor]) -> Plan:
    """The plan with the number of features of each evaluation's extractor."""
    known = [each.num_features for each in extractors]
    evaluations = [
        replace(evaluation, num_features=num)
        for evaluation, num in zip(plan.evaluations, known, strict=True)
    ]
    return replace(plan, evaluations=tuple(evaluations))
