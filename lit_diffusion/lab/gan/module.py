"""A LightningModule that trains GANs, which serve as baselines for diffusion models."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_diffusion.callbacks.trainer_state import completed_steps, eval_mode, is_built_from_config
from lit_diffusion.codecs import PixelCodec
from lit_diffusion.conditioning import ClassLabels, condition_for
from lit_diffusion.modules import checks
from lit_diffusion.modules.optimizers import with_fused_kernels
from lit_diffusion.protocols import NonFiniteSamples
from lit_diffusion.seeding import PerSampleNoise, run_seed, seed_step

Batch = tuple[Tensor, Tensor, Tensor]
"""Images uint8 (B, C, H, W), labels int64 (B,), and indices in the dataset int64 (B,)."""


class AdversarialLoss(Protocol):
    """Per-sample losses of the discriminator and the generator, computed from logits (B,)."""

    def discriminator_loss(self, real: Tensor, fake: Tensor, /) -> Tensor:
        """Return losses (B,) from the logits of real images and the logits of generated images."""

    def generator_loss(self, fake: Tensor, /) -> Tensor:
        """Return losses (B,) from the logits of generated images."""


@dataclass(frozen=True)
class NonSaturating:
    """Non-saturating GAN loss.

    The discriminator minimizes `-log D(x) - log(1 - D(G(z)))`, and the generator minimizes
    `-log D(G(z))`. Here x is a real image, G(z) is a generated image, and D(x) is the sigmoid of
    the discriminator's logit for x.

    Source: Goodfellow et al. 2014, section 3.

    Example:
        >>> NonSaturating().generator_loss(torch.zeros(1))
        tensor([0.6931])
    """

    def discriminator_loss(self, real: Tensor, fake: Tensor, /) -> Tensor:
        """Return losses (B,) from the logits of real images and the logits of generated images."""
        return F.softplus(-real) + F.softplus(fake)

    def generator_loss(self, fake: Tensor, /) -> Tensor:
        """Return losses (B,) from the logits of generated images."""
        return F.softplus(-fake)


@dataclass(frozen=True)
class Hinge:
    """Hinge loss for GANs.

    The discriminator minimizes `max(0, 1 - D(x)) + max(0, 1 + D(G(z)))`, and the generator
    minimizes `-D(G(z))`. Here x is a real image, G(z) is a generated image, and D(x) is the
    discriminator's logit for x.

    Source: Lim & Ye 2017 (Geometric GAN). BigGAN uses this loss.

    Example:
        >>> real, fake = torch.tensor([0.5]), torch.tensor([-2.0])
        >>> Hinge().discriminator_loss(real, fake)
        tensor([0.5000])
    """

    def discriminator_loss(self, real: Tensor, fake: Tensor, /) -> Tensor:
        """Return losses (B,) from the logits of real images and the logits of generated images."""
        return F.relu(1 - real) + F.relu(1 + fake)

    def generator_loss(self, fake: Tensor, /) -> Tensor:
        """Return losses (B,) from the logits of generated images."""
        return -fake


class GANModule(LightningModule):
    """Trains a generator against a discriminator.

    Each batch trains the discriminator for one optimizer step. After every `discriminator_steps`
    of these steps, the generator is trained for one optimizer step. Lightning's `global_step` and
    `max_steps` count the optimizer steps of both networks.

    The random numbers of a training step depend only on (seed, rank, step, micro-batch). The random
    numbers of a sample depend only on the sample's own seed. Samples are generated in eval mode, so
    batch norm uses its running statistics.

    With DDP, pass `--trainer.strategy=ddp_find_unused_parameters_true`, because the
    discriminator's steps do not use the generator's parameters.

    Args:
        generator: network that maps z (B, latent_dim) and labels (B,) to images in [-1, 1]. Its
            attribute `latent_dim` is the size of z.
        discriminator: network that maps images and labels to logits (B,).
        loss: losses of the two networks.
        generator_optimizer: function that creates an optimizer from the generator's parameters.
        discriminator_optimizer: function that creates an optimizer from the discriminator's
            parameters.
        image_shape: (C, H, W) of an image.
        num_classes: number of classes; None if the networks ignore labels.
        discriminator_steps: number of discriminator steps per generator step, >= 1.
        r1: factor of the R1 penalty, >= 0. The penalty is half of the squared norm of the gradient
            of the discriminator's logit with respect to a real image.

    Raises:
        ValueError: if `discriminator_steps` or `r1` is out of range, or if the number of
            classes of a network is not `num_classes`.

    Source: Goodfellow et al. 2014, algorithm 1. The R1 penalty is Eq. 9 of Mescheder et al. 2018.

    Example:
        >>> from lit_diffusion.lab.gan.dcgan import DCGANDiscriminator, DCGANGenerator
        >>> gan = GANModule(
        ...     generator=DCGANGenerator(32, 3, width=8),
        ...     discriminator=DCGANDiscriminator(32, 3, width=8),
        ...     loss=NonSaturating(),
        ...     generator_optimizer=torch.optim.Adam,
        ...     discriminator_optimizer=torch.optim.Adam,
        ...     image_shape=(3, 32, 32),
        ... )
        >>> gan.generate(range(2)).shape
        torch.Size([2, 3, 32, 32])
    """

    def __init__(
        self,
        generator: nn.Module,
        discriminator: nn.Module,
        loss: AdversarialLoss,
        generator_optimizer: OptimizerCallable,
        discriminator_optimizer: OptimizerCallable,
        *,
        image_shape: tuple[int, int, int],
        num_classes: int | None = None,
        discriminator_steps: int = 1,
        r1: float = 0.0,
    ) -> None:
        super().__init__()
        if is_built_from_config():
            self.save_hyperparameters(logger=False)
        self.automatic_optimization = False
        if discriminator_steps < 1 or not r1 >= 0:
            raise ValueError(
                f"discriminator_steps >= 1 and r1 >= 0 must hold, got {discriminator_steps} and "
                f"{r1}."
            )
        for network in (generator, discriminator):
            classes = getattr(network, "num_classes", None)
            if classes != num_classes:
                raise ValueError(
                    f"num_classes is {num_classes} in the module, but {classes} in "
                    f"{type(network).__name__}; change one of them."
                )
        self.generator, self.discriminator = generator, discriminator
        self._latent_dim = cast(int, generator.latent_dim)
        self.loss = loss
        self.codec = PixelCodec()
        self.image_shape = tuple(image_shape)
        self.num_classes = num_classes
        self.conditioning = None if num_classes is None else ClassLabels(num_classes)
        self.discriminator_steps, self.r1 = discriminator_steps, r1
        self._build_optimizers = generator_optimizer, discriminator_optimizer
        self._generator_loss: Tensor | float | None = None  # of this epoch's last generator step

    def setup(self, stage: str) -> None:
        """Raise ValueError if the networks do not fit the shape or the labels of the data."""
        data = getattr(self.trainer, "datamodule", None)
        checks.check_data(data, self.codec, self.image_shape, self.num_classes)

    def configure_optimizers(self) -> list[Optimizer]:
        """Return the generator's optimizer, then the discriminator's."""
        networks = self.generator, self.discriminator
        pairs = zip(self._build_optimizers, networks, strict=True)
        return [with_fused_kernels(build(network.parameters())) for build, network in pairs]

    def on_train_epoch_start(self) -> None:
        """Forget the generator's last loss, so that an epoch logs only its own losses."""
        self._generator_loss = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the generator's last loss, which is logged again until its next step."""
        if self._generator_loss is not None:
            checkpoint["generator_loss"] = float(self._generator_loss)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the generator's last loss."""
        loss = checkpoint.get("generator_loss")
        self._generator_loss = loss if isinstance(loss, float) else None

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Seed the random number generators from the run's seed, rank and step."""
        seed_step(run_seed() or 0, self.global_rank, self.global_step, batch_idx)

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        """Train the discriminator for one step, and the generator if its step is due."""
        generator_optimizer, discriminator_optimizer = cast(Sequence[Any], self.optimizers())
        real, labels, _ = self._unpack(batch)

        z = torch.randn(len(real), self._latent_dim, device=real.device, dtype=real.dtype)
        loss = self.discriminator_losses(real, labels, z).mean()
        self.log("train/discriminator_loss", loss.detach(), prog_bar=True)
        self._step(discriminator_optimizer, loss + self.r1_penalty(real, labels))

        if self.global_step % (self.discriminator_steps + 1) == self.discriminator_steps:
            z = torch.randn(len(real), self._latent_dim, device=real.device, dtype=real.dtype)
            loss = self.generator_losses(labels, z).mean()
            self._generator_loss = loss.detach()
            self._step(generator_optimizer, loss)
        if self._generator_loss is not None:
            self.log("train/generator_loss", self._generator_loss, prog_bar=True)

    def discriminator_losses(self, real: Tensor, labels: Tensor | None, z: Tensor) -> Tensor:
        """Return the discriminator's losses (B,).

        Args:
            real: real images (B, C, H, W) in [-1, 1].
            labels: labels (B,), the same for real and generated images; None if there are none.
            z: latents (B, latent_dim) of the generated images.
        """
        with torch.no_grad():
            fake = self.generator(z, labels)
        return self.loss.discriminator_loss(
            self.discriminator(real, labels), self.discriminator(fake, labels)
        )

    def generator_losses(self, labels: Tensor | None, z: Tensor) -> Tensor:
        """Return the generator's losses (B,) for images generated from z (B, latent_dim)."""
        return self.loss.generator_loss(self.discriminator(self.generator(z, labels), labels))

    def r1_penalty(self, real: Tensor, labels: Tensor | None) -> Tensor:
        """Return `r1 / 2 * mean(|d logit / d image|**2)` over real images (B, C, H, W)."""
        if self.r1 == 0:
            return real.new_zeros(())
        x = real.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.discriminator(x, labels).sum(), x, create_graph=True)
        return 0.5 * self.r1 * gradient.square().sum(dim=(1, 2, 3)).mean()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the losses of both networks, with a fixed z for each index of the dataset."""
        real, labels, index = self._unpack(batch)
        z = self.latents(index.tolist(), "validation").to(real)
        for name, losses in (
            ("discriminator", self.discriminator_losses(real, labels, z)),
            ("generator", self.generator_losses(labels, z)),
        ):
            mean = losses.double().mean()
            self.log(f"val/{name}_loss", mean, sync_dist=True, batch_size=len(real))

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Generate images uint8 (B, C, H, W) from a batch of seeds (B,) and labels (B,)."""
        seeds, labels = batch
        return self.generate(seeds.tolist(), labels)

    @torch.no_grad()
    def generate(self, seeds: Sequence[int], labels: Tensor | None = None) -> Tensor:
        """Generate uint8 images (N, C, H, W); image i depends only on `seeds[i]` and `labels[i]`.

        Args:
            seeds: one integer per image.
            labels: (N,) int64 in [0, num_classes). None uses the class `seed % num_classes`.

        Raises:
            ValueError: if labels are out of range. Networks that ignore labels accept only the
                label -1.
            NonFiniteSamples: if an image contains NaN or infinity.
        """
        labels = cast(Tensor | None, condition_for(seeds, labels, self.conditioning))
        labels = None if labels is None else labels.to(self.device)
        with eval_mode(self.generator):
            z = self.latents(seeds).to(self.device).to(self.dtype)
            x0 = self.generator(z, labels).float()
        is_finite = x0.isfinite().flatten(1).all(1).tolist()
        if not all(is_finite):
            bad = [seed for seed, finite in zip(seeds, is_finite, strict=True) if not finite]
            raise NonFiniteSamples(bad, completed_steps(self), "the generator")
        return self.codec.decode(x0)

    def latents(self, seeds: Sequence[int], stream: str = "sample") -> Tensor:
        """Draw standard normal z (N, latent_dim) on the CPU; row i depends only on `seeds[i]`."""
        return PerSampleNoise(seeds, stream).draw((self._latent_dim,))

    def sampling_record(self) -> dict[str, Any]:
        """Return how `generate` samples, for the records of evaluations."""
        return {"generator": type(self.generator).__name__, "batch_norm": "running statistics"}

    def _unpack(self, batch: Batch) -> tuple[Tensor, Tensor | None, Tensor]:
        checks.check_batch(batch, takes_condition=self.num_classes is not None)
        images, labels, index = batch
        real = self.codec.encode(images).to(self.dtype)
        return real, labels if self.num_classes else None, index

    def _step(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
