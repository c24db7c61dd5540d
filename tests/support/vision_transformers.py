"""Weight files of DINOv2 and CLIP in the published layouts, made on the way: small, not trained."""

import hashlib
import warnings
from dataclasses import replace

import torch
from torch import nn
from torch_fidelity.feature_extractor_clip import (
    FeatureExtractorCLIP,
    VisionTransformer,
    convert_weights,
)
from torch_fidelity.feature_extractor_dinov2 import FeatureExtractorDinoV2

from lit_diffusion.metrics.vision_transformers import CLIP, DINOv2, dinov2_network
from lit_diffusion.metrics.weight_files import WEIGHT_FILES
from support.golden import golden_weight, load

CASE = "case13_dinov2"


def dinov2_shapes(kind):
    """Names and shapes of the published layout; `kind` is "small", or "vitl14" for the real one."""
    names, shapes = (load(CASE)[f"{kind}/{what}"] for what in ("names", "shapes"))
    return {str(n): tuple(int(k) for k in s if k) for n, s in zip(names, shapes, strict=True)}


def write_dinov2(path):
    """DINOv2 of 2 layers of width 128."""
    shapes = dinov2_shapes("small")
    numbers = {name: k for k, name in enumerate(sorted(shapes))}
    state = {name: golden_weight(name, shapes[name], numbers[name]).float() for name in shapes}
    torch.save(state, path)
    return path


class _PublishedCLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = VisionTransformer(224, 32, width=64, layers=2, heads=1, output_dim=16)
        self.text_projection = nn.Parameter(torch.zeros(8, 16))
        self.logit_scale = nn.Parameter(torch.ones([]))
        self.token_embedding = nn.Embedding(5, 8)
        self.register_buffer("input_resolution", torch.tensor(224))

    def forward(self, x):
        return x * self.logit_scale


def write_clip(path):
    """TorchScript in float16 of a CLIP whose image encoder has 2 layers of width 64."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of TorchScript
        torch.manual_seed(0)
        network = _PublishedCLIP()
        convert_weights(network)
        torch.jit.save(torch.jit.trace(network, torch.zeros(1)), path)
    return path


def publish(monkeypatch, kind, path):
    """Make `path` the published file of this protocol, and return the protocol."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    file = replace(WEIGHT_FILES[kind.name], sha256=digest)
    monkeypatch.setitem(WEIGHT_FILES, kind.name, file)
    return kind(str(path))


def fidelity_arguments(monkeypatch, protocol):
    """Arguments with which torch-fidelity uses its own extractor and the weights of `protocol`.

    Its DINOv2 downloads code from GitHub; here, this code is the network of `dinov2_network`, whose
    outputs are golden.
    """
    if isinstance(protocol, DINOv2):
        network = dinov2_network(torch.load(protocol.weights_path, weights_only=True))
        monkeypatch.setattr("torch.hub.load", lambda repository, name: network)
        return {}
    return {"feature_extractor_weights_path": protocol.weights_path}


def fidelity_extractor(monkeypatch, protocol):
    """torch-fidelity's own extractor with the weights of `protocol`."""
    kind = {"dinov2": FeatureExtractorDinoV2, "clip": FeatureExtractorCLIP}
    feature = protocol.name.partition("-")[0]
    return kind[feature](protocol.name, [feature], **fidelity_arguments(monkeypatch, protocol))


WRITERS = {DINOv2: write_dinov2, CLIP: write_clip}
