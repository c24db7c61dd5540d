"""Texts through all that a module does: words, embeddings, and the text encoder shown in docs/."""

import re
from pathlib import Path

import pytest
import torch
from support.plain_module import assert_same_bits, make_trainer, trainable
from support.resuming import Death, DieAfter
from support.small_digits import hyper_parameters, small_digits
from support.tiny_diffusion import tiny_diffusion
from support.tiny_run import spec

from lit_diffusion.callbacks import EMA, NoiseLevelLoss, SampleGrid
from lit_diffusion.checkpoints.loading import build_module
from lit_diffusion.checkpoints.saving import write_checkpoint
from lit_diffusion.cli.generator import load_generator
from lit_diffusion.cli.options import SamplingOptions
from lit_diffusion.conditioning import Embeddings, Words
from lit_diffusion.data.datasets import TensorImages
from lit_diffusion.data.digits import Digits
from lit_diffusion.guidance import ClassifierFree
from lit_diffusion.networks.conditions import Tokens, Vectors, WordIds
from lit_diffusion.networks.unet import UNet

WORDS = Words(("dark", "bright", "thin"), 2, ("dark thin", "bright"))
NULL = (torch.full((3, 6), 2.0), torch.tensor([True, False, False]))
EXAMPLES = (torch.arange(36.0).view(2, 3, 6) / 36, torch.tensor([[True, True, False]] * 2))
KINDS = {
    "words": ({"condition": WordIds(3)}, WORDS),
    "tokens": ({"condition": Tokens(6)}, Embeddings((3, 6), EXAMPLES)),
    "tokens, null given": ({"condition": Tokens(6)}, Embeddings((3, 6), EXAMPLES, NULL)),
    "vectors": (
        {"condition": Vectors(6)},
        Embeddings((6,), (EXAMPLES[0][:, 0], EXAMPLES[1][:, 0])),
    ),
}
PAGE = (Path(__file__).parents[2] / "docs" / "concepts" / "condition.md").read_text()


def with_texts(takes, conditioning, **changes):
    """A module whose every parameter matters."""
    torch.manual_seed(0)
    network = UNet(1, 1, 8, (1, 2), 1, norm_groups=4, **takes)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return tiny_diffusion(network=network, num_classes=None, conditioning=conditioning, **changes)


@pytest.mark.quick("words", "tokens, null given")
@pytest.mark.parametrize("kind", KINDS)
def test_guidance_leaves_texts_out_and_at_scale_one_does_nothing(kind):
    takes, conditioning = KINDS[kind]
    condition = conditioning.for_seeds(range(3))
    plain = with_texts(takes, conditioning).generate(range(3))
    none = with_texts(takes, conditioning).generate(range(3), conditioning.null(condition))
    guided = {
        scale: with_texts(takes, conditioning, guidance=ClassifierFree(scale)).generate(range(3))
        for scale in (0.0, 1.0, 4.0)
    }
    assert torch.equal(guided[1.0], plain)
    assert torch.equal(guided[0.0], none)
    assert not torch.equal(plain, none)
    assert not torch.equal(guided[4.0], plain)


@pytest.mark.quick("words", "tokens, null given")
@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_with_its_text_is_the_same_image_in_any_batch(kind):
    takes, conditioning = KINDS[kind]
    module = with_texts(takes, conditioning, guidance=ClassifierFree(2.0))
    together = module.generate(range(5))
    alone = torch.cat([module.generate([seed]) for seed in range(5)])
    difference = (together.int() - alone.int()).abs()
    assert difference.max() <= 1  # sums in another order may round to the next grey level
    assert (difference > 0).double().mean() < 0.02
    assert (together[0].int() - together[1].int()).abs().max() > 20


class DescribedDigits(Digits):
    """Some digits with texts in the place of labels."""

    class_names, conditioning = (), None

    def load(self, split):
        images = super().load(split).images[:64]
        return TensorImages(images, self.conditioning.for_seeds(range(64)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_on_texts_that_is_resumed_ends_with_the_same_bits(kind, tmp_path):
    """Weights, the learned none among them, and their average."""
    takes, conditioning = KINDS[kind]

    def run(name, *extra, ckpt_path=None):
        module = with_texts(takes, conditioning, label_dropout=0.5)
        ema, data = EMA((0.9,)), DescribedDigits(16)
        data.conditioning = conditioning
        options = {"max_steps": 6, "max_epochs": -1, "enable_checkpointing": bool(extra)}
        callbacks = ema, NoiseLevelLoss(2), SampleGrid(2), *extra
        trainer = make_trainer(tmp_path / name, *callbacks, **options)
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
        assert trainer.callback_metrics["val/loss_u0.25"].isfinite()
        return trainable(module), ema.state_dict()

    (whole, average), death = run("whole"), DieAfter(tmp_path, 3)
    with pytest.raises(Death):
        run("died", death)
    again, average_again = run("died", ckpt_path=death.keep.path)
    assert_same_bits(again, whole)
    assert_same_bits(average_again, average)
    first = trainable(with_texts(takes, conditioning))
    learned = {name for name in first if "condition_emb" in name}
    still = {name for name in learned if torch.equal(first[name], again[name])}
    assert still == ({"network.condition_emb.null"} if kind == "tokens, null given" else set())


@pytest.mark.gpu
def test_texts_follow_their_module_to_another_device():
    takes, conditioning = KINDS["tokens, null given"]
    module = with_texts(takes, conditioning, guidance=ClassifierFree(2.0)).cuda()
    assert module.generate(range(3)).shape == (3, 1, 8, 8)


def test_words_beyond_those_of_the_network_are_refused():
    with pytest.raises(ValueError, match="num_words is 3 in the module, but 4 in UNet; change one"):
        with_texts({"condition": WordIds(4)}, WORDS)


def test_a_described_model_comes_back_and_is_prompted_in_turn(folder):
    config = small_digits(1)
    model = config["model"]["init_args"]
    model["num_classes"] = model["network"]["init_args"]["num_classes"] = None
    kind = spec("lit_diffusion.networks.conditions.WordIds", num_words=17)
    model["network"]["init_args"]["condition"] = kind
    model["conditioning"] = spec("lit_diffusion.data.digits.DigitWords")
    hyper = hyper_parameters(config, "model")
    described = build_module({"hyper_parameters": hyper}, "this").eval()
    for parameter in described.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    content = {"state_dict": described.state_dict(), "global_step": 9, "hyper_parameters": hyper}
    write_checkpoint(content, Path("described.ckpt"))

    prompts = ["thick seven leaning right", ""]
    options = SamplingOptions("described.ckpt", "raw", prompt=prompts)
    generator = load_generator(options)
    rows = torch.stack([described.conditioning.encode(prompts[i % 2]) for i in range(3)])
    expected = described.generate(range(3), rows)
    assert torch.equal(generator.generate(range(3)), expected)
    assert not torch.equal(expected[0], described.generate([0], rows[1:2])[0])
    assert generator.loaded.module.conditioning == described.conditioning
    assert generator.record(3, 3)["prompts"] == prompts


def test_the_text_encoder_of_the_docs_conditions_a_module(tmp_path):
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[diffusers]'")
    letters = [chr(i) for i in range(97, 123)]
    vocabulary = [*letters, *(f"{letter}</w>" for letter in letters)]
    ends = {"<|startoftext|>": 52, "<|endoftext|>": 53}
    tokenizer = transformers.CLIPTokenizer({t: i for i, t in enumerate(vocabulary)} | ends, [])
    tokenizer.save_pretrained(tmp_path)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.CLIPTextConfig(
        vocab_size=54, **sizes, num_attention_heads=2, bos_token_id=52, eos_token_id=53
    )
    torch.manual_seed(0)
    transformers.CLIPTextModel(config).save_pretrained(tmp_path)

    (code,) = [c for c in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "CLIP" in c]
    names = {}
    exec(code, names)
    captions = names["Captions"](str(tmp_path), length=9)
    values, there = captions.encode("a cat")
    assert (values.shape, there.tolist()) == ((9, 8), [True] * 6 + [False] * 3)
    condition = tuple(
        torch.stack(rows) for rows in zip(*map(captions.encode, ["dog", "a cat"]), strict=True)
    )
    module = with_texts({"condition": Tokens(8)}, captions, guidance=ClassifierFree(2.0))
    images = module.generate(range(2), condition)
    assert not torch.equal(images, module.generate(range(2)))
    empty = tuple(torch.stack([row, row]) for row in captions.encode(""))
    assert torch.equal(module.generate(range(2)), module.generate(range(2), empty))
