"""`lit-diffusion replay`: compute a step again whose loss or gradient was not finite."""

from collections.abc import Sequence

from lit_diffusion.cli.options import Parser, add_trust


def parser() -> Parser:
    """Options of the command."""
    made = Parser(
        "replay",
        """Compute a training step again whose loss or gradient was not finite.

    lit-diffusion replay runs/digits/non-finite-rank0.ckpt

A fit that meets such a step leaves FILE in its run folder: the batch, the weights before the
update, and what the step's randomness is a function of. Printed are the losses of the samples with
their noise levels and data indices, which of them are not finite, the part of the network whose
output, and the one whose gradient, first was not, and whether all numbers are those of the run to
the last bit, as they are on the CPU. Nothing is written.

Exit codes: 0, it happened again; 1, it did not; 2, FILE cannot be used.""",
    )
    made.add_argument("file", metavar="FILE", help="non-finite-rank<r>.ckpt of a run folder")
    made.add_argument(
        "--device", help="cpu, cuda, ... (default: what the step ran on, if there is one here)"
    )
    add_trust(made, "FILE")
    return made


def run(argv: Sequence[str]) -> None:
    """Run the command: "replay", then options.

    Raises:
        SystemExit: with 1, where all was finite this time.
    """
    args = parser().parse_args(argv[1:])
    from lit_diffusion.cli.replaying import quiet, replay

    with quiet():
        found = replay(args.file, trust=args.trust, device=args.device)
    print(found.text())
    if not found.failed:
        raise SystemExit(1)
