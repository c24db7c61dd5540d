import re

import pytest
import torch
from support.commands import sampling

from lit_diffusion.cli.options import Parser, SamplingOptions, add_checkpoint, usable_device


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--chekpoint run", "Did you mean 'checkpoint'?"),
        ("runs/digits --out s", "belongs to no option; write --checkpoint runs/digits."),
        ("--out s = 5", "the argument '= 5' belongs to no option; remove it, or the space"),
        ("--out s --image_size 3", "--checkpoint must be given."),
        ("--checkpoint s --image_size=x", "invalid int value: 'x'"),
    ],
)
def test_what_is_unknown_is_named_before_what_is_missing(words, message):
    parser = Parser("x")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--out")
    parser.add_argument("--image-size", type=int)
    with pytest.raises(ValueError, match=re.escape(message)):
        parser.parse_prefixed(words.split(), "--part.")
    args, others = parser.parse_prefixed(
        ["--checkpoint", "c", "--part.a", "3", "--image_size=2"], "--part."
    )
    assert (args.image_size, others) == (2, ["--part.a", "3"])


def test_options_of_sampling():
    assert sampling("") == SamplingOptions("run", trust=[])
    for labels in ("-1", "-1,2"):
        assert sampling(f"--labels {labels}").labels == sampling(f"--labels={labels}").labels
    assert sampling("--prompt a --prompt 'b c'").prompt == ["a", "b c"]
    options = ("", "--init a", "--init a --mask b", "--init a --strength 0.3")
    assert [sampling(each).strength for each in options] == [None, 0.6, None, 0.3]
    assert sampling("--float32_precision tf32").float32_precision == "tf32"
    heun = sampling("--solver Heun --solver.steps 3 --seed 1 --solver.clip=false")
    assert heun.solver_options == ("--solver.steps", "3", "--solver.clip=false")
    assert (heun.solver, heun.seed) == ("Heun", 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--batch-size 0", "--batch-size must be at least 1, got 0."),
        ("--solver.steps 3 --foo 3", "there is no option 'foo'"),
        ("--solver.steps 3 --steps 4", "--steps and --solver.steps set the same number; leave"),
        ("--labels 1 --prompt a", "--labels and --prompt exclude each other; leave one out."),
        ("--guidance nan", "--guidance: must be a finite number, got nan"),
        (f"--seed {2**63}", "--seed: must be an integer of 64 bits, got 9223372036854775808"),
        ("--guidance_interval 1,2", "need --guidance S; add it."),
        ("--guidance 2 --guidance_interval 2", "must be two numbers, LOW,HIGH, got '2'"),
        (
            "--weaker run --classifier run",
            "--weaker and --classifier exclude each other; leave one out.",
        ),
        ("--weaker run --guidance_rescale 0.7", "applies to classifier-free guidance;"),
        ("--classifier run --guidance_interval 1,2", "applies to --guidance and --weaker;"),
        ("--strength 0.5", "--mask and --strength need --init"),
        (
            "--init run --strength 0.5 --mask m.png",
            "--mask and --strength exclude each other; leave one out.",
        ),
    ],
)
def test_options_that_exclude_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message.replace(".", r"\.").replace("?", r"\?")):
        sampling(options)


def test_each_process_of_a_launcher_takes_its_own_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("SLURM_LOCALID", raising=False)
    for variable, rank, num_gpus, device in (
        ("LOCAL_RANK", "97", 1, "cuda:97"),
        ("LOCAL_RANK", "", 8, "cuda:0"),
        ("SLURM_LOCALID", "3", 8, "cuda:3"),
        ("SLURM_LOCALID", "3", 1, "cuda:0"),  # srun shows each task its own GPU
    ):
        monkeypatch.setenv(variable, rank)
        monkeypatch.setattr(torch.cuda, "device_count", lambda num_gpus=num_gpus: num_gpus)
        names = []
        monkeypatch.setattr(
            torch, "empty", lambda *_, device, names=names: names.append(device) or torch.zeros(0)
        )
        usable_device(None)
        assert names == [device]
    monkeypatch.undo()
    assert usable_device("cpu") == torch.device("cpu")
    for odd in ("meta", "cuda:97", "abacus"):
        with pytest.raises(ValueError, match=f"--device {odd} "):
            usable_device(odd)


@pytest.mark.parametrize(
    ("text", "path"), [("digits/", "digits"), ("runs/a", "runs/a"), ("/", "/"), ("", "")]
)
def test_a_slash_at_the_end_of_a_checkpoint_is_ignored(text, path):
    parser = Parser("sample")
    add_checkpoint(parser, required=True)
    assert parser.parse_args(["--checkpoint", text]).checkpoint == path
