from dataclasses import replace

import pytest
import torch
from support.doctor import clean_folder

from lit_diffusion.callbacks import FIDEvaluation
from lit_diffusion.cli.doctor.fid import check_evaluation, extractor_of
from lit_diffusion.cli.doctor.plan import Plan
from lit_diffusion.cli.doctor.report import Level
from lit_diffusion.metrics.extractors import EmbeddedCNN, InceptionV3Compat

RUN = Plan(steps=2000, num_images=1437, held_out=360, batches_per_epoch=22, val_batches=500)


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


def test_weights_that_are_not_there_are_told_and_the_features_are_known_all_the_same():
    found = extractor_of(InceptionV3Compat())
    assert found.network is None
    assert found.num_features == 2048
    assert found.fault.startswith("no extractor weights at ")
    assert "fetch-weights" in found.fault


@pytest.mark.parametrize(
    ("arguments", "features", "changes", "level", "told"),
    [
        ({}, 64, {}, Level.OK, "4 times, every 500 steps, of 360 samples"),
        ({"every_n_steps": 2001}, 64, {}, Level.WARNING, "never measured"),
        ({"every_n_steps": 2001, "repeats_at_end": 2}, 64, {}, Level.WARNING, "but for the end"),
        ({"every_n_steps": 2000}, 64, {}, Level.OK, "1 time"),
        ({}, 64, {"val_batches": 5000}, Level.WARNING, "never measured"),
        ({}, 64, {"val_batches": 0}, Level.WARNING, "never measured"),
        ({"every_n_steps": 600}, 64, {}, Level.NOTE, "step 1,800; the final weights"),
        ({"every_n_steps": 600, "repeats_at_end": 1}, 64, {}, Level.OK, ""),
        ({"num_samples": 64}, 64, {}, Level.WARNING, "num_samples, 64, must exceed the 64"),
        ({"num_samples": 65}, 64, {}, Level.OK, ""),
        ({}, 64, {"held_out": 64}, Level.WARNING, "the real images, 64"),
        ({"reference": "train"}, 64, {"num_images": 63}, Level.WARNING, "the real images, 63"),
        ({"num_samples": 3}, None, {}, Level.OK, ""),
        ({}, 64, {"held_out": None}, Level.OK, ""),
    ],
)
def test_fid_that_is_not_measured_or_means_nothing(arguments, features, changes, level, told):
    evaluation = FIDEvaluation(**{"num_samples": 360, "extractor": "digits-cnn", **arguments})
    found = check_evaluation(evaluation, features, replace(RUN, **changes))
    assert max(finding.level for finding in found) is level
    assert told in " ".join(finding.text for finding in found)
