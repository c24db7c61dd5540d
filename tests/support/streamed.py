"""Sets in litdata's chunks, and the data module that reads them."""

from functools import partial
from io import BytesIO

from PIL import Image

from lit_diffusion.data.digits import Digits
from lit_diffusion.data.streaming import StreamedImages


def write(folder, samples, chunk_size=5):
    """As litdata's `optimize` does, without its processes."""
    from litdata.streaming import Cache

    folder.mkdir(parents=True)
    cache = Cache(str(folder), chunk_size=chunk_size)
    for number, sample in enumerate(samples):
        cache[number] = sample
    cache.done()
    cache.merge()
    return str(folder)


def from_files(folder, root):
    """The files of class folders, in the order of their names."""
    classes = sorted(path.name for path in root.iterdir())
    files = sorted(root.glob("*/*"))
    labels = [classes.index(file.parent.name) for file in files]
    samples = [{"image": f.read_bytes(), "label": n} for f, n in zip(files, labels, strict=True)]
    return write(folder, samples)


def png(image):
    """Bytes of a picture."""
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def digits(folder):
    """Data module by batch_size, num_workers and seed, of a quarter of the training digits."""
    samples = [
        {"image": png(Image.fromarray(image[0].numpy())), "label": label}
        for images, labels, _ in Digits(part=(0, 4)).in_order("train")
        for image, label in zip(images, labels.tolist(), strict=True)
    ]
    return open_digits(write(folder, samples, chunk_size=100))


def open_digits(folder):
    return partial(
        StreamedImages, folder, val=37, image_size=8, channels=1, num_classes=10, flip=True
    )
