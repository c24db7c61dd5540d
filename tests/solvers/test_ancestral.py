from dataclasses import replace

import pytest
import torch
from support.golden import PIX, Z, close, load, tensor
from support.solving import (
    COSINE,
    LINEAR,
    SHAPE,
    Recorder,
    no_noise,
)
from support.toy import CountedNoise, gaussian_denoiser, toy_denoiser

from lit_diffusion.gaussian import FixedLarge, FixedSmall, LearnedRange
from lit_diffusion.grids import LogSNR, Sections, Stride
from lit_diffusion.processes import (
    ContinuousVP,
    CosineBetas,
    DiscreteVP,
    EDMProcess,
    LinearBetas,
)
from lit_diffusion.solvers import (
    DDIM,
    DDPM,
)

LOOPS = {
    "anc_lin50_fixed_small": (DiscreteVP(LinearBetas(50)), DDPM(FixedSmall(), 50)),
    "anc_lin50_fixed_large": (DiscreteVP(LinearBetas(50)), DDPM(FixedLarge(), 50)),
    "anc_lin50_learned_range": (DiscreteVP(LinearBetas(50)), DDPM(LearnedRange(), 50)),
    "anc_cos1000_25_fixed_large": (COSINE, DDPM(FixedLarge(), 25)),
    "anc_cos1000_25_learned_range": (COSINE, DDPM(LearnedRange(), 25)),
    "ddim_cos1000_10_eta0": (COSINE, DDIM(10, times=Stride())),
    "ddim_cos1000_10_eta0.5": (COSINE, DDIM(10, eta=0.5, times=Stride())),
    "ddim_lin1000_10_eta0": (LINEAR, DDIM(10, times=Stride())),
    "ddim_lin1000_10_eta1": (LINEAR, DDIM(10, eta=1.0, times=Stride())),
}


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("tag", LOOPS)
def test_trajectories_equal_improved_diffusion(tag, clip):
    process, solver = LOOPS[tag]
    denoise = Recorder(toy_denoiser(process, "learned_range" in tag))
    end = with_clip(solver, clip).sample(denoise, process, Z(SHAPE, 100), CountedNoise(200))
    states = [*denoise.states[1:], end]  # the state after each executed step
    key = f"{tag}/clip{int(clip)}"
    for step, expected in zip(
        load("case03_sampling")[f"{tag}/snap_steps"],
        tensor("case03_sampling", f"{key}/x_f64"),
        strict=True,
    ):
        close(states[step], expected)
    assert denoise.times == tensor("case03_sampling", f"{tag}/t_seen").tolist()
    x0 = denoise.first.x0.clamp(-1, 1) if clip else denoise.first.x0
    close(x0, tensor("case03_sampling", f"{key}/pred_xstart0_f64"))


def with_clip(solver, clip):
    return type(solver)(**{**vars(solver), "clip": clip})


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize(("tag", "process"), [("lin1000", LINEAR), ("cos1000", COSINE)])
def test_ddim_inversion_equals_improved_diffusion(tag, process, clip):
    denoise = Recorder(toy_denoiser(process))
    solver = DDIM(10, times=Stride(), clip=clip)
    noise = solver.invert(denoise, process, 0.9 * PIX(SHAPE, 101))
    key = f"ddimrev_{tag}_10"
    states = [*denoise.states[1:], noise]
    for step, expected in zip(
        load("case03_sampling")[f"{key}/snap_steps"],
        tensor("case03_sampling", f"{key}/clip{int(clip)}/x_f64"),
        strict=True,
    ):
        close(states[step], expected)
    assert denoise.times == load("case03_sampling")[f"{key}/t_seen"].tolist()
    first = denoise.first.x0.clamp(-1, 1) if clip else denoise.first.x0
    close(first, tensor("case03_sampling", f"{key}/clip{int(clip)}/pred_xstart0_f64"))


def test_networks_are_told_rescaled_times_when_asked():
    process = DiscreteVP(LinearBetas(50), rescale_labels=True)
    denoise = Recorder(toy_denoiser(process, label=process.noise_label))
    end = DDPM(FixedLarge(), 50).sample(denoise, process, Z(SHAPE, 100), CountedNoise(200))
    expected = tensor("case03_sampling", "rescale_lin50/x_f32")[-1]  # float32 only in the reference
    close(end.float(), expected, rtol=1e-4, atol=2e-5 * max(1, expected.abs().max().item()))
    labels = tensor("case03_sampling", "rescale_lin50/t_seen")
    close(process.noise_label(torch.tensor(denoise.times)), labels, rtol=1e-6)
    for tag, betas in [("cos1000", CosineBetas(1000)), ("cos4000", CosineBetas(4000))]:
        process = DiscreteVP(betas, rescale_labels=True)
        labels = process.noise_label(Sections().grid(process, 25)[:-1])
        close(labels, tensor("case03_sampling", f"rescale_{tag}_25/t_seen"))


def test_ddim_with_eta_one_is_ddpm_with_the_small_variance():
    denoise = toy_denoiser(COSINE)
    ends = [
        solver.sample(denoise, COSINE, Z(SHAPE, 100), CountedNoise(200))
        for solver in (DDIM(25, eta=1.0), DDPM(FixedSmall(), 25))
    ]
    close(ends[0], ends[1])


def test_inversion_leads_back_to_the_image():
    solver = DDIM(500, clip=False)
    x0 = 0.3 + 0.5 * Z(SHAPE, 7)
    denoise = gaussian_denoiser(COSINE)
    again = solver.sample(denoise, COSINE, solver.invert(denoise, COSINE, x0), no_noise)
    assert (again - x0).abs().max() < 0.02


@pytest.mark.parametrize("process", [EDMProcess(), ContinuousVP()], ids=repr)
@pytest.mark.parametrize("solver", [DDIM(), DDPM(FixedSmall())], ids=repr)
def test_whole_steps_are_the_usual_grid_in_discrete_time_alone(solver, process):
    assert solver.default_times(COSINE) == Sections()
    assert solver.default_times(process) == LogSNR(noisiest=-10.0)
    with pytest.raises(ValueError, match=r"discrete steps.*use Even, LogSNR or Karras"):
        replace(solver, times=Sections()).check(process)


def test_more_noise_than_there_is_is_refused():
    for eta in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=f"eta must be >= 0 and finite, got {eta}"):
            DDIM(eta=eta)
    with pytest.raises(ValueError, match="eta = 30"):
        DDIM(50, eta=30.0).sample(toy_denoiser(COSINE), COSINE, Z(SHAPE, 1), CountedNoise(1))
