"""Errors as they come out of Lightning and torch; whole commands are in test_run.py."""

from pathlib import Path

import pytest
import torch
from support.tiny_run import TinyNet

from lit_diffusion.cli.error_messages import explain, failed_class
from lit_diffusion.cli.run_folder import Request
from lit_diffusion.networks.unet import UNet

LAST = Path("runs/tiny/checkpoints/last.ckpt")


def request(checkpoint=LAST):
    return Request("fit", (), (), (), Path("runs/tiny"), checkpoint)


def raised(action):
    with pytest.raises(Exception) as info:  # noqa: PT011  of any kind
        action()
    return info.value


def test_weights_that_do_not_fit_are_another_architecture():
    error = raised(lambda: TinyNet(3).load_state_dict(TinyNet(4).state_dict()))
    text = str(explain(error, request(), untrained=True))
    assert text.startswith(f"{LAST} is of another architecture than the config: ")
    assert "size mismatch" in text


def failing_step():
    weights = [torch.nn.Parameter(torch.ones(1))]
    optimizer = torch.optim.Adam(weights)
    weights[0].grad = torch.ones(1)
    optimizer.state[weights[0]] = {"step": torch.tensor(1.0)}  # without its averages
    optimizer.step()


def test_an_optimizer_that_fails_at_once_has_a_state_that_does_not_fit():
    error = raised(failing_step)
    assert f"{LAST} cannot be restored" in str(explain(error, request(), untrained=True))
    assert explain(error, request(), untrained=False) is None  # an accident of training
    assert explain(error, request(None), untrained=True) is None


def test_a_setting_that_an_optimizer_refuses_is_said_to_be_one():
    error = raised(lambda: torch.optim.Adam([torch.ones(1)], lr=-1.0))
    text = str(explain(error, request(None), untrained=False))
    assert text == "model.optimizer or model.lr_scheduler: Invalid learning rate: -1.0"


def test_the_class_that_could_not_be_built_is_named_unless_it_tells():
    assert failed_class(raised(lambda: UNet(1, 1, 32, channel_mult=3))) == "UNet cannot be built: "
    assert failed_class(raised(lambda: UNet(1, 1, 30, norm_groups=8))) == ""
    assert failed_class(raised(lambda: int("x"))) == ""
