"""The LightningModule for diffusion models. Each part of the method is an argument."""

from collections.abc import Sequence
from math import nan
from typing import Any, Literal

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT, OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import MeanMetric

from lit_diffusion.callbacks.trainer_state import (
    attached_trainer,
    completed_steps,
    eval_mode,
    is_built_from_config,
    loss_scale,
    refuse_strategy,
    should_log,
    total_steps,
)
from lit_diffusion.codecs import PixelCodec, encode_for_training
from lit_diffusion.conditioning import ClassLabels, condition_for
from lit_diffusion.distributed import total_norm
from lit_diffusion.gaussian import expand_as
from lit_diffusion.modules import checks, compiled, sharding
from lit_diffusion.modules.compiled import CompileMode
from lit_diffusion.modules.optimizers import optimizer_and_schedule
from lit_diffusion.protocols import (
    Codec,
    Condition,
    Conditioning,
    Denoise,
    Denoised,
    Guidance,
    Loss,
    Parameterization,
    Prediction,
    Process,
    Solver,
    TimestepDistribution,
    UniformDraws,
    Watch,
)
from lit_diffusion.seeding import PerSampleNoise, index_uniforms, run_seed, seed_step
from lit_diffusion.solvers.editing import NoisedImagePrior, repaint_solver, truncate_solver
from lit_diffusion.solvers.steps import with_grid
from lit_diffusion.timesteps import bin_of, draw_uniforms

Batch = tuple[Tensor, Any, Tensor]
"""images uint8 (B, C, H, W); their condition, labels int64 (B,) for example; index int64 (B,)."""


class DiffusionModule(LightningModule):
    """Trains a denoising network, measures its loss on fixed noise, and samples from it.

    Random numbers are reproducible. In a training step, they depend only on (seed, rank, step,
    micro-batch). The seed is the seed that was passed to `seed_everything`, or 0 if it was not
    called. For a validation image, random numbers depend only on the image's index. For a sample,
    they depend only on the sample's seed.

    A non-finite loss does not stop the run by itself. To stop the run, add the callback
    `callbacks.FiniteUpdates` or set Trainer(detect_anomaly=True). The command `lit-diffusion fit`
    adds the callback for you.

    Args:
        network: a `protocols.Network`.
        process: forward process.
        parameterization: defines the network's output, such as noise or velocity.
        loss: training objective.
        times: distribution of the training times.
        solver: sampler that `generate` uses.
        optimizer: function that creates the optimizer from the parameters that require a gradient.
            On a GPU, torch's Adam, AdamW and SGD then use fused=True, unless the function passes
            `fused` or `foreach`.
        image_shape: (C, H, W) of x0. In a config of `fit`, "data" uses the shape of the data
            module's images.
        num_classes: number of classes. This is short for conditioning=ClassLabels(num_classes). In
            a config of `fit`, "data" uses the number of classes of the data module.
        label_dropout: fraction of training samples whose condition is dropped, for classifier-free
            guidance. Usual values are 0.1 to 0.2.
        codec: maps images to x0 and back; None means PixelCodec.
        guidance: guidance that `generate` uses. None samples from the conditional model without
            guidance.
        lr_scheduler: function that creates the lr schedule from the optimizer. The schedule is
            stepped once per optimizer step. None keeps the lr constant.
        conditioning: kind of condition of the data and the network; None ignores the labels of the
            data.
        uniforms: joint distribution of the random numbers from which the times of a batch are
            computed; None means Stratified().
        channels_last: whether network and images use torch's channels_last memory format, which
            can make convolutions faster.
        compile: mode of `torch.compile` for the network in a fit, including validation and samples
            during the fit. A loss with a learned variance is compiled too. None compiles nothing.
            The modes "reduce-overhead" and "max-autotune" use CUDA graphs for the network. Outside
            a fit, nothing is compiled, so that `load` and the commands that sample or evaluate
            start at once. Call `compile_network` to speed up the generation of many samples.
            Dropout draws different random numbers in a compiled network and in an eager network.

    Raises:
        ValueError: if two of the arguments do not fit together.

    Attributes:
        timestep_density: (num_bins,) density over u in [0, 1] from which training times are drawn.
            It need not be normalized. None means the uniform density.
        timestep_weight: (num_bins,) factor on the loss for each bin of u. None means 1.
        watch: function that is called before every step of the solver (`protocols.Watch`), or None.

    Source: Ho et al. 2020 (DDPM), algorithm 1. Here, every choice is an argument.

    Example:
        >>> from lit_diffusion.losses import DenoisingLoss, MinSNR
        >>> from lit_diffusion.networks.unet import UNet
        >>> from lit_diffusion.parameterizations import Velocity
        >>> from lit_diffusion.processes import CosineBetas, DiscreteVP
        >>> from lit_diffusion.solvers import DPMSolverPP
        >>> from lit_diffusion.timesteps import Uniform
        >>> module = DiffusionModule(
        ...     network=UNet(in_channels=1, out_channels=1, model_channels=32, num_classes=10),
        ...     process=DiscreteVP(CosineBetas(1000)),
        ...     parameterization=Velocity(),
        ...     loss=DenoisingLoss(MinSNR()),
        ...     times=Uniform(),
        ...     solver=DPMSolverPP(steps=4),
        ...     optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        ...     image_shape=(1, 8, 8),
        ...     num_classes=10,
        ... )
        >>> module.generate(seeds=range(2)).shape  # trained by Trainer(...).fit(module, data)
        torch.Size([2, 1, 8, 8])
    """

    def __init__(
        self,
        network: nn.Module,
        process: Process,
        parameterization: Parameterization,
        loss: Loss,
        times: TimestepDistribution,
        solver: Solver,
        optimizer: OptimizerCallable,
        *,
        image_shape: tuple[int, int, int] | Literal["data"],
        num_classes: int | Literal["data"] | None = None,
        label_dropout: float = 0.0,
        codec: Codec | None = None,
        guidance: Guidance | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        conditioning: Conditioning | None = None,
        uniforms: UniformDraws | None = None,
        channels_last: bool = False,
        compile: CompileMode | None = None,
    ) -> None:
        super().__init__()
        if is_built_from_config():
            # Hyperparameters from YAML are builtins. Python objects would be pickled into the
            # checkpoint.
            self.save_hyperparameters(logger=False)
        if isinstance(image_shape, str) or isinstance(num_classes, str):
            raise ValueError(
                "image_shape and num_classes may be 'data' in a config of `fit` only, got "
                f"{image_shape!r} and {num_classes!r}; pass numbers."
            )
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
        self.conditioning, self._has_checked_condition = conditioning, False
        self.num_classes: int | None = getattr(conditioning, "num_classes", None)
        self.label_dropout = label_dropout
        self.uniforms = uniforms
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.network.to(memory_format=self.memory_format)
        compiled.check_mode(compile)
        self._fit_compile_mode = compile
        self._compile_mode: CompileMode | None = None  # mode in which the network is compiled
        self.timestep_density: Tensor | None = None
        self.timestep_weight: Tensor | None = None
        self.watch: Watch | None = None
        self._make_optimizer = optimizer
        self._make_lr_scheduler = lr_scheduler
        self._val_loss = MeanMetric(nan_strategy="disable")
        checks.check_channels(network, self.image_shape)
        checks.check_conditioning(network, conditioning, num_classes, label_dropout, guidance)
        checks.check_objective(process, parameterization, loss, solver, guidance)
        checks.check_clipping(self.codec, solver, guidance)

    # Training

    def setup(self, stage: str) -> None:
        """Raise ValueError if device or data do not fit the module, and compile the network."""
        if self.device.type == "mps":  # noise levels are float64
            raise ValueError("MPS has no float64; use --trainer.accelerator=cpu.")
        data = getattr(self.trainer, "datamodule", None)
        checks.check_data(data, self.codec, self.image_shape, self.num_classes)
        if stage == "fit" and self.conditioning is None and (hint := checks.unused_classes(data)):
            rank_zero_info(hint)
        if stage == "fit" and (mode := self._fit_compile_mode) is not None:
            device = self.trainer.strategy.root_device
            factors = [self.trainer.accumulate_grad_batches]
            for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, GradientAccumulationScheduler):
                    factors += callback.scheduling.values()
            compiled.check_accumulation(mode, device, max(factors))
            self.compile_network(mode, isinstance(self.trainer.strategy, ModelParallelStrategy))

    def compile_network(self, mode: CompileMode = "default", by_block: bool = False) -> None:
        """Compile the network in place, at its next call. In a fit, set `compile=` instead.

        Args:
            mode: mode of `torch.compile`.
            by_block: whether to compile the blocks of the network one by one.
        """
        compiled.check_mode(mode)
        self._compile_mode = mode
        compiled.compile_network(self.network, mode, by_block)

    def configure_model(self) -> None:
        """Split the network over the ranks of ModelParallelStrategy. Lightning calls this method.

        Raises:
            ValueError: if weights outside the network are trained, if the strategy has tensor
                parallelism, or if it is FSDPStrategy.
        """
        trainer = attached_trainer(self)
        if trainer is not None and isinstance(trainer.strategy, FSDPStrategy):
            refuse_strategy(trainer, type(self).__name__)
        if trainer is None or not isinstance(trainer.strategy, ModelParallelStrategy):
            return
        others = [name for name, p in self.named_parameters() if p.requires_grad]
        others = [name for name in others if not name.startswith("network.")]
        if others:
            raise ValueError(f"{others[0]} is not part of the network, which alone can be split.")
        mesh = trainer.strategy.device_mesh
        if mesh["tensor_parallel"].size() > 1:
            raise ValueError(
                "ModelParallelStrategy must have tensor_parallel_size=1 and data_parallel_size="
                f"{mesh.size()}, all ranks; got {mesh['tensor_parallel'].size()} and "
                f"{mesh['data_parallel'].size()}."
            )
        sharding.shard_network(self.network, mesh["data_parallel"], trainer.precision)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Seed the random generators for this step."""
        seed_step(run_seed() or 0, self.global_rank, self.global_step, batch_idx)

    def training_step(self, batch: Batch, batch_idx: int) -> STEP_OUTPUT:
        """Compute the loss `E[w(u) * W(t) * mean((target - network(x_t, t))**2)]` of a batch.

        Here, `x_t = alpha(t) * x0 + sigma(t) * noise`. The expectation is over the images x0 of the
        batch, standard normal noise, and u from `timestep_density`. The time t is computed from u.
        The parameterization defines the target. W is the weighting of the loss, and w is
        `timestep_weight`.

        Returns:
            A dictionary with the "loss". For callbacks, it also has "u", "t" and
            "per_sample_loss", each with the shape (B,).
        """
        images, condition, _ = self._unpack_batch(batch)
        x0 = encode_for_training(self.codec, images)  # (B, C, H, W)
        checks.check_shape(x0, self.image_shape)
        u = draw_uniforms(len(x0), self.timestep_density, self.uniforms, device=self.device)
        t = self.times.quantile(u, self.process)  # (B,) float64
        noise = torch.randn_like(x0)
        if self.conditioning is not None and self.label_dropout > 0:
            dropped = torch.rand(len(x0), device=self.device) < self.label_dropout
            condition = self.conditioning.drop(condition, dropped)

        losses = self.per_sample_loss(x0, condition, t, noise, self.global_step)  # (B,)
        if self.timestep_weight is None:
            loss = losses.mean()
        else:
            weight = self.timestep_weight.to(u.device)
            loss = (losses * weight[bin_of(u, len(weight))]).mean()
        self._log_training(loss, losses.detach(), u, batch_idx)
        return {"loss": loss, "u": u, "t": t, "per_sample_loss": losses.detach()}

    def per_sample_loss(
        self, x0: Tensor, condition: Condition, t: Tensor, noise: Tensor, step: int | None = None
    ) -> Tensor:
        """Compute the losses `W(t) * mean((target - network(x_t, t))**2)` of noised images.

        The noised images are `x_t = alpha(t) * x0 + sigma(t) * noise`. The losses depend only on
        the arguments and the weights.

        Args:
            x0: (B, C, H, W) clean images, encoded.
            condition: condition of the images, such as labels (B,) int64; None for an unconditional
                network.
            t: (B,) float64 times.
            noise: (B, C, H, W) standard normal.
            step: optimizer steps completed, for weightings that change during training.

        Returns:
            (B,) losses.
        """
        alpha, sigma = self.process.alpha_sigma(t)  # (B,) float64
        a, s = expand_as(alpha, x0), expand_as(sigma, x0)  # (B, 1, 1, 1) in x0's dtype
        x_t = a * x0 + s * noise  # (B, C, H, W)
        output, variance_output = self._run_network(x_t, t, a, s, condition)  # (B, C, H, W) each
        target = self.parameterization.target(x0, noise, a, s)  # (B, C, H, W)
        error = (target - output).square().flatten(1).mean(1)  # (B,)
        output_scale = self.parameterization.output_scale(alpha, sigma)  # (B,) float64
        weight = self.loss.weighting.weight(alpha, sigma, output_scale, step)  # (B,) float64
        prediction = Prediction(output, variance_output, x0, x_t, t, alpha, sigma)
        inputs = (weight.to(error.dtype) * error, prediction, self.process, self.parameterization)
        if self._compile_mode is None or not self.training:
            return self.loss.per_sample(*inputs)
        losses: Tensor = compiled.run_compiled_loss(self.loss, *inputs)
        return losses

    def _run_network(
        self, x_t: Tensor, t: Tensor, alpha: Tensor, sigma: Tensor, condition: Condition
    ) -> tuple[Tensor, Tensor | None]:
        """The output, and the variance output (None if it is not learned), in the dtype of x_t."""
        x = self.parameterization.network_input(x_t, alpha, sigma)
        x = x.to(self.dtype).contiguous(memory_format=self.memory_format)
        inputs = (x, self.process.noise_label(t).float(), condition)
        if self._compile_mode is None:
            output: Tensor = self.network(*inputs)
        else:
            output = compiled.run_compiled(self.network, self._compile_mode, *inputs)
        expected = (len(x), self.loss.output_factor * x.shape[1], *x.shape[2:])
        if output.shape != expected:
            raise ValueError(
                f"{type(self.loss).__name__} needs a network output of {expected}, got "
                f"{tuple(output.shape)} from {type(self.network).__name__}; change out_channels."
            )
        output = output.to(x_t.dtype)
        if self.loss.output_factor == 1:
            return output, None
        output, variance_output = output.chunk(2, dim=1)
        return output, variance_output

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Log the lr, and the norm of the gradient of all parameters before clipping."""
        # In manual optimization, Lightning would log an old norm again in batches without a step.
        if self.automatic_optimization and should_log(self.trainer):
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
            # There are no gradients if FiniteUpdates skips this update.
            norm = total_norm(gradients) / loss_scale(self.trainer, optimizer) if gradients else nan
            self.log_dict({"train/lr": optimizer.param_groups[0]["lr"], "train/grad_norm": norm})

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer, and the schedule that is stepped with it."""
        configured: OptimizerLRScheduler = optimizer_and_schedule(
            [p for p in self.parameters() if p.requires_grad],
            self._make_optimizer,
            self._make_lr_scheduler,
            lambda: total_steps(self.trainer),
        )
        return configured

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the checksum of the codec, because its weights are not in the checkpoint."""
        checkpoint.update(checks.codec_record(self.codec))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raise ValueError if the checkpoint comes from a run with a different codec."""
        checks.check_codec(self.codec, checkpoint)

    # Validation

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the loss, with a fixed noise level and fixed noise for each image."""
        self.log("val/loss", self._update_val_loss(batch), prog_bar=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the validation loss on the test split, under the name of the split that is used."""
        split = getattr(self.trainer.datamodule, "tests_on", "test")  # type: ignore[attr-defined]
        self.log(f"{split}/loss", self._update_val_loss(batch))

    def _update_val_loss(self, batch: Batch) -> MeanMetric:
        """Add float64 losses that depend only on each image, its index and the weights."""
        images, condition, index = self._unpack_batch(batch)
        x0 = self.codec.encode(images)
        checks.check_shape(x0, self.image_shape)
        t = self.times.quantile(index_uniforms(index), self.process)
        noise = PerSampleNoise(index.tolist(), stream="validation").randn_like(x0)
        # Without the step, because the warm-up of a weighting would distort the curve.
        losses = self.per_sample_loss(x0, condition, t, noise)
        self._val_loss.set_dtype(torch.float64)  # precision plugins and resets change it
        self._val_loss.update(losses.double())
        return self._val_loss

    # Sampling

    def predict_step(self, batch: tuple[Tensor, Any], batch_idx: int) -> Tensor:
        """Generate images uint8 (B, C, H, W) from a batch of seeds (B,) and labels (B,)."""
        seeds, labels = batch
        return self.generate(seeds.tolist(), _tuple_from_list(labels))

    @torch.no_grad()
    def generate(self, seeds: Sequence[int], labels: Condition = None) -> Tensor:
        """Generate images uint8 (N, C, H, W). Image i depends only on seeds[i] and labels[i].

        Args:
            seeds: one integer per image.
            labels: a condition for N images, such as classes (N,) int64 below `num_classes`, where
                -1 means no class. None uses the default of each seed. For classes, the default is
                the seed modulo `num_classes`.

        Raises:
            ValueError: if labels are not a valid condition.
            NonFiniteSamples: if an image or one of its intermediate estimates is NaN or infinite.
        """
        return self._sample(self.solver, self.process, seeds, labels)

    @torch.no_grad()
    def edit(
        self, images: Tensor, seeds: Sequence[int], labels: Condition = None, strength: float = 0.6
    ) -> Tensor:
        """Generate images uint8 (N, C, H, W) from noised images instead of pure noise.

        Args:
            images: uint8 (N, C, H, W) images to start from.
            seeds: one integer per image.
            labels: a condition of N images; None uses the default of each seed, as in `generate`.
            strength: fraction of the solver's steps to use. At least one step is used. A small
                fraction preserves most of the image.

        Raises:
            ValueError: if labels are not a valid condition, if strength is outside (0, 1], or if
                the solver has no `steps` and `times`.
            NonFiniteSamples: if an image or one of its intermediate estimates is NaN or infinite.

        Source: Meng et al. 2022 (SDEdit).
        """
        solver = truncate_solver(self.solver, strength, self.process)
        solver.check(self.process)
        x0 = self.codec.encode(images.to(self.device))
        start: Any = NoisedImagePrior(self.process, x0)
        return self._sample(solver, start, seeds, labels)

    @torch.no_grad()
    def inpaint(
        self,
        images: Tensor,
        mask: Tensor,
        seeds: Sequence[int],
        labels: Condition = None,
        resamples: int = 10,
    ) -> Tensor:
        """Generate images uint8 (N, C, H, W) that equal given images where a mask is 1.

        The sampler is `solvers.editing.RePaint`. It is ancestral sampling with the steps and times
        of the module's solver, and with the solver's variance if it has one.

        Args:
            images: uint8 (N, C, H, W) images to preserve in part.
            mask: (N, 1, H, W) or broadcastable, with the height and width of x0. The mask is 1
                where images are preserved, and 0 where they are generated.
            seeds: one integer per image.
            labels: a condition of N images; None uses the default of each seed, as in `generate`.
            resamples: number of times that each step is taken. A larger number makes both parts
                more consistent.

        Source: Lugmayr et al. 2022 (RePaint).
        """
        known, mask = self.codec.encode(images.to(self.device)), mask.to(self.device)
        solver = repaint_solver(self.solver, self.process, known, mask, resamples)
        checks.check_shift(solver, self.guidance)
        solver.check(self.process)
        return self._sample(solver, self.process, seeds, labels)

    def _sample(
        self, solver: Solver, process: Process, seeds: Sequence[int], labels: Condition
    ) -> Tensor:
        condition = condition_for(seeds, labels, self.conditioning)
        condition = move_data_to_device(condition, self.device)
        noise = PerSampleNoise(seeds)
        start = noise.draw(self.image_shape, self.device)
        with eval_mode(self.network):
            if self.guidance is None:
                denoise = self.denoise_for(condition)
            else:
                null = None if self.conditioning is None else self.conditioning.null(condition)
                denoise = self.guidance.guide(self.denoise_for, condition, self.process, null)
            finite = checks.FiniteDenoise(denoise)
            x0 = solver.sample(finite, process, start, noise.randn_like, self.watch)
        finite.raise_if_non_finite(x0, seeds, completed_steps(self))
        return self.codec.decode(x0)

    def denoise_for(self, labels: Condition) -> Denoise:
        """Return the network as a function from (x_t, t) to `Denoised`, for solvers and guidance.

        Args:
            labels: a condition on this module's device; None for an unconditional network.
        """

        def denoise(x_t: Tensor, t: Tensor) -> Denoised:
            alpha, sigma = (expand_as(v, x_t) for v in self.process.alpha_sigma(t))
            output, variance_output = self._run_network(x_t, t, alpha, sigma, labels)
            frac = None if variance_output is None else (variance_output + 1) / 2
            x0 = self.parameterization.to_x0(output, x_t, alpha, sigma)
            return Denoised(x0, (x_t - alpha * x0) / sigma, frac)

        return denoise

    def sampling_record(self) -> dict[str, Any]:
        """Solver, steps, guidance and process that `generate` uses, for records of scores."""
        return {
            "solver": repr(with_grid(self.solver, self.process)),
            "steps": getattr(self.solver, "steps", None),
            "guidance": None if self.guidance is None else repr(self.guidance),
            "process": repr(self.process),
        }

    # Batches and logs

    def _unpack_batch(self, batch: Batch) -> tuple[Tensor, Condition, Tensor]:
        """Images, condition and index of a batch, validated."""
        checks.check_batch(batch, takes_condition=self.conditioning is not None)
        images, labels, index = batch
        if self.conditioning is None:
            return images, None, index
        condition = _tuple_from_list(labels)
        # On a GPU labels are checked only once, because the check waits for the device.
        if images.device.type == "cpu" or not self._has_checked_condition:
            self.conditioning.check(condition, len(images))
            self._has_checked_condition = True
        return images, condition, index

    def _log_training(self, loss: Tensor, losses: Tensor, u: Tensor, batch_idx: int) -> None:
        """Log the loss, and in logging steps also its mean in each quartile of u (nan if empty).

        Lightning takes 0.5 ms to log a number, so numbers that would not be used are not logged.
        The method does not set `prog_bar=True`, because Lightning would then wait for the device at
        every batch. Instead, `callbacks.progress` shows the loss.
        """
        is_logging_step = should_log(self.trainer)
        if is_logging_step or batch_idx == 0 or self.trainer.is_last_batch:
            self.log("train/loss", loss.detach())
        if not is_logging_step:
            return
        quartile = bin_of(u, 4)
        sums = torch.zeros(4, dtype=losses.dtype, device=u.device).index_add(0, quartile, losses)
        means = sums / torch.zeros_like(sums).index_add(0, quartile, torch.ones_like(losses))
        self.log_dict({f"train/loss_q{i}": mean for i, mean in enumerate(means)})


def _tuple_from_list(labels: Any) -> Any:
    """Undo the DataLoader's conversion of a tuple (a condition of several parts) to a list."""
    return tuple(labels) if isinstance(labels, list) else labels
