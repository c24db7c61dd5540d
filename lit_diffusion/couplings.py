"""Couplings: which noise of a batch is added to which image.

By default, noise is independent of the image. A coupling permutes the noise of a batch, so that
each image gets noise that is close to it. The noise of the batch is still standard normal.

A coupling changes the joint distribution of x0 and noise, and with it the distribution of x_t and
the optimal network. Samplers of the probability flow ODE, such as `DDIM`, `DPMSolverPP` or `Heun`
without churn, still generate the distribution of the images. Guidance, likelihoods, and samplers
that add noise (such as `DDPM`) are not correct with a coupling, because they assume independent
noise.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from lit_diffusion.protocols import Condition, describe_condition


@dataclass(frozen=True)
class BatchAssignment:
    """Assigns the noise of a batch to its images so that the total cost is as low as possible.

    With `cost="squared"`, this is minibatch optimal transport. With `cost="distance"`, it is
    immiscible diffusion. The assignment is exact, and is computed on the CPU in O(B**3). If the
    images are on a GPU, each training step therefore synchronizes the CPU with the GPU. If an image
    has a NaN or infinite value, the noise is not permuted.

    The noise is permuted among the images on one device, and each noise is used once. The authors
    of immiscible diffusion permute the noise among the images on all devices. The code of the
    authors of OT-CFM draws pairs of image and noise with replacement.

    Args:
        cost: the cost of a pair, "squared" for `||x0 - noise||**2` or "distance" for
            `||x0 - noise||`.
        within_classes: whether to permute noise only among images with the same label. With False,
            the noise of a class is not standard normal, because each class gets the noise that is
            close to its images. A conditional model is then biased, because sampling starts from
            standard normal noise. Without labels, noise is permuted in the whole batch.

    Raises:
        ValueError: if cost is unknown. In training, the error is also raised if within_classes is
            True and the condition is not one label per image.

    Source: Tong et al. 2023 (OT-CFM, arXiv 2302.00482), section 3.2; Li et al. 2024 (Immiscible
        Diffusion, arXiv 2406.12303), algorithm 1; Cheng & Schwing 2025 (arXiv 2503.10636) for the
        bias within classes.

    Example:
        >>> x0 = torch.tensor([-1.0, 1.0]).view(2, 1, 1, 1)
        >>> noise = torch.tensor([0.8, -0.7]).view(2, 1, 1, 1)
        >>> BatchAssignment(within_classes=False).couple(x0, noise, None).flatten().tolist()
        [-0.699999988079071, 0.800000011920929]
    """

    cost: Literal["squared", "distance"] = "squared"
    within_classes: bool = True

    def __post_init__(self) -> None:
        if self.cost not in ("squared", "distance"):
            raise ValueError(f"cost must be 'squared' or 'distance', got {self.cost!r}.")

    def couple(self, x0: Tensor, noise: Tensor, condition: Condition, /) -> Tensor:
        """Permute the noise (B, C, H, W)."""
        if condition is None or not self.within_classes:
            return noise[self._assign(x0, noise)]
        if not isinstance(condition, Tensor) or condition.shape != (len(x0),):
            raise ValueError(
                "within_classes=True needs one label per image, got "
                f"{describe_condition(condition)}; pass within_classes=False, which biases a "
                "conditional model."
            )
        order = torch.arange(len(x0), device=x0.device)
        for label in condition.unique():  # type: ignore[no-untyped-call]
            members = (condition == label).nonzero()[:, 0]
            order[members] = members[self._assign(x0[members], noise[members])]
        return noise[order]

    def _assign(self, x0: Tensor, noise: Tensor) -> Tensor:
        """Index (B,) of the noise that each image gets."""
        distance = torch.cdist(x0.double().flatten(1), noise.double().flatten(1))  # (B, B)
        cost = (distance.square() if self.cost == "squared" else distance).cpu()
        if not cost.isfinite().all():
            return torch.arange(len(x0), device=x0.device)
        return torch.from_numpy(linear_sum_assignment(cost.numpy())[1]).to(x0.device)
