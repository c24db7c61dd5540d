"""The kinds of conditions that networks take, and the modules that embed them.

| `condition=` of a network | condition of B images                       | embedded as           |
|---------------------------|---------------------------------------------|-----------------------|
| `Classes(num_classes)`    | labels (B,) int64, -1 for no class          | a vector (B, D)       |
| `Vectors(dim)`            | (vectors (B, dim), present (B,) bool)       | a vector (B, D)       |
| `Tokens(dim)`             | (tokens (B, L, dim), mask (B, L) bool)      | tokens (B, 1 + L, D)  |
| `WordIds(num_words)`      | ids (B, L) int64, -1 where there is no word | tokens (B, 1 + L, D)  |

Every kind has a null embedding for images without a condition: a label of -1, an absent vector, no
token or no word. If the condition is None, all images get it. It is learned, except that labels of
-1 are zeros in a `UNet`.

Masks are True for tokens that exist. Values of absent vectors and tokens are ignored, even if they
are NaN. Nothing here synchronizes with the device.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_diffusion.networks.layers import timestep_embedding
from lit_diffusion.protocols import Condition, check_positive, describe_condition


class ConditionKind(Protocol):
    """A kind of condition, which builds the module that embeds it at the width of a network."""

    def embedding(self, width: int, /) -> nn.Module:
        """A module that maps the condition of B images to an `EmbeddedCondition`."""


@dataclass(frozen=True)
class Classes:
    """Class labels.

    Args:
        num_classes: labels are 0, ..., num_classes - 1, or -1 for no class.
        null_class: whether labels may be -1 or None; False has no null embedding.
    """

    num_classes: int
    null_class: bool = True

    def __post_init__(self) -> None:
        check_positive(num_classes=self.num_classes)

    def embedding(self, width: int, /) -> nn.Module:
        """A learned row for each class."""
        return LabelEmbedding(self.num_classes, width, self.null_class)


@dataclass(frozen=True)
class Vectors:
    """A vector for each image, such as measurements or an embedding of another image.

    Args:
        dim: features of a vector.
    """

    dim: int

    def __post_init__(self) -> None:
        check_positive(dim=self.dim)

    def embedding(self, width: int, /) -> nn.Module:
        """A linear map."""
        return VectorEmbedding(self.dim, width)


@dataclass(frozen=True)
class Tokens:
    """Tokens of an encoder, such as a text encoder.

    Args:
        dim: features of a token.
    """

    dim: int

    def __post_init__(self) -> None:
        check_positive(dim=self.dim)

    def embedding(self, width: int, /) -> nn.Module:
        """A linear map of each token."""
        return TokenEmbedding(self.dim, width)


@dataclass(frozen=True)
class WordIds:
    """Words of a vocabulary, whose embeddings are learned.

    Args:
        num_words: ids are 0, ..., num_words - 1, or -1 where there is no word.
    """

    num_words: int

    def __post_init__(self) -> None:
        check_positive(num_words=self.num_words)

    def embedding(self, width: int, /) -> nn.Module:
        """A learned row for each word."""
        return WordEmbedding(self.num_words, width)


def resolve_condition(
    condition: ConditionKind | None, num_classes: int | None
) -> ConditionKind | None:
    """`condition`, or Classes(num_classes) if only `num_classes` is given.

    Raises:
        ValueError: if both are given.
        TypeError: for another object, such as one of `lit_diffusion.conditioning`.
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
    """The condition of B images at the width D of a network: a vector, or tokens, or neither.

    Attributes:
        vector: (B, D).
        tokens: (B, 1 + L, D), the first of which is the null token.
        mask: (B, 1 + L) bool, True for tokens to attend to: those that exist, or the null token.
    """

    vector: Tensor | None = None
    tokens: Tensor | None = None
    mask: Tensor | None = None


def embed_condition(
    embedding: nn.Module | None, condition: Condition, x: Tensor, network: str
) -> EmbeddedCondition:
    """Embed the condition of images.

    Args:
        embedding: built by `ConditionKind.embedding`; None for a network without a condition.
        condition: of each image; None for no condition.
        x: (B, ...) images.
        network: name of the network, for messages.

    Raises:
        ValueError: for a condition of another kind or size.
    """
    if embedding is None:
        if condition is not None:
            raise ValueError(
                f"{network} without num_classes or condition got "
                f"{describe_condition(condition)}: build it with condition=..., or give it None."
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
    embedded: EmbeddedCondition = embed(condition)
    return embedded


def concat_tokens(tokens: Tensor, condition: EmbeddedCondition) -> tuple[Tensor, Tensor | None]:
    """Append the tokens of a condition to tokens (B, N, D) of images, in the dtype of these.

    Returns:
        Tokens (B, N + 1 + L, D) and their mask (B, N + 1 + L); (B, N, D) and None for a condition
        without tokens.
    """
    if condition.tokens is None or condition.mask is None:
        return tokens, None
    image_mask = condition.mask.new_ones(tokens.shape[:2])
    condition_tokens = condition.tokens.to(tokens.dtype)
    return torch.cat([tokens, condition_tokens], 1), torch.cat([image_mask, condition.mask], 1)


class LabelEmbedding(nn.Module):
    """A learned row per class, and a last row for no class.

    The range of labels is not checked, as this would synchronize with a GPU. Labels of
    `num_classes` or more fail in the embedding (IndexError on the CPU); any negative label is no
    class. Without `null_class` there is no last row, and negative labels fail too.
    """

    expects = "labels (B,) int64"

    def __init__(self, num_classes: int, width: int, null_class: bool = True) -> None:
        super().__init__()
        self.num_classes, self.null_class = num_classes, null_class
        self.weight = nn.Parameter(torch.randn(num_classes + null_class, width))

    def accepts(self, condition: Condition, batch_size: int) -> bool:
        """Whether these are labels (batch_size,)."""
        return _are_ids(condition, 1, batch_size)

    def null_condition(self, x: Tensor) -> Tensor:
        """Labels (B,) of -1."""
        if not self.null_class:
            raise ValueError("null_class=False needs labels, got None: pass them, or null_class.")
        return torch.full((len(x),), -1, device=x.device)

    def forward(self, labels: Tensor) -> EmbeddedCondition:
        """(B,) -> vector (B, D)."""
        # Labels that are too large are increased by 1, so that num_classes is not the null row.
        too_large = labels >= self.num_classes
        rows = torch.where(labels < 0, self.num_classes, labels + too_large)
        return EmbeddedCondition(vector=F.embedding(rows, self.weight))


class VectorEmbedding(nn.Module):
    """A linear map of a vector, or a learned vector where it is absent."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.expects = f"(vectors (B, {dim}), present (B,) bool)"
        self.proj = nn.Linear(dim, width)
        self.null = nn.Parameter(0.02 * torch.randn(width))

    def accepts(self, condition: Condition, batch_size: int) -> bool:
        """Whether these are (vectors (batch_size, dim), present (batch_size,))."""
        return _are_masked_rows(condition, self.proj.in_features, 1, batch_size)

    def null_condition(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Absent vectors (B, dim)."""
        present = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        return x.new_zeros(len(x), self.proj.in_features), present

    def forward(self, condition: tuple[Tensor, Tensor]) -> EmbeddedCondition:
        """((B, dim), (B,)) -> vector (B, D)."""
        vectors, present = condition
        vectors = self.proj(_zero_masked(vectors, present, self.proj.weight.dtype))
        return EmbeddedCondition(vector=torch.where(present[:, None], vectors, self.null))


class TokenEmbedding(nn.Module):
    """A linear map of tokens, after a learned null token that is attended to if it is alone.

    No positions are added, since tokens have those of their encoder.
    """

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.expects = f"(tokens (B, L, {dim}), mask (B, L) bool)"
        self.proj = nn.Linear(dim, width)
        self.null = nn.Parameter(0.02 * torch.randn(width))

    def accepts(self, condition: Condition, batch_size: int) -> bool:
        """Whether these are (tokens (batch_size, L, dim), mask (batch_size, L))."""
        return _are_masked_rows(condition, self.proj.in_features, 2, batch_size)

    def null_condition(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """No tokens (B, 0, dim)."""
        mask = torch.zeros(len(x), 0, dtype=torch.bool, device=x.device)
        return x.new_zeros(len(x), 0, self.proj.in_features), mask

    def forward(self, condition: tuple[Tensor, Tensor]) -> EmbeddedCondition:
        """((B, L, dim), (B, L)) -> tokens (B, 1 + L, D), mask (B, 1 + L)."""
        tokens, mask = condition
        tokens = self.proj(_zero_masked(tokens, mask, self.proj.weight.dtype))
        return _prepend_null_token(self.null, tokens, mask)


class WordEmbedding(nn.Module):
    """A learned row per word plus sinusoids of its position, after a learned null token.

    Sinusoids distinguish "dark on bright" from "bright on dark", for texts of any length and
    without parameters. As with labels, ids of num_words or more fail in the embedding (IndexError
    on the CPU), and any negative id is no word.
    """

    expects = "words (B, L) int64"

    def __init__(self, num_words: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(num_words, width)
        self.null = nn.Parameter(0.02 * torch.randn(width))

    def accepts(self, condition: Condition, batch_size: int) -> bool:
        """Whether these are ids (batch_size, L)."""
        return _are_ids(condition, 2, batch_size)

    def null_condition(self, x: Tensor) -> Tensor:
        """No words (B, 0)."""
        return torch.full((len(x), 0), -1, device=x.device)

    def forward(self, ids: Tensor) -> EmbeddedCondition:
        """(B, L) -> tokens (B, 1 + L, D), mask (B, 1 + L)."""
        mask, rows = ids >= 0, self.words(ids.clamp(min=0))  # (B, L), (B, L, D)
        positions = torch.arange(ids.shape[1], device=ids.device)
        rows = rows + timestep_embedding(positions, len(self.null)).to(rows.dtype)
        return _prepend_null_token(self.null, _zero_masked(rows, mask, rows.dtype), mask)


def _prepend_null_token(null: Tensor, tokens: Tensor, mask: Tensor) -> EmbeddedCondition:
    """Null token (D,), then tokens (B, L, D); the null token's mask is True if it is alone."""
    null = null.to(tokens.dtype).expand(len(tokens), 1, -1)
    mask = torch.cat([~mask.any(dim=1, keepdim=True), mask], 1)
    return EmbeddedCondition(tokens=torch.cat([null, tokens], 1), mask=mask)


def _zero_masked(values: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Values in `dtype`, 0 where the mask is False; multiplying by 0 would keep NaN."""
    return values.to(dtype).masked_fill(~mask[..., None], 0)


def _are_ids(condition: Condition, ndim: int, batch_size: int) -> bool:
    if not isinstance(condition, Tensor) or condition.dtype not in (torch.int64, torch.int32):
        return False
    return condition.ndim == ndim and len(condition) == batch_size


def _are_masked_rows(condition: Condition, dim: int, mask_ndim: int, batch_size: int) -> bool:
    """Whether these are (values (batch_size, ..., dim), mask (batch_size, ...) bool)."""
    if not isinstance(condition, tuple) or len(condition) != 2:
        return False
    values, mask = condition
    is_mask = mask.dtype == torch.bool and mask.ndim == mask_ndim and len(mask) == batch_size
    return is_mask and values.shape == (*mask.shape, dim)
