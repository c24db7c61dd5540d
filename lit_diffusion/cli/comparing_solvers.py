"""The same seeds by several solvers in several numbers of steps: a picture, and an FID for each."""

import csv
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

from PIL import Image

from lit_diffusion.checkpoints.loading import Loaded
from lit_diffusion.cli.evaluating import labels_of, protocol_of_run, real_images
from lit_diffusion.cli.guiding import change_guidance
from lit_diffusion.cli.image_grids import table, tile, written
from lit_diffusion.cli.sampling import (
    RECORD,
    as_text,
    changed_solver,
    first_images,
    folder_of_images,
    own_solver,
    record_of,
    shipped_solvers,
    solver_spec,
    write_samples,
)
from lit_diffusion.files import atomic_write, atomic_write_text, user_cache
from lit_diffusion.grids import LogSNR
from lit_diffusion.metrics.extractors import protocol_by_name
from lit_diffusion.metrics.reference import FEWEST, Scorer, measure
from lit_diffusion.metrics.score import image_set
from lit_diffusion.modules.checks import check_clipping, check_objective, check_sampling
from lit_diffusion.protocols import NonFiniteSamples, Process, Solver
from lit_diffusion.signals import defer_signals, print_error
from lit_diffusion.solvers.steps import check_steps, solver_times, time_grid_of

STEPS = (5, 10, 20, 50)
SHOWN = 12
COLUMNS = ("solver", "steps", "grid", "evaluations", "fid", "left_out")


@dataclass
class Cell:
    """A solver with a number of steps, and the FID of its images, or why there are none.

    `evaluations` are those of the network; guidance may double each.
    """

    solver: str
    steps: int
    grid: str | None = None
    evaluations: int | None = None
    fid: float | None = None
    left_out: str | None = None
    sampling: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        """Of the folder of its images."""
        return f"{self.solver}-{self.steps}"

    @property
    def caption(self) -> str:
        """What stands below its images."""
        fid = "" if self.fid is None else f"FID {self.fid:.4g}, "
        return "left out" if self.left_out else f"{fid}{self.evaluations} evaluations"


def compare_solvers(loaded: Loaded, args: Namespace, out: Path) -> str:
    """Write a folder of images a cell, comparison.json, .csv and .png; what is to be told of them.

    A call that was stopped can be repeated: images that are there are not made again.

    Raises:
        ValueError: for solvers that do not exist, less than one step, a module that takes no other
            solver, and where none of them can run.
    """
    own_solver(loaded)
    steps = sorted(set(args.compare_steps or STEPS))
    check_steps(steps[0])
    cells = [Cell(name, number) for name in _solvers(args.compare) for number in steps]
    fid, scored = _scoring(loaded, args)
    print_error(scored["told"])
    for number, cell in enumerate(cells, 1):
        _draw(loaded, args, cell, out / cell.name)
        if fid and not cell.left_out:
            cell.fid = fid(out / cell.name)
        told = f"{cell.solver}, {cell.steps} steps: {cell.caption}"
        print_error(f"{told}  ({number} of {len(cells)})")
    if all(cell.left_out for cell in cells):
        raise ValueError(f"no solver can run. {_left_out(cells)[0]}")
    _write(loaded, args, cells, scored, out)
    told = f"{args.num} images a solver and number of steps, and comparison.png, in {out}."
    return "\n".join([told, *_left_out(cells)])


def _solvers(given: str) -> list[str]:
    known = list(shipped_solvers())
    by_any_case = {name.lower(): name for name in known}
    asked = known if given == "solvers" else given.split(",")
    if unknown := [name for name in asked if name.lower() not in by_any_case]:
        raise ValueError(
            f"--compare must be solvers, or some of {','.join(known)}, got {unknown[0]!r}."
        )
    return list(dict.fromkeys(by_any_case[name.lower()] for name in asked))


def _draw(loaded: Loaded, args: Namespace, cell: Cell, folder: Path) -> None:
    """Make the images of a cell, unless they are there, or say why not."""
    module: Any = loaded.module
    try:
        _put(loaded, args, cell)
    except ValueError as error:
        cell.left_out = str(error)
        return
    cell.evaluations = evaluations(module.solver, module.process)
    record = record_of(loaded, args, args.num, args.num)
    cell.sampling = record["sampling"]
    if (folder / "grid.png").exists() and (folder / RECORD).read_text() == as_text(record):
        return
    try:
        write_samples(loaded, args, args.num, folder_of_images(str(folder)))
    except NonFiniteSamples as error:
        cell.left_out = str(error)


def _put(loaded: Loaded, args: Namespace, cell: Cell) -> None:
    """Give the module the solver of a cell, or raise ValueError where it does not fit the rest."""
    module: Any = loaded.module
    args.steps = cell.steps
    module.solver = changed_solver(module, own_solver(loaded), solver_spec(cell.solver), args)
    if args.classifier:  # guides DDPM in another way
        change_guidance(module, args)

    def check(solver: Solver) -> None:
        check_sampling(module.process, module.loss, solver, module.guidance)

    module.solver = on_a_grid_that_fits(module.solver, check)
    cell.grid = str(time_grid_of(module.solver))
    parts = module.process, module.parameterization, module.loss
    check_objective(*parts, module.solver, module.guidance)
    check_clipping(module.codec, module.solver, module.guidance)


def on_a_grid_that_fits(solver: Any, check: Callable[[Any], None]) -> Any:
    """The solver, on `LogSNR(noisiest=-10)` where it names no grid and `check` refuses its usual.

    Example:
        >>> from lit_diffusion.processes import EDMProcess
        >>> from lit_diffusion.solvers import DDIM, Heun
        >>> on_a_grid_that_fits(Heun(), lambda solver: solver.check(EDMProcess())).times
        >>> on_a_grid_that_fits(DDIM(), lambda solver: solver.check(EDMProcess())).times
        LogSNR(noisiest=-10.0)
    """
    if solver.times is None:
        try:
            check(solver)
        except ValueError:
            return replace(solver, times=LogSNR(noisiest=-10.0))
    return solver


def evaluations(solver: Solver, process: Process) -> int:
    """How often a solver asks the network, counted on one pixel.

    Example:
        >>> from lit_diffusion.processes import CosineBetas, DiscreteVP
        >>> from lit_diffusion.solvers import Heun
        >>> evaluations(Heun(10), DiscreteVP(CosineBetas(100)))
        19
    """
    return len(solver_times(solver, process))


def _scoring(
    loaded: Loaded, args: Namespace
) -> tuple[Callable[[Path], float] | None, dict[str, Any]]:
    """The FID of a folder, as `evaluate` has it, and against what; where there is none, why."""
    try:
        if args.num < FEWEST:
            raise ValueError(f"it needs {FEWEST} images or more, got --num {args.num}.")
        protocol = protocol_by_name(protocol_of_run(args.checkpoint))
        protocol.check()
        device = loaded.module.device
        scorer = Scorer(protocol, protocol.build().to(device), device, args.batch_size)
        labels = labels_of(loaded, record_of(loaded, args, args.num, args.num))
        sets = real_images(args.reference, args, loaded)
        real = measure(scorer, *sets, args.num, user_cache(), labels)
    except (ValueError, TypeError, OSError) as error:
        return None, {"told": f"No FID: {error}"}

    def fid(folder: Path) -> float:
        metric = scorer.metric()
        metric.add_real_sums(real.sums)
        for images, _ in image_set(folder, "").batches(args.batch_size):
            metric.update(scorer.features(images), real=False)
        return float(metric.compute())

    told = f"FID of {args.num} images by {protocol.name} against {real.name}"
    told += f", floor {real.floor:.4g}."
    about = {"protocol": protocol.name, "extractor_sha256": protocol.sha256, "told": told}
    floor = {"floor": real.floor, "floor_images": real.floor_images}
    return fid, about | {"reference": real.name} | floor


def _write(
    loaded: Loaded, args: Namespace, cells: list[Cell], scored: dict[str, Any], out: Path
) -> None:
    record = record_of(loaded, args, args.num, args.num)
    del record["sampling"]  # is each cell's own
    record |= {"solver_options": args.solver_options, "scored": scored}
    record["cells"] = [asdict(cell) for cell in cells]
    atomic_write_text(out / "comparison.json", as_text(record))
    text = StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(asdict, cells))
    atomic_write_text(out / "comparison.csv", text.getvalue())
    about = f"{loaded.path}, step {loaded.step}, {loaded.weights} weights.\n{scored['told']}"
    picture = table([[written(about)], [_picture(cells, out, min(args.num, SHOWN))]])
    with defer_signals(), atomic_write(out / "comparison.png") as file:
        picture.save(file, "PNG")


def _picture(cells: list[Cell], out: Path, num: int) -> Image.Image:
    """A row a solver that can run, a column a number of steps."""
    steps = sorted({cell.steps for cell in cells})
    rows = [[written(""), *(written(f"{number} steps") for number in steps)]]
    for solver in dict.fromkeys(cell.solver for cell in cells if not cell.left_out):
        row = [written(solver)]
        for cell in cells:
            if cell.solver == solver:
                shown = [] if cell.left_out else [[tile(first_images(out / cell.name, num), 200)]]
                row.append(table([*shown, [written(cell.caption)]]))
        rows.append(row)
    return table(rows)


def _left_out(cells: list[Cell]) -> list[str]:
    """A line a solver and reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        if cell.left_out:
            found.setdefault((cell.solver, cell.left_out), []).append(str(cell.steps))
    return [
        f"Left out: {solver} in {', '.join(steps)} steps: {reason}"
        for (solver, reason), steps in found.items()
    ]
