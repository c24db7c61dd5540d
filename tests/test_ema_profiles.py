import math

import pytest
import torch
from support.golden import close

from lit_diffusion.ema_profiles import LARGEST_WIDTH, coefficients, exponent, power_decay


@pytest.mark.parametrize("width", [0.01, 0.05, 0.1, 0.2, 0.28])
def test_the_profile_of_an_exponent_has_the_width(width):
    gamma, tau = exponent(width), (torch.arange(200_000).double() + 0.5) / 200_000
    profile = (gamma + 1) * tau**gamma / 200_000
    mean = (profile * tau).sum()
    assert profile.sum() == pytest.approx(1, abs=1e-4)
    assert ((profile * (tau - mean) ** 2).sum()).sqrt() == pytest.approx(width, rel=1e-3)
    s = width**-2
    assert gamma**3 + 7 * gamma**2 + (16 - s) * gamma + 12 - s == pytest.approx(0, abs=1e-6 * s)


@pytest.mark.parametrize("width", [0.0, -0.1, LARGEST_WIDTH, 0.5, math.nan])
def test_widths_that_no_profile_has_are_refused(width):
    with pytest.raises(ValueError, match=r"must be above 0 and below 0\.289"):
        exponent(width)


def averages(values, gamma):
    """After each value; the first stands alone."""
    average, averages = 0.0, []
    for step, value in enumerate(values, start=1):
        keep = power_decay(gamma, step)
        average = keep * average + (1 - keep) * value
        averages.append(average)
    return averages


@pytest.mark.parametrize("gamma", [0.0, 6.94, 16.97])
def test_decays_make_an_average_with_the_profile(gamma):
    """Of weights that are all 0 but in one step: its share is the profile there, times 1."""
    steps = 1000
    for at in (400, 900, 990):
        spike = [float(step == at) for step in range(1, steps + 1)]
        expected = (at / steps) ** (gamma + 1) - ((at - 1) / steps) ** (gamma + 1)
        assert averages(spike, gamma)[-1] == pytest.approx(expected, rel=1e-9)


def path(steps):
    """Weights that fall, waver and are noisy."""
    generator = torch.Generator().manual_seed(0)
    t = torch.arange(1, steps + 1).double() / steps
    noise = torch.randn(steps, generator=generator, dtype=torch.float64)
    return torch.exp(-3 * t) + 0.3 * torch.sin(9 * t) + 0.1 * noise


@pytest.mark.parametrize("width", [0.03, 0.05, 0.07, 0.1, 0.15, 0.2])
@pytest.mark.parametrize("end", [4000, 3300])
def test_any_width_at_any_step_is_made_of_two_tracked_ones(width, end):
    values, every = path(4000), 125
    tracked = {exponent(w): averages(values.tolist(), exponent(w)) for w in (0.05, 0.10)}
    steps = list(range(every, 4001, every)) * 2
    gammas = [gamma for gamma in tracked for _ in range(4000 // every)]
    factors, distance = coefficients(steps, gammas, end, exponent(width))
    snapshots = torch.tensor(
        [tracked[gamma][step - 1] for step, gamma in zip(steps, gammas, strict=True)],
        dtype=torch.float64,
    )
    expected = averages(values.tolist(), exponent(width))[end - 1]
    error = abs((factors * snapshots).sum().item() - expected)
    plain = abs(tracked[exponent(0.10)][end - 1] - expected)
    assert error < (2e-3 if width >= 0.05 else 5e-3)  # narrower than any that was tracked
    assert error < plain or width == 0.1
    # Cauchy and Schwarz: an average is the integral of its profile times the weights.
    size = math.sqrt((exponent(width) + 1) ** 2 / (2 * exponent(width) + 1) / end)
    assert error <= distance * size * (values - values.mean()).norm() + 1e-6
    assert factors.sum() == pytest.approx(1)


def profile(tau, step, gamma):
    return torch.where(tau < step, (gamma + 1) * (tau / step) ** gamma / step, 0)


@pytest.mark.parametrize("step", [130, 160])
@pytest.mark.parametrize("gamma", [3.0, 12.0, 30.0])
def test_factors_and_distance_are_those_of_least_squares_on_a_grid(step, gamma):
    steps, gammas = [40, 100, 100, 160], [7.0, 7.0, 17.0, 17.0]
    tau = (torch.arange(160_000).double() + 0.5) / 1000
    profiles = [profile(tau, t, g) for t, g in zip(steps, gammas, strict=True)]
    *first, last = profiles
    wanted = profile(tau, step, gamma)
    others = torch.stack([one - last for one in first], 1)  # the last factor is 1 less these
    solution = torch.linalg.lstsq(others, (wanted - last)[:, None]).solution[:, 0]
    left = (others @ solution + last - wanted).norm() / wanted.norm()
    factors, distance = coefficients(steps, gammas, step, gamma)
    close(factors, torch.cat([solution, 1 - solution.sum(0, keepdim=True)]), atol=1e-3)
    assert distance == pytest.approx(left.item(), rel=1e-3)


def test_factors_do_not_depend_on_the_unit_of_time():
    steps, gammas = list(range(1, 41)) * 2, [7.0] * 40 + [17.0] * 40
    few, _ = coefficients(steps, gammas, 40, 10.0)
    many, _ = coefficients([25_000 * step for step in steps], gammas, 1_000_000, 10.0)
    close(few, many, atol=1e-9)


def test_an_average_later_than_all_snapshots_is_refused():
    with pytest.raises(
        ValueError, match=r"at step 400 needs a snapshot at or after this step, got \[300\]"
    ):
        coefficients([300], [7.0], 400, 7.0)
