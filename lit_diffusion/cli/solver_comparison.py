"""Compare solvers and numbers of steps on the same seeds, by images and FID."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

from PIL import Image

from lit_diffusion import solvers
from lit_diffusion.cli.generator import (
    SOLVERS,
    ImageGenerator,
    build_guidance,
    build_solver,
    load_generator,
    trained_solver,
)
from lit_diffusion.cli.image_grids import table, text_image, tile
from lit_diffusion.cli.options import SamplingOptions
from lit_diffusion.cli.run_data import protocol_of_run, real_images
from lit_diffusion.cli.sampling import RECORD, image_folder, json_text, read_samples, write_samples
from lit_diffusion.files import atomic_write, atomic_write_text, checked_read, user_cache
from lit_diffusion.metrics.extractors import protocol_by_name
from lit_diffusion.metrics.images import as_image_set
from lit_diffusion.metrics.reference import MIN_IMAGES, Scorer, measure_reference
from lit_diffusion.modules.checks import check_clipping, check_sampling
from lit_diffusion.protocols import NonFiniteSamples
from lit_diffusion.signals import defer_signals, print_error
from lit_diffusion.solvers.steps import check_steps, solver_times, time_grid_of

NUM_DRAWN = 12
"""Number of images of each cell in comparison.png."""
COLUMNS = ("solver", "steps", "grid", "evaluations", "fid", "left_out", "same_as")
"""Columns of comparison.csv."""


@dataclass(frozen=True)
class ComparisonOptions:
    """Options of --compare."""

    solvers: str  # "solvers" for all of this library, or names separated by commas
    steps: Sequence[int] | None  # numbers of steps; None for 5, 10, 20 and 50
    num: int  # number of images
    reference: str | None  # real images: argument of `real_images`
    data: Sequence[str] | None  # configs with the data, instead of the run's config


@dataclass
class Cell:
    """A solver with a number of steps, and its result."""

    solver: str
    steps: int
    grid: str | None = None  # the solver's times
    evaluations: int | None = None  # number of function evaluations (NFE); guidance may double it
    fid: float | None = None  # FID of the images; None if it could not be computed
    left_out: str | None = None  # why there are no images; None if there are
    same_as: str | None = None  # an earlier solver that takes the same steps; its images are used
    sampling: dict[str, Any] | None = None  # the module's `sampling_record`

    @property
    def name(self) -> str:
        """Name of the folder with the images."""
        return f"{self.same_as or self.solver}-{self.steps}"

    @property
    def caption(self) -> str:
        """Text below the images."""
        fid = "" if self.fid is None else f"FID {self.fid:.4g}, "
        same = f", the same as {self.same_as}" if self.same_as else ""
        return "left out" if self.left_out else f"{fid}{self.evaluations} evaluations{same}"


def compare_solvers(sampling: SamplingOptions, comparison: ComparisonOptions, folder: Path) -> str:
    """Generate images with each solver and each number of steps. Return a summary.

    The comparison is written to comparison.json, comparison.csv and comparison.png. If an
    interrupted command is repeated, existing images are not generated again.
    """
    # --solver.NAME applies to the solvers of the comparison, not to the checkpoint's solver
    loading = replace(sampling, solver_options=())
    generator = replace(load_generator(loading, check=False), options=sampling)
    trained_solver(generator.loaded)  # raises for a module without a solver
    steps = sorted(set(comparison.steps or (5, 10, 20, 50)))
    check_steps(steps[0])
    cells = [Cell(name, num) for name in _solver_names(comparison.solvers) for num in steps]
    compute_fid, scored = _prepare_fid(generator, comparison)
    print_error(scored["summary"])
    generated: dict[str, Cell] = {}  # canonical solver -> its first cell
    for number, cell in enumerate(cells, 1):
        _prepare_cell(generator, comparison.num, cell)
        if not cell.left_out:
            first = generated.setdefault(_canonical_solver(generator.loaded.module), cell)
            if first is cell:
                _generate_cell(generator, comparison.num, cell, folder / cell.name)
                if compute_fid and not cell.left_out:
                    cell.fid = compute_fid(folder / cell.name)
            else:
                cell.same_as, cell.left_out, cell.fid = first.solver, first.left_out, first.fid
        text = f"{cell.solver}, {cell.steps} steps: {cell.caption}"
        print_error(f"{text}  ({number} of {len(cells)})")
    steps_by_reason: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        if cell.left_out:
            steps_by_reason.setdefault((cell.solver, cell.left_out), []).append(str(cell.steps))
    left_out = [
        f"Left out: {solver} in {', '.join(steps)} steps: {reason}"
        for (solver, reason), steps in steps_by_reason.items()
    ]
    if all(cell.left_out for cell in cells):
        raise ValueError(f"no solver can run. {left_out[0]}")
    _write_comparison(generator, comparison.num, cells, scored, folder)
    summary = f"{comparison.num} images for each solver and number of steps"
    return "\n".join([f"{summary}, and comparison.png, are in {folder}.", *left_out])


def _solver_names(text: str) -> list[str]:
    """Parse the names of solvers in --compare, in any case."""
    if text == "solvers":
        return solvers.__all__
    if unknown := [name for name in text.split(",") if name.lower() not in SOLVERS]:
        shipped = ",".join(solvers.__all__)
        raise ValueError(f"--compare must be solvers, or some of {shipped}, got {unknown[0]!r}.")
    return list(dict.fromkeys(SOLVERS[name.lower()] for name in text.split(",")))


def _prepare_cell(generator: ImageGenerator, num: int, cell: Cell) -> None:
    """Give the module the solver of a cell and describe it, or set `left_out`."""
    module: Any = generator.loaded.module
    try:
        options = replace(generator.options, solver=cell.solver, steps=cell.steps)
        module.solver = build_solver(generator.loaded, options)
        if options.classifier:  # depends on the solver
            module.guidance, _ = build_guidance(module, options)
        cell.grid = str(time_grid_of(module.solver, module.process))
        check_sampling(module.process, module.loss, module.solver, module.guidance)
        check_clipping(module.codec, module.solver, module.guidance)
    except ValueError as error:
        cell.left_out = str(error)
        return
    cell.evaluations = len(solver_times(module.solver, module.process))
    cell.sampling = generator.record(num, num)["sampling"]


def _canonical_solver(module: Any) -> str:
    """A text that is equal for solvers that take the same steps under two names."""
    solver = module.solver
    if isinstance(solver, solvers.DDIM):  # or a subclass, Euler or EulerAncestral
        grid = time_grid_of(solver, module.process)
        solver = solvers.DDIM(solver.steps, solver.eta, grid, solver.clip)
    return repr(solver)


def _generate_cell(generator: ImageGenerator, num: int, cell: Cell, folder: Path) -> None:
    """Generate the images of a cell unless they exist, or set `left_out`."""
    record = generator.record(num, num)
    if (folder / "grid.png").exists() and (folder / RECORD).exists():
        with checked_read(folder / RECORD, "record of samples", "delete its folder") as file:
            if file.read_text() == json_text(record):
                return
    try:
        write_samples(generator, num, image_folder(folder))
    except NonFiniteSamples as error:
        cell.left_out = str(error)


def _prepare_fid(
    generator: ImageGenerator, comparison: ComparisonOptions
) -> tuple[Callable[[Path], float] | None, dict[str, Any]]:
    """A function that computes the FID of a folder, and the protocol for the record.

    If no FID can be computed, the function is None, and the record has the reason under "summary".
    """
    num, options = comparison.num, generator.options
    try:
        if num < MIN_IMAGES:
            raise ValueError(f"--num must be at least {MIN_IMAGES}, got {num}.")
        protocol = protocol_by_name(protocol_of_run(options.checkpoint))
        device: Any = generator.loaded.module.device
        scorer = Scorer(protocol, protocol.build().to(device), device, options.batch_size)
        real, others = real_images(
            comparison.reference, options.checkpoint, comparison.data, options.trust
        )
        reference = measure_reference(
            scorer, real, others, num, user_cache(), generator.image_labels(num)
        )
    except (ValueError, TypeError, OSError) as error:
        return None, {"summary": f"No FID: {error}"}

    def compute_fid(folder: Path) -> float:
        metric = scorer.metric()
        metric.add_real_sums(reference.sums)
        for images, _ in as_image_set(folder, "").batches(options.batch_size):
            metric.update(scorer.features(images), real=False)
        return float(metric.compute())

    return compute_fid, {
        "protocol": protocol.name,
        "extractor_sha256": protocol.sha256,
        "summary": f"FID of {num} images by {protocol.name} against {reference.name}, floor "
        f"{reference.floor:.4g}.",
        "reference": reference.name,
        "floor": reference.floor,
        "floor_images": reference.floor_images,
    }


def _write_comparison(
    generator: ImageGenerator, num: int, cells: list[Cell], scored: dict[str, Any], folder: Path
) -> None:
    """Write comparison.json, .csv and .png."""
    record = generator.record(num, num)
    del record["sampling"]  # each cell has its own
    record |= {"solver_options": list(generator.options.solver_options), "scored": scored}
    record["cells"] = [asdict(cell) for cell in cells]
    atomic_write_text(folder / "comparison.json", json_text(record))
    text = StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(asdict, cells))
    atomic_write_text(folder / "comparison.csv", text.getvalue())
    loaded = generator.loaded
    title = f"{loaded.path}, step {loaded.step}, {loaded.weights} weights.\n{scored['summary']}"
    picture = table([[text_image(title)], [_draw_cells(cells, folder, min(num, NUM_DRAWN))]])
    with defer_signals(), atomic_write(folder / "comparison.png") as file:
        picture.save(file, "PNG")


def _draw_cells(cells: list[Cell], folder: Path, num: int) -> Image.Image:
    """Draw the first `num` images of each cell: a row per solver, a column per number of steps."""
    steps = sorted({cell.steps for cell in cells})
    rows = [[text_image(""), *(text_image(f"{number} steps") for number in steps)]]
    for solver in dict.fromkeys(cell.solver for cell in cells if not cell.left_out):
        row = [text_image(solver)]
        for cell in (each for each in cells if each.solver == solver):
            lines = [[text_image(cell.caption)]]
            if not cell.left_out:
                lines.insert(0, [tile(read_samples(folder / cell.name, num), 200)])
            row.append(table(lines))
        rows.append(row)
    return table(rows)
