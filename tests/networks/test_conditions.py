import pytest
import torch
from support.golden import Z
from torch.testing import assert_close

from lit_diffusion.networks.conditions import (
    LabelEmbedding,
    TokenEmbedding,
    VectorEmbedding,
    WordEmbedding,
    condition_embedding,
    joined,
    told,
)
from lit_diffusion.networks.layers import timestep_embedding

X = torch.zeros(3, 1, 8, 8)
TOKENS = Z((3, 4, 5), 1).float()
MASK = torch.tensor([[True, False, True, False], [False] * 4, [True] * 4])


def test_a_label_has_its_row_and_none_the_last():
    embedding = LabelEmbedding(10, 6)
    rows = embedding(torch.tensor([0, 9, -1, -7]))
    assert torch.equal(rows, embedding.weight[[0, 9, 10, 10]])


@pytest.mark.parametrize("null_class", [True, False])
@pytest.mark.parametrize("label", [10, 11])
def test_labels_beyond_the_last_class_are_no_class(label, null_class):
    with pytest.raises(IndexError):
        LabelEmbedding(10, 6, null_class)(torch.tensor([label]))


def test_without_a_row_for_none_there_is_none():
    embedding = LabelEmbedding(10, 6, null_class=False)
    assert embedding.weight.shape == (10, 6)
    with pytest.raises(IndexError):
        embedding(torch.tensor([-1]))
    with pytest.raises(ValueError, match="null_class=False needs labels, got None"):
        told(embedding, None, X, "Net")


def test_only_the_rows_of_the_batch_get_a_gradient():
    embedding = LabelEmbedding(10, 6)
    embedding(torch.tensor([-1, 7, 2])).sum().backward()
    assert embedding.weight.grad.any(dim=1).nonzero().flatten().tolist() == [2, 7, 10]


def test_a_vector_is_mapped_where_it_is_there():
    embedding, vectors = VectorEmbedding(5, 6), Z((3, 5), 1).float()
    vector = embedding((vectors, torch.tensor([True, False, True])))
    assert torch.equal(vector[1], embedding.null)
    assert_close(vector[[0, 2]], embedding.proj(vectors[[0, 2]]))


def test_a_token_in_front_is_there_where_no_other_is():
    embedding = TokenEmbedding(5, 6)
    tokens, mask = embedding((TOKENS, MASK))
    assert torch.equal(tokens[:, 0], embedding.null.expand(3, 6))
    assert mask.tolist() == torch.cat([torch.tensor([[False], [True], [False]]), MASK], 1).tolist()
    assert_close(tokens[:, 1:][MASK], embedding.proj(TOKENS[MASK]))


def test_a_word_is_its_row_and_its_place():
    embedding = WordEmbedding(5, 6)
    tokens, mask = embedding(torch.tensor([[3, 0, 3], [-1, -1, -1], [-9, 4, -1]]))
    places = timestep_embedding(torch.arange(3), 6).float()
    assert_close(tokens[0, 1:], embedding.words.weight[[3, 0, 3]] + places)
    assert_close(tokens[2, 2], embedding.words.weight[4] + places[1])
    assert torch.equal(tokens[:, 0], embedding.null.expand(3, 6))
    there = [[False, True, True, True], [True, False, False, False], [False, False, True, False]]
    assert mask.tolist() == there


def test_a_word_that_is_not_there_is_no_word_to_the_gradient_and_one_beyond_the_last_fails():
    embedding = WordEmbedding(5, 6)
    embedding(torch.tensor([[2, -1], [-1, -1]]))[0].sum().backward()
    assert embedding.words.weight.grad.any(dim=1).nonzero().flatten().tolist() == [2]
    with pytest.raises(IndexError):
        embedding(torch.tensor([[5]]))


@pytest.mark.parametrize("kind", [VectorEmbedding, TokenEmbedding])
def test_what_is_not_there_is_not_read_not_even_by_the_gradient(kind):
    embedding = kind(5, 6)
    rows, mask = (TOKENS, MASK) if kind is TokenEmbedding else (TOKENS[:, 0], MASK[:, 1])
    found = []
    for filler in (0.0, torch.nan):
        embedding.zero_grad()
        filled = rows.where(mask[..., None], filler).requires_grad_()
        known = told(embedding, (filled, mask), X, "Net")
        output = known.vector if known.tokens is None else known.tokens
        output.square().sum().backward()
        assert not filled.grad[~mask].any()
        found.append([output, *(parameter.grad for parameter in embedding.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    "embedding",
    [LabelEmbedding(10, 6), VectorEmbedding(5, 6), TokenEmbedding(5, 6), WordEmbedding(5, 6)],
)
def test_no_condition_is_the_learned_one_for_every_image(embedding):
    known = told(embedding, None, X, "Net")
    null = getattr(embedding, "null", None)
    null = embedding.weight[10] if null is None else null
    if known.vector is not None:
        assert torch.equal(known.vector, null.expand(3, 6))
    else:
        assert torch.equal(known.tokens, null.expand(3, 1, 6))
        assert known.mask.tolist() == [[True]] * 3


@pytest.mark.parametrize("embedding", [VectorEmbedding(5, 6), TokenEmbedding(5, 6)])
def test_embeddings_of_another_dtype_are_taken_as_they_are(embedding):
    """Text encoders give half precision."""
    tokens = isinstance(embedding, TokenEmbedding)
    rows, mask = (TOKENS, MASK) if tokens else (TOKENS[:, 0], MASK[:, 0])
    known = told(embedding, (rows.half(), mask), X, "Net")
    assert (known.tokens if tokens else known.vector).dtype == torch.float32


def test_tokens_are_joined_after_those_of_the_image_which_are_all_there():
    tokens, mask = joined(Z((3, 7, 6), 2), told(TokenEmbedding(5, 6), (TOKENS, MASK), X, "Net"))
    assert torch.equal(tokens[:, :7], Z((3, 7, 6), 2))
    assert tokens.shape == (3, 12, 6)
    assert mask[:, :7].all()
    assert torch.equal(mask[:, 8:], MASK)
    image, mask = joined(Z((3, 7, 6), 2), told(None, None, X, "Net"))
    assert mask is None
    assert torch.equal(image, Z((3, 7, 6), 2))


def test_a_network_takes_one_kind_of_condition():
    assert condition_embedding(6) is None
    assert isinstance(condition_embedding(6, num_classes=3), LabelEmbedding)
    assert isinstance(condition_embedding(6, context_dim=3), TokenEmbedding)
    assert isinstance(condition_embedding(6, vector_dim=3), VectorEmbedding)
    assert isinstance(condition_embedding(6, num_words=3), WordEmbedding)
    with pytest.raises(ValueError, match="got num_classes=3 and context_dim=0: leave all but one"):
        condition_embedding(6, num_classes=3, context_dim=0)


WORDS = WordEmbedding(5, 6)
LABELS, VECTORS, THREE = LabelEmbedding(10, 6), VectorEmbedding(5, 6), torch.ones(3).bool()


@pytest.mark.parametrize(
    ("embedding", "condition", "message"),
    [
        (None, torch.zeros(3).long(), r"Net without num_classes.* got torch.int64 \(3,\): give"),
        (None, (TOKENS, MASK), r"got \(torch.float32 \(3, 4, 5\), torch.bool \(3, 4\)\): give"),
        (LABELS, torch.zeros(2).long(), r"labels \(B,\) int64 with B=3, got torch.int64 \(2,\)"),
        (LABELS, torch.zeros(3), r"labels \(B,\) int64 with B=3, got torch.float32 \(3,\)"),
        (LABELS, (TOKENS, MASK), r"labels \(B,\) int64 with B=3, got \(torch.float32"),
        (VECTORS, TOKENS[:, 0], r"takes \(vectors \(B, 5\), present \(B,\) bool\) with B=3, got t"),
        (VECTORS, (TOKENS[:, 0], THREE.float()), r"torch.float32 \(3,\)\): change the condition"),
        (VECTORS, (TOKENS[:, 0, :4], THREE), r"got \(torch.float32 \(3, 4\)"),
        (VECTORS, (TOKENS[:, 0], THREE, THREE), r"bool \(3,\), torch.bool \(3,\)\): change"),
        (TokenEmbedding(5, 6), (TOKENS, MASK[:, :3]), r"mask \(B, L\) bool\) with B=3, got"),
        (TokenEmbedding(5, 6), (TOKENS, MASK.long()), r"torch.int64 \(3, 4\)\): change"),
        (TokenEmbedding(4, 6), (TOKENS, MASK), r"takes \(tokens \(B, L, 4\)"),
        (TokenEmbedding(5, 6), (TOKENS[:, 0], MASK[:, 0]), r"takes \(tokens \(B, L, 5\)"),
        (TokenEmbedding(5, 6), TOKENS, r"takes \(tokens \(B, L, 5\)"),
        (
            WORDS,
            torch.zeros(3).long(),
            r"takes words \(B, L\) int64 with B=3, got torch.int64 \(3,",
        ),
        (WORDS, torch.zeros(2, 4).long(), r"words \(B, L\) int64 with B=3, got torch.int64 \(2, 4"),
        (
            WORDS,
            torch.zeros(3, 4),
            r"got torch.float32 \(3, 4\): change the condition, or .*num_wo",
        ),
        (WORDS, (TOKENS, MASK), r"words \(B, L\) int64 with B=3, got \(torch.float32"),
    ],
)
def test_a_condition_of_another_kind_or_size_is_refused(embedding, condition, message):
    with pytest.raises(ValueError, match=message):
        told(embedding, condition, X, "Net")
