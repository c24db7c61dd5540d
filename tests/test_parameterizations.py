import math

import pytest
import torch
from support.golden import PIX, Z, close, tensor

from lit_diffusion.gaussian import expand_as
from lit_diffusion.parameterizations import (
    FDM,
    EDMPreconditioning,
    Epsilon,
    FlowVelocity,
    Sample,
    Velocity,
)
from lit_diffusion.processes import ContinuousVP, CosineBetas, DiscreteVP, EDMProcess

PLAIN = [Epsilon(), Sample(), Velocity(), FlowVelocity()]
EVERY = [*PLAIN, EDMPreconditioning(), EDMPreconditioning(1.3), FDM(Velocity(), 0.002, 80.0)]
SHAPE = (4, 3, 8, 8)
X0, NOISE = PIX(SHAPE, 1), Z(SHAPE, 2)


# also of processes that keep no variance: EDM's, and straight lines
LEVELS = [(1.0, 0.02), (1.0, 20.0), (0.3, 0.7)]


def scales(t):
    if isinstance(t, tuple):
        return tuple(torch.tensor(value, dtype=torch.float64) for value in t)
    process = DiscreteVP(CosineBetas(1000))
    return tuple(expand_as(v, X0) for v in process.alpha_sigma(torch.tensor([float(t)])))


@pytest.mark.parametrize("parameterization", EVERY, ids=repr)
@pytest.mark.parametrize("t", [0, 1, 500, 998, *LEVELS])
def test_x0_is_recovered_from_its_own_target(parameterization, t):
    alpha, sigma = scales(t)
    x_t = alpha * X0 + sigma * NOISE
    target = parameterization.target(X0, NOISE, alpha, sigma)
    close(parameterization.to_x0(target, x_t, alpha, sigma), X0, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("parameterization", EVERY, ids=repr)
@pytest.mark.parametrize("t", [0, 300, 998, *LEVELS])
def test_gain_is_the_slope_of_x0_by_the_output(parameterization, t):
    alpha, sigma = scales(t)
    output = Z(SHAPE, 3).requires_grad_()
    x0 = parameterization.to_x0(output, NOISE, alpha, sigma)
    (slope,) = torch.autograd.grad(x0.sum(), output)
    close(slope.abs(), parameterization.output_scale(alpha, sigma).expand(SHAPE))


# EDM's networks are functions of the un-scaled x = x_t / alpha and sigma / alpha. Its three are
# parameterizations on processes here; VE's output is minus the noise, and its label another
# function of sigma.
EDM_FAMILY = {
    "edm": (EDMProcess(), EDMPreconditioning(), 1, lambda label: label),
    "vp": (ContinuousVP(), Epsilon(), 1, lambda label: label),
    "ve": (EDMProcess(0.02, 100.0), Epsilon(), -1, lambda label: 4 * label - math.log(2)),
}


def compare_with_edm(case, tag, kind, parameterization):
    process, _, sign, label_of = EDM_FAMILY[kind]
    sigmas = tensor(case, f"{tag}/sigmas")
    x = Z((len(sigmas), 3, 4, 4), 800)
    t = process.at_log_snr(-2 * sigmas.log())
    label = expand_as(label_of(process.noise_label(t)), x)
    alpha, sigma = (expand_as(v, x) for v in process.alpha_sigma(t))
    one = torch.ones_like(alpha)
    x_t = alpha * x * (1 + expand_as(sigmas, x))
    network_input = parameterization.network_input(x_t, alpha, sigma)
    output = sign * (
        0.5 * network_input + 0.2 * torch.sin(label) + 0.1 * torch.tanh(2 * network_input)
    )
    for actual, name in [
        (parameterization.to_x0(0 * one, alpha, alpha, sigma).flatten(), "c_skip"),
        (sign * parameterization.to_x0(one, 0 * one, alpha, sigma).flatten(), "c_out"),
        (parameterization.network_input(alpha, alpha, sigma).flatten(), "c_in"),
        (label.flatten(), "c_noise"),
        (parameterization.to_x0(output, x_t, alpha, sigma), "D"),
    ]:
        close(actual, tensor(case, f"{tag}/{name}_f64"))


@pytest.mark.parametrize("kind", EDM_FAMILY)
def test_preconditioned_networks_equal_edm(kind):
    compare_with_edm("case07_edm", kind, kind, EDM_FAMILY[kind][1])


@pytest.mark.parametrize("kind", EDM_FAMILY)
@pytest.mark.parametrize("m", [1, 2])
def test_damped_networks_equal_fdm(kind, m):
    tag = f"{kind}_m{m}"
    low, high = tensor("case08_fdm", f"{tag}/sigma_min_max_f64").tolist()
    multiplier = 1.0 if kind == "ve" else float(m)  # VE's released code reads no multiplier
    fdm = FDM(EDM_FAMILY[kind][1], low, high, multiplier)
    compare_with_edm("case08_fdm", tag, kind, fdm)


@pytest.mark.parametrize("process", [EDMProcess(), ContinuousVP(), DiscreteVP(CosineBetas(1000))])
@pytest.mark.parametrize("sigma_data", [0.5, 1.3])
def test_input_and_target_of_edm_have_unit_variance_at_every_level(process, sigma_data):
    p = EDMPreconditioning(sigma_data)
    alpha, sigma = process.alpha_sigma(process.from_unit(torch.linspace(0, 1, 50)))
    one, zero = torch.ones_like(alpha), torch.zeros_like(alpha)
    signal, noise = (
        p.target(sigma_data * one, zero, alpha, sigma),
        p.target(zero, one, alpha, sigma),
    )
    close(signal**2 + noise**2, one, rtol=1e-12)
    signal = p.network_input(alpha * sigma_data, alpha, sigma)
    noise = p.network_input(sigma, alpha, sigma)
    close(signal**2 + noise**2, one, rtol=1e-12)


def test_damping_begins_with_one_falls_and_leaves_nothing_far_beyond_its_range():
    p = FDM(Velocity(), 0.01, 80.0)
    level = torch.logspace(-4, 5, 200, dtype=torch.float64)
    damping = p.network_input(torch.ones(200), torch.ones(200), level)
    close(damping[:40], torch.ones(40), rtol=1e-6)
    assert (damping.diff()[level[:-1] >= 0.01] <= 0).all()
    alpha, sigma = (
        v.float() for v in DiscreteVP(CosineBetas(1000)).alpha_sigma(torch.arange(1000))
    )
    network_input = p.network_input(alpha + sigma, alpha, sigma)
    assert network_input.isfinite().all()
    assert network_input[-2:].abs().max() < 1e-6


@pytest.mark.parametrize(
    "make",
    [
        lambda: FDM(Epsilon(), 80.0, 0.002),
        lambda: FDM(Epsilon(), -1.0, 80.0),
        lambda: FDM(Epsilon(), 0.002, 80.0, multiplier=0.0),
        lambda: EDMPreconditioning(0.0),
    ],
)
def test_preconditioning_without_meaning_is_refused(make):
    with pytest.raises(ValueError, match=r"must (hold|be > 0), got"):
        make()
