import numpy as np
import pytest
import torch
from torch import nn

from lit_diffusion.lab.analysis.hessian import (
    Spectrum,
    draw_spectra,
    estimate_spectrum,
    finite_difference_error,
    hessian_product,
)


def matrix(values):
    """Symmetric, with these eigenvalues."""
    torch.manual_seed(0)
    q, _ = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64))
    return q @ torch.diag(torch.as_tensor(values, dtype=torch.float64)) @ q.T


def spectrum_of(eigenvalues, steps, num_vectors):
    h = matrix(eigenvalues)
    return estimate_spectrum(lambda v: h @ v, h[0], steps, range(num_vectors))


EIGENVALUES = [-2.0, -0.5, *torch.linspace(0, 1, 44).tolist(), 3.0, 5.0, 9.0, 13.0]


def test_few_steps_give_the_ends_and_the_moments():
    spectrum = spectrum_of(EIGENVALUES, 16, 200)
    np.testing.assert_allclose(spectrum.top[:3], [13, 9, 5], atol=1e-2)
    assert spectrum.nodes[:, -1].mean() == pytest.approx(-2, abs=1e-2)
    eigenvalues = np.array(EIGENVALUES)
    # 2 ||H||_F^2 / (P^2 n) is the variance of a Gaussian probe's mean, about
    deviation = np.sqrt(2 * (eigenvalues**2).sum() / 200) / 50
    assert spectrum.mean == pytest.approx(eigenvalues.mean(), abs=4 * deviation)
    assert spectrum.trace == pytest.approx(50 * spectrum.mean)
    assert spectrum.variance == pytest.approx(eigenvalues.var(), rel=0.02)


def test_outer_eigenvalues_count_once_each_whatever_the_vectors_hold_of_them():
    eigenvalues = np.array([1000.0, -300.0, *EIGENVALUES])
    spectrum = spectrum_of(eigenvalues, 16, 2)
    assert spectrum.mean == pytest.approx(eigenvalues.mean(), rel=0.03)
    assert spectrum.variance == pytest.approx(eigenvalues.var(), rel=0.01)
    at = np.array([1000.0])
    assert spectrum.density(at, width=1.0)[0] == pytest.approx(1 / 52 / np.sqrt(2 * np.pi))


def test_the_density_integrates_to_one_and_has_its_mass_where_the_eigenvalues_are():
    spectrum = spectrum_of(EIGENVALUES, 50, 5)
    at = np.linspace(-4, 15, 4000)
    mass = spectrum.density(at, width=0.1) * (at[1] - at[0])
    assert mass.sum() == pytest.approx(1, abs=1e-6)
    assert mass[at > 2].sum() == pytest.approx(4 / 50, abs=1e-6)


@pytest.mark.parametrize("values", [[2.0], [0.0], [-3.0, -3.0], [2.0, 2.0 + 4e-16]])
def test_equal_eigenvalues_can_be_drawn(values, tmp_path):
    weights = np.full((1, len(values)), 1 / len(values))
    spectrum = Spectrum(10, np.array([values]), weights)
    draw_spectra({"loss": spectrum}, tmp_path / "hessian.png", "note")
    assert (tmp_path / "hessian.png").stat().st_size > 1000


def test_the_spectrum_of_a_network_with_attention_is_that_of_its_dense_hessian():
    torch.manual_seed(0)
    project, norm, out = nn.Linear(4, 12), nn.LayerNorm(4), nn.Linear(4, 1)
    network = nn.ModuleList([project, norm, out]).double()
    x, y = torch.randn(8, 3, 4).double(), torch.randn(8, 3, 1).double()

    def loss():
        attention = nn.functional.scaled_dot_product_attention(*project(x).chunk(3, dim=-1))
        return (out(norm(attention)) - y).square().mean()

    assert finite_difference_error(loss, network.parameters()) < 1e-6
    product, gradient = hessian_product(loss, network.parameters())
    dense = torch.stack([product(e) for e in torch.eye(len(gradient)).double()])
    torch.testing.assert_close(dense, dense.T)
    spectrum = estimate_spectrum(product, gradient, steps=len(gradient), seeds=[0])
    np.testing.assert_allclose(
        spectrum.top[:5], torch.linalg.eigvalsh(dense).flip(0)[:5], atol=1e-4
    )


def test_a_parameter_that_the_loss_does_not_see_has_no_curvature():
    a, b = nn.Parameter(torch.tensor([2.0])), nn.Parameter(torch.tensor([1.0]))
    product, gradient = hessian_product(lambda: a.pow(3).sum(), [a, b])
    assert gradient.tolist() == [12.0, 0.0]
    assert product(torch.tensor([1.0, 5.0])).tolist() == [12.0, 0.0]


class Cut(torch.autograd.Function):
    """x^3 whose derivative is computed where autograd does not see it, as fused kernels do."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 3 * x.detach() ** 2


def test_a_derivative_that_autograd_loses_shows_beside_differences():
    w = torch.linspace(-1, 2, 7, dtype=torch.float64, requires_grad=True)
    before = w.detach().clone()
    assert finite_difference_error(lambda: (w**3).sum(), [w]) < 1e-6
    assert finite_difference_error(lambda: Cut.apply(w).square().sum(), [w]) > 0.1
    assert torch.equal(w, before)
