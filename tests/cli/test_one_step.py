import pytest
import torch
from support.plain_module import PlainModule, loader, make_trainer

from lit_diffusion.callbacks import FiniteUpdates
from lit_diffusion.checkpoints.reading import read_checkpoint
from lit_diffusion.cli.one_step import OneBatch, OneStep, trainer_of


class Place(PlainModule):
    """Knows where in a run it is; its loss is not finite in the batch `bad` of the second epoch."""

    def __init__(self, bad=2):
        super().__init__()
        self.bad, self.places = bad, []

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] + 1]

    def training_step(self, batch, batch_idx):
        place = (self.global_step, self.current_epoch, batch_idx, self.global_rank)
        self.places.append((*place, self.inner[1].running_mean.clone(), batch[0].sum()))
        bad = self.current_epoch == 1 and batch_idx == self.bad
        return super().training_step(batch, batch_idx) * (torch.nan if bad else 1)


@pytest.fixture
def content(tmp_path):
    module = Place()
    with pytest.raises(FloatingPointError):
        make_trainer(tmp_path, FiniteUpdates(), max_epochs=2).fit(module, loader())
    return module, read_checkpoint(tmp_path / "non-finite-rank0.ckpt")


def again(content):
    module, step = Place(), OneStep(content, "this")
    trainer = trainer_of(content["replay"], torch.device("cpu"), step)
    trainer.fit(module, OneBatch(trainer, content["replay"]))
    return module, step


def test_the_module_finds_itself_where_it_was(content):
    then, content = content
    content["replay"]["rank"] = 3
    now, step = again(content)
    assert now.places[0][:4] == (6, 1, 2, 3)
    assert torch.equal(now.places[0][4], then.places[-1][4])  # a buffer before the step
    assert torch.equal(now.places[0][5], then.places[-1][5])  # a batch that was changed once
    assert len(now.places) == 1
    assert torch.isnan(step.outputs["loss"])
    assert step.parameters[0] == "inner.0.weight"


def test_nothing_is_updated(content):
    _, content = content
    module, _ = again(content)
    for name, param in module.named_parameters():
        assert torch.equal(param, content["state_dict"][name])


def test_parts_that_were_in_eval_mode_are_so_again(content):
    _, content = content
    content["replay"]["evaluating"] = ["inner._orig_mod.1"]  # as torch.compile names it
    module, _ = again(content)
    assert not module.inner[1].training
    assert module.inner[0].training
