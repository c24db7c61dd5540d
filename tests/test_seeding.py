import pytest
import torch
from support.golden import close

from lit_diffusion.seeding import (
    PerSampleNoise,
    classes_of,
    fold,
    index_uniforms,
    seed_step,
)


def test_keys_that_differ_anywhere_give_unrelated_seeds():
    keys = [(a, b, c) for a in range(10) for b in range(10) for c in range(10)]
    seeds = {fold("step", *key) for key in keys}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    ones = sum(bin(seed).count("1") for seed in seeds) / 1000
    assert 30.5 < ones < 32.5  # 63 fair bits, standard error 0.13


def test_a_step_draws_the_same_again_and_no_other_step_does():
    def draw(*key):
        seed_step(*key)
        return torch.randn(4)

    assert torch.equal(draw(0, 0, 5, 2), draw(0, 0, 5, 2))
    others = [(1, 0, 5, 2), (0, 1, 5, 2), (0, 0, 6, 2), (0, 0, 5, 3)]
    assert not any(torch.equal(draw(0, 0, 5, 2), draw(*key)) for key in others)


def test_a_sample_depends_on_its_seed_and_not_on_its_batch():
    together = PerSampleNoise([7, 3, 9])
    alone = PerSampleNoise([3])
    for _ in range(3):
        like = torch.empty(3, 2, 5, 5)
        drawn = together.randn_like(like)
        assert drawn.shape == like.shape
        assert torch.equal(drawn[1], alone.randn_like(like[:1])[0])


def test_the_numbers_of_a_seed_are_these():
    """All FIDs and samples there are were drawn so: another mixing is another benchmark."""
    first = PerSampleNoise([0, 1, 2**32 - 1]).draw((1,)).flatten()
    close(first, torch.tensor([0.4461080729961395, -0.3875826299190521, 0.048923294991254807]))
    later = PerSampleNoise([3], "validation")
    later.draw((2, 2))
    close(later.draw((1,)), torch.tensor([[0.4929494857788086]]))
    assert fold("step", 0, 1) == 7531875650895689201
    assert index_uniforms(torch.tensor([0, 1])).tolist() == pytest.approx([0.5, 0.1180339887498949])
    assert classes_of(range(9, 14), 4) == [1, 2, 3, 0, 1]


def test_noise_is_standard_normal():
    x = PerSampleNoise(range(400)).draw((100,)).double()
    assert abs(x.mean()) < 4 / 200
    assert abs(x.var() - 1) < 4 * (2 / 40000) ** 0.5
    across = x - x.mean(0)
    assert abs((across[:-1] * across[1:]).mean()) < 4 / 200


def test_any_run_of_indices_covers_the_noise_levels_evenly():
    for first, n in [(0, 10), (0, 360), (123, 128), (5000, 1000)]:
        u = index_uniforms(torch.arange(first, first + n)).sort().values
        assert ((u >= 0) & (u < 1)).all()
        even = (torch.arange(n) + 0.5).double() / n
        assert (u - even).abs().max() < 2.5 / n


def test_noise_is_drawn_in_float32_whatever_the_default():
    before = torch.get_default_dtype()
    expected = PerSampleNoise([1]).draw((8,))
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(PerSampleNoise([1]).draw((8,)), expected)
    finally:
        torch.set_default_dtype(before)


def test_more_labels_than_a_machine_holds_are_refused_at_once():
    with pytest.raises(ValueError, match="num_samples, num or num_predict must be at most"):
        classes_of(range(10**15), 10)
