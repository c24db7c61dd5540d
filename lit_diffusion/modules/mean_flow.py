"""MeanFlow: learns average velocities, with which one step generates a sample."""

import math
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_diffusion.callbacks.trainer_state import attached_trainer, eval_mode
from lit_diffusion.gaussian import expand_as
from lit_diffusion.losses import DenoisingLoss
from lit_diffusion.modules.diffusion import Batch, DiffusionModule
from lit_diffusion.parameterizations import FlowVelocity
from lit_diffusion.processes import LinearFlow
from lit_diffusion.protocols import Condition, by_part
from lit_diffusion.timesteps import draw_uniforms


class MeanFlow(DiffusionModule):
    """Flow matching that also learns average velocities, for samples in one step or a few steps.

    The flow moves x_t along dx_t/dt = v(x_t, t) to x_r at an earlier time r <= t. The network
    learns the average velocity `u(x_t, r, t) = (x_t - x_r) / (t - r)`. With r = t, it is the
    velocity v. A step from t to r is `x_r = x_t - (t - r) * u(x_t, r, t)`, which is exact for any
    length of the step. The average velocity satisfies the MeanFlow identity

        u = v - (t - r) * du/dt,  du/dt = (partial du/dx_t) v + (partial du/dt).

    The squared error in training is `mean((u - target)**2)`. The target is the right-hand side of
    the identity, computed with the network as u and with `noise - x0` in place of v. No gradient
    flows through the target. The derivative du/dt is a Jacobian-vector product. The loss of an
    image is

        error / (error + 1e-3 / D)**power,

    where D is the number of values of x0, and the denominator has no gradient. The loss equals the
    paper's loss times `D**(power - 1)`. With power = 1, train/loss is always close to 1. Watch the
    FID and val/loss instead. The metric val/loss is the flow-matching loss, with r = t and
    power = 0.

    For each image, training draws two values from `times`. The larger value is t, and the smaller
    value is r. A fraction `equal_times` of the images has r = t instead. Only images with r < t
    need the Jacobian-vector product.

    In `generate`, the solvers `DDIM` and `Euler` use the average velocity of each step if their
    `eta` is 0. Other solvers, likelihoods and inversion use the velocity v.

    Args:
        *args: arguments of `DiffusionModule`. The network must take two times, as `UNet` and `DiT`
            do with `two_times=True`. Its noise labels are (B, 2): labels of t and of t - r. The
            process must be `LinearFlow`, the parameterization `FlowVelocity`, and the loss
            `DenoisingLoss`. An `auxiliary_loss` raises an error.
        equal_times: fraction of the images with r = t. The authors use 0.75.
        power: exponent of the adaptive weight. The authors use 1. With 0, the loss is the squared
            error. Use 0 for data of a few dimensions, where the network would otherwise learn a
            mode of the target instead of its mean.
        guidance_scale: scale of classifier-free guidance. The network learns the average velocity
            of the guided flow, so that `generate` needs no guidance. The velocity in the target is
            then `omega * (noise - x0) + kappa * u(c) + (1 - omega - kappa) * u(no condition)`, with
            kappa = `guidance_mix` and omega = `guidance_scale * (1 - kappa)`. Both values of u are
            outputs of the network at r = t. A scale of 1 means no guidance.
        guidance_mix: the weight kappa, in [0, 1).
        **kwargs: keyword arguments of `DiffusionModule`.

    Raises:
        ValueError: if an argument is out of range or does not fit.

    Source: Geng et al. 2025 (MeanFlow, arXiv 2505.13447), Eq. 6, algorithms 1 and 2, sections 4.2
        and 4.3, and appendix B.1 for kappa. Two choices are ours. The derivative is computed in
        evaluation mode, without dropout. Guidance applies at all times, whereas some of the
        authors' models use it only in an interval. The constant 1e-3 in the loss is from the paper.
        The authors' code has 0.01 instead. For images whose condition was dropped, the target in
        the authors' code contains `noise - x0`, and our target contains the velocity with guidance.
        At the optimum, both targets have the same mean.

    Example:
        >>> from lit_diffusion.losses import Simple
        >>> from lit_diffusion.networks.dit import DiT
        >>> from lit_diffusion.solvers import Euler
        >>> from lit_diffusion.timesteps import LogitNormal
        >>> module = MeanFlow(
        ...     network=DiT(8, 1, 1, width=32, depth=1, num_heads=2, two_times=True),
        ...     process=LinearFlow(),
        ...     parameterization=FlowVelocity(),
        ...     loss=DenoisingLoss(Simple()),
        ...     times=LogitNormal(mean=-0.4, std=1.0),
        ...     solver=Euler(steps=1, clip=False),
        ...     optimizer=torch.optim.Adam,
        ...     image_shape=(1, 8, 8),
        ... )
        >>> module.generate(seeds=range(2)).shape  # one evaluation of the network
        torch.Size([2, 1, 8, 8])
    """

    def __init__(
        self,
        *args: Any,
        equal_times: float = 0.75,
        power: float = 1.0,
        guidance_scale: float = 1.0,
        guidance_mix: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        for part, needed in (
            (self.process, LinearFlow),
            (self.parameterization, FlowVelocity),
            (self.loss, DenoisingLoss),
        ):
            if not isinstance(part, needed):
                raise ValueError(f"MeanFlow needs {needed.__name__}, got {part}; change it.")
        if self.auxiliary_loss is not None:
            raise ValueError(
                "MeanFlow trains at other times than an auxiliary loss would see, got "
                f"auxiliary_loss={type(self.auxiliary_loss).__name__}; leave it out, or use "
                "DiffusionModule."
            )
        if not any(getattr(part, "two_times", False) for part in self.network.modules()):
            raise ValueError(
                "MeanFlow needs a network that takes two times, got "
                f"{type(self.network).__name__}; pass two_times=True to UNet or DiT."
            )
        if not (0 <= equal_times <= 1 and 0 <= power < math.inf and 0 <= guidance_mix < 1):
            raise ValueError(
                "equal_times must be in [0, 1], power >= 0 and guidance_mix in [0, 1), got "
                f"{equal_times}, {power} and {guidance_mix}."
            )
        if guidance_scale != 1 and not (guidance_scale > 0 and self.label_dropout > 0):
            raise ValueError(
                "guidance_scale must be above 0 and needs label_dropout > 0, got "
                f"{guidance_scale} and label_dropout={self.label_dropout}; 0.1 is usual."
            )
        self.equal_times, self.power = equal_times, power
        self.guidance_scale, self.guidance_mix = guidance_scale, guidance_mix

    def configure_model(self) -> None:
        """Raise ValueError if the strategy splits weights."""
        trainer = attached_trainer(self)
        if trainer is not None and isinstance(trainer.strategy, ModelParallelStrategy):
            raise ValueError(
                "MeanFlow differentiates the network in forward mode, which weights that are split "
                "over ranks do not support; use strategy='ddp'."
            )
        super().configure_model()

    def training_step(self, batch: Batch, batch_idx: int) -> STEP_OUTPUT:
        """Compute the training loss.

        Unlike the result of `DiffusionModule.training_step`, the result has no entries "u" and "t",
        because each image has two times.

        Raises:
            ValueError: if a callback has set `timestep_weight`.
        """
        if self.timestep_weight is not None:
            raise ValueError(
                "MeanFlow trains each image at two times, but timestep_weight is a function of one "
                "time; leave out the callback that sets it, or use DiffusionModule."
            )
        outputs: Any = super().training_step(batch, batch_idx)
        return {name: outputs[name] for name in ("loss", "per_sample_loss")}

    def _log_training(self, loss: Tensor, losses: Tensor, u: Tensor | None, batch_idx: int) -> None:
        """Log the loss. It has no quartiles of u, because each image has two times."""
        super()._log_training(loss, losses, None, batch_idx)

    def per_sample_loss(
        self, x0: Tensor, condition: Condition, t: Tensor, noise: Tensor, step: int | None = None
    ) -> Tensor:
        """Compute the loss of each image, (B,).

        Args:
            x0: (B, C, H, W) clean images, encoded by the codec.
            condition: condition of the images; None for an unconditional network.
            t: (B,) float64 times.
            noise: (B, C, H, W) standard normal noise.
            step: number of completed optimizer steps in training; None otherwise. If None, the
                result is the flow-matching loss at t, which depends only on the arguments and the
                weights. In training, the method draws another value besides t for each image. The
                larger of the two values then takes the place of t.
        """
        if step is None:
            return super().per_sample_loss(x0, condition, t, noise)
        u = draw_uniforms(len(t), self.timestep_density, self.uniforms, device=t.device)
        other = self.times.quantile(u, self.process)
        t, r = t.maximum(other), t.minimum(other)  # (B,) float64
        # The number of images with r < t is rounded up or down at random. Data are shuffled, so
        # these images can come first. The sizes of all tensors are then known without the device.
        num = int((1 - self.equal_times) * len(t) + torch.rand((), dtype=torch.float64))
        r = torch.cat([r[:num], t[num:]])
        alpha, sigma = self.process.alpha_sigma(t)  # (B,) float64
        a, s = expand_as(alpha, x0), expand_as(sigma, x0)  # (B, 1, 1, 1) in x0's dtype
        x_t = a * x0 + s * noise  # (B, C, H, W)
        output, _ = self._run_network(x_t, torch.stack([t, t - r], 1), a, s, condition)
        velocity = self.parameterization.target(x0, noise, a, s)  # (B, C, H, W)
        target = self._target(x_t, velocity, t, r[:num], condition)  # (B, C, H, W)
        error = (target - output).square().flatten(1).mean(1)  # (B,)
        output_scale = self.parameterization.output_scale(alpha, sigma)  # (B,) float64
        weight = self.loss.weighting.weight(alpha, sigma, output_scale, step)  # (B,) float64
        adaptive = (error.detach() + 1e-3 / x0[0].numel()) ** self.power
        return weight.to(error.dtype) * error / adaptive

    @torch.no_grad()
    def _target(
        self, x_t: Tensor, velocity: Tensor, t: Tensor, r: Tensor, condition: Condition
    ) -> Tensor:
        """Compute `v - (t - r) * du/dt` for the first images, which have an r, and v for others."""
        num = len(r)

        def average_velocity(x_t: Tensor, t: Tensor) -> Tensor:
            part = by_part(lambda part: part[:num], condition)
            return self._run_eager(x_t, torch.stack([t, t - r], 1), part)

        # Fused kernels of attention have no forward-mode derivative.
        with eval_mode(self.network), sdpa_kernel(SDPBackend.MATH):
            v = self._guide(velocity, x_t, t, condition)
            if num == 0:
                return v
            tangents = v[:num], torch.ones_like(t[:num])
            derivative = torch.func.jvp(average_velocity, (x_t[:num], t[:num]), tangents)[1]
        return torch.cat([v[:num] - expand_as(t[:num] - r, v) * derivative, v[num:]])

    def _guide(self, velocity: Tensor, x_t: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """Compute the velocity (B, C, H, W) of the guided flow."""
        if self.guidance_scale == 1:
            return velocity
        assert self.conditioning is not None  # because label_dropout > 0
        kappa = self.guidance_mix
        omega = self.guidance_scale * (1 - kappa)
        null = self._run_eager(x_t, t, self.conditioning.null(condition))
        guided = omega * velocity + (1 - omega - kappa) * null
        return guided + kappa * self._run_eager(x_t, t, condition) if kappa else guided

    def _run_eager(self, x_t: Tensor, times: Tensor, condition: Condition) -> Tensor:
        """Run the network uncompiled, because torch.func cannot differentiate compiled code."""
        label = self.process.noise_label(times)
        x = x_t.to(self.dtype).contiguous(memory_format=self.memory_format)
        label = label.to(torch.promote_types(x_t.dtype, torch.float32))
        return self.network.forward(x, label, condition).to(x_t.dtype)

    def _run_network(
        self, x_t: Tensor, t: Tensor, alpha: Tensor, sigma: Tensor, condition: Condition
    ) -> tuple[Tensor, Tensor | None]:
        """Run the network. If the solver says when its step ends, use the average velocity."""
        until = getattr(t, "until", None)
        times = t if until is None else torch.stack([t, t - until], 1)
        return super()._run_network(x_t, times, alpha, sigma, condition)
