"""512 images by 50 steps of DDIM with the network of configs/cifar10-improved.yaml."""

from functools import partial

import ours
import peers
import torch
from measure import Step, device
from turns import Body, Channel


def sampling(tiny: bool) -> dict[str, Body]:
    images, steps = (4, 3) if tiny else (512, 50)

    def our_generate(channel: Channel, how: str) -> None:
        solver = ours.ddim(steps)
        module = ours.build("cifar10-improved", tiny, solver=solver, channels_last=True)
        module.eval()
        ours.compile_(module, how)

        def generate() -> None:
            with torch.autocast(device().type, torch.bfloat16):
                module.generate(range(images))

        Step(generate, images).serve(channel)

    def their_loop(channel: Channel, how: str) -> None:
        from diffusers import DDIMScheduler

        network = peers.diffusers_unet(tiny).eval()
        ours.compile_network_(network, how)
        scheduler = DDIMScheduler(beta_schedule="linear", clip_sample=True)
        scheduler.set_timesteps(steps)
        size = 8 if tiny else 32

        @torch.no_grad()
        def generate() -> None:
            x = torch.randn(images, 3, size, size, device=device())
            with torch.autocast(device().type, torch.bfloat16):
                for t in scheduler.timesteps:
                    output = network(x, t).sample[:, :3].float()
                    x = scheduler.step(output, t, x).prev_sample
            ((x + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)

        Step(generate, images).serve(channel)

    runs = {"ours": our_generate, "diffusers": their_loop}
    hows = ("eager", "compiled")
    return {f"{name}, {how}": partial(run, how=how) for name, run in runs.items() for how in hows}
