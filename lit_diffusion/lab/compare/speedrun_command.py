"""Options of `lit-diffusion speedrun`."""

from collections.abc import Sequence
from pathlib import Path

from lit_diffusion.cli.options import Parser, add_trust, check_exists, integer, require_lab
from lit_diffusion.files import atomic_write_text


def parser() -> Parser:
    """Build the parser of the command."""
    parser = Parser(
        "speedrun",
        """Measure in how many steps a recipe reaches fixed targets on the digits, over ten seeds.

    lit-diffusion speedrun configs/arms/digits/fast.yaml --jobs 2
    lit-diffusion speedrun mine.yaml+configs/arms/min-snr.yaml
    lit-diffusion speedrun

ARM is a config that changes configs/digits-ablation.yaml, or several joined by +. Without ARM, the
command prints the records. The rules are in docs/speedrun.md. The runs are resumed if the command
is repeated.""",
    )
    add = parser.add_argument
    add("arm", nargs="?", metavar="ARM", help="config of the recipe")
    add("--jobs", type=integer, default=1, metavar="N", help="number of parallel runs (default 1)")
    add("--out", metavar="DIR", help="folder of the runs (default runs/speedrun-<ARM>)")
    add("--commit", default="", help="commit to write into the rows of the result")
    add_trust(parser, "the config")
    return parser


def run(argv: Sequence[str]) -> None:
    """Run the command.

    Raises:
        ValueError: if the recipe breaks a rule. No run is started then.
        SystemExit: with code 1 if runs are unfinished.
    """
    args = parser().parse_args(argv[1:])
    require_lab()
    from lit_diffusion.config.shipped import shipped_configs
    from lit_diffusion.lab.compare import speedrun
    from lit_diffusion.lab.compare.sweep import Sweep, fit_settings, plan_sweep

    records = speedrun.read_entries(speedrun.RECORDS)
    if args.arm is None:
        print(speedrun.records_table(records).markdown())
        return
    files = [args.arm] if Path(args.arm).is_file() else args.arm.split("+")
    check_exists("config", *files)
    name = "+".join(Path(file).stem for file in files)
    out = Path(args.out or f"runs/speedrun-{name}")
    fixed = speedrun.fixed_options()
    options = [*fixed, *(f"--trust={package}" for package in args.trust)]
    track = str(shipped_configs() / "digits-ablation.yaml")
    settings = fit_settings(name, [track, *files], options)
    speedrun.check_rules(settings, fit_settings("track", [track], fixed))
    speedrun.check_network(settings["model"], args.trust)
    runs = plan_sweep([track, *files], [], speedrun.SEEDS, out, options)
    sweep = Sweep(runs, args.jobs)
    sweep.run()
    if len(sweep.finished) < len(runs):
        raise SystemExit(1)
    entry = speedrun.measure(name, runs, args.commit)
    atomic_write_text(out / "speedrun.csv", speedrun.entry_csv(entry))
    print(speedrun.describe(entry, speedrun.record_holder(records)))
    print(f"\nRows for the table of records: {out / 'speedrun.csv'}")
