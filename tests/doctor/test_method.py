import pytest
import torch

from lit_diffusion.doctor.method import Labels, Noise, check_labels, check_noise
from lit_diffusion.doctor.report import Level
from lit_diffusion.processes import (
    ContinuousVP,
    CosineBetas,
    DiscreteVP,
    EDMProcess,
    LinearBetas,
    SigmoidBetas,
)


def end_of(process):
    alpha, sigma = process.alpha_sigma(torch.tensor([process.t_max], dtype=torch.float64))
    return Noise("process", alpha.item(), sigma.item())


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
    (finding,) = check_noise(end_of(process))
    assert finding.level is Level.OK
    assert "noise alone" in finding.text


@pytest.mark.parametrize(
    "process",
    [ContinuousVP(beta_d=9.0), EDMProcess(sigma_max=10.0)],
)
def test_a_process_that_leaves_some_of_the_image_is_warned_of(process):
    (finding,) = check_noise(end_of(process))
    assert finding.level is Level.WARNING
    assert "of the image is left there" in finding.text


def test_alpha_bar_is_told_where_there_is_one():
    assert "alpha-bar 4e-05" in check_noise(end_of(DiscreteVP(LinearBetas(1000))))[0].text
    assert "alpha-bar" not in check_noise(end_of(EDMProcess()))[0].text


def test_a_solver_that_starts_too_late_is_warned_of():
    (finding,) = check_noise(Noise("CosineBetas", 1e-4, 1.0, 0.1, 0.99))
    assert finding.level is Level.WARNING
    assert "let the solver's times begin noisier" in finding.text
    (finding,) = check_noise(Noise("CosineBetas", 1e-4, 1.0, 0.006, 1.0))
    assert finding.level is Level.OK


@pytest.mark.parametrize(
    ("labels", "level"),
    [
        (Labels(None), None),
        (Labels(10, 0.1), Level.OK),
        (Labels(10, 0.0), Level.NOTE),
        (Labels(10, 0.6), Level.WARNING),
        (Labels(10, 0.1, "ClassifierFree(scale=2.0)", True), Level.OK),
        (Labels(10, 0.2, "ClassifierFree(scale=2.0)", True), Level.OK),
        (Labels(10, 0.0, "ClassifierFree(scale=2.0)", True), Level.PROBLEM),
        (Labels(10, 0.01, "ClassifierFree(scale=2.0)", True), Level.WARNING),
        (Labels(10, 0.4, "ClassifierFree(scale=2.0)", True), Level.WARNING),
        (Labels(10, 0.0, "ClassifierScore(...)", False), Level.NOTE),
    ],
)
def test_guidance_needs_dropped_labels(labels, level):
    found = check_labels(labels)
    assert [finding.level for finding in found] == ([] if level is None else [level])
