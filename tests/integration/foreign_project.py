import torch
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_diffusion.callbacks import EMA, FIDEvaluation, SampleGrid, StepSeed


class MyFlow(LightningModule):
    """A flow-matching model that knows nothing of lit-diffusion."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(65, 512), nn.SiLU(), nn.Linear(512, 512), nn.SiLU(), nn.Linear(512, 64)]
        self.network = nn.Sequential(*layers)

    def velocity(self, x, t):
        return self.network(torch.cat([x, t.expand(len(x), 1)], dim=1))

    def loss(self, images):
        x0 = images.flatten(1) / 127.5 - 1
        noise, t = torch.randn_like(x0), torch.rand(len(x0), 1, device=self.device)
        return (self.velocity(x0 + t * (noise - x0), t) - (noise - x0)).pow(2).mean()

    def training_step(self, batch, batch_idx):
        return self.loss(batch[0])

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch[0]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def generate(self, seeds, labels=None):  # SampleGrid and FIDEvaluation need only this method
        noise = [torch.randn(64, generator=torch.Generator().manual_seed(s)) for s in seeds]
        x = torch.stack(noise).to(self.device)
        for t in torch.linspace(1, 0.05, 20, device=self.device):
            x = x - self.velocity(x, t) / 20
        return (127.5 * x + 127.5).round().clamp(0, 255).to(torch.uint8).view(-1, 1, 8, 8)


def main(folder: str = "runs/foreign", max_epochs: int = 100) -> Trainer:
    pixels = torch.from_numpy(load_digits().images)[:, None] * 255 / 16
    train, held_out = pixels.round().to(torch.uint8).split([1437, 360])
    callbacks = [
        StepSeed(seed=0),
        EMA(decays=(0.99,)),
        SampleGrid(num=64),
        FIDEvaluation(360, extractor="digits-cnn"),
    ]
    trainer = Trainer(
        default_root_dir=folder,
        max_epochs=max_epochs,
        check_val_every_n_epoch=max_epochs,
        callbacks=callbacks,
    )
    trainer.fit(
        MyFlow(),
        DataLoader(TensorDataset(train), batch_size=128, shuffle=True),
        DataLoader(TensorDataset(held_out), batch_size=128),
    )
    return trainer


if __name__ == "__main__":
    main()
