"""What images are conditioned on: class labels, words, or embeddings from any encoder.

    ClassLabels   labels (B,) int64, -1 for none
    Words         ids (B, length) int64, -1 where there is no word
    Embeddings    (values (B, ..., D), there (B, ...) bool): tokens with their mask, or vectors

A condition has a row per image, and says in itself where there is none, so that training can drop
it and guidance can leave it out. The network alone knows what it means.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import cast

import torch
from torch import Tensor

from lit_diffusion.protocols import Condition, Conditioning, by_part, describe_condition
from lit_diffusion.seeding import classes_of


@dataclass(frozen=True)
class ClassLabels:
    """Classes 0, ..., num_classes - 1, as (B,) int64; -1 is none.

    Args:
        num_classes: how many.

    Example:
        >>> labels = ClassLabels(10).for_seeds([3, 12])
        >>> labels.tolist(), ClassLabels(10).drop(labels, torch.tensor([False, True])).tolist()
        ([3, 2], [3, -1])
    """

    num_classes: int

    def drop(self, condition: Condition, where: Tensor, /) -> Condition:
        """-1 where `where` (B,) is true."""
        return by_part(lambda labels: labels.masked_fill(where, -1), condition)

    def null(self, like: Condition, /) -> Condition:
        """-1 everywhere."""
        return by_part(lambda labels: torch.full_like(labels, -1), like)

    def for_seeds(self, seeds: Sequence[int], /) -> Condition:
        """Seed modulo `num_classes`."""
        return torch.tensor(classes_of(seeds, self.num_classes))

    def check(self, condition: Condition, num: int, /) -> None:
        """Raise ValueError where these are not `num` labels, before a GPU could die of one."""
        if not isinstance(condition, Tensor):
            raise ValueError(f"labels must be one tensor ({num},), got {type(condition).__name__}.")
        if condition.shape != (num,) or condition.dtype not in (torch.int64, torch.int32):
            got = f"{tuple(condition.shape)} of {condition.dtype}"
            raise ValueError(f"labels must be one per image, ({num},), got {got}; use int64.")
        if bool(((condition < -1) | (condition >= self.num_classes)).any()):
            last = self.num_classes - 1
            allowed = f"0..{last} or -1" if self.num_classes else "-1, without num_classes"
            values = sorted(set(condition.tolist()))[:10]
            raise ValueError(f"labels must be {allowed}, got {values}.")


@dataclass(frozen=True)
class Words:
    """Texts of known words, as ids (B, length) int64 of words; -1 where there is no word.

    A text is split at white space, without regard to case; a text without words is none.

    Args:
        vocabulary: the words, in lower case; word i has the id i.
        length: words of the longest text.
        texts: what seeds take in turn; without them seeds get none.

    Raises:
        ValueError: for a vocabulary that is not one, or texts that it cannot write.

    Example:
        >>> words = Words(("big", "small", "cat"), length=3)
        >>> words.encode("Small cat").tolist()
        [1, 2, -1]
    """

    vocabulary: tuple[str, ...]
    length: int
    texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse words that no text could hold, and texts beyond the vocabulary."""
        odd = [w for w in self.vocabulary if [w] != w.lower().split()]
        odd += sorted({word for word in self.vocabulary if self.vocabulary.count(word) > 1})
        if odd or not self.vocabulary:
            raise ValueError(
                "vocabulary must be different words in lower case, without spaces, got "
                f"{odd or 'none'}: change these."
            )
        for text in self.texts:
            self.encode(text)

    @property
    def num_words(self) -> int:
        """Of the vocabulary, as the network must know it."""
        return len(self.vocabulary)

    def encode(self, text: str) -> Tensor:
        """(length,) int64 of a text."""
        words = text.lower().split()
        if len(words) > self.length:
            raise ValueError(
                f"a text may have {self.length} words, got {len(words)} in {text!r}: shorten it, "
                "or train with a larger length."
            )
        for word in words:
            if word not in self.vocabulary:
                (nearest,) = get_close_matches(word, self.vocabulary, n=1, cutoff=0)
                raise ValueError(f"{word!r} is not in the vocabulary; the nearest is {nearest!r}.")
        ids = [self.vocabulary.index(word) for word in words]
        return torch.tensor(ids + [-1] * (self.length - len(ids)))

    def drop(self, condition: Condition, where: Tensor, /) -> Condition:
        """No words where `where` (B,) is true."""
        return by_part(lambda ids: ids.masked_fill(where[:, None], -1), condition)

    def null(self, like: Condition, /) -> Condition:
        """No words anywhere."""
        return by_part(lambda ids: torch.full_like(ids, -1), like)

    def for_seeds(self, seeds: Sequence[int], /) -> Condition:
        """`texts` in turn."""
        rows = torch.stack([self.encode(text) for text in self.texts or ("",)])
        return rows[classes_of(seeds, len(rows))]

    def check(self, condition: Condition, num: int, /) -> None:
        """Raise ValueError where these are not words of `num` images."""
        rule = f"words must be ids ({num}, {self.length}) int64 in -1..{self.num_words - 1}"
        if not isinstance(condition, Tensor) or condition.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"{rule}, got {describe_condition(condition)}; `encode` makes them of a text."
            )
        wrong = condition[(condition < -1) | (condition >= self.num_words)][:1].tolist()
        if condition.shape != (num, self.length) or wrong:
            got = " with ".join([describe_condition(condition), *map(str, wrong)])
            raise ValueError(f"{rule}, got {got}; `encode` makes them of a text.")


@dataclass(eq=False)
class Embeddings:
    """Embeddings with what of them is there: (values (B, *shape), there (B, *shape[:-1]) bool).

    For shape (L, D) these are tokens and their mask, for (D,) vectors. Dropped ones are not there,
    for which networks have a learned embedding; or, with `null_embedding`, they are that.

    Args:
        shape: of the values of an image.
        examples: (values (N, *shape), there (N, *shape[:-1])), which seeds take in turn; without
            them seeds get none.
        null_embedding: (values (*shape), there (*shape[:-1])) for no condition, such as those of
            the empty text in Stable Diffusion; None for what the network learns.

    Raises:
        ValueError: for examples or a null of another shape or type.

    Example:
        >>> vectors, there = Embeddings((3,)).for_seeds(range(2))
        >>> vectors.shape, there
        (torch.Size([2, 3]), tensor([False, False]))
    """

    shape: tuple[int, ...]
    examples: tuple[Tensor, Tensor] | None = None
    null_embedding: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        """Refuse examples and nulls that are no embeddings of this shape."""
        if self.examples is not None:
            self._refuse_others("examples", self.examples, len(self.examples[0]))
        if self.null_embedding is not None:
            self._refuse_others(
                "null_embedding", tuple(part[None] for part in self.null_embedding), 1
            )

    def drop(self, condition: Condition, where: Tensor, /) -> Condition:
        """No embeddings where `where` (B,) is true."""
        values, there = cast(tuple[Tensor, Tensor], condition)
        rows = where.view(-1, *[1] * (there.ndim - 1))
        if self.null_embedding is None:
            return values, there & ~rows
        null_values, null_there = (part.to(there.device) for part in self.null_embedding)
        values = torch.where(rows[..., None], null_values.to(values.dtype), values)
        return values, torch.where(rows, null_there, there)

    def null(self, like: Condition, /) -> Condition:
        """None for every image."""
        there = cast(tuple[Tensor, Tensor], like)[1]
        return self.drop(like, there.new_ones(len(there)))

    def for_seeds(self, seeds: Sequence[int], /) -> Condition:
        """`examples` in turn."""
        if self.examples is not None:
            indices = classes_of(seeds, len(self.examples[0]))
            return by_part(lambda rows: rows[indices], self.examples)
        values = torch.zeros(len(seeds), *self.shape)
        return self.null((values, torch.zeros(values.shape[:-1], dtype=torch.bool)))

    def check(self, condition: Condition, num: int, /) -> None:
        """Raise ValueError where these are not embeddings of `num` images."""
        self._refuse_others("embeddings", condition, num)

    def _refuse_others(self, name: str, condition: Condition, num: int) -> None:
        shape = (num, *self.shape)
        if isinstance(condition, tuple) and len(condition) == 2:
            values, there = condition
            fit = values.shape == shape and there.shape == shape[:-1]
            if fit and values.is_floating_point() and there.dtype == torch.bool:
                return
        raise ValueError(
            f"{name} must be a pair (values {shape} float, there {shape[:-1]} bool), got "
            f"{describe_condition(condition)}: change them, or shape={self.shape}."
        )


def condition_for(
    seeds: Sequence[int], labels: Condition, conditioning: Conditioning | None
) -> Condition:
    """What to generate these samples from, checked.

    Labels None leave it to the seeds; a module without conditioning has none, as -1 may say too.

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
