"""Inception weights drawn at random: the real ones cannot be had without a network."""

import hashlib
import io

import torch
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

from lit_diffusion.metrics.extractors import InceptionV3Compat


def inception_of(path):
    """The protocol with the weights of this file."""
    return InceptionV3Compat(str(path), hashlib.sha256(path.read_bytes()).hexdigest())


class _Untrained(FeatureExtractorInceptionV3):
    def load_state_dict(self, state_dict):
        assert state_dict == {}


def write_random_inception(path):
    """A weight file in torch-fidelity's format whose features are of the order of one."""
    nothing = io.BytesIO()
    torch.save({}, nothing)
    nothing.seek(0)
    network = _Untrained("inception-v3-compat", ["2048"], feature_extractor_weights_path=nothing)
    generator = torch.Generator().manual_seed(0)
    state = network.state_dict()
    for value in state.values():
        if value.ndim == 4:
            value.normal_(std=(2 / value[0].numel()) ** 0.5, generator=generator)
        if value.ndim == 2:
            value.normal_(std=0.02, generator=generator)
    torch.save(state, path)
    return path
