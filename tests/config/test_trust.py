import contextlib
import inspect
import json
import pkgutil
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentError, ArgumentParser, _typehints, _util
from lightning.pytorch import Callback
from support.commands import call
from torch import nn

import lit_diffusion
from lit_diffusion.codecs import PixelCodec
from lit_diffusion.config.trust import TRUSTED, allow_class_paths, is_within, short_names
from lit_diffusion.solvers import DDIM


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A module whose import leaves a file behind."""
    traces = tmp_path / "imported"
    for name in ("stranger_module", "stranger_package/__init__", "stranger_package/sub"):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            f"open({str(traces)!r}, 'w').close()\n"
            "import torch\n"
            "class Net(torch.nn.Module): ...\n"
            "def call(text: str) -> bytes: ...\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    yield traces
    for name in [name for name in sys.modules if name.startswith("stranger_")]:
        del sys.modules[name]


def parse(kind: object, value: str) -> object:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--x", type=kind)
    return parser.instantiate(parser.parse_args([f"--x={value}"])).x


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (nn.Module, "stranger_module.Net"),
        (nn.Module, '{"class_path": "stranger_module.Net", "init_args": {}}'),
        (nn.Module | None, "stranger_package.sub.Net"),
        (list[nn.Module], '[{"class_path": "stranger_module.Net"}]'),
        (Callable[[str], bytes], "stranger_module.call"),
        (Callable, "stranger_module.call"),
        (type[nn.Module], "stranger_module.Net"),
    ],
)
def test_a_class_path_of_a_stranger_is_refused_before_it_is_imported(stranger, kind, value):
    trusted_folder = "./stranger_module"
    with allow_class_paths([trusted_folder]), pytest.raises(ArgumentError, match="not allowed"):
        parse(kind, value)
    assert not stranger.exists()


@pytest.mark.parametrize(
    ("trust", "value"),
    [
        ("stranger_module", "stranger_module.Net"),
        ("stranger_module", "stranger_module.call"),
        ("stranger_package", "stranger_package.sub.Net"),
        ("stranger_package.sub", "stranger_package.sub.Net"),
    ],
)
def test_a_package_that_the_user_names_is_imported(stranger, trust, value):
    with allow_class_paths([trust]):
        kind = nn.Module if value.endswith("Net") else Callable[[str], bytes]
        assert parse(kind, value).__module__ == value.rpartition(".")[0]


def test_trust_ends_with_its_context_and_a_program_with_jsonargparse_is_left_alone(stranger):
    with allow_class_paths(["stranger_module"]):
        pass
    with allow_class_paths(), pytest.raises(ArgumentError, match="not allowed"):
        parse(nn.Module, "stranger_module.Net")
    assert not stranger.exists()
    assert type(parse(nn.Module, "stranger_module.Net")).__name__ == "Net"


@pytest.mark.parametrize(
    "path",
    [
        "torch.os.system",
        "torch.hub.load",
        "torch.nn.functional.gelu",
        "torch.nn.utils.fusion.fuse_linear_bn_eval",
        "lit_diffusion.checkpoints.loading.load",
        "lightning.pytorch.cli.LightningCLI",
        "os.system",
    ],
)
def test_what_could_run_code_is_refused_in_packages_that_we_build_on(path):
    with allow_class_paths(), pytest.raises(ArgumentError, match="not allowed"):
        parse(Callable, path)


def returning(path: str, **init_args) -> str:
    return json.dumps({"class_path": path, "init_args": init_args})


@pytest.mark.parametrize("kind", [nn.Module, Callable[[Iterable], nn.Module], Any])
def test_a_function_that_returns_the_wanted_type_runs_nothing(tmp_path, kind):
    path = "torch.fx.graph_module.reduce_graph_module"
    trace = tmp_path / "ran"
    evil = f"open({str(trace)!r}, 'w').close()\n"
    value = returning(path, body={"_code": "forward = print"}, import_block=evil)
    with allow_class_paths(), contextlib.suppress(ArgumentError):
        assert isinstance(parse(kind, value), dict)  # text for Any, which builds nothing
        assert kind is Any
    assert not trace.exists()


def test_no_network_of_ours_has_the_constructor_of_another_package():
    """It may unpickle a file, or download one, that a checkpoint names as its argument."""
    for module in pkgutil.walk_packages(lit_diffusion.__path__, "lit_diffusion."):
        for name, network in vars(import_module(module.name)).items():
            if isinstance(network, type) and issubclass(network, nn.Module):
                is_ours = network.__module__.startswith("lit_diffusion.")
                assert not is_ours or is_within(network.__init__.__module__, TRUSTED), name


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (nn.Module, "torch.nn.SiLU"),
        (nn.Module, "torchvision.ops.Permute"),
        (Callback, "lightning.pytorch.callbacks.EarlyStopping"),
        (DDIM, "lit_diffusion.solvers.DDIM"),
    ],
)
def test_class_paths_of_the_packages_that_we_build_on_are_imported(kind, path):
    with allow_class_paths():
        assert issubclass(parse(type[kind], path), kind)


def test_what_is_replaced_in_jsonargparse_is_there_and_is_put_back():
    paths, resolve = _util.canonical_import_paths, _typehints.resolve_class_path_by_name
    discard = _typehints.discard_init_args_on_class_path_change
    assert list(inspect.signature(paths).parameters) == ["obj"]
    assert paths(PixelCodec) == {"lit_diffusion.codecs.PixelCodec"}
    assert "canonical_import_paths(obj)" in inspect.getsource(_util.import_object)
    assert list(inspect.signature(resolve).parameters) == ["cls", "name"]
    with allow_class_paths():
        assert _util.canonical_import_paths is not paths
        assert _typehints.resolve_class_path_by_name is not resolve
        assert _typehints.discard_init_args_on_class_path_change is not discard
    assert _util.canonical_import_paths is paths
    assert _typehints.resolve_class_path_by_name is resolve
    assert _typehints.discard_init_args_on_class_path_change is discard


DIGITS = Path(__file__).parents[2] / "configs" / "digits.yaml"


def test_each_name_is_that_of_its_class():
    for name, path in short_names().items():
        module, _, last = path.rpartition(".")
        assert last == name
        assert inspect.isclass(getattr(import_module(module), name))


def test_a_config_may_have_them(capsys, tmp_path):
    (tmp_path / "own.yaml").write_text(
        yaml.safe_dump({"model": {"init_args": {"parameterization": "Epsilon"}}})
    )
    command = f"fit --config {DIGITS} --config {tmp_path / 'own.yaml'} --model.times=LogNormal"
    assert call(f"{command} --trainer.callbacks+=MomentumDecay --data=Digits --print_config") == 0
    config = yaml.safe_load(capsys.readouterr().out)
    model = config["model"]["init_args"]
    assert model["parameterization"]["class_path"] == "lit_diffusion.parameterizations.Epsilon"
    assert model["times"]["class_path"] == "lit_diffusion.timesteps.LogNormal"
    callback = config["trainer"]["callbacks"][-1]["class_path"]
    assert callback == "lit_diffusion.callbacks.MomentumDecay"
    assert config["data"]["class_path"] == "lit_diffusion.data.digits.Digits"


def test_a_misspelt_name_is_answered_with_the_nearest(folder, capsys):
    for wrong, name in (
        ("parameterization=Velocty", "Velocity"),
        ("loss.weighting=MINSNR", "MinSNR"),
    ):
        assert call(f"fit --config {DIGITS} --model.{wrong}") == 2
        assert f"Did you mean '{name}'?" in capsys.readouterr().err
