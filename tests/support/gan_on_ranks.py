"""A fit of a small DCGAN on gloo ranks, each of which tells its weights and its images."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from lit_diffusion.callbacks import EMA
from lit_diffusion.lab.gan.dcgan import DCGANDiscriminator, DCGANGenerator
from lit_diffusion.lab.gan.module import GANModule, NonSaturating
from support.plain_module import make_trainer
from support.tiny_diffusion import images


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-3, betas=(0.5, 0.999))


class Watched(GANModule):
    seen: list[int]

    def on_train_start(self):
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen += batch[2].tolist()
        return super().training_step(batch, batch_idx)


def main(folder: Path) -> None:
    torch.manual_seed(int(os.environ["RANK"]))  # DDP gives all ranks the weights of the first
    generator = DCGANGenerator(8, 1, latent_dim=6, width=8, smallest=2)
    discriminator = DCGANDiscriminator(8, 1, width=8, smallest=2)
    module = Watched(
        generator, discriminator, NonSaturating(), adam, adam, image_shape=(1, 8, 8), r1=0.1
    )
    strategy = DDPStrategy(process_group_backend="gloo", find_unused_parameters=True)
    ema = EMA((0.9,), prefix="generator", buffers=True)
    options = {"strategy": strategy, "devices": int(os.environ["WORLD_SIZE"]), "max_steps": 8}
    trainer = make_trainer(folder, ema, max_epochs=-1, **options)
    trainer.fit(module, images(32, 4))
    found = {name: p.double().sum().item() for name, p in module.named_parameters()}
    told = {"weights": found, "seen": module.seen, "step": trainer.global_step}
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(told))
    dist.barrier()
    os._exit(0)  # as gloo aborts where the process group is taken apart


if __name__ == "__main__":
    main(Path(sys.argv[1]))
