"""diffusers' schedulers and our solvers on the same denoiser, at the same times, with one noise."""

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lit_diffusion.parameterizations import (
    EDMPreconditioning,
    Epsilon,
    FlowVelocity,
    Sample,
    Velocity,
)
from lit_diffusion.processes import LinearFlow
from lit_diffusion.protocols import Denoise, Process
from lit_diffusion.solvers.steps import batch_of

PREDICTIONS = {
    "epsilon": Epsilon(),
    "sample": Sample(),
    "v_prediction": Velocity(),
    "flow_prediction": FlowVelocity(),
}
TWO_CALLS = ("DPMSolverSinglestepScheduler", "HeunDiscreteScheduler")
SCALED = ("EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler", "HeunDiscreteScheduler")
"""Those whose state is x_t / alpha."""


@dataclass(frozen=True)
class FixedTimes:
    """Times from elsewhere."""

    times: tuple[float, ...]

    def grid(self, process: Process, steps: int, /) -> Tensor:
        return torch.tensor([*self.times, process.t_clean], dtype=torch.float64)


def both(
    scheduler: Any, solver: Any, process: Process, denoise: Denoise, start: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """What a scheduler makes of noise, and our solver where the scheduler asks the model."""
    asked = times_of(scheduler, process)
    theirs = played(scheduler, asked, process, denoise, start, **options)
    times = asked[::2] if type(scheduler).__name__ in TWO_CALLS else asked
    solver = replace(solver, steps=len(times), times=FixedTimes(tuple(times.tolist())))
    ours = solver.sample(denoise, process, start.double(), drawing(start.dtype))
    return theirs, ours


def drawing(dtype: torch.dtype) -> Any:
    """The noise that a scheduler draws from a generator of seed 0."""
    generator = torch.Generator().manual_seed(0)
    return lambda x: torch.randn(x.shape, generator=generator, dtype=dtype).to(x)


def times_of(scheduler: Any, process: Process) -> Tensor:
    """Our times of each call of the model."""
    if not hasattr(scheduler, "sigmas"):
        return scheduler.timesteps.double()
    sigmas = scheduler.sigmas[:-1].double()
    return sigmas if isinstance(process, LinearFlow) else process.at_log_snr(-2 * sigmas.log())


def played(
    scheduler: Any, times: Tensor, process: Process, denoise: Denoise, start: Tensor, **options: Any
) -> Tensor:
    """The scheduler's loop, told what the denoiser finds in the terms that it wants."""
    scaled = type(scheduler).__name__ in SCALED
    if "generator" in inspect.signature(scheduler.step).parameters:
        options["generator"] = torch.Generator().manual_seed(0)
    x = process.prior(start, times[0])
    x = x / process.alpha_sigma(times[0])[0].to(x) if scaled else x
    if hasattr(scheduler, "set_begin_index"):  # steps of few times may have one label
        scheduler.set_begin_index(0)
    for t, label in zip(times, scheduler.timesteps, strict=True):
        alpha, sigma = (v.to(x) for v in process.alpha_sigma(t))
        if hasattr(scheduler, "is_scale_input_called"):
            scheduler.is_scale_input_called = True  # else it warns
        denoised = denoise(alpha * x if scaled else x, batch_of(t, x))
        output = parameterization_of(scheduler).target(denoised.x0, denoised.noise, alpha, sigma)
        x = scheduler.step(output, label, x, **options).prev_sample
    return x


def parameterization_of(scheduler: Any) -> Any:
    name, config = type(scheduler).__name__, scheduler.config
    if name.startswith("EDM"):
        return EDMPreconditioning(config.sigma_data)
    return FlowVelocity() if name.startswith("Flow") else PREDICTIONS[config.prediction_type]
