import inspect
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from jsonargparse import _typehints
from support.commands import call

from lit_diffusion.config.short_names import short_names
from lit_diffusion.config.trust import trusting

DIGITS = Path(__file__).parents[2] / "configs" / "digits.yaml"


def test_each_name_is_that_of_its_class():
    for name, path in short_names().items():
        module, _, last = path.rpartition(".")
        assert last == name
        assert inspect.isclass(getattr(import_module(module), name))


def test_names_of_what_configs_are_made_of_are_among_them():
    assert short_names()["UNet"] == "lit_diffusion.networks.unet.UNet"
    assert short_names()["Digits"] == "lit_diffusion.data.digits.Digits"
    assert short_names()["DiffusionModule"] == "lit_diffusion.modules.diffusion.DiffusionModule"


def test_a_config_may_have_them(capsys, tmp_path):
    (tmp_path / "own.yaml").write_text(
        yaml.safe_dump({"model": {"init_args": {"parameterization": "Epsilon"}}})
    )
    command = f"fit --config {DIGITS} --config {tmp_path / 'own.yaml'} --model.times=LogNormal"
    assert call(f"{command} --trainer.callbacks+=MomentumDecay --data=Digits --print_config") == 0
    said = yaml.safe_load(capsys.readouterr().out)
    model = said["model"]["init_args"]
    assert model["parameterization"]["class_path"] == "lit_diffusion.parameterizations.Epsilon"
    assert model["times"]["class_path"] == "lit_diffusion.timesteps.LogNormal"
    assert said["trainer"]["callbacks"][-1]["class_path"] == "lit_diffusion.callbacks.MomentumDecay"
    assert said["data"]["class_path"] == "lit_diffusion.data.digits.Digits"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--model.parameterization=Velocty", "no class 'Velocty'. Did you mean 'Velocity'?"),
        ("configs/x.yaml", "configs/x.yaml stands alone; write --config configs/x.yaml."),
    ],
)
def test_mistakes_are_told(capsys, options, told):
    assert call(f"fit --config {DIGITS} {options}") == 2
    assert told in capsys.readouterr().err


def test_what_is_replaced_in_jsonargparse_is_there_and_is_put_back():
    before = _typehints.resolve_class_path_by_name
    assert list(inspect.signature(before).parameters) == ["cls", "name"]
    with trusting():
        assert _typehints.resolve_class_path_by_name is not before
    assert _typehints.resolve_class_path_by_name is before
