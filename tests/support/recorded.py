"""A module that records the options of each update, and those that its training step sees."""

from functools import partial

import torch

from support.plain_module import PlainModule

ADAM = partial(torch.optim.Adam, betas=(0.8, 0.999))


def options_of(optimizer):
    """(lr, momentum) of each group."""
    return [
        (float(group["lr"]), group["betas"][0] if "betas" in group else group.get("momentum"))
        for group in optimizer.param_groups
    ]


class Recorded(PlainModule):
    """`used` and `visible` hold (steps completed, options of each group), in updates and batches.

    Hooks of an optimizer run in the order in which they were added, so those of a callback come
    after the one that is added here.
    """

    def __init__(self, optimizer=ADAM, schedule=None, lr=1e-2):
        super().__init__(lr, optimizer)
        self.schedule, self.used, self.visible = schedule, [], []

    def make_optimizer(self, params):
        optimizer = self.optimizer(params, lr=self.lr)
        optimizer.register_step_post_hook(
            lambda *_: self.used.append((self.global_step, options_of(optimizer)))
        )
        return optimizer

    def configure_optimizers(self):
        optimizer = self.make_optimizer([p for p in self.parameters() if p.requires_grad])
        if self.schedule is None:
            return optimizer
        schedule = {"scheduler": self.schedule(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.visible.append((self.global_step, options_of(self.trainer.optimizers[0])))
        return loss


class TwoRecorded(Recorded):
    """Steps its first optimizer in each batch and the second in every other one."""

    def __init__(self, optimizer=ADAM):
        super().__init__(optimizer)
        self.automatic_optimization = False
        self.used = {"often": [], "seldom": []}

    def make_optimizer(self, name, params):
        optimizer = self.optimizer(params, lr=self.lr)
        used = self.used[name]
        optimizer.register_step_post_hook(lambda *_: used.append(*options_of(optimizer)))
        return optimizer

    def configure_optimizers(self):
        return [
            self.make_optimizer("often", self.inner[:2].parameters()),
            self.make_optimizer("seldom", self.inner[2:].parameters()),
        ]

    def training_step(self, batch, batch_idx):
        often, seldom = self.optimizers()
        for optimizer in [often, seldom] if self.current_epoch % 2 == 0 else [often]:
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
