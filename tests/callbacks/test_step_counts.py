import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from support.plain_module import loader, make_trainer
from support.recorded import TwoRecorded

from lit_diffusion.callbacks.step_counts import StepCounts


class Counts(Callback):
    """Counts from where an earlier one left off, and remembers after each batch."""

    def __init__(self, start=(0, 0)):
        self.start, self.completed = start, []

    def on_train_start(self, trainer, pl_module):
        self.counts = StepCounts(trainer, list(self.start))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.counts.turn_to(optimizer)
        assert sum(self.counts.completed()) == trainer.global_step

    def on_train_batch_end(self, trainer, *args):
        self.completed.append(self.counts.completed())
        assert sum(self.completed[-1]) == trainer.global_step


def run(folder, module, counts, epochs=6, ckpt_path=None, **options):
    trainer = make_trainer(folder, counts, max_epochs=epochs, **options)
    trainer.fit(module, loader(8, 8), ckpt_path=ckpt_path)
    return trainer


BOTH_THEN_ONE = [[1, 1], [2, 1], [3, 2], [4, 2], [5, 3], [6, 3]]


def test_each_optimizer_has_its_own_count_and_their_sum_is_global_step(tmp_path):
    counts = Counts()
    run(tmp_path, TwoRecorded(), counts)
    assert counts.completed == BOTH_THEN_ONE
    assert counts.counts.since_start() == [6, 3]


def test_counts_go_on_after_a_resume(tmp_path):
    first, second = Counts(), Counts(start=(3, 2))
    run(tmp_path, TwoRecorded(), first, epochs=3).save_checkpoint(tmp_path / "c.ckpt")
    run(tmp_path, TwoRecorded(), second, ckpt_path=tmp_path / "c.ckpt")
    assert first.completed + second.completed == BOTH_THEN_ONE
    assert second.counts.since_start() == [3, 1]


def test_a_step_that_the_grad_scaler_skips_counts_as_it_does_in_global_step(tmp_path):
    class Overflows(TwoRecorded):
        def loss(self, batch):
            return super().loss(batch) * (torch.inf if self.current_epoch == 2 else 1)

    module, counts = Overflows(), Counts()
    scaler = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))
    run(tmp_path, module, counts, plugins=[scaler])
    assert counts.completed == BOTH_THEN_ONE
    assert [len(used) for used in module.used.values()] == [5, 2]
