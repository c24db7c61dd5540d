"""Latents of a variational autoencoder that somebody else trained, in place of pixels."""

import hashlib
import json
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

WEIGHTS = "diffusion_pytorch_model.safetensors"


class VAECodec:
    """diffusers' AutoencoderKL of a local folder, frozen and in float32.

    x0 = scale (z - shift) for z ~ N(mean, exp(logvar)), the encoder's posterior of an image. A
    training step draws z (`encode_for_training`), from torch's generator of the images' device;
    whatever has to be a function of the image alone, such as validation, takes the mean (`encode`).
    Both take uint8 images or the moments that `lit-diffusion encode` writes, by their dtype.

    It is no nn.Module: the weights are in no parameters(), state_dict, average or checkpoint, which
    holds their SHA-256. They are loaded when first needed, to the device of what they are used on.

    Args:
        folder: with config.json and diffusion_pytorch_model.safetensors.
        scale: that makes the variance of x0 about 1; None is `scaling_factor` of config.json, which
            is 0.18215 where it has none, as Stable Diffusion's.
        shift: what is taken off z; None is `shift_factor` of config.json, or 0.
        batch_size: images at a time, >= 1.

    Raises:
        FileNotFoundError: if a file is missing.
        ModuleNotFoundError: without diffusers.
        ValueError: for numbers out of their range, or a folder of something else.

    Source: Rombach et al. 2022 (latent diffusion), sections 3.1 and D.1.
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
        lacking = [n for n in ("config.json", WEIGHTS) if not (self.folder / n).is_file()]
        if lacking:
            raise FileNotFoundError(
                f"{self.folder.absolute()} holds no {' and no '.join(lacking)}: put there the "
                "folder of an AutoencoderKL, as its save_pretrained writes it."
            )
        if find_spec("diffusers") is None:
            raise ModuleNotFoundError("VAECodec needs diffusers: pip install -e '.[diffusers]'.")
        config = json.loads((self.folder / "config.json").read_text())
        if config.get("_class_name") != "AutoencoderKL":
            raise ValueError(
                f"{self.folder} holds {config.get('_class_name')}, and an AutoencoderKL is needed."
            )
        self.scale: float = config.get("scaling_factor", 0.18215) if scale is None else scale
        self.shift: float = (config.get("shift_factor") or 0.0) if shift is None else shift
        if not (self.scale > 0 and batch_size >= 1):
            raise ValueError(
                f"scale > 0 and batch_size >= 1 must hold, got {self.scale} and {batch_size}."
            )
        self.image_channels: int = config["in_channels"]
        self._channels: int = config["latent_channels"]
        self._factor: int = 2 ** (len(config["block_out_channels"]) - 1)

    def __repr__(self) -> str:
        return f"VAECodec({str(self.folder)!r}, scale={self.scale}, shift={self.shift})"

    @cached_property
    def sha256(self) -> str:
        """Of the weights."""
        with (self.folder / WEIGHTS).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def encoded_shape(self, image_shape: tuple[int, ...], /) -> tuple[int, ...]:
        """(C, H, W) of x0."""
        channels, height, width = image_shape
        if channels != self.image_channels or height % self._factor or width % self._factor:
            raise ValueError(
                f"{self} takes images of {self.image_channels} channels whose sides are multiples "
                f"of {self._factor}, got {image_shape}."
            )
        return self._channels, height // self._factor, width // self._factor

    def encode(self, images: Tensor, /) -> Tensor:
        """Images uint8 (B, C, H, W), or moments (B, 2C', H', W') -> the mean x0 float32."""
        return self._x0(self._moments(images).chunk(2, dim=1)[0])

    def encode_for_training(self, images: Tensor, /) -> Tensor:
        """Images or moments as for `encode` -> x0 float32 drawn from the posterior."""
        mean, logvar = self._moments(images).chunk(2, dim=1)
        return self._x0(mean + (0.5 * logvar).exp() * torch.randn_like(mean))

    def decode(self, x0: Tensor, /) -> Tensor:
        """x0 -> images uint8 (B, C, H, W)."""
        z = x0.float() / self.scale + self.shift
        pixels = self._in_batches(lambda part: self._vae_on(z.device).decode(part).sample, z)
        return (pixels * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8)

    def moments(self, images: Tensor, /) -> Tensor:
        """Images uint8 (B, C, H, W) -> mean and logvar of z, (B, 2C', H', W') float32."""

        def of_part(part: Tensor) -> Tensor:
            posterior = self._vae_on(part.device).encode(part.float() / 127.5 - 1).latent_dist
            return torch.cat([posterior.mean, posterior.logvar], dim=1)

        return self._in_batches(of_part, images)

    def _moments(self, images: Tensor) -> Tensor:
        if images.dtype == torch.uint8:
            return self.moments(images)
        if images.is_floating_point() and images.shape[1:2] == (2 * self._channels,):
            return images.float()
        raise TypeError(
            f"{self} encodes uint8 images, or floating-point moments of {2 * self._channels} "
            f"channels, got {images.dtype} {tuple(images.shape)}."
        )

    def _x0(self, z: Tensor) -> Tensor:
        return (z - self.shift) * self.scale

    @torch.no_grad()
    def _in_batches(self, function: Any, whole: Tensor) -> Tensor:
        """In float32, whatever the Trainer's precision."""
        with torch.autocast(whole.device.type, enabled=False):
            return torch.cat([function(part) for part in torch.split(whole, self.batch_size)])

    def _vae_on(self, device: torch.device) -> Any:
        return self._vae.to(device)

    @cached_property
    def _vae(self) -> Any:
        from diffusers import AutoencoderKL

        with torch.random.fork_rng(devices=[]):  # a network begins with random weights
            read: Any = AutoencoderKL.from_pretrained
            vae, info = read(
                self.folder,
                torch_dtype=torch.float32,
                local_files_only=True,
                use_safetensors=True,
                low_cpu_mem_usage=False,
                output_loading_info=True,
            )
        if wrong := [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]:
            raise ValueError(
                f"{self.folder / WEIGHTS} does not fit its config.json: {wrong[0]} and "
                f"{len(wrong) - 1} more are missing, unknown or of another shape."
            )
        return vae.eval().requires_grad_(False)
