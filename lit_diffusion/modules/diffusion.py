"""The LightningModule for diffusion models, with network, process, loss and solver as arguments."""

from collections.abc import Sequence
from contextlib import nullcontext
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
    AuxiliaryLoss,
    Codec,
    Condition,
    Conditioning,
    Coupling,
    Denoise,
    Denoised,
    Guidance,
    Loss,
    NoisedBatch,
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
"""(images uint8 (B, C, H, W), condition such as labels int64 (B,), index int64 (B,))."""


class DiffusionModule(LightningModule):
    """Diffusion model: trains a denoising network, logs its validation loss, and generates samples.

    Random numbers are reproducible. In a training step, they depend only on the seed of the run,
    the rank, the number of the optimizer step, and the number of the micro-batch. The seed of the
    run is the one passed to `seed_everything`, or 0 if you did not call it. For a validation image,
    random numbers depend only on the image's index. For a generated image, they depend only on the
    seed that was passed to `generate` for this image.

    A non-finite loss does not stop training. To stop training, add the callback
    `callbacks.FiniteUpdates`, as the command `lit-diffusion fit` does, or set
    `Trainer(detect_anomaly=True)`.

    Args:
        network: network with the interface of `protocols.Network`.
        process: forward process.
        parameterization: definition of the network's output, such as noise or velocity.
        loss: training objective.
        times: distribution of the training times.
        solver: sampler that `generate` uses.
        optimizer: function that creates the optimizer from the parameters that require a gradient.
            For torch's Adam, AdamW or SGD with parameters on a GPU, the module sets fused=True,
            unless the function has set `fused` or `foreach`. For an `optimizers.MuonAdamW`, the
            module calls the optimizer's method `attach`.
        image_shape: (C, H, W) of x0. In a config of `lit-diffusion fit`, the value "data" takes the
            shape from the data module.
        num_classes: number of classes, short for `conditioning=ClassLabels(num_classes)`. In a
            config of `lit-diffusion fit`, the value "data" takes the number from the data module.
        label_dropout: fraction of training samples whose condition is dropped, for classifier-free
            guidance. Usual values are 0.1 to 0.2.
        codec: map from images to x0 and back; None means PixelCodec.
        guidance: guidance that `generate` uses; None for no guidance.
        lr_scheduler: function that creates the learning-rate schedule from the optimizer. Lightning
            steps the schedule once per optimizer step. None keeps the learning rate constant.
        conditioning: kind of condition that the data provide and the network takes. If both
            `conditioning` and `num_classes` are None, the module ignores the labels of the data.
        uniforms: joint distribution of the uniform random numbers from which the module computes
            the times of a batch; None means `Stratified()`.
        channels_last: whether network and images use torch's channels_last memory format, which
            can make convolutions faster.
        compile: mode of `torch.compile` for the network during a fit, including its validation and
            samples. A loss that learns the variance is compiled too. None compiles nothing. The
            modes "reduce-overhead" and "max-autotune" use CUDA graphs for the network. Outside a
            fit, `compile` has no effect, because compilation would delay the first samples. To
            generate many samples faster, call `compile_network`. In a compiled network, dropout
            draws different random numbers than in an eager network.
        coupling: rule that assigns the noise of a training batch to its images, as in
            `protocols.Coupling`. None draws noise independently of the images.
        auxiliary_loss: further term of the training loss, as in `protocols.AuxiliaryLoss`. The term
            is logged as train/auxiliary_loss, and is not part of train/loss or val/loss.

    Raises:
        ValueError: if two arguments do not fit together.

    Attributes:
        timestep_density: (num_bins,) density over u in [0, 1]. Training draws u from this density,
            and computes the time from u. The density need not be normalized. None means the uniform
            density.
        timestep_weight: (num_bins,) factor on the loss for each bin of u. None means 1.
        watch: function that the solver calls before every step (`protocols.Watch`), or None.

    Source: Ho et al. 2020 (DDPM), algorithm 1, generalized so that every choice is an argument.

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
        coupling: Coupling | None = None,
        auxiliary_loss: AuxiliaryLoss | None = None,
    ) -> None:
        super().__init__()
        if is_built_from_config():
            # Hyperparameters from YAML are plain builtins. Other Python objects are not saved,
            # because they would be pickled into the checkpoint.
            self.save_hyperparameters(logger=False)
        if isinstance(image_shape, str) or isinstance(num_classes, str):
            raise ValueError(
                "image_shape and num_classes may be 'data' only in a config of `lit-diffusion "
                f"fit`, got {image_shape!r} and {num_classes!r}; pass numbers."
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
        self.coupling = coupling
        self.auxiliary_loss = auxiliary_loss
        if auxiliary_loss is not None:
            auxiliary_loss.attach(network)
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
        """Check that device and data fit the module, and compile the network if `compile` is set.

        Raises:
            ValueError: if the device is MPS, or if the data do not fit the module. Before a fit,
                the error is also raised if a `ContrastCorrection` does not fit the auxiliary loss,
                or if the `fourier_bandwidth` of the network does not suit the process.
        """
        checks.check_device(self.device)
        if stage == "fit":
            checks.check_correction(self.parameterization, self.auxiliary_loss)
            checks.check_noise_labels(self.network, self.process)
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

    def teardown(self, stage: str) -> None:
        """After a fit with `compile`, let the network run eagerly again."""
        if stage == "fit" and self._fit_compile_mode is not None:
            self.compile_network(None, isinstance(self.trainer.strategy, ModelParallelStrategy))

    def compile_network(self, mode: CompileMode | None = "default", by_block: bool = False) -> None:
        """Compile the network in place, when it is called the next time.

        This method is for sampling. For training, set the argument `compile` of the module instead.

        Args:
            mode: mode of `torch.compile`. None lets the network run eagerly again.
            by_block: whether to compile each block of the network separately.
        """
        compiled.check_mode(mode)
        self._compile_mode = mode
        compiled.compile_network(self.network, mode, by_block)

    def configure_model(self) -> None:
        """Shard the network over all ranks if the strategy is ModelParallelStrategy.

        Lightning calls this method.

        Raises:
            ValueError: if the strategy is FSDPStrategy, if it uses tensor parallelism, or if
                trainable weights are outside the network.
        """
        trainer = attached_trainer(self)
        if trainer is not None and isinstance(trainer.strategy, FSDPStrategy):
            refuse_strategy(trainer, type(self).__name__)
        if trainer is None or not isinstance(trainer.strategy, ModelParallelStrategy):
            return
        trained = [name for name, p in self.named_parameters() if p.requires_grad]
        if others := [name for name in trained if not name.startswith("network.")]:
            raise ValueError(
                f"{others[0]} is not part of the network, and only weights of the network can be "
                "sharded."
            )
        mesh = trainer.strategy.device_mesh
        if mesh["tensor_parallel"].size() > 1:
            raise ValueError(
                "ModelParallelStrategy must have tensor_parallel_size=1 and data_parallel_size="
                f"{mesh.size()}, the number of ranks; got {mesh['tensor_parallel'].size()} and "
                f"{mesh['data_parallel'].size()}."
            )
        sharding.shard_network(self.network, mesh["data_parallel"], trainer.precision)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Seed the random generators for this step."""
        seed_step(run_seed() or 0, self.global_rank, self.global_step, batch_idx)

    def training_step(self, batch: Batch, batch_idx: int) -> STEP_OUTPUT:
        """Compute the training loss of a batch.

        The loss is the mean of `w(u) * W(t) * mean((target - network(x_t, t))**2)` over the images
        x0 of the batch, with `x_t = alpha(t) * x0 + sigma(t) * noise`. Each image has its own
        standard normal noise and its own u, which is drawn from `timestep_density`. The time t is
        the quantile of the distribution `times` at u. The target is defined by the
        parameterization, W is the weighting of the loss, and w is `timestep_weight`. A loss that
        learns the variance adds a term, and so does `auxiliary_loss`. If there is a `coupling`, it
        assigns the noise of the batch to the images of the batch.

        Returns:
            A dictionary with the "loss". For callbacks, it also contains "u", "t" and
            "per_sample_loss", each of shape (B,). The per-sample losses do not contain the
            factor `timestep_weight`.
        """
        images, condition, _ = self._unpack_batch(batch)
        x0 = encode_for_training(self.codec, images)  # (B, C, H, W)
        checks.check_shape(x0, self.image_shape)
        u = draw_uniforms(len(x0), self.timestep_density, self.uniforms, device=self.device)
        t = self.times.quantile(u, self.process)  # (B,) float64
        noise = torch.randn_like(x0)
        if self.coupling is not None:
            noise = self.coupling.couple(x0, noise, condition)
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
        if self.auxiliary_loss is not None:
            noised = NoisedBatch(x0, condition, t, noise, u, images)
            term = self.auxiliary_loss.compute(self, noised)
            if should_log(self.trainer):
                self.log("train/auxiliary_loss", term.detach())
            loss = loss + term
        return {"loss": loss, "u": u, "t": t, "per_sample_loss": losses.detach()}

    def per_sample_loss(
        self, x0: Tensor, condition: Condition, t: Tensor, noise: Tensor, step: int | None = None
    ) -> Tensor:
        """Compute the loss of each image at a given time and with given noise.

        The loss is `W(t) * mean((target - network(x_t, t))**2)` with
        `x_t = alpha(t) * x0 + sigma(t) * noise`. The result depends only on the arguments and
        weights. A loss that learns the variance adds a term.

        Args:
            x0: (B, C, H, W) clean images, encoded by the codec.
            condition: condition of the images, such as labels (B,) int64; None for an unconditional
                network.
            t: (B,) float64 times.
            noise: (B, C, H, W) standard normal noise.
            step: number of completed optimizer steps, for weightings that change during training;
                None outside training.

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
        return compiled.run_compiled_loss(self.loss, *inputs)

    def network_inputs(
        self, x_t: Tensor, t: Tensor, alpha: Tensor, sigma: Tensor, condition: Condition
    ) -> tuple[Tensor, Tensor, Condition]:
        """Return the arguments of the network for noised images.

        Args:
            x_t: (B, C, H, W) noised images.
            t: (B,) float64 times.
            alpha: signal scales at t, which broadcast against x_t.
            sigma: noise scales at t, which broadcast against x_t.
            condition: condition of the images.

        Returns:
            The network's input (B, C, H, W), the noise labels (B,), and the condition.
        """
        x = self.parameterization.network_input(x_t, alpha, sigma)
        x = x.to(self.dtype).contiguous(memory_format=self.memory_format)
        return x, self.process.noise_label(t).float(), condition

    def _run_network(
        self, x_t: Tensor, t: Tensor, alpha: Tensor, sigma: Tensor, condition: Condition
    ) -> tuple[Tensor, Tensor | None]:
        """Return output and variance output (None if not learned), in the dtype of x_t."""
        inputs = self.network_inputs(x_t, t, alpha, sigma, condition)
        x = inputs[0]
        if self._compile_mode is None:
            output = self.network(*inputs)
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
        """Log the learning rate, and the norm of the gradient before clipping."""
        # In manual optimization, Lightning would log the old norm again in batches without a step.
        if self.automatic_optimization and should_log(self.trainer):
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
            # There are no gradients if FiniteUpdates skips this update.
            norm = total_norm(gradients) / loss_scale(self.trainer, optimizer) if gradients else nan
            self.log_dict({"train/lr": optimizer.param_groups[0]["lr"], "train/grad_norm": norm})

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer and the learning-rate schedule."""
        return optimizer_and_schedule(
            self, self._make_optimizer, self._make_lr_scheduler, lambda: total_steps(self.trainer)
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the checksum of the codec's weights, because a checkpoint does not contain them."""
        checkpoint.update(checks.codec_record(self.codec))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raise ValueError if the checkpoint comes from a run whose codec had different weights."""
        checks.check_codec(self.codec, checkpoint)

    # Validation

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the loss. For each image, the noise level and the noise are fixed."""
        self.log("val/loss", self._update_val_loss(batch), prog_bar=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the loss of the test split, computed as in validation.

        The name of the metric starts with the data module's attribute `tests_on`, such as "val". If
        the data module has no such attribute, the name starts with "test".
        """
        split = getattr(self.trainer.datamodule, "tests_on", "test")  # type: ignore[attr-defined]
        self.log(f"{split}/loss", self._update_val_loss(batch))

    def _update_val_loss(self, batch: Batch) -> MeanMetric:
        """Add losses in float64 that depend only on the images, their index and the weights."""
        images, condition, index = self._unpack_batch(batch)
        x0 = self.codec.encode(images)
        checks.check_shape(x0, self.image_shape)
        t = self.times.quantile(index_uniforms(index), self.process)
        noise = PerSampleNoise(index.tolist(), stream="validation").randn_like(x0)
        # `step` is not passed, because the warm-up of a weighting would distort the loss curve.
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
            labels: the condition of the N images. For classes, it is labels (N,) int64 below
                `num_classes`, where -1 means no class. None uses the default condition of each
                seed, which for classes is the seed modulo `num_classes`.

        Raises:
            ValueError: if `labels` is not a valid condition.
            NonFiniteSamples: if a sample, or an intermediate estimate of x0, is NaN or infinite.
        """
        return self._sample(self.solver, self.process, seeds, labels)

    @torch.no_grad()
    def edit(
        self, images: Tensor, seeds: Sequence[int], labels: Condition = None, strength: float = 0.6
    ) -> Tensor:
        """Generate images uint8 (N, C, H, W) from noised images instead of pure noise.

        Args:
            images: uint8 (N, C, H, W) images to which noise is added.
            seeds: one integer per image.
            labels: the condition of the N images. None uses the default condition of each seed, as
                in `generate`.
            strength: fraction of the solver's steps to take, in (0, 1]. At least one step is taken.
                A small fraction preserves most of the image.

        Raises:
            ValueError: if `labels` is not a valid condition, if `strength` is not in (0, 1], or if
                the solver is not a dataclass with `steps` and `times`.
            NonFiniteSamples: if a sample, or an intermediate estimate of x0, is NaN or infinite.

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

        The method samples with `solvers.editing.RePaint` instead of the module's solver. RePaint
        gets the `steps`, `times` and, if there is one, `variance` of the module's solver.

        Args:
            images: uint8 (N, C, H, W) images to preserve in part.
            mask: (N, 1, H, W), or a shape that broadcasts to it. H and W are those of x0, not of
                the images. The mask is 1 where images are preserved, and 0 where they are
                generated.
            seeds: one integer per image.
            labels: the condition of the N images. None uses the default condition of each seed, as
                in `generate`.
            resamples: number of times that each step is taken. A larger number makes the preserved
                part and the generated part more consistent.

        Raises:
            ValueError: if the mask is (N, H, W), if `labels` is not a valid condition, or if the
                solver is not a dataclass with `steps` and `times`.
            NonFiniteSamples: if a sample, or an intermediate estimate of x0, is NaN or infinite.

        Source: Lugmayr et al. 2022 (RePaint).
        """
        if mask.ndim == 3 and len(mask) > 1:  # the first axis would be that of the channels
            raise ValueError(
                f"mask must be (N, 1, H, W) or (H, W), got {tuple(mask.shape)}; pass mask[:, None]."
            )
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
        """Return a function that maps (x_t, t) to estimates of x0 and noise (`Denoised`).

        Solvers and guidance call this function instead of the network. The network runs in eval
        mode, without dropout.

        Args:
            labels: condition of the images, on this module's device; None for an unconditional
                network.
        """

        def denoise(x_t: Tensor, t: Tensor) -> Denoised:
            alpha, sigma = (expand_as(v, x_t) for v in self.process.alpha_sigma(t))
            # `generate` has set eval mode already, but not in the weaker model of `Autoguidance`.
            with eval_mode(self.network) if self.network.training else nullcontext():
                output, variance_output = self._run_network(x_t, t, alpha, sigma, labels)
            frac = None if variance_output is None else (variance_output + 1) / 2
            x0 = self.parameterization.to_x0(output, x_t, alpha, sigma)
            return Denoised(x0, (x_t - alpha * x0) / sigma, frac)

        return denoise

    def sampling_record(self) -> dict[str, Any]:
        """Describe solver, steps, guidance and process of `generate`, for evaluation records."""
        return {
            "solver": repr(with_grid(self.solver, self.process)),
            "steps": getattr(self.solver, "steps", None),
            "guidance": None if self.guidance is None else repr(self.guidance),
            "process": repr(self.process),
        }

    # Batches and logs

    def _unpack_batch(self, batch: Batch) -> tuple[Tensor, Condition, Tensor]:
        """Validate a batch, and return its images, condition and index."""
        checks.check_batch(batch, takes_condition=self.conditioning is not None)
        images, labels, index = batch
        if self.conditioning is None:
            return images, None, index
        condition = _tuple_from_list(labels)
        # On a GPU, labels are checked only once, because the check synchronizes with the device.
        if images.device.type == "cpu" or not self._has_checked_condition:
            self.conditioning.check(condition, len(images))
            self._has_checked_condition = True
        return images, condition, index

    def _log_training(self, loss: Tensor, losses: Tensor, u: Tensor | None, batch_idx: int) -> None:
        """Log the loss, and in logging steps also its mean in each quartile of u unless u is None.

        The mean of an empty quartile is NaN. In other steps, nothing more is logged, because
        Lightning takes 0.5 ms to log a number. The method does not set `prog_bar=True`, because
        Lightning would then wait for the device in every batch. `callbacks.progress` shows the loss
        instead.
        """
        is_logging_step = should_log(self.trainer)
        if is_logging_step or batch_idx == 0 or self.trainer.is_last_batch:
            self.log("train/loss", loss.detach())
        if u is None or not is_logging_step:
            return
        quartile = bin_of(u, 4)
        sums = torch.zeros(4, dtype=losses.dtype, device=u.device).index_add(0, quartile, losses)
        means = sums / torch.zeros_like(sums).index_add(0, quartile, torch.ones_like(losses))
        self.log_dict({f"train/loss_q{i}": mean for i, mean in enumerate(means)})


def _tuple_from_list(labels: Any) -> Any:
    """Undo the DataLoader's conversion of a tuple (a condition of several parts) to a list."""
    return tuple(labels) if isinstance(labels, list) else labels
