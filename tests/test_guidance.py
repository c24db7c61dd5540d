import math
import warnings

import pytest
import torch
from support.golden import Z, close, tensor
from support.toy import CountedNoise, toy_denoiser

from lit_diffusion.gaussian import FixedLarge, FixedSmall, LearnedRange, posterior
from lit_diffusion.grids import Sections, Stride
from lit_diffusion.guidance import Autoguidance, ClassifierFree, ClassifierScore, ClassifierShift
from lit_diffusion.processes import CosineBetas, DiscreteVP, LinearBetas
from lit_diffusion.protocols import Denoised
from lit_diffusion.solvers import DDIM, DDPM

SHAPE = (2, 3, 4, 4)
PROCESS = DiscreteVP(CosineBetas(100))
LABELS, NONE = torch.tensor([0, 3]), torch.tensor([-1, -1])


def labelled(labels):
    """A model whose x0, and the contrast of it, depend on the label; -1 is none."""
    label = labels.reshape(-1, 1, 1, 1)

    def denoise(x, t):
        x0 = (0.1 + 0.02 * label) * x + 0.2 * label
        alpha, sigma = (v.reshape(-1, 1, 1, 1) for v in PROCESS.alpha_sigma(t))
        return Denoised(x0, (x - alpha * x0) / sigma, logvar_frac=x0 + 1)

    return denoise


def guided(scale, x, t):
    return ClassifierFree(scale).guide(labelled, LABELS, PROCESS, NONE)(x, t)


X, T = Z(SHAPE, 1), torch.tensor([40.0, 40.0], dtype=torch.float64)


def test_scale_zero_is_unconditional_and_scale_one_conditional():
    for scale, labels in [(0.0, NONE), (1.0, LABELS)]:
        expected = labelled(labels)(X, T)
        assert all(map(torch.equal, guided(scale, X, T)[:3], expected[:3]))
    usual = ClassifierFree().guide(labelled, LABELS, PROCESS, NONE)(X, T)
    assert torch.equal(usual.x0, labelled(LABELS)(X, T).x0)


def test_guidance_extrapolates_linearly_and_keeps_the_conditional_variance():
    zero, one, three = (guided(scale, X, T) for scale in (0.0, 1.0, 3.0))
    close(three.x0, zero.x0 + 3 * (one.x0 - zero.x0))
    close(three.noise, zero.noise + 3 * (one.noise - zero.noise))
    assert torch.equal(three.logvar_frac, one.logvar_frac)
    alpha, sigma = (v.reshape(-1, 1, 1, 1) for v in PROCESS.alpha_sigma(T))
    close(alpha * three.x0 + sigma * three.noise, X)


def test_a_network_that_ignores_its_labels_is_said():
    ignorant = lambda labels: lambda x, t: Denoised(0.1 * x, x)  # noqa: E731
    with pytest.warns(UserWarning, match="no effect"):
        ClassifierFree(2.0).guide(ignorant, LABELS, PROCESS, NONE)(X, T)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guided(2.0, X, T)
        ClassifierFree(2.0).guide(labelled, NONE, PROCESS, NONE)(X, T)


def gradient(x, t, labels):
    """cond_fn of the golden files."""
    by_sample = (-1, 1, 1, 1)
    return 2 * (
        0.5 * torch.cos(3 * x)
        + 0.0002 * t.double().reshape(by_sample)
        - 0.1 * labels.double().reshape(by_sample)
    )


CLASSIFIERS = {
    "lin1000_250_range": (LinearBetas(1000), Sections(), 250, LearnedRange()),
    "lin1000_ddim25_range": (LinearBetas(1000), Stride(), 25, LearnedRange()),
    "lin50_fixedlarge": (LinearBetas(50), Sections(), 50, FixedLarge()),
}


def one_step(tag, clip):
    """The parts of an ancestral step at each time that the golden file has."""
    betas, times, steps, variance = CLASSIFIERS[tag]
    process = DiscreteVP(betas)
    grid = times.grid(process, steps)
    every = posterior(process, grid)
    x = Z(SHAPE, 500)
    for respaced in (0, 1, steps // 2, steps - 1):
        t = grid[steps - 1 - respaced].expand(2)
        step = every.at(steps - 1 - respaced)
        denoise = lambda labels: toy_denoiser(process, variance.learned)  # noqa: E731
        yield f"{tag}/clip{int(clip)}/t{respaced}", process, denoise, step, variance, x, t


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("tag", CLASSIFIERS)
def test_classifier_guidance_equals_guided_diffusion_step_by_step(tag, clip):
    for key, process, denoise_for, step, variance, x, t in one_step(tag, clip):
        shifted = ClassifierShift(gradient).guide(denoise_for, LABELS, process, None)(x, t)
        x0 = shifted.x0.clamp(-1, 1) if clip else shifted.x0
        mean = step.x0_coef * x0 + step.xt_coef * x
        bounds = step.log_beta, step.log_variance, step.last
        var = variance.log_variance(*bounds, shifted.logvar_frac).exp()
        score = ClassifierScore(gradient, clip).guide(denoise_for, LABELS, process, None)(x, t)
        for actual, name in [
            (mean, "mean_uncond"),
            (var.expand(SHAPE), "variance"),
            (mean + var * shifted.shift, "condition_mean"),
            (score.x0, "score_pred_xstart"),
            (step.x0_coef * score.x0 + step.xt_coef * x, "score_mean"),
        ]:
            close(actual, tensor("case06_guidance", f"{key}/{name}_f64"))


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("tag", ["lin1000_ddim25_range", "lin50_fixedlarge"])
def test_classifier_guided_samples_equal_guided_diffusion(tag, clip):
    betas, times, steps, variance = CLASSIFIERS[tag]
    process = DiscreteVP(betas)
    denoise_for = lambda labels: toy_denoiser(process, variance.learned)  # noqa: E731
    for name, guidance, solver in [
        ("loop_ancestral", ClassifierShift(gradient), DDPM(variance, steps, times, clip)),
        ("loop_ddim", ClassifierScore(gradient, clip), DDIM(steps, times=times, clip=False)),
    ]:
        denoise = guidance.guide(denoise_for, LABELS, process, None)
        end = solver.sample(denoise, process, Z(SHAPE, 100), CountedNoise(200))
        close(end, tensor("case06_guidance", f"{tag}/clip{int(clip)}/{name}_f64"))


@pytest.mark.parametrize("guidance", [ClassifierShift, ClassifierScore])
def test_a_gradient_is_told_the_times_of_the_steps(guidance):
    process, times = DiscreteVP(CosineBetas(4000), rescale_labels=True), []

    def recorded(x, t, labels):
        times.append(t)
        return torch.zeros_like(x)

    denoise_for = lambda labels: toy_denoiser(process)  # noqa: E731
    denoise = guidance(recorded).guide(denoise_for, LABELS, process, None)
    DDPM(FixedSmall(), 5).sample(denoise, process, Z(SHAPE, 1), CountedNoise(2))
    assert [t.tolist() for t in times] == [[t, t] for t in (3999, 2999, 2000, 1000, 0)]
    assert {t.dtype for t in times} == {torch.float64}


def level(t):
    alpha, sigma = PROCESS.alpha_sigma(torch.tensor(t))
    return float(sigma / alpha)


@pytest.mark.parametrize("scale", [0.0, 3.0])
def test_outside_of_its_interval_guidance_is_conditional_by_one_call(scale):
    calls = []

    def counted(labels):
        denoise = labelled(labels)
        return lambda x, t: (calls.append(len(x)), denoise(x, t))[1]

    inside, below, above = 40.0, 20.0, 60.0
    limits = (level(30.0), level(inside))  # the upper one is inside
    guide = ClassifierFree(scale, limits).guide(counted, LABELS, PROCESS, NONE)
    for time, expected in [
        (inside, ClassifierFree(scale)),
        (below, ClassifierFree(1.0)),
        (above, ClassifierFree(1.0)),
        (30.0, ClassifierFree(1.0)),
    ]:
        t = torch.full((2,), time, dtype=torch.float64)
        guided_x = guide(X, t)
        close(guided_x.x0, expected.guide(labelled, LABELS, PROCESS, NONE)(X, t).x0)
    assert calls == [4, 2, 2, 2]


@pytest.mark.parametrize(("scale", "rescale"), [(4.0, 0.3), (4.0, 1.0), (0.0, 1.0)])
def test_rescaled_guidance_has_the_contrast_of_the_conditional_image(scale, rescale):
    guide = ClassifierFree(scale, rescale=rescale).guide(labelled, LABELS, PROCESS, NONE)
    guided_x, plain, conditional = guide(X, T), guided(scale, X, T), labelled(LABELS)(X, T)
    std = lambda x: x.flatten(1).std(1)  # noqa: E731
    assert ((std(plain.x0) - std(conditional.x0)).abs() > 0.01).all()
    close(std(guided_x.x0), rescale * std(conditional.x0) + (1 - rescale) * std(plain.x0))
    assert not torch.allclose(guided_x.x0, conditional.x0)
    alpha, sigma = (v.reshape(-1, 1, 1, 1) for v in PROCESS.alpha_sigma(T))
    close(alpha * guided_x.x0 + sigma * guided_x.noise, X)


def test_rescaled_guidance_of_constant_images_is_finite():
    """Which a network that outputs x0 predicts before its first update."""

    def constant(labels):
        return lambda x, t: Denoised(torch.zeros_like(x) + 0.1 * labels.reshape(-1, 1, 1, 1), x)

    plain = ClassifierFree(2.0).guide(constant, LABELS, PROCESS, NONE)(X, T)
    rescaled = ClassifierFree(2.0, rescale=0.7).guide(constant, LABELS, PROCESS, NONE)(X, T)
    assert torch.equal(rescaled.x0, plain.x0)
    assert rescaled.noise.isfinite().all()


def test_autoguidance_extrapolates_from_the_weaker_model():
    weaker = lambda labels: labelled(labels + 1)  # noqa: E731
    guided_x = Autoguidance(weaker, 2.5).guide(labelled, LABELS, PROCESS, None)(X, T)
    strong, weak = labelled(LABELS)(X, T), weaker(LABELS)(X, T)
    close(guided_x.x0, weak.x0 + 2.5 * (strong.x0 - weak.x0))
    close(guided_x.noise, weak.noise + 2.5 * (strong.noise - weak.noise))
    alone = Autoguidance(weaker, 2.5, (0.0, 0.01)).guide(labelled, LABELS, PROCESS, None)(X, T)
    assert torch.equal(alone.x0, strong.x0)


LABELLESS = "needs labels and the null condition"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ClassifierFree(math.inf), "scale must be finite"),
        (lambda: ClassifierFree(2.0, (1.0, 0.5)), "interval must be two levels"),
        (lambda: ClassifierFree(2.0, (1.0, 2.0, 3.0)), "interval must be two levels"),
        (lambda: ClassifierFree(2.0, rescale=1.5), r"rescale must be in \[0, 1\], got 1.5"),
        (lambda: Autoguidance(labelled, math.nan), "scale must be finite"),
        (lambda: ClassifierFree(2.0).guide(labelled, None, PROCESS, NONE), LABELLESS),
        (lambda: ClassifierFree(2.0).guide(labelled, LABELS, PROCESS, None), LABELLESS),
    ],
)
def test_guidance_without_meaning_or_labels_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
