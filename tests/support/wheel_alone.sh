# What somebody does who has installed the wheel and has no checkout. In an empty folder.
lit-diffusion --version
lit-diffusion sample --checkpoint digits --num 4 --out digits-samples
test -s digits-samples/grid.png
lit-diffusion doctor configs/digits.yaml
lit-diffusion fit --config configs/digits.yaml --trainer.max_steps=100
lit-diffusion sample --checkpoint runs/digits --num 4 --out samples
test -s samples/grid.png
python - <<'PYTHON'
from lit_diffusion import load

assert load("mnist").generate(range(2)).shape == (2, 1, 28, 28)
assert load("runs/digits", weights="ema").generate(range(2)).shape == (2, 1, 8, 8)
PYTHON
