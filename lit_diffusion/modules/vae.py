"""A codec that maps images to the latents of a pretrained variational autoencoder (VAE)."""

import json
from functools import cached_property
from importlib.util import find_spec
from math import inf, isfinite
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_diffusion.files import check_regular, checked_read, sha256_of

WEIGHTS = "diffusion_pytorch_model.safetensors"


class VAECodec:
    """Codec that encodes images with a pretrained VAE, an AutoencoderKL of diffusers.

    The codec computes `x0 = scale * (z - shift)` from the latent z. The encoder's posterior of z
    for an image is `N(mean, exp(logvar))`. Training steps call `encode_for_training`, which draws z
    from the posterior with the device's torch generator. Validation and other deterministic uses
    call `encode`, which sets z to the mean. Both methods accept uint8 images. They also accept
    floating-point moments (mean and logvar), which `lit-diffusion encode` writes in advance.

    The VAE is frozen and runs in float32. The codec loads the weights of the VAE at first use, and
    moves them to the device of the input. Since the codec is not an nn.Module, these weights are
    not in the parameters, the state_dict, the EMA or the checkpoints of a LightningModule.
    Checkpoints contain only the SHA-256 of these weights.

    Args:
        folder: local folder with config.json and diffusion_pytorch_model.safetensors.
        scale: factor that gives x0 a variance of about 1. None uses `scaling_factor` of
            config.json, or Stable Diffusion's 0.18215 if config.json has no such entry.
        shift: offset that is subtracted from z. None uses `shift_factor` of config.json, or 0 if
            config.json has no such entry.
        batch_size: number of images per call of the VAE, >= 1.

    Raises:
        FileNotFoundError: if a file is missing.
        ModuleNotFoundError: if diffusers is not installed.
        ValueError: if a number is out of range, if the folder contains a different kind of model,
            or if the weights are in several files. At first use, the error is also raised if the
            weights do not fit config.json or are not finite.

    Source: Rombach et al. 2022 (latent diffusion), sections 3.1 and D.1.

    Example:
        >>> codec = VAECodec("sd-vae-ft-mse")  # doctest: +SKIP
        >>> codec.encoded_shape((3, 256, 256))  # doctest: +SKIP
        (4, 32, 32)
    """

    bounded: ClassVar[bool] = False

    def __init__(
        self,
        folder: str,
        scale: float | None = None,
        shift: float | None = None,
        batch_size: int = 16,
    ) -> None:
        self.folder, self.batch_size = Path(folder).expanduser(), batch_size
        missing = [n for n in ("config.json", WEIGHTS) if not (self.folder / n).exists()]
        if missing:
            raise FileNotFoundError(
                f"{self.folder.absolute()} holds no {' and no '.join(missing)}: put the folder of "
                "an AutoencoderKL there, as its save_pretrained writes it."
            )
        index = self.folder / f"{WEIGHTS}.index.json"
        if index.exists():  # diffusers would read the files listed there, instead of WEIGHTS
            raise ValueError(
                f"{index} lists weight files other than {WEIGHTS}: delete it, or write a single "
                "file by calling save_pretrained with a larger max_shard_size."
            )
        if find_spec("diffusers") is None:
            raise ModuleNotFoundError("VAECodec needs diffusers: pip install -e '.[diffusers]'.")
        check_regular(self.folder / WEIGHTS)
        with checked_read(self.folder / "config.json", "config of an AutoencoderKL") as file:
            config = dict(json.loads(file.read_text()))
        if config.get("_class_name") != "AutoencoderKL":
            raise ValueError(
                f"{self.folder} contains a {config.get('_class_name')}, not an AutoencoderKL."
            )
        with checked_read(self.folder / "config.json", "config of an AutoencoderKL"):
            self.scale = float(config.get("scaling_factor", 0.18215) if scale is None else scale)
            self.shift = float((config.get("shift_factor") or 0.0) if shift is None else shift)
            self.image_channels = int(config["in_channels"])
            self._latent_channels = int(config["latent_channels"])
            self._reduction = 2 ** (len(config["block_out_channels"]) - 1)
            for name in ("layers_per_block", "norm_num_groups"):
                number = config.get(name, 1)
                if type(number) is not int or not 1 <= number <= 1000:
                    raise ValueError(f"{name} must be 1 to 1000, and is {number!r:.50}")
            is_valid = 0 < self.scale < inf and isfinite(self.shift) and batch_size >= 1
        if not is_valid:
            raise ValueError(
                "0 < scale < inf, a finite shift and batch_size >= 1 must hold, got "
                f"{self.scale}, {self.shift} and {batch_size}."
            )

    def __repr__(self) -> str:
        return f"VAECodec({str(self.folder)!r}, scale={self.scale}, shift={self.shift})"

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the weights."""
        return sha256_of(self.folder / WEIGHTS)

    def encoded_shape(self, image_shape: tuple[int, ...], /) -> tuple[int, ...]:
        """Return the shape (C, H, W) of x0 for images of shape (C, H, W)."""
        channels, height, width = image_shape
        if channels != self.image_channels or height % self._reduction or width % self._reduction:
            raise ValueError(
                f"{self} takes images of {self.image_channels} channels whose height and width are "
                f"multiples of {self._reduction}, got {image_shape}."
            )
        return self._latent_channels, height // self._reduction, width // self._reduction

    def encode(self, images: Tensor, /) -> Tensor:
        """Map images uint8 (B, C, H, W), or moments (B, 2C', H', W'), to posterior means of x0."""
        return self._x0(self._moments(images).chunk(2, dim=1)[0])

    def encode_for_training(self, images: Tensor, /) -> Tensor:
        """Draw x0 from the posterior. `images` are images or moments, as in `encode`."""
        mean, logvar = self._moments(images).chunk(2, dim=1)
        return self._x0(mean + (0.5 * logvar).exp() * torch.randn_like(mean))

    def decode(self, x0: Tensor, /) -> Tensor:
        """Decode x0 to images uint8 (B, C, H, W)."""
        z = x0.float() / self.scale + self.shift
        pixels = self._in_batches(lambda part: self._vae.to(z.device).decode(part).sample, z)
        return (pixels * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8)

    def moments(self, images: Tensor, /) -> Tensor:
        """Encode images uint8 (B, C, H, W) to mean and logvar of z, float32 (B, 2C', H', W')."""

        def encode_part(part: Tensor) -> Tensor:
            posterior = self._vae.to(part.device).encode(part.float() / 127.5 - 1).latent_dist
            return torch.cat([posterior.mean, posterior.logvar], dim=1)

        return self._in_batches(encode_part, images)

    def _moments(self, images: Tensor) -> Tensor:
        if images.dtype == torch.uint8:
            return self.moments(images)
        if images.is_floating_point() and images.shape[1:2] == (2 * self._latent_channels,):
            return images.float()
        raise TypeError(
            f"{self} encodes uint8 images, or floating-point moments of "
            f"{2 * self._latent_channels} channels, got {images.dtype} {tuple(images.shape)}."
        )

    def _x0(self, z: Tensor) -> Tensor:
        return (z - self.shift) * self.scale

    @torch.no_grad()
    def _in_batches(self, function: Any, whole: Tensor) -> Tensor:
        """Apply `function` to batches of `whole`, in float32 whatever the Trainer's precision."""
        with torch.autocast(whole.device.type, enabled=False):
            return torch.cat([function(part) for part in torch.split(whole, self.batch_size)])

    @cached_property
    def _vae(self) -> Any:
        from diffusers import AutoencoderKL

        # fork_rng, because the constructor draws random weights, which the file then replaces.
        weights = checked_read(self.folder / WEIGHTS, "weights of its config.json")
        with weights, torch.random.fork_rng(devices=[]):
            from_pretrained: Any = AutoencoderKL.from_pretrained
            vae, info = from_pretrained(
                self.folder,
                torch_dtype=torch.float32,
                local_files_only=True,
                use_safetensors=True,
                low_cpu_mem_usage=False,
                output_loading_info=True,
            )
        if keys := [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]:
            raise ValueError(
                f"{self.folder / WEIGHTS} does not fit its config.json: {keys[0]} and "
                f"{len(keys) - 1} more are missing, unknown or have a different shape."
            )
        for name, parameter in vae.named_parameters():
            if not parameter.isfinite().all():
                raise ValueError(
                    f"{self.folder / WEIGHTS}: weights must be finite, and {name} is not; the file "
                    "is damaged: copy it again."
                )
        return vae.requires_grad_(False)
