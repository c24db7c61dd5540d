"""`lit-diffusion encode`: precompute the latents of a folder of images."""

from collections.abc import Sequence
from pathlib import Path

from lit_diffusion.cli.options import Parser, add_device, check_exists, integer, usable_device
from lit_diffusion.signals import print_error, raise_on_signals


def build_parser() -> Parser:
    """Build the argument parser of the command."""
    parser = Parser(
        "encode",
        """Encode a folder of images with a VAE, to train on the latents.

    lit-diffusion encode --images ILSVRC2012/train --image-size 256 --vae sd-vae-ft-mse \\
        --out data/imagenet256-latents/train --flips
    torchrun --nproc-per-node=8 --no-python lit-diffusion encode ...

Images are labeled by their class folders, and resized and cropped as ImageFolder(strict=False)
does. The output folder gets index.json and shards. Each shard is written completely or not at all.
If the command is stopped, repeat it to encode the rest. The processes of torchrun or srun divide
the shards. --vae is a folder that AutoencoderKL.save_pretrained of diffusers has written.""",
    )
    add = parser.add_argument
    add("--images", required=True, metavar="DIR", help="folder of images")
    text = "pixels on each side of a crop"
    add("--image-size", required=True, type=integer, metavar="N", help=text)
    add("--vae", required=True, metavar="DIR", help="folder of an AutoencoderKL")
    add("--out", required=True, metavar="DIR", help="folder for the latents")
    add("--flips", action="store_true", help="encode the mirror image of every image too")
    text = "images per batch (default 16)"
    add("--batch-size", type=integer, default=16, metavar="B", help=text)
    text = "images per shard (default 4096)"
    add("--shard-size", type=integer, default=4096, metavar="N", help=text)
    text = "processes that read images (default: set from the number of cores)"
    add("--num-workers", type=integer, metavar="W", help=text)
    add_device(parser)
    return parser


def run(argv: Sequence[str]) -> None:
    """Run the command: "encode", then options."""
    args = build_parser().parse_args(argv[1:])
    check_exists("folder", args.images, args.vae)
    from lit_diffusion.cli.encoding import encode_shards, launcher_rank_and_world_size, plan_shards
    from lit_diffusion.data.image_folder import ImageFolder
    from lit_diffusion.modules.vae import VAECodec

    codec = VAECodec(args.vae, batch_size=args.batch_size)
    images = ImageFolder(
        args.images,
        args.images,
        args.image_size,
        strict=False,
        channels=codec.image_channels,
        full_check=False,  # encoding reads all pixels
        num_workers=args.num_workers,
    )
    device, folder = usable_device(args.device), Path(args.out)
    try:
        with raise_on_signals():
            index = plan_shards(images, codec, folder, args.shard_size, args.flips)
            share = launcher_rank_and_world_size()
            num = encode_shards(images, codec, folder, index, device, *share)
    except KeyboardInterrupt:
        print_error(f"Stopped. Finished shards are in {folder}; repeat the command to continue.")
        raise
    total = len(index.shards())
    done = total - len(index.missing_shards(folder))
    print(f"{num} shards were written to {folder}, which has {done} of {total}.")
