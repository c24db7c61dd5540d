"""A teacher for representation alignment that is a pretrained vision transformer."""

import json
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_diffusion.files import checked_read, sha256_of
from lit_diffusion.protocols import NoisedBatch, check_positive

CONFIG, WEIGHTS, PREPROCESSING = "config.json", "model.safetensors", "preprocessor_config.json"


class PretrainedEncoder(nn.Module):
    """Teacher of REPA: a frozen vision transformer, such as DINOv2, that sees the clean images.

    The features are the encoder's output for each patch (the patch tokens of `last_hidden_state`,
    after the final layer norm). The images are resized to `image_size` by antialiased bicubic
    interpolation, and normalized by the mean and standard deviation in preprocessor_config.json. A
    gray image is copied to all three color channels. The encoder sees the same crops and flips as
    the network.

    The encoder needs images. It works with data modules that return images, with `PixelCodec` or
    with a `VAECodec` that encodes the images in each step. It does not work with latents that were
    encoded in advance (`data.latents.Latents`), because these data have no images.

    The folder is read in the first training step. Sampling from a checkpoint does not need the
    folder. The encoder's weights are not part of the module's parameters. Checkpoints contain only
    the SHA-256 of the encoder's weights. The encoder computes in the precision of the Trainer.

    Args:
        path: local folder in the layout of transformers: config.json, model.safetensors and
            preprocessor_config.json.
        width: number of features of the encoder's tokens. DINOv2-B has 768.
        image_size: height and width to which images are resized, a multiple of the encoder's patch
            size. For images of 256x256 pixels, REPA uses 224. The patches of DINOv2 then form a
            16x16 grid, like the patches of a DiT with patch_size=2 on the latents.

    Raises:
        ValueError: if a numeric argument is not positive. In the first training step, the error is
            also raised if width, image size or data do not fit the encoder, or if the run that is
            resumed was trained with other weights of the encoder.
        FileNotFoundError: in the first training step, if a file is missing.
        ModuleNotFoundError: in the first training step, if transformers is not installed.

    Source: Yu et al. 2024 (REPA, arXiv 2410.06940), section 3. The authors' code
        interpolates the images bicubically without antialiasing.

    Example:
        >>> teacher = PretrainedEncoder("data/dinov2-base")
        >>> list(teacher.parameters()), teacher.width
        ([], 768)
    """

    sha256: Tensor

    def __init__(self, path: str, width: int = 768, image_size: int = 224) -> None:
        super().__init__()
        check_positive(width=width, image_size=image_size)
        self.path = Path(path).expanduser()
        self.width, self.image_size = width, image_size
        # Bytes of the SHA-256 of the weights; zeros before the first training step.
        self.register_buffer("sha256", torch.zeros(32, dtype=torch.uint8))

    def attach(self, network: nn.Module) -> None:
        """Do nothing, because the encoder does not depend on the network."""

    @torch.no_grad()
    def features(self, module: Any, batch: NoisedBatch) -> Tensor:
        """Return the features (B, h, h, D) of the clean images."""
        images = batch.images
        if images.dtype != torch.uint8:
            raise ValueError(
                f"{type(self).__name__} needs uint8 images, but the batches of the data hold "
                f"{images.dtype} {tuple(images.shape)}; train on images instead of encoded "
                "latents, such as data.image_folder.ImageFolder with a VAECodec."
            )
        encoder, mean, std = self._encoder
        size = (self.image_size, self.image_size)
        pixels = images.float().expand(-1, 3, -1, -1) / 255  # (B, 3, H, W) in [0, 1]
        pixels = F.interpolate(pixels, size, mode="bicubic", antialias=True)
        pixels = (pixels - mean.to(pixels)) / std.to(pixels)
        tokens: Tensor = encoder.to(images.device)(pixel_values=pixels).last_hidden_state
        side = self.image_size // encoder.config.patch_size
        patches = tokens[:, -(side**2) :]  # after class and register tokens
        return patches.reshape(len(patches), side, side, -1)

    @cached_property
    def _encoder(self) -> tuple[Any, Tensor, Tensor]:
        """The encoder, and the mean and standard deviation (3, 1, 1) of its images."""
        self._check_files()
        with checked_read(self.path / PREPROCESSING, "preprocessing of an image encoder") as file:
            preprocessing = dict(json.loads(file.read_text()))
            mean, std = (
                torch.tensor(preprocessing[f"image_{n}"], dtype=torch.float32).view(3, 1, 1)
                for n in ("mean", "std")
            )
        if find_spec("transformers") is None:
            raise ModuleNotFoundError(
                f"{type(self).__name__} needs transformers: pip install -e '.[diffusers]'."
            )
        from transformers import AutoModel

        # fork_rng, because the constructor draws random weights, which the file then replaces.
        weights = checked_read(self.path / WEIGHTS, f"weights of its {CONFIG}")
        with weights, torch.random.fork_rng(devices=[]):
            from_pretrained: Any = AutoModel.from_pretrained
            encoder, info = from_pretrained(
                self.path,
                dtype=torch.float32,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,  # else transformers asks whether to run the folder's code
                output_loading_info=True,
            )
        if keys := [*info["missing_keys"], *info["mismatched_keys"]]:
            raise ValueError(f"{self.path / WEIGHTS} lacks {keys[0]} and {len(keys) - 1} others.")
        with checked_read(self.path / CONFIG, "config of a vision transformer"):
            width, patch_size = int(encoder.config.hidden_size), int(encoder.config.patch_size)
        if width != self.width or self.image_size % patch_size:
            raise ValueError(
                f"width must be {width} and image_size a multiple of {patch_size} for the encoder "
                f"in {self.path}, got {self.width} and {self.image_size}; change them."
            )
        return encoder.requires_grad_(False).eval(), mean, std

    def _check_files(self) -> None:
        """Raise an error if files are missing, or differ from those of the run that is resumed."""
        missing = [n for n in (CONFIG, WEIGHTS, PREPROCESSING) if not (self.path / n).exists()]
        if missing:
            raise FileNotFoundError(
                f"{self.path.absolute()} holds no {' and no '.join(missing)}: put the folder of an "
                "image encoder there, as its save_pretrained and that of its image processor "
                "write it."
            )
        saved, sha256 = bytes(self.sha256.tolist()), sha256_of(self.path / WEIGHTS)
        if any(saved) and saved.hex() != sha256:
            raise ValueError(
                f"the run was trained with an encoder of SHA-256 {saved.hex()}, but "
                f"{self.path / WEIGHTS} has {sha256}; put the encoder of the run there."
            )
        self.sha256.copy_(torch.tensor([*bytes.fromhex(sha256)], dtype=torch.uint8))
