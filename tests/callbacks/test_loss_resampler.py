import numpy as np
import pytest
import torch
from support.foreign_times import ForeignTimes, train_on_two_ranks
from support.golden import close, load, tensor
from support.memory_logger import MemoryLogger
from support.plain_module import assert_same_bits, loader, make_trainer
from support.spawn import spawn
from support.tiny_diffusion import images, tiny_diffusion

from lit_diffusion.callbacks import LossDensity, LossSecondMomentResampler
from lit_diffusion.callbacks.curriculum import importance_weight, total_variation
from lit_diffusion.callbacks.loss_resampler import LossHistory, update_history

CASE = "case05_resampler"


def after_rounds(n):
    history = LossHistory.empty(8, 10)
    for ts, losses in zip(load(CASE)["ts"][:n], load(CASE)["losses"][:n], strict=True):
        history = update_history(history, torch.from_numpy(ts), torch.from_numpy(losses))
    return history


def second_moment_density(history, uniform_prob=0.001):
    return LossSecondMomentResampler(*history.losses.shape, uniform_prob).density(history)


def oldest_first(history):
    """Rows as the reference stores them, of full histories."""
    size = history.losses.shape[1]
    columns = (history.counts[:, None] + torch.arange(size)) % size
    return history.losses.gather(1, columns)


# The pure functions


def test_histories_equal_improved_diffusion():
    assert torch.equal(oldest_first(after_rounds(25)), tensor(CASE, "history_after_25"))
    for n in (8, 10):
        counts = after_rounds(n).counts.clamp(max=10)
        assert torch.equal(counts, tensor(CASE, f"counts_after_{n}"))


def test_densities_equal_improved_diffusion():
    for n, key in ((0, "weights_empty"), *((n, f"weights_after_{n}_rounds") for n in (8, 10, 25))):
        close(second_moment_density(after_rounds(n)), tensor(CASE, key), rtol=1e-9, atol=1e-14)
    density = second_moment_density(after_rounds(25))
    close(density / density.sum(), tensor(CASE, "p_after_25"), rtol=1e-9, atol=1e-14)
    expected = tensor(CASE, "importance_after_25")
    close(importance_weight(density), expected, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("batch", [1, 3, 40])
def test_a_batch_counts_as_its_samples_one_after_the_other(batch):
    """Also where it holds more samples of one bin than are remembered."""
    rng = np.random.default_rng(0)
    history, rows = LossHistory.empty(5, 4), [[] for _ in range(5)]
    for _ in range(12):
        bins, losses = rng.integers(0, 5, batch) ** 2 // 4, rng.random(batch)
        for i, loss in zip(bins, losses, strict=True):
            rows[i] = [*rows[i], loss][-4:]
        history = update_history(history, torch.from_numpy(bins), torch.from_numpy(losses))
        for i, row in enumerate(rows):
            if len(row) == 4:
                assert oldest_first(history)[i].tolist() == row
            else:
                assert history.losses[i, : len(row)].tolist() == row
    assert history.counts.sum() == 12 * batch


def test_every_bin_keeps_its_share_of_uniform_draws():
    history = LossHistory(torch.tensor([[0.0], [0.0], [5.0]]).double(), torch.ones(3).long())
    close(second_moment_density(history, 0.3), torch.tensor([0.1, 0.1, 0.8]))
    close(second_moment_density(history, 1.0), torch.full((3,), 1 / 3).double())


@pytest.mark.parametrize("kind", [LossSecondMomentResampler, LossDensity])
def test_losses_that_are_all_0_leave_the_density_uniform(kind):
    history = LossHistory(torch.zeros(3, 2).double(), torch.tensor([2, 2, 2]))
    assert kind(3, history=2).density(history).tolist() == [1, 1, 1]


# On a module


class Returns(ForeignTimes):
    """Changes what its training step returns."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def training_step(self, batch, batch_idx):
        return self.change(super().training_step(batch, batch_idx))


def replay(drawn, num_bins, size):
    """Histories before each of the batches that a module drew."""
    histories = [LossHistory.empty(num_bins, size)]
    for u, losses in drawn:
        bins = (u.double() * num_bins).long()
        histories.append(update_history(histories[-1], bins, losses))
    return histories


@pytest.mark.parametrize(
    ("kind", "accumulate"),
    [(LossSecondMomentResampler, 1), (LossSecondMomentResampler, 3), (LossDensity, 1)],
)
def test_each_batch_is_drawn_by_the_losses_of_all_batches_before(tmp_path, kind, accumulate):
    module, sampler = ForeignTimes(), kind(3, history=4)
    options = {"max_epochs": 3, "accumulate_grad_batches": accumulate}
    make_trainer(tmp_path, sampler, **options).fit(module, loader())
    histories = replay(module.drawn, 3, 4)
    for (_, density, weight), history in zip(module.visible, histories, strict=False):
        assert torch.equal(density, sampler.density(history))
        if kind is LossDensity:
            assert weight is None
        else:
            assert torch.equal(weight, importance_weight(density))
    state = {"losses": histories[-1].losses, "seen": histories[-1].counts}
    assert_same_bits(sampler.state_dict(), state)
    visible = [density.tolist() for _, density, _ in module.visible]
    assert visible[0] == [1, 1, 1]
    assert len({tuple(row) for row in visible}) > 5  # it was full in time


def test_discrete_times_in_single_precision_fill_every_bin(tmp_path):
    """Some t / T are below t / T."""
    t = torch.arange(1000)

    def discrete(out):
        return {**out, "u": t.float() / 1000, "per_sample_loss": t.float()}

    resampler = LossSecondMomentResampler(1000, history=4)
    make_trainer(tmp_path, resampler, max_epochs=1).fit(Returns(discrete), loader(32, 8))
    assert torch.equal(resampler.state_dict()["losses"], t.double()[:, None].expand(-1, 4))


def test_losses_are_remembered_without_the_weight(tmp_path):
    """Else they would shrink where they are drawn often."""
    module, computed = tiny_diffusion(label_dropout=0.0), []
    per_sample_loss = module.per_sample_loss

    def recorded(*args):
        computed.append(per_sample_loss(*args))
        return computed[-1]

    module.per_sample_loss = recorded
    resampler = LossSecondMomentResampler(2, history=3)
    make_trainer(tmp_path, resampler, max_epochs=4).fit(module, images(16, 8))
    stored = set(resampler.state_dict()["losses"].flatten().float().tolist())
    assert stored <= set(torch.cat(computed).tolist())


def test_a_checkpoint_of_another_size_is_refused(tmp_path):
    trainer = make_trainer(tmp_path, LossSecondMomentResampler(4, history=3))
    trainer.fit(ForeignTimes(), loader())
    trainer.save_checkpoint(tmp_path / "c.ckpt")
    other = make_trainer(tmp_path, LossSecondMomentResampler(4, history=10), max_epochs=2)
    with pytest.raises(ValueError, match=r"4 bins with 3 losses each, .*history=10\); use the num"):
        other.fit(ForeignTimes(), loader(), ckpt_path=tmp_path / "c.ckpt")


def test_full_bins_and_the_distance_from_uniform_are_logged(tmp_path):
    module, logger = ForeignTimes(), MemoryLogger()
    options = {"logger": logger, "max_epochs": 2, "log_every_n_steps": 2}
    make_trainer(tmp_path, LossSecondMomentResampler(3, history=9), **options).fit(module, loader())
    before = replay(module.drawn, 3, 9)[1:8:2]
    full = [(history.counts >= 9).double().mean().item() for history in before]
    distances = [total_variation(second_moment_density(history)).item() for history in before]
    for name, values in {"full": full, "tv": distances}.items():
        logged = [value for _, value in logger.of(f"resampler/{name}")]
        assert logged == pytest.approx(values, abs=1e-6)
    assert full[0] < 1 == full[-1]
    assert distances[0] == 0 < distances[-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out: {"loss": out["loss"]}, r"shapes \{'loss': \(\)\}; add what is missing"),
        (lambda out: {**out, "u": out["u"][:, None]}, r"'u': \(8, 1\)"),
        (lambda out: {**out, "u": 1000 * out["u"]}, r"return u in \[0, 1\], got .*; divide"),
        (lambda out: None, r"returned tensors with the shapes \{\}"),
    ],
)
def test_a_module_that_does_not_tell_its_losses_is_refused_at_the_first_step(
    tmp_path, change, message
):
    module = Returns(change)
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, LossSecondMomentResampler(4)).fit(module, loader())
    assert len(module.drawn) == 1
    assert module.timestep_density is module.timestep_weight is None


def test_bad_arguments_are_refused():
    for wrong in ({"num_bins": 0}, {"history": 0}, {"uniform_prob": 0.0}, {"uniform_prob": 1.5}):
        with pytest.raises(ValueError, match="got"):
            LossSecondMomentResampler(**{"num_bins": 4, **wrong})


@pytest.mark.system
def test_ranks_share_the_losses_of_batches_of_different_sizes(tmp_path):
    resampler = LossSecondMomentResampler(2, history=3)
    zero, one = spawn(train_on_two_ranks, 2, tmp_path, resampler)
    assert zero["visible"] == one["visible"]
    assert zero["state"] == one["state"]
    pairs = zip(zero["drawn"], one["drawn"], strict=True)
    drawn = [[torch.tensor(a + b) for a, b in zip(*pair, strict=True)] for pair in pairs]
    assert [len(u) for u, _ in drawn] == [13] * 4
    histories = replay(drawn, 2, 3)
    for (_, density, _), history in zip(zero["visible"], histories, strict=False):
        assert density == second_moment_density(history).tolist()
    assert len({tuple(density) for _, density, _ in zero["visible"]}) > 1
    assert zero["state"] == [value.tolist() for value in histories[-1]]
    assert zero["weights"] == one["weights"]


def test_draws_are_in_proportion_to_mean_losses_once_all_are_known():
    callback = LossDensity(num_bins=3, history=2, uniform_prob=0.3)
    losses = torch.tensor([[1.0, 3.0], [0.0, 0.0], [5.0, 1.0]]).double()
    full = LossHistory(losses, torch.tensor([2, 2, 2]))
    expected = 0.7 * torch.tensor([2, 0, 3]).double() / 5 + 0.1
    torch.testing.assert_close(callback.density(full), expected)
    partly = LossHistory(losses, torch.tensor([2, 1, 2]))
    assert callback.density(partly).tolist() == [1, 1, 1]
