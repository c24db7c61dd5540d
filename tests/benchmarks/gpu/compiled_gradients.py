"""Gradients, fits and samples of compiled networks beside eager ones: finite, and how far off?

    python tests/benchmarks/gpu/compiled_gradients.py [--seconds 60] [--out rows.jsonl]

Prints a row of JSON for each case as it is done, the most telling ones first, and begins none after
so many seconds. A compiled gradient is fine if it is finite and about as far from the float64
gradient as the eager one is. Runs on a CPU too, where CUDA graphs do nothing.
"""

import argparse
import copy
import json
import time

import torch
from lightning.pytorch import Trainer
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, Dataset

from lit_diffusion.callbacks import EMA, FiniteUpdates
from lit_diffusion.losses import DenoisingLoss, Simple
from lit_diffusion.modules.compiled import compile_network, run_compiled
from lit_diffusion.modules.diffusion import DiffusionModule
from lit_diffusion.networks.dit import DiT
from lit_diffusion.networks.unet import UNet
from lit_diffusion.parameterizations import Epsilon
from lit_diffusion.processes import CosineBetas, DiscreteVP
from lit_diffusion.solvers import DDIM, DPMSolverPP, UniPC
from lit_diffusion.timesteps import Uniform

START = time.monotonic()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def network(name):
    torch.manual_seed(0)
    if name == "dit":
        built = DiT(8, 3, 3, 2, width=32, depth=1, num_heads=2, num_classes=10)
    else:
        built = UNet(3, 3, 16, (1,), 1, (1,), num_classes=10, norm_groups=4)
    for parameter in built.parameters():  # layers that are zero at first have no gradient behind
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    return built.to(DEVICE)


def batch(size):
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randn(2, size, 3, 8, 8, generator=generator).to(DEVICE)
    noise_label = 999 * torch.rand(size, generator=generator).to(DEVICE)
    return x, noise_label, torch.arange(size, device=DEVICE) % 10, target


def gradients(net, call, memory_format, dtype, amp):
    """Loss, and the gradients of all parameters in float64."""
    x, noise_label, labels, target = (v.to(dtype) if v.is_floating_point() else v for v in batch(8))
    net.zero_grad()
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=amp):
        output = call(x.contiguous(memory_format=memory_format), noise_label, labels)
    loss = (output.to(target) - target).square().mean()
    loss.backward()
    return loss.item(), [p.grad.double() for p in net.parameters()]


def compare_gradients(name, memory_format, precision, mode):
    """How far eager and compiled gradients are from those in float64."""
    amp = precision == "bf16-mixed"
    net = network(name).to(memory_format=FORMATS[memory_format])
    layout = FORMATS[memory_format]
    exact_net = copy.deepcopy(net).double()
    _, exact = gradients(exact_net, exact_net, layout, torch.float64, False)
    eager_loss, eager = gradients(net, net, layout, torch.float32, amp)
    torch.compiler.reset()
    counters.clear()
    compile_network(net, mode)

    def call(*inputs):
        return run_compiled(net, mode, *inputs)

    begin = time.monotonic()
    for _ in range(3):  # CUDA graphs are recorded in the second call
        loss, compiled = gradients(net, call, layout, torch.float32, amp)
    size = sum(g.square().sum() for g in exact).sqrt()

    def error(grads):
        total = sum((a - b).square().sum() for a, b in zip(grads, exact, strict=True))
        return (total.sqrt() / size).item()

    names = [n for n, _ in net.named_parameters()]
    bad = [n for n, g in zip(names, compiled, strict=True) if not g.isfinite().all()]
    return {
        "losses": [eager_loss, loss],
        "nonfinite": len(bad),
        "first_nonfinite": bad[:5],
        "error_eager": error(eager),
        "error_compiled": error(compiled),
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "seconds": time.monotonic() - begin,
    }


class Images(Dataset):
    """40 images of noise, as the data sets of the project give them."""

    pixels = torch.randint(0, 256, (40, 3, 8, 8), generator=torch.Generator().manual_seed(2))

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, i):
        return self.pixels[i].to(torch.uint8), i % 10, i


def fit_and_sample(name, mode):
    """Weights, averages and images after five steps in bf16-mixed."""
    torch.compiler.reset()
    module = DiffusionModule(
        network(name),
        DiscreteVP(CosineBetas(1000)),
        Epsilon(),
        DenoisingLoss(Simple()),
        Uniform(),
        DDIM(10),
        lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        image_shape=(3, 8, 8),
        num_classes=10,
        compile=mode,
    )
    ema = EMA((0.5,))
    trainer = Trainer(
        max_steps=5,
        precision="bf16-mixed",
        devices=1,
        callbacks=[ema, FiniteUpdates()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(Images(), batch_size=8))
    module.to(DEVICE)
    result = {"weights": torch.cat([p.detach().flatten() for p in module.parameters()])}
    with ema.weights("ema_0.5"):
        averages = [p.detach().clone().flatten() for p in module.parameters()]
        result["averages"] = torch.cat(averages)
        for module.solver in (DDIM(10), DPMSolverPP(10), UniPC(10)):
            images = [module.generate(range(size)).float() for size in (8, 5, 8)]
            result[type(module.solver).__name__] = torch.cat(images)
    return result


def compare_fits(name, *modes):
    """Largest differences of weights, averages and grey levels between runs in several modes."""
    begin = time.monotonic()
    first, *others = (fit_and_sample(name, mode) for mode in modes)
    differences = {
        key: [(first[key] - other[key]).abs().max().item() for other in others] for key in first
    }
    finite = all(v.isfinite().all().item() for run in (first, *others) for v in run.values())
    return {"differences": differences, "finite": finite, "seconds": time.monotonic() - begin}


CASES = [
    (compare_gradients, "unet", "channels_last", "bf16-mixed", "default"),
    (compare_fits, "dit", "default", "reduce-overhead", None),
    (compare_gradients, "dit", "contiguous", "bf16-mixed", "default"),
    (compare_gradients, "unet", "channels_last", "32-true", "default"),
    (compare_gradients, "unet", "contiguous", "bf16-mixed", "default"),
    (compare_gradients, "dit", "contiguous", "32-true", "default"),
    (compare_gradients, "unet", "contiguous", "32-true", "default"),
    (compare_gradients, "unet", "channels_last", "bf16-mixed", "reduce-overhead"),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False  # so that float32 rows are float32
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
    for function, *case in CASES:
        if time.monotonic() - START > args.seconds:
            break
        row = {"case": [function.__name__, *case], "device": device, "torch": torch.__version__}
        try:
            row |= function(*case)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error)[:600]}"
        print(json.dumps(row), flush=True)
        if args.out:
            with open(args.out, "a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
