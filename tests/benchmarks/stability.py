"""The study of docs/results/stability.md: what trains and what is compared.

    stability.py train OUT --data digits|mnist
    stability.py analyse OUT --data digits|mnist       consistency of groups
    stability.py look OUT --data digits|mnist          lines, planes, spectra

All can be stopped, and go on with the same command. For MNIST, OUT's folder holds
mnist-cnn.safetensors of `lit-diffusion train-extractor`, and data/MNIST/raw the files.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
NETWORK = "--model.init_args.network.init_args"
LR = "--model.init_args.optimizer.init_args.lr"
SAMPLE = "--model.parameterization=lit_diffusion.parameterizations.Sample"
"""Transformers learn much better by it and the textbook's recipe: docs/results/backbones.md."""
STEPS = {"digits": 1000, "mnist": 600}
JOBS = 2
"""Processes at a time."""


def arm(name: str) -> list[str]:
    return [f"--config={ROOT}/configs/arms/{name}.yaml"]


SCHEDULE = "--model.init_args.lr_scheduler"
NOISE = [
    f"{SCHEDULE}=lit_diffusion.lr_schedules.WarmupLinear",
    f"{SCHEDULE}.init_args.warmup_steps=50",
    f"{LR}=2e-3",
]
"""The lr falls to zero: what is compared has come to rest."""
CLEAN = [*arm("digits/textbook"), SAMPLE, f"{LR}=4e-3"]
"""By NOISE a U-Net on patches of MNIST has FID 46 to 61."""

FLOW_GRID = [
    "--model.solver.times=lit_diffusion.grids.LogSNR",
    "--model.solver.times.init_args.noisiest=-4",
]
"""The grid of mnist.yaml, by which docs/results/stability.md was measured."""


def sizes(data: str, **changes: object) -> list[str]:
    """Of the U-Net, which MNIST has inside of `Patched`."""
    inside = NETWORK if data == "digits" else f"{NETWORK}.network.init_args"
    return [f"{inside}.{key}={json.dumps(value)}" for key, value in changes.items()]


def kinds(data: str) -> dict[str, list[str]]:
    """Options by kind of model, after the recipe of its data."""
    narrow, wide = (16, 48) if data == "digits" else (16, 32)
    networks = {
        "unet": [],
        "narrow": sizes(data, model_channels=narrow),
        "wide": sizes(data, model_channels=wide),
        "shallow": sizes(data, channel_mult=[1], attention_downsample=[1]),
        "deep": sizes(data, num_res_blocks=2),
        "linear": arm("digits/linear"),
        "edm": [*arm("digits/edm"), *arm("simple")],
        "flow": [*arm("digits/flow"), *arm("simple"), *(FLOW_GRID if data == "mnist" else [])],
        "x0": [*arm("x0"), *arm("simple")],
        "x0-snr": arm("x0-snr"),
        "x0-min-snr": [*arm("x0"), *arm("min-snr")],
        "half-0": ["--data.init_args.part=[0,2]"],
        "half-1": ["--data.init_args.part=[1,2]"],
    }
    recipe = NOISE if data == "digits" else CLEAN
    dit_lr = f"{LR}={'2e-3' if data == 'digits' else '4e-3'}"
    return {
        **{kind: [*recipe, *options] for kind, options in networks.items()},
        "noise": NOISE,
        "uvit": [*CLEAN, *arm(f"{data}/uvit")],
        "dit": [*CLEAN, *arm(f"{data}/dit"), dit_lr],
        "dcgan": [],
        "biggan": [],
    }


GROUPS = {
    "other seeds": ["unet/0", "unet/1", "unet/2"],
    "other widths": ["unet/0", "narrow/1", "wide/2"],
    "other depths": ["unet/0", "shallow/1", "deep/2"],
    "U-Net, U-ViT, DiT": ["unet/0", "uvit/1", "dit/2"],
    "cosine and linear betas": ["unet/0", "linear/1", "linear/2"],
    "VP and EDM": ["unet/0", "edm/1", "edm/2"],
    "VP and flow matching": ["unet/0", "flow/1", "flow/2"],
    "one half, other seeds": ["half-0/0", "half-0/1", "half-0/2"],
    "one half and the other": ["half-0/0", "half-1/1", "half-1/2"],
    "x0, unweighted, other seeds": ["x0/0", "x0/1", "x0/2"],
    "x0, weights of noise, other seeds": ["x0-snr/0", "x0-snr/1", "x0-snr/2"],
    "DCGAN, other seeds": ["dcgan/0", "dcgan/1", "dcgan/2"],
    "BigGAN, other seeds": ["biggan/0", "biggan/1", "biggan/2"],
    "EDM, other seeds": ["edm/0", "edm/1", "edm/2"],
    "flow matching, other seeds": ["flow/0", "flow/1", "flow/2"],
    "DiT, other seeds": ["dit/0", "dit/1", "dit/2"],
    "U-ViT, other seeds": ["uvit/0", "uvit/1", "uvit/2"],
}
"""What is compared: the first with the others, and all pairs."""
GROUPS_OF_DATA = {
    "digits": {
        "noise and x0": ["unet/0", "x0/1", "x0-min-snr/2"],
        "x0, Min-SNR, other seeds": ["x0-min-snr/0", "x0-min-snr/1", "x0-min-snr/2"],
    },
    "mnist": {
        "noise and x0": ["noise/0", "x0/1", "unet/2"],
        "noise, other seeds": ["noise/0", "noise/1", "noise/2"],
    },
}
"""The U-Net predicts the noise of digits, and x0 by Min-SNR of MNIST."""


def groups(data: str) -> dict[str, list[str]]:
    """Those of this data."""
    return GROUPS | GROUPS_OF_DATA[data]


def slug(group: str) -> str:
    """Name of a group's folder."""
    return group.replace(", ", "-").replace(" ", "-")


def lit_diffusion(log: Path, *words: str) -> bool:
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [str(Path(sys.executable).parent / "lit-diffusion"), *words]
    one = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("w") as file:
        ended = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=one)
    if ended.returncode:
        print(f"{' '.join(words)}\n  failed: see {log}", file=sys.stderr)
    return ended.returncode == 0


def train(out: Path, data: str, kind: str, seed: int, options: list[str]) -> None:
    """One model, unless it is there; one that was stopped goes on."""
    folder = out / kind / str(seed)
    if (folder / "done").exists():
        return
    is_gan = kind in ("dcgan", "biggan")
    config = f"{data}-{kind}" if is_gan else {"digits": "digits-ablation"}.get(data, data)
    words = [f"--config={ROOT}/configs/{config}.yaml"]
    if not is_gan:
        # on MNIST a step of a transformer takes less than half of the U-Net's
        steps = 1500 if data == "mnist" and kind in ("uvit", "dit") else STEPS[data]
        words += [*options, f"--trainer.max_steps={steps}", f"--trainer.val_check_interval={steps}"]
    if kind in ("unet", "dcgan", "biggan"):
        words += ["--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint"]
        words += [f"--trainer.callbacks.dirpath={folder}/steps"]
        words += ["--trainer.callbacks.filename={step:05d}", "--trainer.callbacks.save_top_k=-1"]
        words += [f"--trainer.callbacks.every_n_train_steps={500 if is_gan else 25}"]
    if is_gan and data == "mnist":
        words += [f"--trainer.max_steps={4800 if kind == 'dcgan' else 1600}"]  # for want of time
    if data == "mnist":
        words += ["--data.init_args.root=data", "--data.init_args.num_workers=0"]
    elif not is_gan:
        words += ["--trainer.callbacks.FIDEvaluation.repeats_at_end=0"]
    words += [f"--seed_everything={seed}", f"--trainer.default_root_dir={folder}"]
    words += ["--ckpt_path=last-or-none"]
    if lit_diffusion(out / f"{kind}-{seed}.log", "fit", *words):
        (folder / "done").touch()
        print(f"trained {kind} from seed {seed}", flush=True)


def train_all(out: Path, data: str) -> None:
    options = kinds(data)
    models = dict.fromkeys(
        tuple(model.split("/")) for models in groups(data).values() for model in models
    )
    with ThreadPoolExecutor(JOBS) as pool:
        list(pool.map(lambda run: train(out, data, run[0], int(run[1]), options[run[0]]), models))


def looks(out: Path, data: str) -> dict[str, list[str]]:
    """Words of `analyze` for the figures of single models: lines, planes, spectra."""
    of_digits = data == "digits"
    few = ["--images", "128" if of_digits else "64"]
    many = ["--images", "64"] if of_digits else ["--images", "32", "--vectors", "2"]
    early = {"unet": "00100", "dcgan": "02000", "biggan": "00500"}
    if not of_digits:
        early |= {"unet": "00075", "dcgan": "00500"}
    commands: dict[str, list[str]] = {}
    for kind, step in early.items():
        steps = sorted((out / kind / "0/steps").glob("*.ckpt"))
        if not steps:
            continue
        last, other = str(out / kind / "0"), str(out / kind / "1")
        first = str(out / kind / "0/steps" / f"step={step}.ckpt")
        commands[f"line-{kind}-times"] = ["interpolate", last, first, *few]
        commands[f"line-{kind}-seeds"] = ["interpolate", last, other, "--align", *few]
        commands[f"plane-{kind}"] = ["landscape", last, *few]
        before = dict.fromkeys(str(steps[i * (len(steps) - 1) // 7]) for i in range(7))
        config = ["--data", f"{last}/config.yaml"]  # the steps lie beside the run's checkpoints
        commands[f"own-{kind}"] = ["consistency", last, *before, "--num", "100", *config]
        kinks = [] if kind == "unet" else ["--kinks"]
        commands[f"spectrum-{kind}"] = ["hessian", last, *many, *kinks]
    if "line-biggan-seeds" in commands:
        commands["line-biggan-seeds"].remove("--align")  # of whose blocks no order is known
    way = sorted(str(path) for path in (out / "unet/0/steps").glob("*.ckpt"))
    commands["way-unet"] = ["landscape", str(out / "unet/0"), *few, "--path", *way]
    return commands


def look(out: Path, data: str) -> None:
    """Lines, planes and spectra of the models that are there."""

    commands = looks(out, data)

    def analyze(name: str) -> None:
        log = out / "looks" / f"{name}.log"
        if log.is_file() and log.read_text().endswith("done\n"):
            return
        if lit_diffusion(log, "analyze", *commands[name], "--out", str(log.parent / name)):
            with log.open("a") as file:
                file.write("done\n")
            print(f"looked: {name}", flush=True)

    with ThreadPoolExecutor(JOBS) as pool:
        list(pool.map(analyze, commands))


def analyse(out: Path, data: str) -> None:
    """Consistency of each group whose models are there."""
    for name, models in groups(data).items():
        folders = [out / model for model in models]
        if not all((each / "done").exists() for each in folders):
            continue
        target = out / "consistency" / slug(name)
        if not (target / "consistency.png").exists():
            words = ["consistency", *map(str, folders), "--num", "100", "--out", str(target)]
            lit_diffusion(out / f"consistency-{slug(name)}.log", "analyze", *words)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("train", "analyse", "look"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", choices=STEPS, default="digits")
    args = parser.parse_args()
    {"train": train_all, "analyse": analyse, "look": look}[args.what](args.out, args.data)
