"""Contrastive flow matching: pushes the network's output away from the targets of other images."""

from typing import Any

import torch
from torch import Tensor, nn

from lit_diffusion.auxiliary_losses.features import BlockFeatures
from lit_diffusion.gaussian import expand_as
from lit_diffusion.losses import UncertaintyLoss
from lit_diffusion.protocols import NoisedBatch
from lit_diffusion.timesteps import bin_of


class ContrastiveFlow:
    """Contrastive term `-weight * mean(W(t) * mean((output - other_target)**2))`.

    The term has the opposite sign of the training loss. `other_target` is the target that another
    image of the batch, with its own noise, would have at the same t. This image is drawn uniformly
    from the other images on the same device. As in the authors' code, both images may have the same
    label. W is the weight of the training loss, including `timestep_weight`. The training loss
    must be a `DenoisingLoss` or `HybridLoss`, because W does not contain the learned weights of
    `UncertaintyLoss`.

    The term biases the model. Let E[target] be the mean target over all images at time t. At the
    optimum, the network outputs

        (E[target | x_t, condition] - weight * E[target]) / (1 - weight).

    Samples then have less variance than the data. For example, let the data be Gaussian with the
    standard deviation s < 1. A model with `LinearFlow` and `FlowVelocity` then generates samples
    with the correct mean and the standard deviation `s**(1 / (1 - weight))`. With `Epsilon`, the
    bias is larger, because `Epsilon.to_x0` divides by alpha, which is close to 0 at high noise
    levels. To undo the bias in sampling, use `parameterizations.ContrastCorrection`.

    Args:
        weight: factor on the term, in (0, 1). The paper calls this factor lambda. The authors use
            0.05.

    Attributes:
        bias_weight: the weight, from which `DiffusionModule` checks that the weight of a
            `ContrastCorrection` is the same. A loss of your own that contains this term needs this
            attribute too.

    Raises:
        ValueError: unless 0 < weight < 1.

    Source: Stoica et al. 2025 (Contrastive Flow Matching, arXiv 2506.05350).

    Example:
        >>> loss = ContrastiveFlow(weight=0.05)  # for DiffusionModule(auxiliary_loss=loss)
        >>> loss.weight
        0.05
    """

    def __init__(self, weight: float = 0.05) -> None:
        if not 0 < weight < 1:
            raise ValueError(f"0 < weight < 1 must hold, got {weight}.")
        self.weight = self.bias_weight = weight
        self.output = BlockFeatures("")

    def attach(self, network: nn.Module, /) -> None:
        """Register a forward hook that records the output of the network."""
        self.output.attach(network)

    def compute(self, module: Any, batch: NoisedBatch, /) -> Tensor:
        """Compute the term () from the network's output in the last forward pass.

        Args:
            module: the `DiffusionModule` that is trained.
            batch: the images, noise and times of the forward pass.

        Raises:
            ValueError: if the batch has only one image, or if the training loss is
                `UncertaintyLoss`.
        """
        if isinstance(module.loss, UncertaintyLoss):
            raise ValueError(
                "ContrastiveFlow does not know the learned weights of UncertaintyLoss; choose "
                "DenoisingLoss or HybridLoss."
            )
        x0, noise = batch.x0, batch.noise
        if len(x0) < 2:
            raise ValueError(
                "ContrastiveFlow needs at least 2 images per device, got 1; use a larger "
                "batch_size, and drop_last=True in your DataLoader."
            )
        output = self.output.take()[:, : x0.shape[1]].to(x0.dtype)  # without learned variance
        shift = torch.randint(1, len(x0), (len(x0),), device=x0.device)
        other = (torch.arange(len(x0), device=x0.device) + shift) % len(x0)
        alpha, sigma = module.process.alpha_sigma(batch.t)  # (B,) float64
        a, s = expand_as(alpha, x0), expand_as(sigma, x0)
        target: Tensor = module.parameterization.target(x0[other], noise[other], a, s)
        error = (target - output).square().flatten(1).mean(1)  # (B,)
        output_scale = module.parameterization.output_scale(alpha, sigma)
        weight: Tensor = module.loss.weighting.weight(
            alpha, sigma, output_scale, module.global_step
        )
        if module.timestep_weight is not None:
            factors = module.timestep_weight.to(weight.device)
            weight = weight * factors[bin_of(batch.u, len(factors))]
        return -self.weight * (weight.to(error.dtype) * error).mean()
