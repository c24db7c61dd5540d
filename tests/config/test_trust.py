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
from support.tiny_run import spec, write_config
from torch import nn

import lit_diffusion
from lit_diffusion.codecs import PixelCodec
from lit_diffusion.config.trust import TRUSTED, allow_class_paths, is_within, short_names
from lit_diffusion.solvers import DDIM


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A package whose import leaves a file behind, at the path that this is."""
    trace = tmp_path / "imported"
    (tmp_path / "stranger").mkdir()
    for name in ("__init__", "sub"):
        (tmp_path / "stranger" / f"{name}.py").write_text(
            f"open({str(trace)!r}, 'w').close()\n"
            "import torch\n"
            "class Net(torch.nn.Module): ...\n"
            "def call(text: str) -> bytes: ...\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    yield trace
    for name in ("stranger", "stranger.sub"):
        sys.modules.pop(name, None)


def parse(kind: object, value: str) -> object:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--x", type=kind)
    return parser.instantiate(parser.parse_args([f"--x={value}"])).x


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (nn.Module, "stranger.Net"),
        (list[nn.Module], '[{"class_path": "stranger.Net"}]'),
        (Callable[[str], bytes], "stranger.call"),
        (type[nn.Module], "stranger.Net"),
    ],
)
def test_a_class_path_of_a_stranger_is_refused_before_it_is_imported(stranger, kind, value):
    with allow_class_paths(["./stranger"]), pytest.raises(ArgumentError, match="not allowed"):
        parse(kind, value)  # a folder that is trusted is no package
    assert not stranger.exists()


@pytest.mark.parametrize(("trust", "name"), [("stranger", "Net"), ("stranger.sub", "call")])
def test_a_package_that_the_user_names_is_imported(stranger, trust, name):
    kind = nn.Module if name == "Net" else Callable[[str], bytes]
    with allow_class_paths([trust]):
        assert parse(kind, f"stranger.sub.{name}").__module__ == "stranger.sub"


def test_trust_ends_with_its_context_and_a_program_with_jsonargparse_is_left_alone(stranger):
    with allow_class_paths(["stranger"]):
        pass
    with allow_class_paths(), pytest.raises(ArgumentError, match="not allowed"):
        parse(nn.Module, "stranger.Net")
    assert not stranger.exists()
    assert type(parse(nn.Module, "stranger.Net")).__name__ == "Net"


@pytest.mark.parametrize(
    "path",
    [
        "torch.os.system",
        "torch.hub.load",
        "torch.nn.functional.gelu",
        "lit_diffusion.checkpoints.loading.load",
        "lightning.pytorch.cli.LightningCLI",
        "os.system",
    ],
)
def test_what_could_run_code_is_refused_in_packages_that_we_build_on(path):
    with allow_class_paths(), pytest.raises(ArgumentError, match="not allowed"):
        parse(Callable, path)


@pytest.mark.parametrize("kind", [nn.Module, Callable[[Iterable], nn.Module], Any])
def test_a_function_that_returns_the_wanted_type_runs_nothing(tmp_path, kind):
    path = "torch.fx.graph_module.reduce_graph_module"
    trace = tmp_path / "ran"
    evil = f"open({str(trace)!r}, 'w').close()\n"
    value = json.dumps(spec(path, body={"_code": "forward = print"}, import_block=evil))
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
    def functions():
        return (
            _util.canonical_import_paths,
            _typehints.resolve_class_path_by_name,
            _typehints.discard_init_args_on_class_path_change,
        )

    before = functions()
    assert before[0](PixelCodec) == {"lit_diffusion.codecs.PixelCodec"}
    assert "canonical_import_paths(obj)" in inspect.getsource(_util.import_object)
    with allow_class_paths():
        assert not set(before) & set(functions())
    assert functions() == before


DIGITS = Path(__file__).parents[2] / "configs" / "digits.yaml"


def test_each_name_is_that_of_its_class():
    for name, path in short_names().items():
        module, _, last = path.rpartition(".")
        assert last == name
        assert inspect.isclass(getattr(import_module(module), name))


def test_a_config_may_have_them(capsys, tmp_path):
    path = write_config(
        {"model": {"init_args": {"parameterization": "Epsilon"}}}, tmp_path / "a.yaml"
    )
    command = f"fit --config {DIGITS} --config {path} --model.times=LogNormal"
    assert call(f"{command} --trainer.callbacks+=MomentumDecay --data=Digits --print_config") == 0
    config = yaml.safe_load(capsys.readouterr().out)
    model = config["model"]["init_args"]
    objects = model["parameterization"], model["times"], config["trainer"]["callbacks"][-1]
    assert [each["class_path"] for each in (*objects, config["data"])] == [
        "lit_diffusion.parameterizations.Epsilon",
        "lit_diffusion.timesteps.LogNormal",
        "lit_diffusion.callbacks.MomentumDecay",
        "lit_diffusion.Digits",  # the shortest path, as jsonargparse writes it
    ]


def test_a_misspelt_name_is_answered_with_the_nearest(folder, capsys):
    assert call(f"fit --config {DIGITS} --model.parameterization=Velocty") == 2
    assert "Did you mean 'Velocity'?" in capsys.readouterr().err
