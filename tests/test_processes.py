import copy

import numpy as np
import pytest
import torch
from support.golden import close, tensor

from lit_diffusion.gaussian import posterior
from lit_diffusion.processes import (
    VE,
    ContinuousVP,
    CosineBetas,
    DiscreteVP,
    EDMProcess,
    GivenBetas,
    LinearBetas,
    LinearFlow,
    SigmoidBetas,
    ZeroTerminalSNR,
)

PROCESSES = {
    "linear1000": DiscreteVP(LinearBetas(1000)),
    "cosine4000": DiscreteVP(CosineBetas(4000)),
    "linear50": DiscreteVP(LinearBetas(50)),
}
ZERO = DiscreteVP(ZeroTerminalSNR(LinearBetas(1000)))
EVERY = [*PROCESSES.values(), DiscreteVP(SigmoidBetas(1000)), DiscreteVP(CosineBetas(100)), ZERO]
CONTINUOUS = [ContinuousVP(), EDMProcess(), VE(), LinearFlow()]


def every_time(process):
    return torch.arange(process.num_steps - 1, -2, -1, dtype=torch.float64)


@pytest.mark.parametrize("tag", PROCESSES)
def test_tables_equal_improved_diffusion(tag):
    process = PROCESSES[tag]
    alpha, sigma = process.alpha_sigma(every_time(process)[:-1].flip(0))
    steps = posterior(process, every_time(process))

    def exact(actual, name):
        close(actual, tensor("case01_tables", f"{tag}/{name}"), rtol=1e-9, atol=1e-14)

    exact(process.betas.betas(), "betas")
    exact(alpha**2, "alphas_cumprod")
    exact(1 - sigma**2, "alphas_cumprod")
    exact(steps.variance.flip(0), "posterior_variance")
    exact(steps.log_variance.flip(0), "posterior_log_variance_clipped")
    exact(steps.x0_coef.flip(0), "posterior_mean_coef1")
    exact(steps.xt_coef.flip(0), "posterior_mean_coef2")


@pytest.mark.parametrize("process", [*EVERY, ContinuousVP()], ids=repr)
def test_signal_and_noise_keep_unit_variance_at_any_time(process):
    t = torch.linspace(process.t_clean, process.t_max, 777, dtype=torch.float64)
    alpha, sigma = process.alpha_sigma(t)
    close(alpha**2 + sigma**2, torch.ones_like(t), rtol=1e-14)
    assert (alpha.diff() < 0).all()


@pytest.mark.parametrize("process", [*EVERY, *CONTINUOUS], ids=repr)
def test_the_clean_time_has_no_noise(process):
    alpha, sigma = process.alpha_sigma(torch.tensor([process.t_clean]))
    assert (alpha.item(), sigma.item()) == (1.0, 0.0)


@pytest.mark.parametrize("process", EVERY, ids=repr)
def test_time_is_recovered_from_log_snr(process):
    t = torch.linspace(-0.9, process.t_max, 1234, dtype=torch.float64)
    alpha, sigma = process.alpha_sigma(t)
    log_snr = torch.log(alpha**2) - torch.log(sigma**2)
    recovered = process.at_log_snr(log_snr)
    again, _ = process.alpha_sigma(recovered)
    close(again, alpha, rtol=1e-9)
    close(recovered, t, rtol=0, atol=1e-5)


@pytest.mark.parametrize("process", CONTINUOUS, ids=repr)
def test_continuous_time_is_recovered_from_log_snr_also_beyond_the_ends(process):
    beyond = 0.0 if isinstance(process, LinearFlow) else 0.3  # which has nothing behind noise
    t = process.t_max * torch.logspace(-5, beyond, 1234, dtype=torch.float64)
    alpha, sigma = process.alpha_sigma(t)
    close(process.at_log_snr(2 * (alpha / sigma).log()), t, rtol=1e-9, atol=0)


@pytest.mark.parametrize("process", [*EVERY, *CONTINUOUS], ids=repr)
def test_uniforms_run_from_the_least_noisy_time_to_the_noisiest(process):
    u = torch.linspace(0, 1, 101, dtype=torch.float64)
    t = process.from_unit(u)
    close(t[[0, -1]], torch.tensor([process.t_min, process.t_max]), rtol=1e-12)
    assert (t.diff() >= 0).all()


@pytest.mark.parametrize("process", [*EVERY, *CONTINUOUS], ids=repr)
def test_the_prior_is_as_noisy_as_the_noisiest_time(process):
    t = torch.tensor(process.t_max)
    start = process.prior(torch.ones(2, 1, 1, 1), t)
    alpha, sigma = process.alpha_sigma(t)
    assert start.dtype == torch.float32
    close(start.flatten(), (alpha**2 * (t < 2) + sigma**2).sqrt().expand(2), rtol=1e-4)


def test_continuous_levels_equal_edm_fdm_and_k_diffusion():
    u = tensor("case07_edm", "loss/rnd_uniform")
    close(VE().from_unit(u), 0.02 * 5000**u)
    vp = ContinuousVP()
    alpha, sigma = vp.alpha_sigma(vp.from_unit(torch.tensor([0.0, 1.0])))
    close(sigma / alpha, tensor("case08_fdm", "vp_m1/sigma_min_max_f64"))
    vp = ContinuousVP(t_min=1e-3)
    alpha, sigma = vp.alpha_sigma(vp.from_unit(torch.linspace(1, 0, 10, dtype=torch.float64)))
    close(sigma / alpha, tensor("case11_kdiffusion", "sigmas_vp_n10_f64")[:-1])


def test_ranks_are_shared_evenly_among_the_steps():
    process = DiscreteVP(LinearBetas(50))
    u = (torch.arange(50 * 8, dtype=torch.float64) + 0.5) / (50 * 8)
    counts = np.bincount(process.from_unit(u).long().numpy(), minlength=50)
    assert (counts == 8).all()
    assert process.from_unit(torch.tensor([1.0])).item() == 49


def test_labels_are_rescaled_to_a_thousand_only_when_asked():
    t = torch.tensor([0.0, 3999.0])
    assert DiscreteVP(CosineBetas(4000)).noise_label(t).tolist() == [0, 3999]
    rescaled = DiscreteVP(CosineBetas(4000), rescale_labels=True)
    assert rescaled.noise_label(t).tolist() == [0, 999.75]


def test_labels_of_continuous_times_are_those_of_the_papers():
    t = torch.tensor([0.25, 1.0], dtype=torch.float64)
    close(ContinuousVP().noise_label(t), torch.tensor([249.75, 999.0]))
    close(EDMProcess().noise_label(t), t.log() / 4)
    close(VE().noise_label(t), (t / 2).log())
    close(LinearFlow().noise_label(t), 1000 * t)


def test_sigmoid_betas_follow_their_formula():
    alpha, _ = DiscreteVP(SigmoidBetas(1000)).alpha_sigma(torch.tensor([249.0, 499.0]))
    sigmoid = lambda x: 1 / (1 + np.exp(x))  # noqa: E731
    expected = [(sigmoid(6 * u - 3) - sigmoid(3)) / (sigmoid(-3) - sigmoid(3)) for u in (0.25, 0.5)]
    np.testing.assert_allclose(alpha**2, expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EDMProcess(0.0, 80.0), "must hold, got"),
        (lambda: EDMProcess(80.0, 0.002), "must hold, got"),
        (lambda: EDMProcess(0.002, float("nan")), "must hold, got"),
        (lambda: ContinuousVP(t_min=0.0), "must hold, got"),
        (lambda: ContinuousVP(beta_d=0.0), "must hold, got"),
        (lambda: ContinuousVP(beta_min=0.0), "must hold, got"),
        (lambda: LinearFlow(t_min=0.0), "must hold, got"),
        (lambda: LinearFlow(label_scale=0.0), "label_scale < inf must hold, got"),
        (lambda: DiscreteVP(LinearBetas(1)), "num_steps must be at least 2, got 1"),
        (lambda: DiscreteVP(CosineBetas(1)), "num_steps must be at least 2, got 1"),
        (lambda: DiscreteVP(SigmoidBetas(1)), "num_steps must be at least 2, got 1"),
        (lambda: DiscreteVP(GivenBetas([0.1, 1.2])), r"must lie in \(0, 1\), got 0.1 to 1.2"),
        (lambda: DiscreteVP(GivenBetas([0.1] * 999 + [1.2])), "^.{,200}or other arguments.$"),
        (lambda: DiscreteVP(LinearBetas(19)), r"betas must lie in \(0, 1\).*use more steps"),
    ],
)
def test_processes_without_levels_or_steps_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_schedule_bent_to_pure_noise_begins_as_it_did_and_stays_straight_to_its_base():
    """sqrt(alpha-bar) is an affine function of the base's: algorithm 1 of Lin et al."""
    times = torch.arange(1000.0)
    base, _ = DiscreteVP(LinearBetas(1000)).alpha_sigma(times)
    bent, sigma = ZERO.alpha_sigma(times)
    close(bent[0], base[0])
    assert (bent[-1], sigma[-1]) == (0, 1)
    close((bent - bent[-1]) / (bent[0] - bent[-1]), (base - base[-1]) / (base[0] - base[-1]))


def test_a_copy_of_a_process_leaves_its_copies_on_devices_out():
    process, t = DiscreteVP(CosineBetas(50)), torch.tensor([-1.0, 0.5, 30.25, 49.0])
    process.alpha_sigma(t.to("meta"))
    again = copy.deepcopy(process)
    assert (len(process._copies), len(again._copies)) == (1, 0)
    assert all(map(torch.equal, again.alpha_sigma(t), process.alpha_sigma(t)))
