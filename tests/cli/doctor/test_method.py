import pytest

from lit_diffusion.cli.doctor.method import check_dropout, check_noise
from lit_diffusion.cli.doctor.report import Level
from lit_diffusion.guidance import ClassifierFree
from lit_diffusion.processes import (
    ContinuousVP,
    CosineBetas,
    DiscreteVP,
    EDMProcess,
    LinearBetas,
    SigmoidBetas,
)


def noise_of(process, start=None):
    return check_noise(process, process.t_max if start is None else start)


@pytest.mark.parametrize(
    "process",
    [
        DiscreteVP(LinearBetas(1000)),
        DiscreteVP(CosineBetas(4000)),
        DiscreteVP(SigmoidBetas(1000)),
        ContinuousVP(),
        EDMProcess(),
    ],
)
def test_the_usual_processes_end_in_noise_alone(process):
    finding = noise_of(process)
    assert finding.level is Level.OK
    assert "noise alone" in finding.text


@pytest.mark.parametrize(
    "process",
    [ContinuousVP(beta_d=9.0), EDMProcess(sigma_max=10.0)],
)
def test_a_process_that_leaves_some_of_the_image_is_warned_of(process):
    finding = noise_of(process)
    assert finding.level is Level.WARNING
    assert "of the image is left there" in finding.text


def test_alpha_bar_is_told_where_there_is_one():
    assert "alpha-bar 4e-05" in noise_of(DiscreteVP(LinearBetas(1000))).text
    assert "alpha-bar" not in noise_of(EDMProcess()).text


def test_a_solver_that_starts_too_late_is_warned_of():
    process = DiscreteVP(CosineBetas(1000))
    finding = noise_of(process, start=930)
    assert finding.level is Level.WARNING
    assert "let the solver's times begin noisier" in finding.text
    assert noise_of(process, start=995).level is Level.OK


@pytest.mark.parametrize(
    ("dropout", "guidance", "level"),
    [
        (0.1, None, Level.OK),
        (0.0, None, Level.NOTE),
        (0.6, None, Level.WARNING),
        (0.1, ClassifierFree(scale=2.0), Level.OK),
        (0.2, ClassifierFree(scale=2.0), Level.OK),
        (0.0, ClassifierFree(scale=2.0), Level.PROBLEM),
        (0.01, ClassifierFree(scale=2.0), Level.WARNING),
        (0.4, ClassifierFree(scale=2.0), Level.WARNING),
        (0.0, ClassifierFree(scale=1.0), Level.NOTE),
    ],
)
def test_guidance_needs_dropped_labels(dropout, guidance, level):
    assert check_dropout(dropout, guidance).level is level
