"""FID protocols whose extractors are pretrained vision transformers: DINOv2 and CLIP."""

import hashlib
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_fidelity.feature_extractor_base import FeatureExtractorBase
from torch_fidelity.feature_extractor_clip import FeatureExtractorCLIP
from torch_fidelity.feature_extractor_dinov2 import FeatureExtractorDinoV2
from torchvision.models import VisionTransformer

from lit_diffusion.files import check_regular
from lit_diffusion.metrics import weight_files
from lit_diffusion.metrics.weight_files import WEIGHT_FILES

IMAGE_SIZE = 224
"""Height and width in pixels to which images are resized."""


@dataclass(frozen=True)
class _PretrainedViT:
    """Base class of FID protocols with a pretrained vision transformer."""

    weights_path: str | None = None

    name: ClassVar[str]
    metric: ClassVar[str]  # name of the distance in logs and records
    channels = 3
    resize = f"{IMAGE_SIZE}x{IMAGE_SIZE}, bicubic as in Pillow: antialiased, rounded to 8 bits"

    @property
    def sha256(self) -> str:
        """SHA-256 of the published weight file, 64 hex digits."""
        return WEIGHT_FILES[self.name].sha256

    def check(self) -> None:
        """Raise an error if the weight file is missing or is not the published file."""
        WEIGHT_FILES[self.name].check(self.weights_path)


class DINOv2(_PretrainedViT):
    """FID protocol of published FD-DINOv2, with DINOv2 ViT-L/14.

    The features are the 1024 outputs of the class token after the last layer norm. Images are
    resized to 224x224, and the color channels are normalized by the mean and standard deviation of
    ImageNet. The metric is logged as `fd_dinov2_<num_samples>`.

    torch-fidelity's extractor `dinov2-vit-l-14` has the same weights and the same normalization.
    It resizes differently: with bilinear interpolation and without antialiasing. Therefore, its
    distances equal the distances of this protocol only for images of 224x224 pixels.

    Args:
        weights_path: the published file dinov2_vitl14_pretrain.pth. None means the file in the
            cache of `torch.hub`, where `lit-diffusion fetch-weights` writes it. The file is read
            without running code from it.

    Source: Stein et al. 2023, "Exposing flaws of generative model evaluation metrics and their
        unfair treatment of diffusion models" (arXiv 2306.04675). The paper's code resizes the
        images with Pillow's bicubic interpolation. This protocol resizes with PyTorch's version of
        the same algorithm. For square images, a few of every thousand pixel values differ from
        Pillow's, by at most 2 of 255. If one side of an image is shorter than 224 pixels and the
        other side is longer, the differences are larger, because recent versions of Pillow resize
        the two directions in another order.

    Example:
        >>> DINOv2().name, DINOv2().metric
        ('dinov2-vit-l-14', 'fd_dinov2')
    """

    name = weight_files.DINOV2
    metric = "fd_dinov2"

    def build(self) -> nn.Module:
        """Build a module that maps images uint8 (N, 3, H, W) to features (N, 1024)."""
        path = WEIGHT_FILES[self.name].check(self.weights_path)
        return _DINOv2(torch.load(check_regular(path), map_location="cpu", weights_only=True))


class _DINOv2(FeatureExtractorDinoV2):  # type: ignore[misc]
    def __init__(self, state: Mapping[str, Tensor]) -> None:
        # The constructor of torch-fidelity would download code from GitHub and run it.
        FeatureExtractorBase.__init__(self, DINOv2.name, ["dinov2"])
        self.feature_extractor_internal_dtype = torch.float32
        self.model = dinov2_network(state)
        self.num_features = self.model.hidden_dim
        self.requires_grad_(False).eval()

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(_resize(images))[0]


@torch.no_grad()
def dinov2_network(state: Mapping[str, Tensor]) -> VisionTransformer:
    """Build a DINOv2 network for 224x224 images as a vision transformer of torchvision.

    torchvision's network lacks LayerScale, so the factors of LayerScale are multiplied into the
    linear layer before it. DINOv2 interpolates its position embeddings to the number of patches in
    each call. Here they are interpolated once.

    Args:
        state: weights in the published layout. The number of layers and their width are inferred
            from the shapes.

    Source: Oquab et al. 2023, "DINOv2: Learning Robust Visual Features without Supervision" (arXiv
        2304.07193). The paper does not state how position embeddings are interpolated. As in the
        code that the authors published, the interpolation is bicubic, with a scale factor of
        16.1 / 37 instead of 16 / 37.
    """
    width, patch_size = state["pos_embed"].shape[-1], state["patch_embed.proj.weight"].shape[-1]
    depth = sum(name.endswith("attn.qkv.weight") for name in state)
    with torch.device("meta"):
        network = VisionTransformer(
            image_size=IMAGE_SIZE,
            patch_size=patch_size,
            num_layers=depth,
            num_heads=width // 64,
            hidden_dim=width,
            mlp_dim=4 * width,
        )
    network.heads = nn.Identity()
    class_position, positions = state["pos_embed"][:, :1], state["pos_embed"][:, 1:]
    side = math.isqrt(positions.shape[1])
    scale = (IMAGE_SIZE // patch_size + 0.1) / side
    grid = positions.mT.reshape(1, width, side, side)
    grid = F.interpolate(grid, scale_factor=(scale, scale), mode="bicubic")
    weights = {
        "class_token": state["cls_token"],
        "encoder.pos_embedding": torch.cat([class_position, grid.flatten(2).mT], dim=1),
    }
    # Names of layers in the published layout, their names in torchvision, and LayerScale.
    layers = [("patch_embed.proj", "conv_proj.", ""), ("norm", "encoder.ln.", "")]
    for i in range(depth):
        block, layer = f"blocks.{i}", f"encoder.layers.encoder_layer_{i}"
        layers += [
            (f"{block}.norm1", f"{layer}.ln_1.", ""),
            (f"{block}.attn.qkv", f"{layer}.self_attention.in_proj_", ""),
            (f"{block}.attn.proj", f"{layer}.self_attention.out_proj.", f"{block}.ls1.gamma"),
            (f"{block}.norm2", f"{layer}.ln_2.", ""),
            (f"{block}.mlp.fc1", f"{layer}.mlp.0.", ""),
            (f"{block}.mlp.fc2", f"{layer}.mlp.3.", f"{block}.ls2.gamma"),
        ]
    for published, ours, layer_scale in layers:
        weight, bias = state[f"{published}.weight"], state[f"{published}.bias"]
        if layer_scale:
            gamma = state[layer_scale]
            weight, bias = gamma[:, None] * weight, gamma * bias
        weights |= {f"{ours}weight": weight, f"{ours}bias": bias}
    network.load_state_dict(weights, assign=True)
    return network


class CLIP(_PretrainedViT):
    """FID protocol of CLIP-FID, with the image encoder of OpenAI's CLIP ViT-B/32.

    The features are the 512 components of the image embedding, before it is normalized to unit
    length. Images are resized to 224x224, and the color channels are normalized by CLIP's mean and
    standard deviation. The metric is logged as `fd_clip_<num_samples>`.

    torch-fidelity's extractor `clip-vit-b-32` has the same weights and the same normalization. It
    resizes differently: with bilinear interpolation and without antialiasing. Therefore, its
    distances equal the distances of this protocol only for images of 224x224 pixels.

    Args:
        weights_path: the published file ViT-B-32.pt. None means the file in the cache of
            `torch.hub`, where `lit-diffusion fetch-weights` writes it. The file contains
            TorchScript code. Therefore, a file is loaded only if its SHA-256 is that of the
            published file.

    Source: Kynkaanniemi et al. 2022, "The Role of ImageNet Classes in Frechet Inception Distance"
        (arXiv 2203.06026). The code of the paper does not show how images are resized, because the
        network file that it loads includes the resizing. Here, images are resized as in CLIP's own
        preprocessing, with one exception: images that are not square are stretched instead of
        cropped.

    Example:
        >>> CLIP().name, CLIP().metric
        ('clip-vit-b-32', 'fd_clip')
    """

    name = weight_files.CLIP
    metric = "fd_clip"

    def build(self) -> nn.Module:
        """Build a module that maps images uint8 (N, 3, H, W) to features (N, 512)."""
        path = WEIGHT_FILES[self.name].check(self.weights_path)
        return _CLIP(check_regular(path).read_bytes())


class _CLIP(FeatureExtractorCLIP):  # type: ignore[misc]
    def __init__(self, content: bytes) -> None:
        # torch-fidelity loads TorchScript, which can contain code. Therefore, this constructor
        # checks the hash again: a class path in a checkpoint could call it with another content.
        if hashlib.sha256(content).hexdigest() != WEIGHT_FILES[CLIP.name].sha256:
            raise ValueError(f"content must be the published weight file of {CLIP.name}.")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.jit.load` is deprecated", FutureWarning)
            super().__init__(
                CLIP.name, ["clip"], feature_extractor_weights_path=BytesIO(content), verbose=False
            )
        self.num_features = self.model.visual.output_dim
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(_resize(images))[0]


def _resize(images: Tensor) -> Tensor:
    """Resize images uint8 (N, 3, H, W) to 224x224 by Pillow's bicubic algorithm, on the CPU."""
    size = (IMAGE_SIZE, IMAGE_SIZE)
    # PyTorch implements Pillow's integer arithmetic only for the CPU.
    return F.interpolate(images.cpu(), size, mode="bicubic", antialias=True).to(images.device)
