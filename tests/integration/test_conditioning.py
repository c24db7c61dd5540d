"""A condition of several parts, embeddings with a mask, through all that a module does with one."""

import pytest
import torch
from support.plain_module import make_trainer
from support.tiny_diffusion import tiny_diffusion
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lit_diffusion.callbacks import EMA, NoiseLevelLoss, SampleGrid
from lit_diffusion.guidance import ClassifierFree

LENGTH, WIDTH = 3, 6


class Captions:
    """(B, LENGTH, WIDTH) embeddings and a (B, LENGTH) mask of those that are there."""

    def drop(self, condition, drop):
        embeddings, mask = condition
        return embeddings, mask & ~drop[:, None]

    def null(self, like):
        embeddings, mask = like
        return embeddings, torch.zeros_like(mask)

    def for_seeds(self, seeds):
        rows = [caption(seed) for seed in seeds]
        return torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])

    def check(self, condition, num):
        if [len(part) for part in condition] != [num, num]:
            raise ValueError(f"captions must be {num} embeddings and masks.")


def caption(i):
    """Dark for even i, bright for odd, in one to three embeddings."""
    generator = torch.Generator().manual_seed(i)
    embeddings = torch.randn(LENGTH, WIDTH, generator=generator)
    embeddings[0, 0] = 2.0 if i % 2 else -2.0
    return embeddings, torch.arange(LENGTH) <= i % LENGTH


class Captioned(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        image = torch.full((1, 8, 8), 220 if i % 2 else 30, dtype=torch.uint8)
        return image, caption(i), i


class CrossAttention(nn.Module):
    """Pixels attend to the embeddings that the mask leaves, and to a learned one for none."""

    def __init__(self):
        super().__init__()
        self.none = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.enter, self.leave = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1)
        self.attend = nn.MultiheadAttention(8, 2, kdim=WIDTH, vdim=WIDTH, batch_first=True)
        self.present = []

    def forward(self, x, noise_label, condition):
        embeddings, mask = condition
        self.present.append(mask.any(1))
        tokens = torch.cat([self.none.expand(len(x), 1, WIDTH), embeddings], dim=1)
        left_out = torch.cat([torch.zeros_like(mask[:, :1]), ~mask], dim=1)
        h = self.enter(x) + noise_label.view(-1, 1, 1, 1) / 100
        pixels = h.flatten(2).transpose(1, 2)
        attended, _ = self.attend(pixels, tokens, tokens, key_padding_mask=left_out)
        return self.leave(torch.tanh(h + attended.transpose(1, 2).reshape(h.shape)))


def captioned(**changes):
    torch.manual_seed(0)
    arguments = {"conditioning": Captions(), "num_classes": None, "network": CrossAttention()}
    return tiny_diffusion(**{**arguments, **changes})


def loader():
    return DataLoader(Captioned(), batch_size=8)


def mean_loss(module, condition):
    x0 = module.codec.encode(torch.stack([Captioned()[i][0] for i in range(24)]))
    t = torch.arange(24).double() * 4
    noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return module.per_sample_loss(x0, condition, t, noise).mean().item()


def test_a_condition_of_two_parts_is_trained_dropped_validated_and_generated_from(tmp_path):
    module = captioned()
    callbacks = [NoiseLevelLoss(2), SampleGrid(2), EMA((0.9,))]
    trainer = make_trainer(tmp_path, *callbacks, max_epochs=20, check_val_every_n_epoch=20)
    trainer.fit(module, loader(), loader())
    assert trainer.callback_metrics["val/loss"].isfinite()
    assert trainer.callback_metrics["val/loss_u0.25"].isfinite()
    trained = torch.cat([mask for mask in module.network.present if len(mask) == 8])
    assert 0 < (~trained).sum() < len(trained)
    condition = Captions().for_seeds(range(24))
    assert mean_loss(module, condition) < 0.9 * mean_loss(module, Captions().null(condition))
    images = module.generate(range(4))
    assert images.shape == (4, 1, 8, 8)
    assert torch.equal(images, module.generate(range(4), Captions().for_seeds(range(4))))


@pytest.mark.gpu
def test_a_condition_of_two_parts_follows_its_module_to_another_device():
    images = captioned(guidance=ClassifierFree(2.0)).cuda().generate(range(3))
    assert images.shape == (3, 1, 8, 8)
