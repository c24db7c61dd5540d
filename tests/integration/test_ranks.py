"""1, 2 and 3 gloo processes: they draw different numbers, agree, and count each image once."""

from itertools import combinations

import numpy as np
import pytest
from scipy.stats import chi2_contingency, chisquare, norm
from support.ranks import BATCH, INSTEAD, STEPS, TOGETHER, VALUES, resume, score, train
from support.spawn import spawn

from lit_diffusion.cli.loggers import read_evaluations

BINS = 20
RARE = 1e-3  # draws are functions of fixed seeds: what passes once passes always


def uniformity(u):
    """p of so uneven a spread of all ranks' draws together; u (ranks, draws) in [0, 1)."""
    counts = np.histogram(u, bins=BINS, range=(0, 1))[0]
    return chisquare(counts).pvalue


def independence(one, other, bins=6):
    """p of so close a relation of two ranks' draws of the same place in the same step."""
    table = np.histogram2d(one, other, bins=bins, range=((0, 1), (0, 1)))[0]
    return chi2_contingency(table).pvalue


def assert_draws_are_independent(u):
    assert uniformity(u) > RARE
    for one, other in combinations(u, 2):
        assert independence(one, other) > RARE
    assert len(np.unique(u)) == u.size  # nor in other steps or places


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "draws"), [(2, "independent"), (3, "stratified")])
def test_ranks_draw_independent_times_and_noise_and_end_alike(tmp_path, ranks, draws):
    results = spawn(train, ranks, tmp_path, draws)
    u = np.array([rank["u"] for rank in results]).reshape(ranks, -1)
    noise = np.array([rank["noise"] for rank in results]).reshape(ranks, -1)
    assert u.shape[1] == STEPS * BATCH
    assert noise.shape[1] == STEPS * BATCH * VALUES
    assert_draws_are_independent(u)
    assert uniformity(norm.cdf(noise)) > RARE
    for one, other in combinations(norm.cdf(noise), 2):
        assert independence(one, other) > RARE
    steps = noise.reshape(ranks * STEPS, -1)
    assert len(np.unique(steps, axis=0)) == len(steps)
    assert all(rank["ends"] == results[0]["ends"] for rank in results)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num", "batch_size", "extractor", "rounding"),
    [
        (31, 4, "pixels", 1e-12),
        (7, 2, "digits-cnn", 1e-5),  # whose float32 features depend on the batch they are in
    ],
)
def test_scores_do_not_depend_on_the_number_of_ranks(
    tmp_path, num, batch_size, extractor, rounding
):
    """Each image and each sample is counted once, whatever the remainder."""
    scores = {}
    for ranks in (1, 2, 3):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        results = spawn(score, ranks, folder, num, batch_size, extractor)
        assert sorted(index for rank in results for index in rank["counted"]) == list(range(num))
        assert [rank["seeds"] for rank in results] == [
            list(range(rank, num, ranks)) for rank in range(ranks)
        ]
        assert len({rank["loss"] for rank in results}) == 1
        (record,) = read_evaluations(folder / "evaluations.jsonl")
        assert (record["num_fake"], record["num_real"]) == (num, num)
        scores[ranks] = (results[0]["loss"], record["value"], record["floor"])
    loss, *fids = scores.pop(1)
    for other_loss, *other_fids in scores.values():
        assert other_loss == pytest.approx(loss, rel=1e-14)
        assert other_fids == pytest.approx(fids, rel=rounding)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("callbacks", "step"), [(TOGETHER, 3), (INSTEAD, 8)], ids=["curriculum-3", "resampler-8"]
)
def test_all_callbacks_together_resume_on_three_ranks(tmp_path, callbacks, step):
    results = spawn(resume, 3, tmp_path, callbacks, step)
    assert len(set(results)) == 1
