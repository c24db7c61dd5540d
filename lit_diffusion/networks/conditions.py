"""How networks read conditions: labels, vectors, tokens or words, each with a learned "none".

    labels   (B,) int64, -1 for none                                  -> a vector an image
    vectors  (vectors (B, D), present (B,) bool)                      -> a vector an image
    tokens   (tokens (B, L, D), mask (B, L) bool), all False for none -> 1 + L tokens an image
    words    (B, L) int64, -1 where there is no word                  -> 1 + L tokens an image

What a row holds where it is none, or its mask is False, changes nothing, not even if it is NaN.
Masks are True for what is there. No value is read back from the device.
"""

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from lit_diffusion.networks.layers import timestep_embedding

Condition: TypeAlias = Tensor | tuple[Tensor, ...] | None
"""As in `protocols.Condition`."""


class Told(NamedTuple):
    """What a network is told of its condition, in its own width.

    Attributes:
        vector: (B, width) of labels and vectors.
        tokens: (B, 1 + L, width) of tokens and words, after one that stands for none.
        mask: (B, 1 + L) bool, the tokens that are there.
    """

    vector: Tensor | None = None
    tokens: Tensor | None = None
    mask: Tensor | None = None


class LabelEmbedding(nn.Embedding):
    """A row per class, and a last one for none.

    Labels are not range-checked, since a GPU would have to wait for the result: `num_classes` or
    more fails inside the embedding (IndexError on the CPU), and any negative number is none.

    Args:
        num_classes: how many.
        width: of a row.
        null_class: whether there is a row for none; without one, none fails.
    """

    takes = "labels (B,) int64"

    def __init__(self, num_classes: int, width: int, null_class: bool = True) -> None:
        super().__init__(num_classes + null_class, width)
        self.num_classes = num_classes

    def fits(self, condition: Condition, batch: int) -> bool:
        """Whether these are labels of so many images."""
        return isinstance(condition, Tensor) and (
            condition.shape == (batch,) and condition.dtype in (torch.int64, torch.int32)
        )

    def none(self, x: Tensor) -> Tensor:
        """None for each image of x; refused where there is no row for it."""
        if self.num_embeddings == self.num_classes:
            raise ValueError("null_class=False needs labels, got None: pass them, or null_class.")
        return torch.full((len(x),), -1, device=x.device)

    def forward(self, input: Tensor) -> Tensor:
        """(B,) -> (B, width)."""
        beyond = input >= self.num_classes  # else the first of these would be the null row
        return super().forward(torch.where(input < 0, self.num_classes, input + beyond))


class VectorEmbedding(nn.Module):
    """A linear map of a vector, or a learned one.

    Args:
        dim: of the vectors.
        width: of the result.
    """

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.takes = f"(vectors (B, {dim}), present (B,) bool)"
        self.proj = nn.Linear(dim, width)
        self.null = nn.Parameter(0.02 * torch.randn(width))

    def fits(self, condition: Condition, batch: int) -> bool:
        """Whether these are vectors of so many images, and which of them are there."""
        return _are_rows(condition, (batch, self.proj.in_features), (batch,))

    def none(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """None for each image of x."""
        absent = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        return x.new_zeros(len(x), self.proj.in_features), absent

    def forward(self, condition: tuple[Tensor, Tensor]) -> Tensor:
        """((B, dim), (B,)) -> (B, width)."""
        present = condition[1][:, None]
        vector = self.proj(_kept(condition[0], present, self.proj.weight.dtype))
        return torch.where(present, vector, self.null)


class TokenEmbedding(nn.Module):
    """A linear map of tokens, and a learned token in front, there where they are none.

    They keep the positions that their encoder gave them, and get no others.

    Args:
        dim: of the tokens.
        width: of the result.
    """

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.takes = f"(tokens (B, L, {dim}), mask (B, L) bool)"
        self.proj = nn.Linear(dim, width)
        self.null = nn.Parameter(0.02 * torch.randn(width))

    def fits(self, condition: Condition, batch: int) -> bool:
        """Whether these are tokens of so many images, and which of them are there."""
        length = condition[0].shape[1:2] if isinstance(condition, tuple) else ()
        shape = (batch, *length)
        return _are_rows(condition, (*shape, self.proj.in_features), shape)

    def none(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """None for each image of x, in no tokens."""
        mask = torch.zeros(len(x), 0, dtype=torch.bool, device=x.device)
        return x.new_zeros(len(x), 0, self.proj.in_features), mask

    def forward(self, condition: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """((B, L, dim), (B, L)) -> (B, 1 + L, width), (B, 1 + L)."""
        tokens, mask = condition
        tokens = self.proj(_kept(tokens, mask[..., None], self.proj.weight.dtype))
        return _after_null(self.null, tokens, mask)


class WordEmbedding(nn.Module):
    """A row per word plus sinusoids of its place, and a learned token as of `TokenEmbedding`.

    Places are told because "dark on bright" is not "bright on dark"; by sinusoids, since these need
    no longest text and nothing to learn. As labels, words beyond the vocabulary fail inside.

    Args:
        num_words: of the vocabulary.
        width: of the result, even.
    """

    takes = "words (B, L) int64"

    def __init__(self, num_words: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(num_words, width)
        self.null = nn.Parameter(0.02 * torch.randn(width))

    def fits(self, condition: Condition, batch: int) -> bool:
        """Whether these are words of so many images."""
        return isinstance(condition, Tensor) and (
            condition.ndim == 2
            and len(condition) == batch
            and condition.dtype in (torch.int64, torch.int32)
        )

    def none(self, x: Tensor) -> Tensor:
        """None for each image of x, in no words."""
        return torch.full((len(x), 0), -1, device=x.device)

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """(B, L) -> (B, 1 + L, width), (B, 1 + L)."""
        mask, rows = input >= 0, self.words(input.clamp(min=0))
        places = timestep_embedding(
            torch.arange(input.shape[1], device=input.device), len(self.null)
        )
        tokens = _kept(rows + places.to(rows.dtype), mask[..., None], rows.dtype)
        return _after_null(self.null, tokens, mask)


GivesTokens: TypeAlias = TokenEmbedding | WordEmbedding
Embedding: TypeAlias = LabelEmbedding | VectorEmbedding | GivesTokens


def condition_embedding(
    width: int,
    num_classes: int | None = None,
    context_dim: int | None = None,
    vector_dim: int | None = None,
    num_words: int | None = None,
    *,
    null_class: bool = True,
) -> Embedding | None:
    """Embedding of the one kind of condition that a network is built for; None for none.

    Args:
        width: of the network.
        num_classes: number of labels.
        context_dim: of tokens.
        vector_dim: of vectors.
        num_words: of the vocabulary of words.
        null_class: whether labels may be none.

    Raises:
        ValueError: for more than one kind.

    Example:
        >>> condition_embedding(8, num_classes=10)
        LabelEmbedding(11, 8)
    """
    sizes = {"num_classes": num_classes, "context_dim": context_dim}
    sizes |= {"vector_dim": vector_dim, "num_words": num_words}
    given = [f"{name}={size}" for name, size in sizes.items() if size is not None]
    if len(given) > 1:
        raise ValueError(
            f"A network takes one kind of condition, got {' and '.join(given)}: leave all but one "
            "out, or give it tokens that hold the others."
        )
    if context_dim is not None:
        return TokenEmbedding(context_dim, width)
    if vector_dim is not None:
        return VectorEmbedding(vector_dim, width)
    if num_words is not None:
        return WordEmbedding(num_words, width)
    return None if num_classes is None else LabelEmbedding(num_classes, width, null_class)


def told(embedding: Embedding | None, condition: Condition, x: Tensor, network: str) -> Told:
    """What the network of this name is told of images x (B, ...) by their condition.

    Raises:
        ValueError: for a condition that is not of the kind and size that the embedding takes.
    """
    if embedding is None:
        if condition is not None:
            raise ValueError(
                f"{network} without num_classes, context_dim, vector_dim and num_words got "
                f"{_said(condition)}: give the network its one, or no condition."
            )
        return Told()
    if condition is None:
        condition = embedding.none(x)
    if not embedding.fits(condition, len(x)):
        raise ValueError(
            f"{network} takes {embedding.takes} with B={len(x)}, got {_said(condition)}: change "
            "the condition, or the network's num_classes, context_dim, vector_dim or num_words."
        )
    if isinstance(embedding, GivesTokens):
        tokens, mask = embedding(condition)
        return Told(tokens=tokens, mask=mask)
    return Told(embedding(condition))


def joined(tokens: Tensor, told: Told) -> tuple[Tensor, Tensor | None]:
    """Tokens (B, N, width) of an image, then those of its condition; and the mask of both."""
    if told.tokens is None or told.mask is None:
        return tokens, None
    there = told.mask.new_ones(tokens.shape[:2])
    return torch.cat([tokens, told.tokens], 1), torch.cat([there, told.mask], 1)


def _after_null(null: Tensor, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The learned token before the others, there where none of them is."""
    null = null.to(tokens.dtype).expand(len(tokens), 1, -1)
    none = ~mask.any(dim=1, keepdim=True)
    return torch.cat([null, tokens], 1), torch.cat([none, mask], 1)


def _kept(values: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where the mask is False: weights of 0 would let NaN, and its gradient, through."""
    return values.to(dtype).masked_fill(~mask, 0)


def _are_rows(condition: Condition, shape: tuple[int, ...], mask_shape: tuple[int, ...]) -> bool:
    if not isinstance(condition, tuple) or len(condition) != 2:
        return False
    values, mask = condition
    return values.shape == shape and mask.shape == mask_shape and mask.dtype == torch.bool


def _said(condition: Condition) -> str:
    parts = condition if isinstance(condition, tuple) else (condition,)
    kinds = [f"{p.dtype} {tuple(p.shape)}" for p in parts if isinstance(p, Tensor)]
    return f"({', '.join(kinds)})" if isinstance(condition, tuple) else " ".join(kinds)
