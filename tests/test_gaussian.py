import gc

import pytest
import torch
from support.golden import close, load, tensor
from torch._subclasses import FakeTensorMode

from lit_diffusion import gaussian
from lit_diffusion.gaussian import (
    LearnedRange,
    approx_normal_cdf,
    discretized_log_likelihood,
    normal_kl,
    posterior,
    step_posterior,
)
from lit_diffusion.processes import CosineBetas, DiscreteVP, LinearBetas


def golden(key):
    return tensor("case02_primitives", key)


def test_primitives_equal_improved_diffusion():
    keys = load("case02_primitives")
    assert {"dg_x", "dg_mean", "dg_log_scale", "dg_loglik", "cdf", "cdf_x", "kl"} <= set(keys)
    x, mean, log_scale = golden("dg_x"), golden("dg_mean"), golden("dg_log_scale")
    close(discretized_log_likelihood(x, mean, 2 * log_scale), golden("dg_loglik"))
    close(approx_normal_cdf(golden("cdf_x")), golden("cdf"))
    close(normal_kl(x, golden("kl_logvar1"), mean, golden("kl_logvar2")), golden("kl"))


def test_bins_of_the_discretized_gaussian_hold_all_of_its_mass():
    levels = (torch.arange(256, dtype=torch.float64) / 127.5 - 1).reshape(1, -1)
    for mean, std in [(0.0, 0.1), (-0.9, 0.3), (1.3, 0.05)]:
        loglik = discretized_log_likelihood(
            levels,
            torch.full_like(levels, mean),
            torch.full_like(levels, 2 * torch.tensor(std).log()),
        )
        assert loglik.exp().sum().item() == pytest.approx(1, abs=1e-6)


def test_learned_range_without_a_learned_variance_is_refused():
    one = torch.ones(1)
    with pytest.raises(ValueError, match="HybridLoss"):
        LearnedRange().log_variance(one, one, one, None)


class Counted(DiscreteVP):
    """Counts calls, and has no hash, as a dataclass that compares by value."""

    calls = 0
    __hash__ = None

    def alpha_sigma(self, t, /):
        self.calls += 1
        return super().alpha_sigma(t)


def test_posteriors_of_a_step_are_rows_of_the_table_of_all_steps():
    process = Counted(CosineBetas(60))
    t = torch.tensor([59.0, 0.0, 17.0, 17.0], dtype=torch.float64)
    whole = posterior(process, torch.arange(59.0, -2, -1).double())
    for dtype in (torch.float64, torch.float32):
        for actual, entries in zip(step_posterior(process, t, dtype), whole, strict=True):
            expected = entries[59 - t.long()]
            assert torch.equal(
                actual, expected if expected.dtype == torch.bool else expected.to(dtype)
            )


def test_posteriors_are_computed_once_for_a_process_on_a_device():
    process, other = Counted(CosineBetas(60)), Counted(LinearBetas(60))
    for t in (3.0, 5.0, 3.0):
        first = step_posterior(process, torch.tensor([t]))
        step_posterior(other, torch.tensor([t]))
    step_posterior(process, torch.zeros(1, device="meta"))
    assert (process.calls, other.calls) == (2, 1)
    assert torch.equal(first.log_beta, step_posterior(process, torch.tensor([3])).log_beta)
    tables = gaussian._tables_of
    assert {id(process), id(other)} <= tables.keys()
    before = len(tables)
    del process, other
    gc.collect()
    assert len(tables) == before - 2


def test_tables_of_the_fake_mode_are_not_used_outside_of_it():
    process, t = DiscreteVP(CosineBetas(60)), torch.tensor([3.0], dtype=torch.float64)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert process.alpha_sigma(mode.from_tensor(t))[0].shape == (1,)
        assert step_posterior(process, mode.from_tensor(t)).variance.shape == (1,)
    for entry in (*process.alpha_sigma(t), *step_posterior(process, t)):
        assert entry.isfinite().all()
