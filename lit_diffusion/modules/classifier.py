"""A LightningModule that learns to classify noisy images, for classifier guidance."""

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from lit_diffusion.callbacks.trainer_state import eval_mode, is_built_from_config, total_steps
from lit_diffusion.codecs import PixelCodec, encode_for_training
from lit_diffusion.conditioning import ClassLabels
from lit_diffusion.gaussian import expand_as
from lit_diffusion.guidance import LogProbGradient
from lit_diffusion.modules import checks
from lit_diffusion.modules.optimizers import optimizer_and_schedule
from lit_diffusion.protocols import Codec, Process, TimestepDistribution
from lit_diffusion.seeding import PerSampleNoise, index_uniforms, run_seed, seed_step
from lit_diffusion.timesteps import draw_uniforms

Batch = tuple[Tensor, Tensor, Tensor]
"""(images uint8 (B, C, H, W), labels int64 (B,), index int64 (B,))."""


class NoisyClassifier(LightningModule):
    """Classifier that learns `log p(label | x_t)` at all noise levels of a diffusion model.

    The network's input is `x_t / sqrt(alpha**2 + sigma**2)`. This input has about unit variance for
    every forward process, and equals x_t if `alpha**2 + sigma**2 = 1`.

    In a training step, random numbers depend only on the seed of the run, the rank, the number of
    the optimizer step, and the number of the micro-batch. For a validation image, they depend only
    on the image's index.

    Args:
        network: a network such as `EncoderUNet`, which maps the scaled x_t (B, C, H, W) and the
            noise_label (B,) to logits (B, num_classes).
        process: forward process of the diffusion model.
        times: distribution of training times, usually the same as in the diffusion model.
        optimizer: function that creates the optimizer from the parameters.
        image_shape: (C, H, W) of x0.
        num_classes: number of classes; labels are 0, ..., num_classes - 1.
        codec: codec of the diffusion model; None means PixelCodec.
        lr_scheduler: function that creates the learning-rate schedule from the optimizer. Lightning
            steps the schedule once per optimizer step. None keeps the learning rate constant.

    Source: Dhariwal & Nichol 2021 (guided-diffusion), section 4.

    Example:
        >>> from lit_diffusion.guidance import ClassifierScore
        >>> from lit_diffusion.networks.unet import EncoderUNet
        >>> from lit_diffusion.processes import CosineBetas, DiscreteVP
        >>> from lit_diffusion.timesteps import Uniform
        >>> classifier = NoisyClassifier(
        ...     network=EncoderUNet(8, in_channels=1, out_channels=10, model_channels=64),
        ...     process=DiscreteVP(CosineBetas(1000)),
        ...     times=Uniform(),
        ...     optimizer=torch.optim.Adam,
        ...     image_shape=(1, 8, 8),
        ...     num_classes=10,
        ... )
        >>> guidance = ClassifierScore(classifier.gradient(scale=2.0))
    """

    def __init__(
        self,
        network: nn.Module,
        process: Process,
        times: TimestepDistribution,
        optimizer: OptimizerCallable,
        *,
        image_shape: tuple[int, int, int],
        num_classes: int,
        codec: Codec | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        if is_built_from_config():
            self.save_hyperparameters(logger=False)
        self.network = network
        self.process = process
        self.times = times
        self.codec = PixelCodec() if codec is None else codec
        self.image_shape = tuple(image_shape)
        self.num_classes, self._has_checked_labels = num_classes, False
        self._make_optimizer = optimizer
        self._make_lr_scheduler = lr_scheduler

    def setup(self, stage: str) -> None:
        """Raise ValueError if the device is MPS, or if the data do not fit the module."""
        checks.check_device(self.device)
        data = getattr(self.trainer, "datamodule", None)
        checks.check_data(data, self.codec, self.image_shape, self.num_classes)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Seed the random generators for this step."""
        seed_step(run_seed() or 0, self.global_rank, self.global_step, batch_idx)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Compute the mean of `-log p(label | x_t)` over a batch, with random times and noise."""
        images, labels, _ = self._unpack_batch(batch)
        x0 = encode_for_training(self.codec, images)
        t = self.times.quantile(draw_uniforms(len(x0), device=self.device), self.process)
        loss = F.cross_entropy(self.logits(x0, t, torch.randn_like(x0)), labels)
        self.log("train/loss", loss.detach())
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log loss and accuracy. For each image, the noise level and the noise are fixed."""
        images, labels, index = self._unpack_batch(batch)
        x0 = self.codec.encode(images)
        t = self.times.quantile(index_uniforms(index), self.process)
        noise = PerSampleNoise(index.tolist(), stream="validation").randn_like(x0)
        logits = self.logits(x0, t, noise)
        accuracy = (logits.argmax(1) == labels).double().mean()
        self.log("val/accuracy", accuracy, prog_bar=True, sync_dist=True, batch_size=len(x0))
        loss = F.cross_entropy(logits, labels)
        self.log("val/loss", loss, sync_dist=True, batch_size=len(x0))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the checksum of the codec's weights, because a checkpoint does not contain them."""
        checkpoint.update(checks.codec_record(self.codec))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raise ValueError if the checkpoint comes from a run whose codec had different weights."""
        checks.check_codec(self.codec, checkpoint)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer and the learning-rate schedule."""
        return optimizer_and_schedule(
            self, self._make_optimizer, self._make_lr_scheduler, lambda: total_steps(self.trainer)
        )

    def logits(self, x0: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """Compute logits (B, num_classes) of `x_t = alpha * x0 + sigma * noise` at times t (B,)."""
        alpha, sigma = (expand_as(v, x0) for v in self.process.alpha_sigma(t))
        return self._logits_of(alpha * x0 + sigma * noise, t)

    def gradient(self, scale: float = 1.0) -> LogProbGradient:
        """Return a function for guidance that computes `scale * grad log p(label | x_t)`.

        The gradient is with respect to x_t. For the label -1, it is 0. The network runs in eval
        mode, without dropout.
        """

        @torch.inference_mode(mode=False)  # a Trainer validates in inference mode
        def gradient(x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
            x, t, labels = (part.detach().clone() for part in (x_t, t, labels))
            with torch.enable_grad(), eval_mode(self.network):
                log_p = self._logits_of(x.requires_grad_(), t).log_softmax(1)
                log_p = log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0]
                (gradient,) = torch.autograd.grad(log_p[labels >= 0].sum(), x)
            return scale * gradient

        return gradient

    def _unpack_batch(self, batch: Batch) -> Batch:
        """Validate a batch, and return its images, labels and index."""
        checks.check_batch(batch, takes_condition=True)
        images, labels, index = batch
        # On a GPU, labels are checked only once, because the check synchronizes with the device.
        if images.device.type == "cpu" or not self._has_checked_labels:
            ClassLabels(self.num_classes).check(labels, len(images))
            if bool((labels < 0).any()):
                raise ValueError(
                    f"{type(self).__name__} needs the class of each image, got labels of -1; use "
                    "data with classes."
                )
            self._has_checked_labels = True
        return images, labels, index

    def _logits_of(self, x_t: Tensor, t: Tensor) -> Tensor:
        scale = expand_as(torch.hypot(*self.process.alpha_sigma(t)), x_t)
        noise_label = self.process.noise_label(t).float()
        return self.network((x_t / scale).to(self.dtype), noise_label).float()
