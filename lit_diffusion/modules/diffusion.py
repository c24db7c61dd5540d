"""The LightningModule: network + process + parameterization + loss + solver, all injected."""

from collections.abc import Sequence
from math import nan
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT, OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import MeanMetric

from lit_diffusion.callbacks.trainer_state import (
    completed_steps,
    eval_mode,
    is_built_from_config,
    loss_scale,
    should_log,
)
from lit_diffusion.codecs import PixelCodec, drawn
from lit_diffusion.conditioning import ClassLabels, condition_for
from lit_diffusion.distributed import total_norm
from lit_diffusion.gaussian import expand_as
from lit_diffusion.modules import checks
from lit_diffusion.modules.optimizers import optimizer_and_schedule
from lit_diffusion.modules.watches import SampleWatch
from lit_diffusion.protocols import (
    Codec,
    Condition,
    Conditioning,
    Denoise,
    Denoised,
    Draws,
    Guidance,
    Loss,
    Parameterization,
    Prediction,
    Process,
    Quantile,
    Solver,
    Watch,
)
from lit_diffusion.seeding import PerSampleNoise, index_uniforms, run_seed, seed_step
from lit_diffusion.solvers.editing import Begun, repainting, shortened
from lit_diffusion.timesteps import bin_of, draw_uniforms

Batch = tuple[Tensor, Any, Tensor]
"""images uint8 (B, C, H, W); their condition, labels int64 (B,) for example; index int64 (B,)."""


class DiffusionModule(LightningModule):
    """Trains a denoising network, measures its loss on fixed noise, and samples from it.

    Randomness of a training step is a function of (seed, rank, step, micro-batch), with the seed of
    `seed_everything` (0 without); that of a validation image a function of its index; that of a
    sample a function of its seed.

    A loss that is not finite stops no run by itself: `callbacks.FiniteUpdates` does, which `fit` of
    the command line adds, as does Trainer(detect_anomaly=True).

    Args:
        network: fits `protocols.Network`.
        process: forward process.
        parameterization: what the network outputs.
        loss: training objective.
        times: distribution of the training times.
        solver: generator used by `generate`.
        optimizer: called with the parameters that require a gradient.
        image_shape: (C, H, W) of what is diffused.
        num_classes: short for ClassLabels(num_classes) as the conditioning.
        label_dropout: share of training samples that lose their condition, for classifier-free
            guidance; 0.1 to 0.2 is usual.
        codec: between images and what is diffused; None is PixelCodec.
        guidance: used by `generate`; None samples from the conditional model as it is.
        lr_scheduler: called with the optimizer, stepped once per optimizer step; None keeps the lr
            constant.
        conditioning: what the network is told of an image; None ignores the labels of the data.
        draws: how the uniforms of a batch's times depend on each other; None is Stratified().
        channels_last: whether network and images use torch's channels_last memory format, which
            convolutions like.

    Raises:
        ValueError: where two of the arguments do not go together.

    Attributes:
        timestep_density: (num_bins,) unnormalised density over u in [0, 1] that training times are
            drawn from; None is uniform.
        timestep_weight: (num_bins,) factor on the loss per bin of u; None is 1.
        watch: told of every step by which samples are generated; None is nobody.

    Source: Ho et al. 2020 (DDPM), algorithm 1, with every choice an argument.
    """

    def __init__(
        self,
        network: nn.Module,
        process: Process,
        parameterization: Parameterization,
        loss: Loss,
        times: Quantile,
        solver: Solver,
        optimizer: OptimizerCallable,
        *,
        image_shape: tuple[int, int, int],
        num_classes: int | None = None,
        label_dropout: float = 0.0,
        codec: Codec | None = None,
        guidance: Guidance | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        conditioning: Conditioning | None = None,
        draws: Draws | None = None,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        if is_built_from_config():
            # Built from YAML: plain builtins. Objects handed over in Python would be pickled into
            # the checkpoint.
            self.save_hyperparameters(logger=False)
        self.network = network
        self.process = process
        self.parameterization = parameterization
        self.loss = loss
        self.times = times
        self.solver = solver
        self.guidance = guidance
        self.codec = PixelCodec() if codec is None else codec
        self.image_shape = tuple(image_shape)
        if conditioning is None and num_classes is not None:
            conditioning = ClassLabels(num_classes)
        self.conditioning, self._has_checked = conditioning, False
        self.num_classes: int | None = getattr(conditioning, "num_classes", None)
        self.label_dropout = label_dropout
        self.draws = draws
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.network.to(memory_format=self.memory_format)
        self.timestep_density: Tensor | None = None
        self.timestep_weight: Tensor | None = None
        self.watch: Watch | None = None
        self._make_optimizer = optimizer
        self._make_lr_scheduler = lr_scheduler
        self._val_loss = MeanMetric(nan_strategy="disable")
        checks.check_conditioning(network, conditioning, num_classes, label_dropout, guidance)
        checks.check_objective(process, parameterization, loss, solver, guidance)
        checks.check_clipping(self.codec, solver, guidance)

    # Training

    def setup(self, stage: str) -> None:
        """Refuse devices and data that do not fit before the first step."""
        if self.device.type == "mps":  # noise levels are float64
            raise ValueError("MPS has no float64; use --trainer.accelerator=cpu.")
        data = getattr(self.trainer, "datamodule", None)
        checks.check_data(data, self.codec, self.image_shape, self.num_classes)
        if stage == "fit" and self.conditioning is None and (said := checks.unused_classes(data)):
            rank_zero_info(said)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Make the randomness of this step a function of its number."""
        seed_step(run_seed() or 0, self.global_rank, self.global_step, batch_idx)

    def training_step(self, batch: Batch, batch_idx: int) -> STEP_OUTPUT:
        """E[w(u) W(t) mean |target - network(x_t, t)|^2], x_t = alpha(t) x0 + sigma(t) noise.

        That is over the images x0 of the batch, noise standard normal, u from `timestep_density`
        and t its quantile; the target is the parameterization's, W the loss's weighting, and w(u)
        is `timestep_weight`. Returned with what callbacks may want to know.
        """
        x0, labels, _ = self._unpack(batch, draws=True)
        u = draw_uniforms(len(x0), self.timestep_density, self.draws, device=self.device)
        t, noise = self.times.quantile(u, self.process), torch.randn_like(x0)
        labels = self._dropped(labels, len(x0))
        losses = self.per_sample_loss(x0, labels, t, noise, self.global_step)
        loss = (losses * self._weight_at(u)).mean()
        self._log_training(loss, losses.detach(), u, batch_idx)
        return {"loss": loss, "u": u, "t": t, "per_sample_loss": losses.detach()}

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Log the lr and, before it is clipped, the norm of the gradient of all parameters."""
        # By hand, Lightning would log the last norm again with batches that make no step.
        if self.automatic_optimization and should_log(self.trainer):
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
            # FiniteUpdates has taken those of an update that it leaves out.
            norm = total_norm(gradients) / loss_scale(self.trainer, optimizer) if gradients else nan
            self.log_dict({"train/lr": optimizer.param_groups[0]["lr"], "train/grad_norm": norm})

    def per_sample_loss(
        self, x0: Tensor, labels: Condition, t: Tensor, noise: Tensor, step: int | None = None
    ) -> Tensor:
        """(B,) losses: a function of the arguments and the weights alone.

        Args:
            x0: (B, C, H, W) clean images, encoded.
            labels: what the network is told, such as (B,) int64; None for an unconditional one.
            t: (B,) float64 times.
            noise: (B, C, H, W) standard normal.
            step: optimizer steps completed, for weightings that change over training.
        """
        alpha, sigma = (expand_as(v, x0) for v in self.process.alpha_sigma(t))
        x_t = alpha * x0 + sigma * noise
        output = self._run_network(x_t, labels, t, alpha, sigma)
        prediction = Prediction(output, x0, x_t, noise, t, step)
        return self.loss.per_sample(prediction, self.process, self.parameterization)["loss"]

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer, and the schedule stepped with it."""
        return optimizer_and_schedule(self, self._make_optimizer, self._make_lr_scheduler)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Say which codec it is for, where that was trained: it is not in the file."""
        checkpoint.update(checks.codec_record(self.codec))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the weights of a run with another codec."""
        checks.check_codec(self.codec, checkpoint)

    # Validation

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Loss at one fixed noise level and noise per image, without any curriculum."""
        self.log("val/loss", self._add(self._val_loss, batch), prog_bar=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """As validation, on the test split; named after what the data have in its place."""
        split = getattr(self.trainer.datamodule, "tests_on", "test")  # type: ignore[attr-defined]
        self.log(f"{split}/loss", self._add(self._val_loss, batch))

    # Sampling

    def predict_step(self, batch: tuple[Tensor, Any], batch_idx: int) -> Tensor:
        """(seeds (B,), labels (B,)) -> images uint8 (B, C, H, W)."""
        seeds, labels = batch
        return self.generate(seeds.tolist(), _uncollated(labels))

    @torch.no_grad()
    def generate(self, seeds: Sequence[int], labels: Condition = None) -> Tensor:
        """Images uint8 (N, C, H, W); image i depends on seeds[i] and labels[i] alone.

        Args:
            seeds: one integer per image.
            labels: a condition of N images, for classes (N,) int64 below `num_classes`, -1 for
                none; None leaves it to the seeds: for classes, seed modulo `num_classes`.

        Raises:
            ValueError: for labels that do not fit.
            NonFiniteSamples: where an image is NaN or infinite, if only on the way.
        """
        return self._generated(self.solver, self.process, seeds, labels)

    @torch.no_grad()
    def edit(
        self, images: Tensor, seeds: Sequence[int], labels: Condition = None, strength: float = 0.6
    ) -> Tensor:
        """As `generate`, from images uint8 (N, C, H, W) with noise on them instead of pure noise.

        Args:
            images: where each sample begins.
            seeds: as of `generate`.
            labels: as of `generate`.
            strength: share of the solver's steps that are taken, one at least; little keeps most of
                the image.

        Raises:
            ValueError: as `generate`, for a strength that is not in (0, 1], and a solver without
                `steps` and `times`.

        Source: Meng et al. 2022 (SDEdit).
        """
        solver = shortened(self.solver, strength)
        solver.check(self.process)
        begun: Any = Begun(self.process, self.codec.encode(images.to(self.device)))
        return self._generated(solver, begun, seeds, labels)

    @torch.no_grad()
    def inpaint(
        self,
        images: Tensor,
        mask: Tensor,
        seeds: Sequence[int],
        labels: Condition = None,
        resamples: int = 10,
    ) -> Tensor:
        """As `generate`, but that the masked part of images uint8 (N, C, H, W) is kept.

        By ancestral sampling, in the steps and times of the solver.

        Args:
            images: of which a part is kept.
            mask: (N, 1, H, W) or broadcastable, in the size of x0; 1 where they are kept.
            seeds: as of `generate`.
            labels: as of `generate`.
            resamples: how often each step is taken; more make both parts agree better.

        Source: Lugmayr et al. 2022 (RePaint).
        """
        known, mask = self.codec.encode(images.to(self.device)), mask.to(self.device)
        solver = repainting(self.solver, known, mask, resamples)
        checks.check_shift(solver, self.guidance)
        solver.check(self.process)
        return self._generated(solver, self.process, seeds, labels)

    def _generated(
        self, solver: Solver, process: Process, seeds: Sequence[int], labels: Condition
    ) -> Tensor:
        labels = condition_for(seeds, labels, self.conditioning)
        noise = PerSampleNoise(seeds)
        start = noise.draw(self.image_shape).to(self.device)
        with eval_mode(self.network):
            denoise = SampleWatch(self._guided(move_data_to_device(labels, self.device)))
            x0 = solver.sample(denoise, process, start, noise.randn_like, self.watch)
        denoise.refuse_non_finite(x0, seeds, completed_steps(self))
        return self.codec.decode(x0)

    def denoise_for(self, labels: Condition) -> Denoise:
        """The network as solvers, guidance and `likelihood.bits_per_dim` see it.

        Args:
            labels: a condition on this module's device; None for an unconditional network.
        """

        def denoise(x_t: Tensor, t: Tensor) -> Denoised:
            alpha, sigma = (expand_as(v, x_t) for v in self.process.alpha_sigma(t))
            output = self._run_network(x_t, labels, t, alpha, sigma)
            frac = None
            if self.loss.output_factor == 2:
                output, r = output.chunk(2, dim=1)
                frac = (r + 1) / 2
            x0 = self.parameterization.to_x0(output, x_t, alpha, sigma)
            return Denoised(x0, (x_t - alpha * x0) / sigma, frac)

        return denoise

    def sampling_record(self) -> dict[str, Any]:
        """How `generate` makes images, for the record beside a score."""
        return {
            "solver": repr(self.solver),
            "steps": getattr(self.solver, "steps", None),
            "guidance": None if self.guidance is None else repr(self.guidance),
            "process": repr(self.process),
        }

    # The rest: what the methods above are made of

    def _unpack(self, batch: Batch, draws: bool = False) -> tuple[Tensor, Condition, Tensor]:
        """x0 (B, C, H, W), condition and index of a batch."""
        checks.check_batch(batch, takes_condition=self.conditioning is not None)
        images, labels, index = batch
        x0 = drawn(self.codec, images) if draws else self.codec.encode(images)
        if x0.shape[1:] != self.image_shape:
            raise ValueError(
                f"image_shape is {self.image_shape}, but the data are {tuple(x0.shape[1:])}; "
                "change one of them."
            )
        if self.conditioning is None:
            return x0, None, index
        condition = _uncollated(labels)
        if x0.device.type == "cpu" or not self._has_checked:  # a GPU would have to be waited for
            self.conditioning.check(condition, len(x0))
            self._has_checked = True
        return x0, condition, index

    def _dropped(self, condition: Condition, num: int) -> Condition:
        if self.conditioning is None or self.label_dropout == 0:
            return condition
        drop = torch.rand(num, device=self.device) < self.label_dropout
        return self.conditioning.dropped(condition, drop)

    def _weight_at(self, u: Tensor) -> Tensor | float:
        if self.timestep_weight is None:
            return 1.0
        weight = self.timestep_weight.to(u.device)
        return weight[bin_of(u, len(weight))]

    def _log_training(self, loss: Tensor, losses: Tensor, u: Tensor, batch_idx: int) -> None:
        """The loss; for loggers its mean per quartile of u too, nan where a batch has none.

        Lightning takes 0.5 ms for a number, so one that nobody would read is left out.
        """
        due = should_log(self.trainer)
        if due or batch_idx == 0 or self.trainer.is_last_batch:
            self.log("train/loss", loss.detach(), prog_bar=True)
        if not due:
            return
        quartile = bin_of(u, 4)
        sums = torch.zeros(4, dtype=losses.dtype, device=u.device).index_add(0, quartile, losses)
        means = sums / torch.zeros_like(sums).index_add(0, quartile, torch.ones_like(losses))
        self.log_dict({f"train/loss_q{i}": mean for i, mean in enumerate(means)})

    def _run_network(
        self, x_t: Tensor, labels: Condition, t: Tensor, alpha: Tensor, sigma: Tensor
    ) -> Tensor:
        """Raw output in the images' dtype, whatever the network's own precision."""
        x = self.parameterization.network_input(x_t, alpha, sigma)
        x = x.to(self.dtype).contiguous(memory_format=self.memory_format)
        output: Tensor = self.network(x, self.process.noise_label(t).float(), labels)
        expected = (len(x), self.loss.output_factor * x.shape[1], *x.shape[2:])
        if output.shape != expected:
            raise ValueError(
                f"{type(self.loss).__name__} needs a network output of {expected}, got "
                f"{tuple(output.shape)} from {type(self.network).__name__}; change out_channels."
            )
        return output.to(x_t.dtype)

    def _add(self, mean: MeanMetric, batch: Batch) -> MeanMetric:
        """Count a batch in, in float64: precision plugins and resets give the sums other types."""
        mean.set_dtype(torch.float64)
        mean.update(self._fixed_losses(batch))
        return mean

    def _fixed_losses(self, batch: Batch) -> Tensor:
        """(B,) float64 losses that depend on each image, its index and the weights alone."""
        x0, labels, index = self._unpack(batch)
        t = self.times.quantile(index_uniforms(index), self.process)
        noise = PerSampleNoise(index.tolist(), stream="validation").randn_like(x0)
        # Without the step: a weighting's warm-up would bend the curve.
        return self.per_sample_loss(x0, labels, t, noise).double()

    def _guided(self, labels: Condition) -> Denoise:
        if self.guidance is None:
            return self.denoise_for(labels)
        null = None if self.conditioning is None else self.conditioning.null(labels)
        return self.guidance.guide(self.denoise_for, labels, self.process, null)


def _uncollated(labels: Any) -> Any:
    """A condition of parts is a tuple, of which a DataLoader makes a list."""
    return tuple(labels) if isinstance(labels, list) else labels
