"""Published weights of feature extractors: how to download them, and where extractors find them."""

from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError

import torch
from torch_fidelity.feature_extractor_clip import MODEL_METADATA, MODEL_URLS
from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3

from lit_diffusion.files import sha256_of

INCEPTION, DINOV2, CLIP = "inception-v3-compat", "dinov2-vit-l-14", "clip-vit-b-32"
CLIP_SHA256: str = MODEL_METADATA[CLIP]["hash"]


@dataclass(frozen=True)
class WeightFile:
    """Published weight file of a feature extractor.

    torch-fidelity caches the file under the same name, so torch-fidelity and this package share one
    download.
    """

    extractor: str  # name of the feature extractor
    url: str
    filename: str
    sha256: str  # of the published file

    def cached_path(self) -> Path:
        """Return the path of the file in the cache of `torch.hub`."""
        return Path(torch.hub.get_dir()) / "checkpoints" / self.filename

    def check(self, path: str | Path | None = None, sha256: str | None = None) -> Path:
        """Return the path of the file, after a check of its SHA-256.

        Args:
            path: the file; None means `cached_path()`.
            sha256: expected SHA-256; None means that of the published file.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if the file has a different SHA-256.
        """
        path = self.cached_path() if path is None else Path(path)
        option = "" if self.extractor == INCEPTION else f" --extractor {self.extractor}"
        require_sha256(
            path,
            sha256 or self.sha256,
            "On a machine with internet access, such as the login node of a cluster, run "
            f"`lit-diffusion fetch-weights{option}`, or download {self.url} yourself and copy it "
            "to this path.",
        )
        return path


WEIGHT_FILES = {
    file.extractor: file
    for file in (
        WeightFile(
            INCEPTION,
            URL_INCEPTION_V3,
            "weights-inception-2015-12-05-6726825d.pth",
            "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2",
        ),
        WeightFile(
            DINOV2,
            "https://dl.fbaipublicfiles.com/dinov2/dinov2_vitl14/dinov2_vitl14_pretrain.pth",
            "dinov2_vitl14_pretrain.pth",
            # The publisher states no hash. Several independent projects report this one.
            "d5383ea8f4877b2472eb973e0fd72d557c7da5d3611bd527ceeb1d7162cbf428",
        ),
        WeightFile(CLIP, MODEL_URLS[CLIP], f"{CLIP}-{CLIP_SHA256}.pt", CLIP_SHA256),
    )
}
"""Published weight files by the name of the feature extractor."""


def fetch_weights(
    destination: str | Path | None = None, url: str | None = None, extractor: str = INCEPTION
) -> Path:
    """Download the published weights of a feature extractor, unless the file exists.

    No other function of this package downloads weights.

    Args:
        destination: file to write, or existing folder for the file. None means the cache of
            `torch.hub`, which extractors read.
        url: URL of the file. None means the original URL. Set it to a mirror if your machine cannot
            reach the original.
        extractor: name of the feature extractor: "inception-v3-compat" (96 MB), "dinov2-vit-l-14"
            (1.2 GB) or "clip-vit-b-32" (350 MB).

    Returns:
        Path of the file, whose SHA-256 has been verified.

    Raises:
        ConnectionError: if the URL cannot be reached.
        ValueError: if the existing or the downloaded file does not have the expected SHA-256, or if
            there is no such extractor.
    """
    if extractor not in WEIGHT_FILES:
        raise ValueError(f"extractor must be one of {', '.join(WEIGHT_FILES)}, got {extractor!r}.")
    file = WEIGHT_FILES[extractor]
    url = file.url if url is None else url
    path = file.cached_path() if destination is None else Path(destination)
    path = path / file.filename if path.is_dir() else path
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            torch.hub.download_url_to_file(url, str(path), hash_prefix=file.sha256)
        except URLError as error:
            raise ConnectionError(
                f"cannot download {url} ({error.reason}); run this on a machine with internet "
                f"access, then copy the file to {path}."
            ) from error
        except RuntimeError as error:  # raised by torch for a wrong hash, after deleting the file
            raise ValueError(f"{url}: {error}; the file was deleted. Try again.") from error
    return file.check(path)


def require_sha256(path: Path, sha256: str, remedy: str) -> None:
    """Raise an error unless the file `path` exists and has this SHA-256, of 64 hex digits.

    The error message ends with `remedy`, advice to the user.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file has a different SHA-256.
    """
    if not path.exists():
        raise FileNotFoundError(f"no extractor weights at {path}. {remedy}")
    if (actual := sha256_of(path)) != sha256:
        raise ValueError(
            f"{path} has SHA-256 {actual}, expected {sha256}: the download is broken, or the file "
            f"contains different weights. Delete it. {remedy}"
        )
