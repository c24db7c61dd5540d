import os

import pytest
import torch
from support.plain_module import PlainModule, make_trainer

from lit_diffusion.callbacks.parts.micro_batch import MicroBatch, index_of, storable


def seen(losses=None, batch=None, **outputs):
    made = MicroBatch(7, 1, 3, 2, batch, {}, {}, loss_is_bad=torch.tensor(True))
    if losses is not None:
        outputs = {"per_sample_loss": torch.tensor(losses), **outputs}
    made.see_outputs({"loss": torch.tensor(torch.nan), **outputs})
    return made


WHERE = "the loss is not finite at optimizer step 7 (batch 3, rank 2)"


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (seen(), ""),
        (seen([1.0, torch.nan]), ": sample 1"),
        (
            seen([1.0, torch.inf], u=torch.tensor([0.1, 1.0])),
            ": sample 1 at u = 1.000 (train/loss_q3)",
        ),
        (
            seen([torch.nan, 1.0], u=torch.tensor([0.26, 1.0]), t=torch.tensor([12.5, 3])),
            ": sample 0 at u = 0.260 (train/loss_q1), t = 12.5",
        ),
        (
            seen([1.0, torch.nan], (torch.zeros(2), torch.zeros(2), torch.tensor([70, 90]))),
            ": sample 1 (data index 90)",
        ),
        (seen([torch.nan] * 5), ": sample 0; sample 1; sample 2 and 2 more"),
        (seen([1.0, 1.0]), ""),
    ],
)
def test_what_a_module_tells_of_its_samples_is_told(batch, text):
    assert batch.describe(PlainModule()) == WHERE + text


def test_of_many_parameters_the_first_are_named_in_the_modules_order():
    module, batch = PlainModule(), seen()
    optimizer = torch.optim.SGD([*reversed([*module.inner.parameters()])], lr=1)
    for param in module.inner.parameters():
        param.grad = torch.full_like(param, torch.nan)
    module.inner[0].bias.grad = torch.ones(8)
    batch.loss_is_bad = torch.tensor(False)
    batch.see_gradients([optimizer])
    text = "of inner.0.weight; inner.1.weight; inner.1.bias and 2 more"
    assert batch.describe(module).endswith(f"rank 2): {text}")
    assert batch.flags().tolist() == [0.0, 1.0]


def test_weights_that_were_broken_before_are_told_apart_from_what_a_step_does():
    batch, module = seen([torch.nan]), PlainModule()
    torch.nn.init.constant_(module.inner[0].bias, torch.nan)
    text = batch.describe(module)
    assert text.startswith("the weights were not finite before the update at optimizer step")
    assert text.endswith("inner.0.bias")


def test_losses_of_a_batch_add_up():
    batch, module = seen(), PlainModule()
    batch.loss_is_bad = torch.tensor(False)
    for loss, bad in ((1.0, 0.0), (torch.inf, 1.0), (1.0, 1.0)):
        batch.see_loss(torch.tensor(loss), module, scaled=False)
        assert batch.flags().tolist() == [bad, 0.0]


@pytest.mark.parametrize(("value", "bad"), [(torch.inf, False), (torch.nan, True)])
def test_an_infinite_half_may_be_the_scalers_doing(value, bad):
    batch = MicroBatch(0, 0, 0, 0, None, {}, {})
    batch.see_loss(torch.tensor(value, dtype=torch.float16), PlainModule(), scaled=True)
    assert batch.loss_is_bad.item() is bad


def test_buffers_are_those_before_the_step():
    module = PlainModule()
    module._trainer = make_trainer("/tmp")
    batch = MicroBatch.begin(module.trainer, module, None, 0)
    before = module.inner[1].running_mean.clone()
    module.inner(torch.randn(5, 4))
    assert torch.equal(batch.buffers["inner.1.running_mean"], before)
    assert not torch.equal(module.inner[1].running_mean, before)


def test_only_the_part_of_a_tensor_that_a_batch_holds_is_stored():
    whole = torch.arange(1000.0)
    stored = storable({"x": [whole[:2]]})["x"][0]
    assert stored.untyped_storage().nbytes() == 8
    whole[0] = 5
    assert stored.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("value", [object(), os, {1: {object}}, torch.float32])
def test_other_things_than_tensors_and_builtins_are_refused(value):
    with pytest.raises(TypeError, match="only tensors and plain builtins can be stored, got "):
        storable(value)


@pytest.mark.parametrize(
    "batch",
    [
        torch.ones(2),
        [torch.ones(2), torch.ones(2)],
        (0, 0, torch.ones(3).long()),
        (0, 0, torch.ones(2)),
        (0, 0, [1, 2]),
    ],
)
def test_a_batch_of_another_kind_has_no_index(batch):
    assert index_of(batch, 2) is None
