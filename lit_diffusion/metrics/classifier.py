"""The small convolutional network whose features score small images."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


class SmallClassifier(nn.Module):
    """Classifies small images; the mean over places of its last feature map is what FID compares.

    Every stage is convolution 3x3, batch norm, ReLU; all but the last end in max pooling 2x2.

    Args:
        channels: of the images, >= 1.
        size: height and width of the images in pixels; one number where they are equal.
        widths: feature maps per stage; the last is the number of features.
        num_classes: outputs of the head.

    Example:
        >>> network = SmallClassifier(channels=1, size=8, widths=(4, 6), num_classes=10).eval()
        >>> features = network(torch.zeros(5, 1, 8, 8, dtype=torch.uint8))
        >>> features.shape, network.head(features).shape
        (torch.Size([5, 6]), torch.Size([5, 10]))
    """

    def __init__(
        self, channels: int, size: int | Sequence[int], widths: Sequence[int], num_classes: int
    ) -> None:
        super().__init__()
        self.channels = channels
        self.size = (size, size) if isinstance(size, int) else tuple(size)
        self.num_features = widths[-1]
        stages: list[nn.Module] = []
        for before, after in zip([channels, *widths], widths, strict=False):
            stages += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after)]
            stages += [nn.ReLU(), nn.MaxPool2d(2)]
        self.stages = nn.Sequential(*stages[:-1])
        self.head = nn.Linear(self.num_features, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Images uint8 (N, C, H, W) of the size trained on -> features (N, num_features) >= 0."""
        if images.dtype != torch.uint8:
            raise TypeError(f"images must be uint8 in [0, 255], got {images.dtype}.")
        if images.shape[1:] != (self.channels, *self.size):
            raise ValueError(
                f"this extractor scores images of {(self.channels, *self.size)}, got "
                f"{tuple(images.shape[1:])}; choose an extractor made for them."
            )
        return self.features(images.float() / 127.5 - 1)

    def features(self, x: Tensor) -> Tensor:
        """Images float (N, C, H, W) in [-1, 1] -> features (N, num_features)."""
        maps: Tensor = self.stages(x)
        return maps.mean(dim=(2, 3))


def classifier_of(state: Mapping[str, Tensor], size: int | Sequence[int]) -> SmallClassifier:
    """The `SmallClassifier` with these weights, in eval mode and frozen.

    Raises:
        KeyError, RuntimeError: of weights that are no SmallClassifier's.
    """
    convolutions = {int(name.split(".")[1]): v for name, v in state.items() if v.ndim == 4}
    weights = [convolutions[index] for index in sorted(convolutions)]
    num_classes = len(state["head.weight"])
    network = SmallClassifier(weights[0].shape[1], size, [len(w) for w in weights], num_classes)
    network.load_state_dict(state)
    return network.eval().requires_grad_(False)
