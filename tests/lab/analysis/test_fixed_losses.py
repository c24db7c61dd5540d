import copy
from dataclasses import replace

import pytest
import torch
from support.small_digits import write_small_digits
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from lit_diffusion.checkpoints.loading import load_module
from lit_diffusion.data.digits import Digits
from lit_diffusion.lab.analysis.fixed_losses import (
    check_same_losses,
    copy_weights,
    evaluate_losses,
    fixed_batch,
    fixed_losses,
    use_exact_spectral_norm_,
)
from lit_diffusion.lab.analysis.hessian import finite_difference_error, hessian_product
from lit_diffusion.seeding import PerSampleNoise, index_uniforms


def network(width=3):
    torch.manual_seed(width)
    return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width))


def test_weights_are_put_back_also_if_something_fails():
    module = network()
    before = copy_weights(module)
    assert before.keys() == module.state_dict().keys() - {"1.num_batches_tracked"}
    states = [{"0.weight": before["0.weight"] + 1}, {"0.bias": torch.full((3,), torch.nan)}]

    def loss():
        if module[0].bias.isnan().any():
            raise RuntimeError("stop")
        return (module[0].weight - before["0.weight"]).mean()

    assert evaluate_losses(module, states[:1], {"loss": loss}) == pytest.approx(1)
    with pytest.raises(RuntimeError, match="stop"):
        evaluate_losses(module, states, {"loss": loss})
    assert all(torch.equal(value, before[name]) for name, value in copy_weights(module).items())


def test_exact_spectral_norm_belongs_to_the_weights_wherever_they_are():
    torch.manual_seed(0)
    module = nn.Sequential(spectral_norm(nn.Linear(40, 30))).eval()
    use_exact_spectral_norm_(module)
    state = copy_weights(module)
    assert set(state) == {"0.bias", "0.parametrizations.weight.original"}
    module.load_state_dict({name: torch.randn(value.shape) for name, value in state.items()})
    largest = torch.linalg.matrix_norm(module[0].weight, 2).item()
    assert largest == pytest.approx(1, abs=1e-5)


def test_the_norm_is_a_part_of_the_curvature():
    """By differences of gradients of W / its norm, which torch's own takes for W / a constant."""
    torch.manual_seed(0)
    module = spectral_norm(nn.Linear(5, 4, bias=False).double())
    use_exact_spectral_norm_(module)
    x = torch.randn(20, 5).double()
    loss = lambda: module(x).square().mean()  # noqa: E731
    assert finite_difference_error(loss, module.parameters()) < 1e-5
    w = module.parametrizations["weight"].original.detach().requires_grad_()
    by_formula = (x @ (w / torch.linalg.svdvals(w)[0]).T).square().mean()
    exact = torch.autograd.grad(by_formula, w)[0].flatten()
    torch.testing.assert_close(hessian_product(loss, module.parameters())[1], exact)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3)])
@pytest.mark.parametrize("others", [(2.0, 1.0), (1.0, 1.0), (0.0, 0.0)])
def test_smaller_singular_values_may_be_equal(shape, others):
    module = spectral_norm(nn.Linear(*shape[::-1], bias=False).double())
    use_exact_spectral_norm_(module)
    w = module.parametrizations["weight"].original
    w.data = torch.zeros_like(w)
    w.data.diagonal().copy_(torch.tensor([3.0, *others]))
    x = torch.randn(9, shape[1], generator=torch.Generator().manual_seed(0)).double()
    assert finite_difference_error(lambda: module(x).tanh().square().sum(), [w]) < 1e-5


def test_a_repeated_largest_singular_value_has_a_norm_but_no_hessian():
    module = spectral_norm(nn.Linear(3, 3, bias=False).double())
    use_exact_spectral_norm_(module)
    w = module.parametrizations["weight"].original
    w.data = 3 * torch.eye(3).double()
    torch.testing.assert_close(module.weight, torch.eye(3).double())
    loss = lambda: module(torch.arange(3.0).double()).square().sum()  # noqa: E731
    assert finite_difference_error(loss, [w]) > 0.1


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    path = tmp_path_factory.mktemp("a") / "checkpoints/last.ckpt"
    write_small_digits(path)
    return load_module(path, "raw")


DIGITS = Digits().dataset("train")


@pytest.mark.parametrize("flip", [False, True])
def test_images_are_even_over_the_set_encoded_and_those_of_the_first_epoch(loaded, flip):
    dataset = replace(DIGITS, flip=flip, seed=3)
    x0, labels, index = fixed_batch(loaded.module, dataset, 9)
    assert index.tolist() == [i * len(DIGITS) // 9 for i in range(9)]
    images, expected, _ = dataset.__getitems__(index.tolist())  # an index is a key of epoch 0
    torch.testing.assert_close(x0, images / 127.5 - 1)
    assert torch.equal(labels, expected)


def test_losses_are_of_their_level_or_of_a_level_by_index(loaded):
    module = loaded.module
    losses = fixed_losses(module, DIGITS, 6, [0.3, 0.8])
    assert list(losses) == ["u = 0.3", "u = 0.8", "all"]
    x0, labels, index = fixed_batch(module, DIGITS, 6)
    noise = PerSampleNoise(index.tolist(), stream="validation").randn_like(x0)
    levels = (torch.full((6,), 0.3), torch.full((6,), 0.8), index_uniforms(index))
    for loss, u in zip(losses.values(), levels, strict=True):
        t = module.process.from_unit(u.double())
        expected = module.per_sample_loss(x0, labels, t, noise).mean()
        assert loss().item() == pytest.approx(expected.item())


@pytest.mark.parametrize(("num", "levels"), [(1438, [0.5]), (6, [0.5, 1.1])])
def test_numbers_out_of_range_are_refused(loaded, num, levels):
    rule = "--levels must be different" if num == 6 else f"--images must be 2 to 1437, got {num}"
    with pytest.raises(ValueError, match=rule):
        fixed_losses(loaded.module, DIGITS, num, levels)


def test_the_methods_that_a_module_lacks_are_named(loaded):
    class Plain(nn.Module):
        device = torch.device("cpu")
        codec = loaded.module.codec

    with pytest.raises(ValueError, match="Plain lacks per_sample_loss and process"):
        fixed_losses(Plain(), DIGITS, 6, [0.5])


def test_models_share_their_losses_whatever_their_times_but_not_with_other_shapes(loaded):
    other = loaded._replace(checkpoint=copy.deepcopy(loaded.checkpoint))
    times = {"class_path": "lit_diffusion.timesteps.LogNormal"}
    other.checkpoint["hyper_parameters"]["times"] = times
    check_same_losses(loaded, other)
    narrow, wide = (loaded._replace(module=network(width)) for width in (3, 5))
    with pytest.raises(ValueError, match=r"same architecture.*differ in 0\.bias and 5 more"):
        check_same_losses(narrow, wide)
