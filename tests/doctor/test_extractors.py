import pytest
import torch
from support.doctor import clean_folder

from lit_diffusion.doctor.extractors import check_extractors, extractor_of, with_features
from lit_diffusion.doctor.plan import Evaluation, Plan
from lit_diffusion.doctor.report import Level
from lit_diffusion.metrics.protocols import EmbeddedCNN, InceptionV3Compat


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    clean_folder(tmp_path, monkeypatch)


def test_a_network_that_ships_is_built():
    found = extractor_of(EmbeddedCNN("digits-cnn"))
    assert found.fault is None
    assert found.network(torch.zeros(2, 1, 8, 8, dtype=torch.uint8)).shape == (
        2,
        found.num_features,
    )
    assert list(check_extractors([found])) == []


def test_weights_that_are_not_there_are_a_problem_and_the_features_are_known_all_the_same():
    found = extractor_of(InceptionV3Compat())
    assert found.network is None
    assert found.num_features == 2048
    (finding,) = check_extractors([found])
    assert finding.level is Level.PROBLEM
    assert finding.text.startswith("inception-v3-compat: ")
    assert "fetch-weights" in finding.text


def test_each_evaluation_gets_the_features_of_its_own_extractor():
    plan = Plan(evaluations=(Evaluation(1000), Evaluation(50, num_real=360)))
    extractors = [extractor_of(InceptionV3Compat()), extractor_of(EmbeddedCNN("digits-cnn"))]
    first, second = with_features(plan, extractors).evaluations
    assert first.num_features == 2048
    assert second == Evaluation(50, num_real=360, num_features=extractors[1].num_features)
