"""Whether noise, labels and guidance go together: what samples start from, and what was trained."""

import torch

from lit_diffusion.cli.doctor.report import Finding, note, ok, problem, share, warning
from lit_diffusion.guidance import ClassifierFree
from lit_diffusion.modules.diffusion import DiffusionModule
from lit_diffusion.protocols import Guidance, Process
from lit_diffusion.solvers.steps import solver_times

LEFT = 0.05
"""Scale of the image beside that of the noise at the noisiest time, from which it is told."""


def check_noise(process: Process, start: float) -> Finding:
    """Whether the end of the process is the noise that samples `start` from, at that time.

    Source: Lin et al. 2024, "Common Diffusion Noise Schedules and Sample Steps are Flawed".
    """
    times = torch.tensor([process.t_max, start], dtype=torch.float64)
    alphas, sigmas = process.alpha_sigma(times)
    (alpha, sigma), left = (alphas[0].item(), sigmas[0].item()), (alphas / sigmas).tolist()
    name = type(getattr(process, "betas", process)).__name__
    told = f"{name} ends at alpha {alpha:.2g}, sigma {sigma:.3g}"
    if alpha < 1:
        told += f" (alpha-bar {alpha**2:.2g})"
    if left[0] > LEFT:
        text = f"{told}: {share(left[0])} of the image is left there, but samples start from noise "
        text += "alone, which is not trained; take a process with a noisier end, as CosineBetas."
        return warning("terminal SNR", text)
    if left[1] > LEFT:
        text = f"samples start where {share(left[1])} of an image should be left, from noise alone:"
        return warning("terminal SNR", f"{text} let the solver's times begin noisier; {told}.")
    return ok("terminal SNR", f"{told}: noise alone")


def check_dropout(dropout: float, guidance: Guidance | None) -> Finding:
    """Whether what guidance compares with, the prediction without labels, is trained."""
    topic, told = "guidance", f"label_dropout={dropout:g}"
    if isinstance(guidance, ClassifierFree) and guidance.scale != 1:
        if dropout == 0:
            text = f"{guidance} compares with the prediction without labels, which {told} never "
            return problem(topic, f"{text}trains; set 0.1 to 0.2.")
        if not 0.05 <= dropout <= 0.3:
            text = f"{told} is unusual where {guidance} is used; 0.1 to 0.2 is usual."
            return warning(topic, text)
    if dropout > 0.5:
        return warning(topic, f"{told}: training is mostly without labels; 0.1 to 0.2 is usual.")
    if dropout == 0:
        text = f"{told}: samples of this model can't be guided without a classifier; 0.1 would do."
        return note(topic, text)
    return ok(topic, f"{share(dropout)} of the labels are dropped")


def check_method(module: DiffusionModule) -> list[Finding]:
    """All of it."""
    start = float(solver_times(module.solver, module.process)[0])
    found = [check_noise(module.process, start)]
    if module.num_classes is not None:
        found.append(check_dropout(module.label_dropout, module.guidance))
    return found
