import pytest
import torch
from support.golden import PIX, Z, close

from lit_diffusion.gaussian import expand_as
from lit_diffusion.parameterizations import Epsilon, Sample, Velocity
from lit_diffusion.processes import CosineBetas, DiscreteVP

EVERY = [Epsilon(), Sample(), Velocity()]
SHAPE = (4, 3, 8, 8)
X0, NOISE = PIX(SHAPE, 1), Z(SHAPE, 2)


def scales(t):
    process = DiscreteVP(CosineBetas(1000))
    return tuple(expand_as(v, X0) for v in process.alpha_sigma(torch.tensor([float(t)])))


@pytest.mark.parametrize("parameterization", EVERY, ids=repr)
@pytest.mark.parametrize("t", [0, 1, 500, 998])
def test_x0_is_recovered_from_its_own_target(parameterization, t):
    alpha, sigma = scales(t)
    x_t = alpha * X0 + sigma * NOISE
    target = parameterization.target(X0, NOISE, alpha, sigma)
    close(parameterization.to_x0(target, x_t, alpha, sigma), X0, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("parameterization", EVERY, ids=repr)
@pytest.mark.parametrize("t", [0, 300, 998])
def test_gain_is_the_slope_of_x0_by_the_output(parameterization, t):
    alpha, sigma = scales(t)
    output = Z(SHAPE, 3).requires_grad_()
    x0 = parameterization.to_x0(output, NOISE, alpha, sigma)
    (slope,) = torch.autograd.grad(x0.sum(), output)
    close(slope.abs(), parameterization.gain(alpha, sigma).expand(SHAPE))


@pytest.mark.parametrize("parameterization", EVERY, ids=repr)
def test_the_network_sees_x_t_itself(parameterization):
    assert parameterization.network_input(NOISE, *scales(1)) is NOISE
