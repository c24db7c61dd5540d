"""`lit-diffusion init`: write a config and a README to train on a folder of images."""

import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from lit_diffusion.cli.options import Parser, integer
from lit_diffusion.config.shipped import shipped_configs
from lit_diffusion.files import IMAGE_EXTENSIONS, atomic_write_text, check_regular, walk_files

UNWRITABLE = r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]"
"""Characters that YAML does not allow. Python decodes bytes that are not UTF-8 as surrogates."""

OF_A_CLASS = " For images of the first class, with guidance, add `--labels 0 --guidance 2`."

FID_NETWORK = "fid-network.safetensors"

DEFAULT_METHOD = "velocity"
"""The method of configs/folder-small.yaml."""

HEADER = """\
# A diffusion model of the images in {images}.
#
#   lit-diffusion fit --config {config}
#
# README.md says what to do next. The command line can change every setting, as in
#   --trainer.max_steps=5000 --data.batch_size=16
"""

FID_OFF = """\
    # FID scores the samples. First train its network, as README.md says. Then uncomment this:
"""

README = """\
# A diffusion model of the images in {images}

`config.yaml` holds the settings and says what they mean. Run these commands in {here}.

Train. Ctrl-C saves a checkpoint and stops:

    lit-diffusion fit --config {config}

Every 500 steps, a grid of samples is written into `{run}/samples`.
Training on a CPU is slow: images of 32x32 pixels take a quarter of the work of 64x64.

Resume a run that was stopped, or raise `max_steps` of one that has ended:

    lit-diffusion fit --config {config} --ckpt_path=last
    lit-diffusion fit --config {config} --ckpt_path=last --trainer.max_steps=40000

Generate 64 images.{of_a_class}

    lit-diffusion sample --checkpoint {run} --num 64 --out {folder}/samples

To score samples by FID during training, first train the network that FID needs. Then uncomment
`FIDEvaluation` in `config.yaml`:

    lit-diffusion train-extractor --config {config} --out {fid_network}

Check the config for problems before a long run:

    lit-diffusion doctor {config}

If a GPU runs out of memory, halve `batch_size`. If samples stay blurred, train longer, or raise
`model_channels` to 64 or 128.
"""


def build_parser() -> Parser:
    """Build the argument parser of the command."""
    methods = method_names()
    parser = Parser(
        "init",
        """Write DIR/config.yaml, with comments, and DIR/README.md, to train on a folder of images.

    lit-diffusion init flowers --images photos/flowers --size 32
    lit-diffusion fit --config flowers/config.yaml

Images are cropped to squares of one size, and converted to RGB. If they are in a folder per class,
as in photos/flowers/rose/1.jpg, the model learns the classes.""",
    )
    add = parser.add_argument
    add("folder", metavar="DIR", help="folder for the config, the README and the run")
    add("--images", metavar="PATH", help="folder of images (default: DIR/images)")
    text = "pixels on each side, a multiple of 8 (default 64)"
    add("--size", type=integer, default=64, metavar="N", help=text)
    text = "auto (default): train on classes if there are class folders; none: without classes"
    add("--classes", choices=("auto", "none"), default="auto", metavar="C", help=text)
    text = f"{', '.join(methods)}, or {DEFAULT_METHOD} (default): cosine betas, Min-SNR weights"
    choices = (DEFAULT_METHOD, *methods)
    add("--method", choices=choices, default=DEFAULT_METHOD, metavar="M", help=text)
    return parser


def run(argv: Sequence[str]) -> None:
    """Run the command: "init", then options."""
    args = build_parser().parse_args(argv[1:])
    if not args.folder:
        raise ValueError("DIR must not be empty.")
    folder = Path(args.folder)
    config, readme = folder / "config.yaml", folder / "README.md"
    for file in (config, readme):
        if file.exists():
            raise FileExistsError(f"{file} exists already; name another folder, or move it away.")
    if args.size < 16 or args.size % 8:
        raise ValueError(f"--size must be a multiple of 8 and at least 16, got {args.size}.")
    images = Path(args.images or folder / "images").expanduser().absolute()
    for path in (str(folder.absolute()), str(images), str(Path.cwd())):
        if re.search(UNWRITABLE, path):
            raise ValueError(
                f"{path!r} has control characters, or is not UTF-8, which a config cannot hold; "
                "rename the folder."
            )
    if Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(images)):
        raise ValueError(
            f"{folder} is in the folder of images {images}, where samples of the run would become "
            "training images; name a DIR outside of it."
        )
    num, classes = count_images(images)
    classes = [] if args.classes == "none" else classes
    settings = build_config(images, folder.absolute(), num, args.size, bool(classes), args.method)
    paths = {"config": config, "folder": folder, "run": folder / "run"}
    paths |= {"fid_network": folder / FID_NETWORK}
    names = {name: shlex.quote(str(path)) for name, path in paths.items()}
    names |= {"images": str(images), "here": str(Path.cwd())}
    names |= {"of_a_class": OF_A_CLASS if classes else ""}
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write_text(config, HEADER.format(**names) + settings)
    atomic_write_text(readme, README.format(**names))
    kinds = f"{len(classes)} classes" if classes else "no classes"
    print(f"{config} and {readme} are written, for {num} images with {kinds}. To train:\n")
    print(f"  lit-diffusion fit --config {names['config']}")


def count_images(root: Path) -> tuple[int, list[str]]:
    """Number of image files below a folder, and the names of its class folders."""
    if not root.is_dir():
        raise FileNotFoundError(
            f"--images: there is no folder {root}; put images there, or name another folder."
        )
    images = (file for file in walk_files(root) if file.lower().endswith(IMAGE_EXTENSIONS))
    folders = (os.path.relpath(os.path.dirname(image), root) for image in images)
    counts = Counter(folder.split(os.sep)[0] for folder in folders)  # "." for images in the root
    extensions = ", ".join(IMAGE_EXTENSIONS)
    if counts.total() < 4:
        raise ValueError(
            f"--images: {root} must hold four images or more ({extensions}), got {counts.total()}."
        )
    classes = sorted(e.name for e in os.scandir(root) if e.is_dir() and e.name[0] != ".")
    if empty := [name for name in classes if not counts[name]]:
        raise ValueError(
            f"--images: {root / empty[0]} holds no images ({extensions}); remove this folder."
        )
    if classes and counts["."]:
        raise ValueError(
            f"--images: {root} has class folders such as {classes[0]}, and images that are in none "
            f"({counts['.']}); move all images into class folders, or all into {root}."
        )
    return counts.total(), classes


def method_names() -> list[str]:
    """List the methods that `init` offers: all in configs/methods that train a DiffusionModule."""
    texts = {
        file.stem: check_regular(file).read_text()
        for file in sorted((shipped_configs() / "methods").glob("*.yaml"))
    }
    return [name for name, text in texts.items() if not re.search("^  class_path", text, re.M)]


def build_config(
    images: Path, folder: Path, num: int, size: int, has_classes: bool, method: str
) -> str:
    """Return the text of configs/folder-small.yaml, adapted to a folder of images.

    The run folder is `folder`/run. Of the `num` images, a tenth, at least 2 and at most 50, is held
    out. `method` is `DEFAULT_METHOD`, or the name of a file in configs/methods.
    """
    text = check_regular(shipped_configs() / "folder-small.yaml").read_text()
    text = text[text.index("seed_everything:") :]
    num_held_out = max(2, min(50, num // 10))
    values = {
        "  max_epochs: -1": f"  default_root_dir: {_quote(f'{folder}/run')}\n  max_epochs: -1",
        "    val: 50": f"    train: {_quote(str(images))}\n    val: {num_held_out}",
        "    image_size: 64": f"    image_size: {size}\n    strict: false  # convert others",
        "    batch_size: 32": f"    batch_size: {min(32, num - num_held_out)}",
        "        num: 36": "        num: 36\n        every_n_steps: 500",
        "folder-cnn.safetensors": _quote(f"{folder}/{FID_NETWORK}"),
    }
    if not has_classes:
        values |= {"    num_classes: data": "    num_classes: null"}
        values |= {"    label_dropout: 0.1": "    label_dropout: 0.0"}
    for old, new in values.items():
        text = text.replace(old, new)
    [fid] = re.findall(r" +- class_path: \S+FIDEvaluation\n.*?(?= +- )", text, flags=re.S)
    text = text.replace(fid, FID_OFF + re.sub("^    ", "    # ", fid, flags=re.M))
    if method != DEFAULT_METHOD:
        lines = check_regular(shipped_configs() / "methods" / f"{method}.yaml").read_text()
        block = lines[lines.index("    process:") :]
        text = re.sub(r"    process:.*?(?=    optimizer:)", lambda _: block, text, flags=re.S)
    if "LearnedRange" in text:
        text = text.replace("out_channels: 3", "out_channels: 6  # mean and variance")
    return text


def _quote(path: str) -> str:
    """Quote a path for YAML, which does not allow the surrogate pairs of ASCII JSON."""
    return json.dumps(path, ensure_ascii=False)
