"""Conditions of images: class labels, words, or embeddings from any encoder.

    ClassLabels   labels (B,) int64, -1 for none
    Words         ids (B, length) int64, -1 where there is no word
    Embeddings    (values (B, ..., D), present (B, ...) bool): tokens with their mask, or vectors

A condition has one row per image. Each kind of condition has a value that means "no condition": the
null condition. Classifier-free guidance needs predictions with the null condition. Therefore,
training replaces the conditions of randomly chosen images with the null condition (label dropout).
The classes here only prepare conditions, and the network embeds them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import cast

import torch
from torch import Tensor

from lit_diffusion.protocols import (
    Condition,
    Conditioning,
    by_part,
    check_positive,
    describe_condition,
)
from lit_diffusion.seeding import classes_of


@dataclass(frozen=True)
class ClassLabels:
    """Class labels from 0 to num_classes - 1, one int64 per image. The label -1 means no class.

    Args:
        num_classes: number of classes.

    Example:
        >>> labels = ClassLabels(10).for_seeds([3, 12])
        >>> labels.tolist(), ClassLabels(10).drop(labels, torch.tensor([False, True])).tolist()
        ([3, 2], [3, -1])
    """

    num_classes: int

    def drop(self, condition: Condition, where: Tensor, /) -> Condition:
        """Replace the labels with -1 where `where` (B,) is True."""
        return by_part(lambda labels: labels.masked_fill(where, -1), condition)

    def null(self, like: Condition, /) -> Condition:
        """Return a label of -1 for each image."""
        return by_part(lambda labels: torch.full_like(labels, -1), like)

    def for_seeds(self, seeds: Sequence[int], /) -> Condition:
        """Return the label of each sample, which is the seed modulo `num_classes`."""
        return torch.tensor(classes_of(seeds, self.num_classes))

    def check(self, condition: Condition, num: int, /) -> None:
        """Raise ValueError unless `condition` has `num` valid labels."""
        # On a GPU, an invalid label fails an assertion in a kernel. CUDA is unusable after that.
        if not isinstance(condition, Tensor):
            raise ValueError(f"labels must be one tensor ({num},), got {type(condition).__name__}.")
        if condition.shape != (num,) or condition.dtype not in (torch.int64, torch.int32):
            got = f"{tuple(condition.shape)} of {condition.dtype}"
            raise ValueError(f"labels must be one per image, ({num},), got {got}; use int64.")
        if bool(((condition < -1) | (condition >= self.num_classes)).any()):
            last = self.num_classes - 1
            allowed = (
                f"0..{last} or -1" if self.num_classes else "-1, because num_classes is not set"
            )
            values = sorted(set(condition.tolist()))[:10]
            raise ValueError(f"labels must be {allowed}, got {values}.")


@dataclass(frozen=True)
class Words:
    """Texts over a fixed vocabulary, as word ids (B, length) int64 padded with -1.

    A text is converted to lower case and split at white space. An empty text means no condition.

    Args:
        vocabulary: the words, in lower case. Word i has the id i.
        length: maximum number of words in a text, at least 1.
        texts: default texts of samples. The sample with seed s gets `texts[s % len(texts)]`.
            Without texts, samples are unconditional by default.

    Raises:
        ValueError: if the vocabulary is empty, repeats a word, or has an entry that is not a single
            word in lower case. The error is also raised if length < 1, or if a text has an unknown
            word or too many words.

    Example:
        >>> words = Words(("big", "small", "cat"), length=3)
        >>> words.encode("Small cat").tolist()
        [1, 2, -1]
    """

    vocabulary: tuple[str, ...]
    length: int
    texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Validate the vocabulary and the texts."""
        invalid = [w for w in self.vocabulary if [w] != w.lower().split()]
        invalid += sorted({word for word in self.vocabulary if self.vocabulary.count(word) > 1})
        if invalid or not self.vocabulary:
            raise ValueError(
                "vocabulary must be different words in lower case, without spaces, got "
                f"{invalid or 'no words'}: change them."
            )
        check_positive(length=self.length)
        for text in self.texts:
            self.encode(text)

    @property
    def num_words(self) -> int:
        """Size of the vocabulary. The argument `num_words` of the network must have this value."""
        return len(self.vocabulary)

    def encode(self, text: str) -> Tensor:
        """Convert a text to word ids (length,) int64, padded with -1."""
        words = text.lower().split()
        if len(words) > self.length:
            raise ValueError(
                f"a text may have at most {self.length} words, got {len(words)} in {text!r}: "
                "shorten it, or train with a larger length."
            )
        for word in words:
            if word not in self.vocabulary:
                (nearest,) = get_close_matches(word, self.vocabulary, n=1, cutoff=0)
                listed = ", ".join(self.vocabulary[:50]) + ", ..." * (len(self.vocabulary) > 50)
                raise ValueError(
                    f"{word!r} is not in the vocabulary; the nearest word is {nearest!r}. The "
                    f"words are: {listed}."
                )
        ids = [self.vocabulary.index(word) for word in words]
        return torch.tensor(ids + [-1] * (self.length - len(ids)))

    def drop(self, condition: Condition, where: Tensor, /) -> Condition:
        """Replace all ids of a text with -1 (no words) where `where` (B,) is True."""
        return by_part(lambda ids: ids.masked_fill(where[:, None], -1), condition)

    def null(self, like: Condition, /) -> Condition:
        """Return ids that are all -1 (no words)."""
        return by_part(lambda ids: torch.full_like(ids, -1), like)

    def for_seeds(self, seeds: Sequence[int], /) -> Condition:
        """Return the word ids of the default text `texts[s % len(texts)]` for each seed s."""
        rows = torch.stack([self.encode(text) for text in self.texts or ("",)])
        return rows[classes_of(seeds, len(rows))]

    def check(self, condition: Condition, num: int, /) -> None:
        """Raise ValueError unless `condition` has valid word ids of `num` images."""
        rule = f"words must be ids ({num}, {self.length}) int64 in -1..{self.num_words - 1}"
        if not isinstance(condition, Tensor) or condition.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"{rule}, got {describe_condition(condition)}; use `encode` to convert a text."
            )
        wrong = condition[(condition < -1) | (condition >= self.num_words)][:1].tolist()
        if condition.shape != (num, self.length) or wrong:
            got = " with ".join([describe_condition(condition), *map(str, wrong)])
            raise ValueError(f"{rule}, got {got}; use `encode` to convert a text.")


@dataclass(eq=False)
class Embeddings:
    """Embeddings and their mask: (values (B, *shape), present (B, *shape[:-1]) bool).

    Use `shape=(L, D)` for L tokens per image, and `shape=(D,)` for one vector per image. The mask
    `present` is False for tokens or vectors that are missing. In label dropout, the method `drop`
    replaces the embedding of an image with `null_embedding`. If `null_embedding` is None, `drop`
    sets `present` to False, and the network uses its own learned null embedding for this image.

    Args:
        shape: shape of the values for one image.
        examples: default conditions of samples: values (N, *shape) and mask (N, *shape[:-1]). The
            sample with seed s gets row `s % N`. Without examples, samples are unconditional by
            default.
        null_embedding: the null condition: values (*shape) and mask (*shape[:-1]). An example is
            Stable Diffusion's embedding of the empty text. None uses the network's learned null
            embedding.

    Raises:
        ValueError: if a tensor in `examples` or `null_embedding` does not match `shape`, if values
            are not floating-point, or if masks are not bool.

    Example:
        >>> vectors, present = Embeddings((3,)).for_seeds(range(2))
        >>> vectors.shape, present
        (torch.Size([2, 3]), tensor([False, False]))
    """

    shape: tuple[int, ...]
    examples: tuple[Tensor, Tensor] | None = None
    null_embedding: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        """Validate `examples` and `null_embedding`."""
        if self.examples is not None:
            self._check_pair("examples", self.examples, len(self.examples[0]))
        if self.null_embedding is not None:
            self._check_pair("null_embedding", tuple(part[None] for part in self.null_embedding), 1)

    def drop(self, condition: Condition, where: Tensor, /) -> Condition:
        """Replace the condition with the null condition where `where` (B,) is True."""
        values, present = cast(tuple[Tensor, Tensor], condition)
        rows = where.view(-1, *[1] * (present.ndim - 1))
        if self.null_embedding is None:
            return values, present & ~rows
        null_values, null_present = (part.to(present.device) for part in self.null_embedding)
        values = torch.where(rows[..., None], null_values.to(values.dtype), values)
        return values, torch.where(rows, null_present, present)

    def null(self, like: Condition, /) -> Condition:
        """Return the null condition for every image."""
        present = cast(tuple[Tensor, Tensor], like)[1]
        return self.drop(like, present.new_ones(len(present)))

    def for_seeds(self, seeds: Sequence[int], /) -> Condition:
        """Return example `s % N` for each seed s, or the null condition without examples."""
        if self.examples is not None:
            indices = classes_of(seeds, len(self.examples[0]))
            return by_part(lambda rows: rows[indices], self.examples)
        values = torch.zeros(len(seeds), *self.shape)
        return self.null((values, torch.zeros(values.shape[:-1], dtype=torch.bool)))

    def check(self, condition: Condition, num: int, /) -> None:
        """Raise ValueError unless `condition` has valid embeddings of `num` images."""
        self._check_pair("embeddings", condition, num)

    def _check_pair(self, name: str, condition: Condition, num: int) -> None:
        shape = (num, *self.shape)
        if isinstance(condition, tuple) and len(condition) == 2:
            values, present = condition
            shapes_match = values.shape == shape and present.shape == shape[:-1]
            if shapes_match and values.is_floating_point() and present.dtype == torch.bool:
                return
        raise ValueError(
            f"{name} must be a pair (values {shape} float, present {shape[:-1]} bool), got "
            f"{describe_condition(condition)}: change them, or shape={self.shape}."
        )


def condition_for(
    seeds: Sequence[int], labels: Condition, conditioning: Conditioning | None
) -> Condition:
    """Check and return `labels`. If `labels` is None, return the default condition of each seed.

    Args:
        seeds: one integer per sample.
        labels: condition of the samples. None uses the default condition of each seed.
        conditioning: kind of condition that the model takes. None means that the model is
            unconditional. In this case, `labels` must be None or a tensor of -1.

    Returns:
        The condition. None for an unconditional model.

    Raises:
        ValueError: if `labels` is not a valid condition, or if there are no seeds.

    Example:
        >>> condition_for([3], torch.tensor([-1]), None) is None
        True
    """
    if not len(seeds):
        raise ValueError("generate needs at least one seed, got none.")
    if labels is None:
        return None if conditioning is None else conditioning.for_seeds(seeds)
    (conditioning or ClassLabels(0)).check(labels, len(seeds))
    return None if conditioning is None else labels
