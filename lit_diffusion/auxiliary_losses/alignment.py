"""Representation alignment: the features of a block predict the features of a teacher."""

from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_diffusion.auxiliary_losses.features import BlockFeatures, feature_grid
from lit_diffusion.protocols import NoisedBatch, Teacher, check_positive

SMOOTH_L1_BETA = 0.05
"""Error below which the smooth L1 distance is quadratic, from the code of the authors of SRA."""


class RepresentationAlignment(nn.Module):
    """Alignment loss `weight * mean_n distance(projector(h[n]), y[n])`.

    The vector h[n] contains the features of a block of the network at position n of the noised
    image. The vector y[n] contains the features of a teacher at the same position. The projector is
    an MLP, which is trained with the network, and is not used for sampling. No gradient flows into
    the teacher. The mean is over all positions and all images on one device.

    - With the teacher `PretrainedEncoder`, this is REPA. The defaults are the settings of REPA.
    - With the teacher `SelfTeacher`, this is SRA. Set `distance="smooth_l1"` and
      `hidden=(2 * width,)`, as in the paper. In the authors' code for the paper, the weight is 0.2
      for SiT and 0.04 for DiT, so the term has about the same magnitude as the training loss. On
      ImageNet-256, this weight falls slowly after 150 epochs. Their later code for SiT uses the
      weight 0.5 and a cosine distance that differs from `distance="cosine"`. Theirs has one cosine
      per feature, over all positions. Ours has one per position, over all features, as in REPA.
    - With `until_step`, the term is switched off after a number of steps, as in HASTE. HASTE also
      aligns attention maps, which this class does not.

    If block and teacher have grids of different sizes, the projected features of the block are
    interpolated bilinearly to the grid of the teacher.

    The projector has PyTorch's default initialization, whereas the code of the authors of REPA and
    SRA uses Xavier initialization. `ModelParallelStrategy` is not supported, because the projector
    is not a part of the network.

    Args:
        block: name of the block in the network, such as "blocks.7". REPA uses the eighth block of
            SiT-XL, which has 28 blocks.
        width: number of features of the block at each position.
        teacher: object that computes the features to predict: a `PretrainedEncoder`, a
            `SelfTeacher`, or another `protocols.Teacher`.
        hidden: number of features of each hidden layer of the projector. SiLU follows each hidden
            layer.
        distance: "cosine" for the negative cosine similarity, or "smooth_l1" for the smooth L1
            distance, averaged over features. The smooth L1 distance is quadratic for errors below
            0.05, as in the code of the authors of SRA.
        weight: factor on the term.
        until_step: number of optimizer steps after which the term is 0 and the teacher does not
            run any more. None uses the term in the whole run. The code of the authors of HASTE
            stops the term at step 250,000, for SiT-XL on ImageNet.

    Raises:
        ValueError: if an argument is out of range. In training, the error is also raised if `width`
            is not the number of features of the block.

    Source: Yu et al. 2024 (REPA, arXiv 2410.06940), section 3; Jiang et al. 2025 (SRA, arXiv
        2505.02831); Wang et al. 2025 (HASTE, arXiv 2505.16792) for `until_step`.

    Example:
        >>> from lit_diffusion.auxiliary_losses import SelfTeacher
        >>> from lit_diffusion.networks.dit import DiT
        >>> network = DiT(8, 1, 1, depth=3, width=32, num_heads=2)
        >>> loss = RepresentationAlignment("blocks.0", 32, SelfTeacher("blocks.2"), hidden=(64,))
        >>> loss.attach(network)
        >>> loss.projector
        Sequential(
          (0): Linear(in_features=32, out_features=64, bias=True)
          (1): SiLU()
          (2): Linear(in_features=64, out_features=32, bias=True)
        )
    """

    def __init__(
        self,
        block: str,
        width: int,
        teacher: Teacher,
        hidden: tuple[int, ...] = (2048, 2048),
        distance: Literal["cosine", "smooth_l1"] = "cosine",
        weight: float = 0.5,
        until_step: int | None = None,
    ) -> None:
        super().__init__()
        sizes = [width, *hidden, width if teacher.width is None else teacher.width]
        check_positive(weight=weight, width=width, hidden=min(sizes), until_step=until_step)
        if distance not in ("cosine", "smooth_l1"):
            raise ValueError(f"distance must be 'cosine' or 'smooth_l1', got {distance!r}.")
        self.features = BlockFeatures(block)
        self.width, self.teacher = width, teacher
        self.distance, self.weight, self.until_step = distance, weight, until_step
        layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.SiLU())]
        self.projector = nn.Sequential(*layers[:-1])

    def attach(self, network: nn.Module) -> None:
        """Prepare the teacher, and register a forward hook on the block.

        Raises:
            ValueError: if the network lacks the block, or if the teacher does not fit the network.
        """
        self.teacher.attach(network)  # first, because a teacher may copy the network
        self.features.attach(network)

    def compute(self, module: Any, batch: NoisedBatch) -> Tensor:
        """Compute the loss () of the features from the last forward pass."""
        output = self.features.take()
        if self.until_step is not None and module.global_step >= self.until_step:
            # A gradient of 0, because DDP waits for the gradient of each parameter.
            return 0 * torch.stack([p.sum() for p in self.projector.parameters()]).sum()
        h = feature_grid(output, module.network)  # (B, h, w, D)
        if h.shape[-1] != self.width:
            raise ValueError(
                f"width must be the number of features of block {self.features.block!r}, which is "
                f"{h.shape[-1]}, got {self.width}; pass width={h.shape[-1]}."
            )
        target = self.teacher.features(module, batch).float()  # (B, h', w', D')
        return self.weight * self._mean_distance(self.projector(h).float(), target)

    def _mean_distance(self, projected: Tensor, target: Tensor) -> Tensor:
        """Mean distance () of features (B, h, w, D) to target features (B, h', w', D)."""
        if projected.shape[1:3] != target.shape[1:3]:
            maps = F.interpolate(projected.movedim(-1, 1), target.shape[1:3], mode="bilinear")
            projected = maps.movedim(1, -1)
        if self.distance == "cosine":
            return -F.cosine_similarity(projected, target, dim=-1).mean()
        return F.smooth_l1_loss(projected, target, beta=SMOOTH_L1_BETA)
