"""The kinds of conditions that networks take, and the modules that embed them.

| `condition=` of a network | condition of B images                       | embedded as           |
|---------------------------|---------------------------------------------|-----------------------|
| `Classes(num_classes)`    | labels (B,) int64, -1 for no class          | a vector (B, D)       |
| `Vectors(dim)`            | (vectors (B, dim), present (B,) bool)       | a vector (B, D)       |
| `Tokens(dim)`             | (tokens (B, L, dim), mask (B, L) bool)      | tokens (B, 1 + L, D)  |
| `WordIds(num_words)`      | ids (B, L) int64, -1 where there is no word | tokens (B, 1 + L, D)  |

B is the number of images, D the width of the network, and L the number of tokens or words per
image.

An image may have no condition. Depending on the kind of condition, it then has the label -1, no
vector, no tokens or no words. Networks use a null embedding for such an image, and for all images
if the condition of a batch is None. The null embedding is learned. The only exception is a `UNet`
with class labels, whose null embedding is zero.

A mask is True for tokens that exist, and False for padding. The values of padding and of absent
vectors are ignored, even if they are NaN. No function in this file synchronizes with the device.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_diffusion.networks.layers import timestep_embedding
from lit_diffusion.protocols import Condition, check_positive, describe_condition


class ConditionKind(Protocol):
    """Kind of condition, such as class labels. It builds the module that embeds the conditions."""

    def embedding(self, width: int, /) -> nn.Module:
        """Build a module that maps conditions to an `EmbeddedCondition` with `width` features."""


@dataclass(frozen=True)
class Classes:
    """Condition of class labels.

    Args:
        num_classes: number of classes. Labels are 0, ..., num_classes - 1, or -1 for no class.
        null_class: whether the network has a null embedding. If False, the label -1 and the
            condition None raise an error.

    Example:
        >>> embedding = Classes(10).embedding(16)
        >>> embedding(torch.tensor([7, -1])).vector.shape
        torch.Size([2, 16])
    """

    num_classes: int
    null_class: bool = True

    def __post_init__(self) -> None:
        check_positive(num_classes=self.num_classes)

    def embedding(self, width: int, /) -> nn.Module:
        """Build an embedding with a learned vector for each class."""
        return LabelEmbedding(self.num_classes, width, self.null_class)


@dataclass(frozen=True)
class Vectors:
    """Condition that is one vector per image, such as measurements or an image embedding.

    Args:
        dim: features of a vector.

    Example:
        >>> embedding = Vectors(8).embedding(16)
        >>> embedding((torch.randn(2, 8), torch.tensor([True, False]))).vector.shape
        torch.Size([2, 16])
    """

    dim: int

    def __post_init__(self) -> None:
        check_positive(dim=self.dim)

    def embedding(self, width: int, /) -> nn.Module:
        """Build a linear map of vectors."""
        return VectorEmbedding(self.dim, width)


@dataclass(frozen=True)
class Tokens:
    """Condition that is a sequence of tokens from an encoder, such as a text encoder.

    Args:
        dim: features of a token.

    Example:
        >>> embedding = Tokens(8).embedding(16)
        >>> embedding((torch.randn(2, 5, 8), torch.ones(2, 5).bool())).tokens.shape
        torch.Size([2, 6, 16])
    """

    dim: int

    def __post_init__(self) -> None:
        check_positive(dim=self.dim)

    def embedding(self, width: int, /) -> nn.Module:
        """Build a linear map of tokens."""
        return TokenEmbedding(self.dim, width)


@dataclass(frozen=True)
class WordIds:
    """Condition that is a sequence of words from a vocabulary. The network learns word embeddings.

    Args:
        num_words: number of words in the vocabulary. Word ids are 0, ..., num_words - 1, or -1 for
            padding.

    Example:
        >>> embedding = WordIds(3).embedding(16)
        >>> embedding(torch.tensor([[2, 0], [1, -1]])).tokens.shape
        torch.Size([2, 3, 16])
    """

    num_words: int

    def __post_init__(self) -> None:
        check_positive(num_words=self.num_words)

    def embedding(self, width: int, /) -> nn.Module:
        """Build an embedding with a learned vector for each word."""
        return WordEmbedding(self.num_words, width)


def resolve_condition(
    condition: ConditionKind | None, num_classes: int | None
) -> ConditionKind | None:
    """Return `condition`, or `Classes(num_classes)` if only `num_classes` is given.

    Raises:
        ValueError: if both `condition` and `num_classes` are given.
        TypeError: if `condition` is not one of the four kinds in this file. A likely mistake is to
            pass an object of `lit_diffusion.conditioning`.
    """
    if condition is None:
        return None if num_classes is None else Classes(num_classes)
    if num_classes is not None:
        raise ValueError(
            "A network takes one kind of condition, and num_classes is short for Classes: leave "
            f"out num_classes={num_classes} or condition={condition}."
        )
    if not isinstance(condition, Classes | Vectors | Tokens | WordIds):
        raise TypeError(
            f"condition must be Classes, Vectors, Tokens or WordIds of {__name__}, got {condition}."
        )
    return condition


class EmbeddedCondition(NamedTuple):
    """Embedded condition of B images: a vector, or tokens, or neither. D is the network's width.

    Attributes:
        vector: (B, D), or None.
        tokens: (B, 1 + L, D), or None. The first token is the null token.
        mask: (B, 1 + L) bool, True for the tokens to attend to. The network attends to all tokens
            that are not padding, or to the null token if an image has only padding.
    """

    vector: Tensor | None = None
    tokens: Tensor | None = None
    mask: Tensor | None = None


def embed_condition(
    embedding: nn.Module | None, condition: Condition, x: Tensor, network: str
) -> EmbeddedCondition:
    """Embed the condition of images.

    Args:
        embedding: module built by `ConditionKind.embedding`; None for a network without a
            condition.
        condition: condition of the images. None gives all images the null embedding.
        x: (B, ...) images, which determine the batch size and the device.
        network: name of the network, for error messages.

    Raises:
        ValueError: if the condition has the wrong kind or size.
    """
    if embedding is None:
        if condition is not None:
            raise ValueError(
                f"{network} without num_classes or condition got "
                f"{describe_condition(condition)}: build it with condition=..., or pass None."
            )
        return EmbeddedCondition()
    embed: Any = embedding  # one of the four below
    if condition is None:
        condition = embed.null_condition(x)
    if not embed.accepts(condition, len(x)):
        raise ValueError(
            f"{network} takes {embed.expects} with B={len(x)}, got "
            f"{describe_condition(condition)}: change it, or build a network with condition=..."
        )
    return embed(condition)


def concat_tokens(tokens: Tensor, condition: EmbeddedCondition) -> tuple[Tensor, Tensor | None]:
    """Append the tokens of a condition to the tokens (B, N, D) of image patches.

    Returns:
        All tokens (B, N + 1 + L, D), in the dtype of `tokens`, and their mask (B, N + 1 + L). If
        the condition has no tokens, the result is `tokens` and None.
    """
    if condition.tokens is None or condition.mask is None:
        return tokens, None
    image_mask = condition.mask.new_ones(tokens.shape[:2])
    condition_tokens = condition.tokens.to(tokens.dtype)
    return torch.cat([tokens, condition_tokens], 1), torch.cat([image_mask, condition.mask], 1)


class LabelEmbedding(nn.Module):
    """Embedding of labels: a learned vector for each class, and one for no class.

    Every negative label means no class. The module does not check the range of labels, because a
    check would synchronize with the GPU. Labels >= `num_classes` fail in torch's embedding
    lookup, with an IndexError on the CPU. With `null_class=False`, there is no null embedding, and
    negative labels fail in the same way.
    """

    expects = "labels (B,) int64"

    def __init__(self, num_classes: int, width: int, null_class: bool = True) -> None:
        super().__init__()
        self.num_classes, self.null_class = num_classes, null_class
        self.weight = nn.Parameter(torch.randn(num_classes + null_class, width))

    def accepts(self, condition: Condition, batch_size: int) -> bool:
        """Return whether a condition is labels (batch_size,)."""
        return _are_ids(condition, 1, batch_size)

    def null_condition(self, x: Tensor) -> Tensor:
        """Return labels (B,) of -1."""
        if not self.null_class:
            raise ValueError(
                "null_class=False needs labels, got None: pass labels, or set null_class=True."
            )
        return torch.full((len(x),), -1, device=x.device)

    def rows(self, labels: Tensor) -> Tensor:
        """Return the index of each label in the table of embeddings, (B,) -> (B,)."""
        # Row `num_classes` of the table is the null embedding. Labels that are too large are
        # increased by 1, so that the label `num_classes` fails instead of reading this row.
        too_large = labels >= self.num_classes
        return torch.where(labels < 0, self.num_classes, labels + too_large)

    def forward(self, labels: Tensor) -> EmbeddedCondition:
        """(B,) -> vector (B, D)."""
        return EmbeddedCondition(vector=F.embedding(self.rows(labels), self.weight))


class VectorEmbedding(nn.Module):
    """Linear map of a vector per image, with a learned null embedding for an absent vector."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.expects = f"(vectors (B, {dim}), present (B,) bool)"
        self.proj = nn.Linear(dim, width)
        self.null = nn.Parameter(0.02 * torch.randn(width))

    def accepts(self, condition: Condition, batch_size: int) -> bool:
        """Return whether a condition is a tuple (vectors, mask) with vectors (batch_size, dim)."""
        return _are_masked_rows(condition, self.proj.in_features, 1, batch_size)

    def null_condition(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return vectors (B, dim) that are marked as absent."""
        present = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        return x.new_zeros(len(x), self.proj.in_features), present

    def forward(self, condition: tuple[Tensor, Tensor]) -> EmbeddedCondition:
        """((B, dim), (B,)) -> vector (B, D)."""
        vectors, present = condition
        vectors = self.proj(_zero_masked(vectors, present, self.proj.weight.dtype))
        return EmbeddedCondition(vector=torch.where(present[:, None], vectors, self.null))


class TokenEmbedding(nn.Module):
    """Linear map of each token, with a learned null token in front of the sequence.

    The network attends to the null token only if an image has no other tokens. This module adds no
    position embeddings, because tokens from an encoder already contain their positions.
    """

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.expects = f"(tokens (B, L, {dim}), mask (B, L) bool)"
        self.proj = nn.Linear(dim, width)
        self.null = nn.Parameter(0.02 * torch.randn(width))

    def accepts(self, condition: Condition, batch_size: int) -> bool:
        """Return whether a condition is a tuple (tokens, mask) with tokens (batch_size, L, dim)."""
        return _are_masked_rows(condition, self.proj.in_features, 2, batch_size)

    def null_condition(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return an empty sequence of tokens (B, 0, dim)."""
        mask = torch.zeros(len(x), 0, dtype=torch.bool, device=x.device)
        return x.new_zeros(len(x), 0, self.proj.in_features), mask

    def forward(self, condition: tuple[Tensor, Tensor]) -> EmbeddedCondition:
        """((B, L, dim), (B, L)) -> tokens (B, 1 + L, D), mask (B, 1 + L)."""
        tokens, mask = condition
        tokens = self.proj(_zero_masked(tokens, mask, self.proj.weight.dtype))
        return _prepend_null_token(self.null, tokens, mask)


class WordEmbedding(nn.Module):
    """Learned embedding of words, plus position embeddings. A learned null token comes first.

    The position embeddings are sinusoids, which work for texts of any length and have no
    parameters.

    Every negative id means no word. Ids >= `num_words` fail in torch's embedding lookup,
    with an IndexError on the CPU.
    """

    expects = "words (B, L) int64"

    def __init__(self, num_words: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(num_words, width)
        self.null = nn.Parameter(0.02 * torch.randn(width))

    def accepts(self, condition: Condition, batch_size: int) -> bool:
        """Return whether a condition is word ids (batch_size, L)."""
        return _are_ids(condition, 2, batch_size)

    def null_condition(self, x: Tensor) -> Tensor:
        """Return an empty sequence of word ids (B, 0)."""
        return torch.full((len(x), 0), -1, device=x.device)

    def forward(self, ids: Tensor) -> EmbeddedCondition:
        """(B, L) -> tokens (B, 1 + L, D), mask (B, 1 + L)."""
        mask, rows = ids >= 0, self.words(ids.clamp(min=0))  # (B, L), (B, L, D)
        positions = torch.arange(ids.shape[1], device=ids.device)
        rows = rows + timestep_embedding(positions, len(self.null)).to(rows.dtype)
        return _prepend_null_token(self.null, _zero_masked(rows, mask, rows.dtype), mask)


def _prepend_null_token(null: Tensor, tokens: Tensor, mask: Tensor) -> EmbeddedCondition:
    """Prepend null token (D,) to (B, L, D). Its mask is True if all other tokens are padding."""
    null = null.to(tokens.dtype).expand(len(tokens), 1, -1)
    mask = torch.cat([~mask.any(dim=1, keepdim=True), mask], 1)
    return EmbeddedCondition(tokens=torch.cat([null, tokens], 1), mask=mask)


def _zero_masked(values: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Values in `dtype`, filled with 0 where the mask is False. A product with 0 would keep NaN."""
    return values.to(dtype).masked_fill(~mask[..., None], 0)


def _are_ids(condition: Condition, ndim: int, batch_size: int) -> bool:
    if not isinstance(condition, Tensor) or condition.dtype not in (torch.int64, torch.int32):
        return False
    return condition.ndim == ndim and len(condition) == batch_size


def _are_masked_rows(condition: Condition, dim: int, mask_ndim: int, batch_size: int) -> bool:
    """Return whether a condition is (values (batch_size, ..., dim), mask (batch_size, ...))."""
    if not isinstance(condition, tuple) or len(condition) != 2:
        return False
    values, mask = condition
    if not (isinstance(values, Tensor) and isinstance(mask, Tensor)):
        return False
    is_mask = mask.dtype == torch.bool and mask.ndim == mask_ndim and len(mask) == batch_size
    return is_mask and values.shape == (*mask.shape, dim)
