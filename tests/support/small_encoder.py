"""Folders of vision transformers with random weights, as transformers writes them."""

import torch

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28}
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def save(folder, seed=0, registers=0):
    """Write a DINOv2 of 16 features and patches of 7x7 pixels, and its preprocessing."""
    from transformers import (
        BitImageProcessor,
        Dinov2Config,
        Dinov2Model,
        Dinov2WithRegistersConfig,
        Dinov2WithRegistersModel,
    )

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if registers:
            config = Dinov2WithRegistersConfig(patch_size=7, num_register_tokens=registers, **SIZES)
            Dinov2WithRegistersModel(config).save_pretrained(folder)
        else:
            Dinov2Model(Dinov2Config(patch_size=7, **SIZES)).save_pretrained(folder)
    BitImageProcessor(image_mean=MEAN, image_std=STD).save_pretrained(folder)
    return folder
