"""`lit-diffusion plan`: estimate memory, communication and arithmetic per rank with FSDP."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lit_diffusion.cli.options import Parser, add_trust, check_exists, integers, number

if TYPE_CHECKING:
    from lit_diffusion.modules.sharding import StepCost

GIB = 2**30


def build_parser() -> Parser:
    """Build the argument parser of the command."""
    parser = Parser(
        "plan",
        """Estimate what each rank needs if the weights are sharded over all ranks: memory,
communication and arithmetic per step. The estimate is computed from the shapes of the network.
Nothing is trained or allocated. Activations include attention matrices, which fused kernels do not
store.

    lit-diffusion plan --config configs/dit-1b.yaml
    lit-diffusion plan --config configs/dit-1b.yaml --ranks 8,64,512 --bandwidth 50""",
    )
    add = parser.add_argument
    text = "YAML with the model; may be repeated, as in fit"
    add("-c", "--config", required=True, action="append", metavar="FILE", help=text)
    text = "numbers of ranks (default: as in the config)"
    add("--ranks", type=integers, metavar="N,N", help=text)
    text = "data that a rank receives per second (default 400, as between GPUs of one node)"
    add("--bandwidth", type=number, default=400.0, metavar="GB/S", help=text)
    text = "speed of a rank (default 400, about half of the bfloat16 peak of an H100)"
    add("--tflops", type=number, default=400.0, metavar="TFLOP/S", help=text)
    add_trust(parser, "the config")
    return parser


def run(argv: Sequence[str]) -> None:
    """Run the command: "plan", then options."""
    args = build_parser().parse_args(argv[1:])
    check_exists("config", *args.config)
    import torch
    from torch import nn

    from lit_diffusion.checkpoints.loading import instantiate
    from lit_diffusion.cli.run_folder import read_config
    from lit_diffusion.modules.sharding import measure_step, network_blocks

    configs, path = [read_config(file) for file in args.config], ", ".join(args.config)
    trainer: dict[str, Any] = {}
    for config in configs:
        trainer |= config.get("trainer") or {}
    networks = _values(configs, "model", "network")
    shape = [None, *_values(configs, "model", "image_shape")][-1]
    batch = [None, *_values(configs, "data", "batch_size")][-1]
    devices, nodes = trainer.get("devices", 1), trainer.get("num_nodes", 1)
    needed = {
        "model.network": bool(networks),
        "model.image_shape in numbers": isinstance(shape, list),
        "data.batch_size": isinstance(batch, int),
        "trainer.devices as a number, or pass --ranks": bool(args.ranks) or type(devices) is int,
    }
    for name, is_stated in needed.items():
        if not is_stated:
            raise ValueError(f"{path} must state {name}.")
    ranks = args.ranks or [devices * nodes]
    if min(*ranks, args.bandwidth, args.tflops) <= 0:
        raise ValueError(
            "numbers of ranks, --bandwidth and --tflops must be positive, got "
            f"{', '.join(map(str, ranks))}, {args.bandwidth:g} and {args.tflops:g}."
        )
    precision = str(trainer.get("precision"))
    with torch.device("meta"):
        network = instantiate(networks, nn.Module, args.trust, path, key="network")
    if not list(network_blocks(network)):
        raise ValueError(f"{path}: {type(network).__name__} names no blocks that FSDP could shard.")
    network.to(torch.bfloat16 if precision.startswith("bf16") else torch.float32)
    cost = measure_step(network, shape, batch)
    print(f"{type(network).__name__}: {cost.parameters:,} weights, {batch} images on each rank")
    print(f"{'ranks':28}" + "".join(f"{n:>10}" for n in ranks))
    averages = _num_averages(config.get("trainer") or {} for config in configs)
    columns = [_plan(cost, n, precision, averages, args.bandwidth, args.tflops) for n in ranks]
    for name in columns[0]:
        print(f"{name:28}" + "".join(f"{column[name]:>10.4g}" for column in columns))


def _values(configs: Sequence[dict[str, Any]], part: str, name: str) -> list[Any]:
    """Values of an argument of the model or the data, in the order of the configs."""
    parts = [config.get(part) for config in configs]  # a part without arguments may be a class path
    arguments = [each.get("init_args") or {} for each in parts if isinstance(each, dict)]
    return [values[name] for values in arguments if name in values]


def _num_averages(trainers: Iterable[dict[str, Any]]) -> int:
    """Number of weight averages of the callbacks, given `trainer` of each config, in order."""
    callbacks: list[Any] = []
    for trainer in trainers:
        if "callbacks" in trainer:
            callbacks = _as_list(trainer["callbacks"])
        callbacks = [*callbacks, *_as_list(trainer.get("callbacks+"))]
    total = 0
    for callback in callbacks:
        spec = callback if isinstance(callback, dict) else {"class_path": callback}
        name, arguments = str(spec.get("class_path")), spec.get("init_args") or {}
        if name.rpartition(".")[2] == "PowerEMA":
            total += len(arguments.get("widths", (0.05, 0.10)))
        elif name.rpartition(".")[2] == "EMA":
            total += len(arguments.get("decays", (0.9999,)))
    return total


def _as_list(callbacks: Any) -> list[Any]:
    """Make a list of `trainer.callbacks` of a config, which may also be None or one callback."""
    return callbacks if isinstance(callbacks, list) else [callbacks] * bool(callbacks)


def _plan(
    cost: "StepCost", ranks: int, precision: str, averages: int, bandwidth: float, tflops: float
) -> dict[str, float]:
    """Return the estimates for one rank, by name."""
    weight = 2 if precision == "bf16-true" else 4  # bytes
    gathered = 2 if precision.startswith("bf16") else 4
    split = weight * cost.parameters / ranks / GIB
    # Weights of the block in use, of the next block, and of the rest; gradients in float32.
    peak = gathered * (2 * cost.block + cost.rest) + 4 * (cost.block + cost.rest)
    memory = {
        "weights, GiB": split,
        "gradients": split,
        "moments of Adam": 2 * split,
        f"averages ({averages})": averages * 4 * cost.parameters / ranks / GIB,
        "gathered": peak / GIB if ranks > 1 else 0.0,
        "activations, at most": cost.activations / GIB,
    }
    # Blocks are gathered in the forward and in the backward pass, and gradients are scattered.
    of_all = gathered * (2 * cost.parameters - cost.rest) + 4 * cost.parameters
    received = of_all * (ranks - 1) / ranks
    return {
        **memory,
        "in all, GiB": sum(memory.values()),
        "received in a step, GiB": received / GIB,
        "at the bandwidth, s": received / (bandwidth * 1e9),
        "arithmetic, s": cost.flops / (tflops * 1e12),
    }
