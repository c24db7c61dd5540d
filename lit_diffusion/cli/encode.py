"""`lit-diffusion encode`: latents of a folder of images, once, for many epochs."""

from collections.abc import Sequence
from pathlib import Path

from lit_diffusion.cli.parser import Parser
from lit_diffusion.signals import print_error, raise_on_signals


def parser() -> Parser:
    """Options of the command."""
    made = Parser(
        "encode",
        """Encode a folder of images with a VAE, for training on latents.

    lit-diffusion encode --images ILSVRC2012/train --image-size 256 --vae sd-vae-ft-mse \\
        --out data/imagenet256-latents/train --flips
    torchrun --nproc-per-node=8 --no-python lit-diffusion encode ...

Images are labelled by their class folders, resized and cropped as ImageFolder(strict=False) does.
OUT gets index.json and shards, each written whole or not at all. A call that is stopped keeps the
shards that it has written; the same command goes on. Processes that torchrun or srun starts share
the shards. VAE is a folder that diffusers' AutoencoderKL.save_pretrained has written.""",
    )
    made.add_argument("--images", required=True, metavar="DIR", help="folder of images")
    made.add_argument("--image-size", required=True, type=int, metavar="N", help="side of a crop")
    made.add_argument("--vae", required=True, metavar="DIR", help="folder of an AutoencoderKL")
    made.add_argument("--out", required=True, metavar="DIR", help="folder for the latents")
    made.add_argument("--flips", action="store_true", help="a second set, of mirrored images")
    made.add_argument(
        "--batch-size", type=int, default=16, metavar="B", help="images at a time (default 16)"
    )
    made.add_argument(
        "--shard-size", type=int, default=4096, metavar="N", help="images a file (default 4096)"
    )
    made.add_argument("--num-workers", type=int, metavar="W", help="processes that read images")
    made.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    return made


def run(argv: Sequence[str]) -> None:
    """Run the command: "encode", then options."""
    args = parser().parse_args(argv[1:])

    from lit_diffusion.cli.encoding import encode_shards, planned, shared_place
    from lit_diffusion.cli.sampling import usable_device
    from lit_diffusion.data.image_folder import ImageFolder
    from lit_diffusion.modules.vae import VAECodec

    codec = VAECodec(args.vae, batch_size=args.batch_size)
    images = ImageFolder(
        args.images,
        args.images,
        args.image_size,
        strict=False,
        channels=codec.image_channels,
        full_check=False,  # encoding reads them to their ends
        num_workers=args.num_workers,
    )
    device, out = usable_device(args.device), Path(args.out)
    try:
        with raise_on_signals():
            index = planned(images, codec, out, args.shard_size, args.flips)
            num = encode_shards(images, codec, out, index, device, shared_place(), print_error)
    except KeyboardInterrupt:
        print_error(f"Stopped; finished shards are in {out}, and the same command goes on.")
        raise
    whole = len(index.shards())
    print(f"{num} shards written to {out}, which has {whole - len(index.lacking(out))} of {whole}.")
