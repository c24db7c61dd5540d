"""Whether noise, labels and guidance go together: what samples start from, and what was trained."""

from dataclasses import dataclass

from lit_diffusion.doctor.report import Finding, note, ok, problem, share, warning

LEFT = 0.05
"""Scale of the image beside that of the noise at the noisiest time, from which it is told."""


@dataclass(frozen=True)
class Noise:
    """The noisy end of a process.

    Attributes:
        process: its name.
        alpha: scale of the image at the noisiest time that is trained.
        sigma: that of the noise.
        start_alpha: scale of the image at the time where samples start; None where not known.
        start_sigma: that of the noise.
    """

    process: str
    alpha: float
    sigma: float
    start_alpha: float | None = None
    start_sigma: float | None = None


@dataclass(frozen=True)
class Labels:
    """How labels are used.

    Attributes:
        num_classes: None without labels.
        dropout: share of training images that lose theirs.
        guidance: what samples are steered with; None without.
        needs_dropout: whether that compares with predictions without labels.
    """

    num_classes: int | None
    dropout: float = 0.0
    guidance: str | None = None
    needs_dropout: bool = False


def check_noise(noise: Noise) -> list[Finding]:
    """Whether the end of the process is the noise that samples start from.

    Source: Lin et al. 2024, "Common Diffusion Noise Schedules and Sample Steps are Flawed".
    """
    trained, start = noise.alpha / noise.sigma, None
    if noise.start_alpha is not None and noise.start_sigma:
        start = noise.start_alpha / noise.start_sigma
    told = f"{noise.process} ends at alpha {noise.alpha:.2g}, sigma {noise.sigma:.3g}"
    if noise.alpha < 1:
        told += f" (alpha-bar {noise.alpha**2:.2g})"
    if trained > LEFT:
        return [
            warning(
                "terminal SNR",
                f"{told}: {share(trained)} of the image is left there, but samples start from "
                "noise alone, which is not trained, and keep its mean grey; take a process with a "
                "noisier end, such as CosineBetas.",
            )
        ]
    if start is not None and start > LEFT:
        return [
            warning(
                "terminal SNR",
                f"samples start where {share(start)} of an image should be left, from noise alone: "
                f"let the solver's times begin noisier; {told}.",
            )
        ]
    return [ok("terminal SNR", f"{told}: noise alone")]


def check_labels(labels: Labels) -> list[Finding]:
    """Whether what guidance compares with is trained."""
    if labels.num_classes is None:
        return []
    dropout, topic = labels.dropout, "guidance"
    told = f"label_dropout={dropout:g}"
    if labels.needs_dropout and dropout == 0:
        return [
            problem(
                topic,
                f"{labels.guidance} compares with the prediction without labels, which {told} "
                "never trains; set 0.1 to 0.2.",
            )
        ]
    if labels.needs_dropout and not 0.05 <= dropout <= 0.3:
        text = f"{told} is unusual where {labels.guidance} is used; 0.1 to 0.2 is usual."
        return [warning(topic, text)]
    if dropout > 0.5:
        text = f"{told}: most of the training is without labels; 0.1 to 0.2 is usual."
        return [warning(topic, text)]
    if dropout == 0:
        text = f"{told}: samples of this model can't be guided without a classifier; 0.1 would do."
        return [note(topic, text)]
    return [ok(topic, f"{share(dropout)} of the labels are dropped")]
