"""Weight files of feature extractors: where they are, and proof that they are the right ones.

Nothing here downloads but `fetch_weights`, which somebody must ask for.
"""

import hashlib
from pathlib import Path
from urllib.error import URLError

import torch
from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3

INCEPTION_FILE = "weights-inception-2015-12-05-6726825d.pth"
INCEPTION_SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"


def cached_inception() -> Path:
    """Where torch-fidelity keeps its Inception weights: the checkpoints of `torch.hub`."""
    return Path(torch.hub.get_dir()) / "checkpoints" / INCEPTION_FILE


FETCH = (
    "On a machine with a network (the login node of a cluster) run `lit-diffusion fetch-weights`, "
    f"or copy {INCEPTION_FILE} there from {URL_INCEPTION_V3}."
)


def require(path: Path, digest: str, cure: str) -> None:
    """Raise unless `path` holds the bytes that `digest` is the SHA-256 of, else tell the cure."""
    if not path.is_file():
        raise FileNotFoundError(f"no extractor weights at {path}. {cure}")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != digest:
        raise ValueError(
            f"{path} has SHA-256 {found}, expected {digest}: a broken download or other weights. "
            f"Delete it. {cure}"
        )


def fetch_weights(destination: str | Path | None = None, url: str = URL_INCEPTION_V3) -> Path:
    """Download torch-fidelity's Inception weights (96 MB), unless they are there already.

    Args:
        destination: file or existing folder; None is where `inception-v3-compat` looks.
        url: of a mirror, for networks that cannot reach the original.

    Returns:
        Path of the file, whose SHA-256 has been checked.

    Raises:
        ConnectionError: If `url` cannot be reached.
        ValueError: If the file there, or the one downloaded, has another hash.
    """
    path = cached_inception() if destination is None else Path(destination)
    path = path / INCEPTION_FILE if path.is_dir() else path
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            torch.hub.download_url_to_file(url, str(path), hash_prefix=INCEPTION_SHA256)
        except URLError as error:
            raise ConnectionError(
                f"cannot download {url} ({error.reason}); run this where there is a network, then "
                f"copy the file to {path}."
            ) from error
        except RuntimeError as error:  # torch's word for another hash; it keeps no file then
            raise ValueError(f"{url}: {error}; nothing was kept. Try again.") from error
    require(path, INCEPTION_SHA256, FETCH)
    return path
