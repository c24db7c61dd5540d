"""A later config or option that names another class starts from that class's own defaults."""

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.cli import OptimizerCallable
from support.tiny_run import spec
from torch import nn

from lit_diffusion.config.trust import allow_class_paths
from lit_diffusion.grids import Karras, LogSNR
from lit_diffusion.networks.layers import TwoTimesMLP
from lit_diffusion.processes import DiscreteVP, LinearBetas
from lit_diffusion.protocols import Process, Solver
from lit_diffusion.solvers import DDIM, DPMSolverPP, Heun

SOLVER = spec("DPMSolverPP", steps=7, clip=False, times=spec("LogSNR", noisiest=-10.0))
KARRAS = spec("Karras", noisiest=-10.0)


def build(kind: object, specs: list, as_files: bool, folder) -> object:
    """Give specs of an argument one after the other, in config files or as options."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_argument("--x", type=kind)
    arguments = []
    for i, each in enumerate(specs):
        (folder / f"{i}.yaml").write_text(yaml.safe_dump({"x": each}))
        text = each if isinstance(each, str) else yaml.safe_dump(each)
        arguments.append(f"--config={folder / f'{i}.yaml'}" if as_files else f"--x={text}")
    with allow_class_paths():
        return parser.instantiate(parser.parse_args(arguments)).x


@pytest.mark.parametrize("as_files", [True, False], ids=["configs", "options"])
@pytest.mark.parametrize(
    ("kind", "specs", "expected"),
    [
        (Solver, [SOLVER, "Heun"], Heun()),
        (Solver, [SOLVER, spec("Heun", times=KARRAS)], Heun(times=Karras(noisiest=-10.0))),
        (Solver, [SOLVER, {"init_args": {"times": "Karras"}}], DPMSolverPP(7, Karras(), False)),
        (
            Solver,  # the same class by another path
            [SOLVER, spec("lit_diffusion.solvers.exponential.DPMSolverPP", steps=8)],
            DPMSolverPP(8, LogSNR(-10.0), False),
        ),
        (
            Process,
            [
                spec("DiscreteVP", betas=spec("CosineBetas", num_steps=9), rescale_labels=True),
                spec("DiscreteVP", betas="LinearBetas"),
            ],
            DiscreteVP(LinearBetas(), rescale_labels=True),
        ),
        (list[Solver], [[SOLVER, spec("DDIM", steps=3)], ["DDIM", "Heun"]], [DDIM(), Heun()]),
    ],
)
def test_only_arguments_of_the_same_class_stay(tmp_path, kind, specs, expected, as_files):
    assert repr(build(kind, specs, as_files, tmp_path)) == repr(expected)


def test_arguments_of_a_module_stay_for_its_subclass(tmp_path):
    names = (f"lit_diffusion.networks.layers.{name}" for name in ("TimestepMLP", "TwoTimesMLP"))
    specs = [spec(next(names), dim=8, width=4), spec(next(names), width=6)]
    module = build(nn.Module, specs, True, tmp_path)
    assert repr(module) == repr(TwoTimesMLP(dim=8, width=6))


def test_a_factory_is_a_class_too(tmp_path):
    specs = [spec("torch.optim.Adam", lr=0.5), "torch.optim.SGD"]
    factory = build(OptimizerCallable, specs, True, tmp_path)
    assert factory([torch.zeros(1)]).defaults["lr"] == 1e-3


def test_a_line_names_what_the_new_class_has_too(tmp_path, capsys):
    specs = [SOLVER, spec("Heun", steps=18), spec("Heun", steps=9), SOLVER | {"class_path": "DDIM"}]
    build(Solver, specs, True, tmp_path)
    assert [line.split(";")[0] for line in capsys.readouterr().err.splitlines()] == [
        "Heun replaces DPMSolverPP, whose clip=False, times=LogSNR(noisiest=-10.0) no longer apply"
    ]
