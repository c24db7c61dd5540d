"""The Frechet distance between two sets of features."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance

REAL_SUMS = ("real_features_sum", "real_features_cov_sum", "real_features_num_samples")
"""Names of the metric's states that describe the real images."""


class FrechetDistance(FrechetInceptionDistance):
    """Frechet distance between the features of fake and real images, computed in float64.

    The distance is `|mu_1 - mu_2|**2 + tr(S_1 + S_2 - 2 * (S_1 @ S_2)**(1/2))`. Here, mu_1 and S_1
    are the mean and covariance of the fake features, and mu_2 and S_2 are those of the real
    features.

    The base class from torchmetrics accumulates the features. This class computes the trace of the
    square root itself, because torchmetrics' method does not converge for some rank-deficient
    covariances.

    Source: Heusel et al. 2017, "GANs Trained by a Two Time-Scale Update Rule Converge to a Local
    Nash Equilibrium", Eq. 6.

    Example:
        >>> metric = FrechetDistance(2)
        >>> points = torch.tensor([[0.0, 0.0], [0.0, 2.0], [2.0, 0.0], [2.0, 2.0]])
        >>> metric.update(points, real=True)
        >>> metric.update(points + torch.tensor([3.0, 4.0]), real=False)
        >>> round(metric.compute().item(), 6)
        25.0
    """

    def __init__(self, num_features: int) -> None:
        features = nn.Identity()
        features.num_features = num_features  # type: ignore[assignment]
        super().__init__(feature=features, dist_sync_fn=_sum_over_processes)
        self.orig_dtype = torch.float64

    def update(self, features: Tensor, real: bool) -> None:
        """Add features (N, num_features) of real or of fake images."""
        super().update(features.double(), real)

    def compute(self) -> Tensor:
        """Compute the distance from the features of all processes.

        All processes must call this method.

        Returns:
            A float64 scalar >= 0, or NaN if any feature is not finite.

        Raises:
            RuntimeError: if there are fewer than two fake or fewer than two real images.
        """
        sums = (self.fake_features_cov_sum, self.real_features_cov_sum)
        if not all(bool(total.isfinite().all()) for total in sums):
            return torch.full((), torch.nan, dtype=torch.float64, device=self.device)
        mean_1, cov_1 = self._moments("fake")
        mean_2, cov_2 = self._moments("real")
        values, vectors = torch.linalg.eigh(cov_1)
        sqrt_1 = vectors * values.clamp(min=0).sqrt() @ vectors.T  # S_1^(1/2)
        # S_1 S_2 has the same eigenvalues as S_1^(1/2) S_2 S_1^(1/2), which is symmetric.
        trace_sqrt = torch.linalg.eigvalsh(sqrt_1 @ cov_2 @ sqrt_1).clamp(min=0).sqrt().sum()
        mean_distance = (mean_1 - mean_2).square().sum()
        distance = mean_distance + cov_1.trace() + cov_2.trace() - 2 * trace_sqrt
        return distance.clamp(min=0)

    def _moments(self, kind: str) -> tuple[Tensor, Tensor]:
        """Mean (F,) and covariance (F, F) of the "fake" or "real" features."""
        count, total, outer = (
            getattr(self, f"{kind}_features_{what}") for what in ("num_samples", "sum", "cov_sum")
        )
        if count < 2:
            raise RuntimeError(f"a covariance needs at least two {kind} images, got {count}.")
        mean = total / count
        return mean, (outer - count * mean.outer(mean)) / (count - 1)

    def real_sums(self) -> dict[str, Tensor]:
        """Return the metric's states for the real images, summed over all processes, on the CPU.

        All processes must call this method.
        """
        with self.sync_context(dist_sync_fn=_sum_over_processes):
            return {name: getattr(self, name).cpu().clone() for name in REAL_SUMS}

    def add_real_sums(self, sums: Mapping[str, Tensor]) -> None:
        """Add sums that `real_sums` returned.

        Only one process may call this method, because `compute` sums the states over processes.
        """
        for name in REAL_SUMS:
            setattr(self, name, getattr(self, name) + sums[name].to(self.device))


def _sum_over_processes(state: Tensor, group: Any = None) -> list[Tensor]:
    """Sum a state over processes with an all-reduce.

    The default of torchmetrics gathers all states, which would take 2 GiB for 2048 x 2048 float64
    entries on 64 processes.
    """
    total = state.clone()
    torch.distributed.all_reduce(total, group=group)
    return [total]
