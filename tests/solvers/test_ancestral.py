from dataclasses import replace

import pytest
import torch
from support.golden import PIX, Z, close, load, tensor
from support.solving import COSINE, LINEAR, SHAPE, Recorder
from support.toy import CountedNoise, toy_denoiser

from lit_diffusion.gaussian import FixedLarge, FixedSmall, LearnedRange
from lit_diffusion.grids import LogSNR, Sections, Stride
from lit_diffusion.processes import CosineBetas, DiscreteVP, EDMProcess, LinearBetas
from lit_diffusion.solvers import DDIM, DDPM

LINEAR50 = DiscreteVP(LinearBetas(50))
LOOPS = {
    "anc_lin50_fixed_small": (LINEAR50, DDPM(FixedSmall(), 50)),
    "anc_lin50_fixed_large": (LINEAR50, DDPM(FixedLarge(), 50)),
    "anc_lin50_learned_range": (LINEAR50, DDPM(LearnedRange(), 50)),
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
    solver = replace(solver, clip=clip)
    end = solver.sample(denoise, process, Z(SHAPE, 100), CountedNoise(200))
    assert_trajectory(tag, clip, denoise, end)


def assert_trajectory(tag, clip, denoise, end):
    """The times, the states after the steps that the file has, and the first estimate of x0."""
    states = [*denoise.states[1:], end]
    key = f"{tag}/clip{int(clip)}"
    steps = load("case03_sampling")[f"{tag}/snap_steps"]
    close(torch.stack([states[i] for i in steps]), tensor("case03_sampling", f"{key}/x_f64"))
    assert denoise.times == tensor("case03_sampling", f"{tag}/t_seen").tolist()
    x0 = denoise.first.x0.clamp(-1, 1) if clip else denoise.first.x0
    close(x0, tensor("case03_sampling", f"{key}/pred_xstart0_f64"))


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize(("tag", "process"), [("lin1000", LINEAR), ("cos1000", COSINE)])
def test_ddim_inversion_equals_improved_diffusion(tag, process, clip):
    denoise = Recorder(toy_denoiser(process))
    solver = DDIM(10, times=Stride(), clip=clip)
    noise = solver.invert(denoise, process, 0.9 * PIX(SHAPE, 101))
    assert_trajectory(f"ddimrev_{tag}_10", clip, denoise, noise)


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


@pytest.mark.parametrize("solver", [DDIM(), DDPM(FixedSmall())], ids=repr)
def test_whole_steps_are_the_usual_grid_in_discrete_time_alone(solver):
    assert solver.default_times(COSINE) == Sections()
    assert solver.default_times(EDMProcess()) == LogSNR(noisiest=-10.0)
    with pytest.raises(ValueError, match=r"discrete steps.*use Even, LogSNR or Karras"):
        replace(solver, times=Sections()).check(EDMProcess())


def test_more_noise_than_there_is_is_refused():
    for eta in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=f"eta must be >= 0 and finite, got {eta}"):
            DDIM(eta=eta)
    with pytest.raises(ValueError, match="eta = 30"):
        DDIM(50, eta=30.0).sample(toy_denoiser(COSINE), COSINE, Z(SHAPE, 1), CountedNoise(1))
